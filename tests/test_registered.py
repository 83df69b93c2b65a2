"""Registered dataclasses and enums: what comes back, what is refused, and that no file names a class to import."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

import ckptd
from ckptd import registered
from ckptd.errors import CkptdError, CorruptCheckpoint, InvalidArgument, StateMismatch, UnstorableState
from ckptd.tensors.capture import capture
from ckptd.tensors.foreseeing import foresee
from ckptd.tensors.registered_tags import Unbuilt
from ckptd.tensors.restoring import apply_state
from ckptd.tensors.tag_reader import decode
from ckptd_places import places
from round_trip import LAYOUTS, same, through_disk

__all__ = ["places"]

T = TypeVar("T")


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """What a test registers ends with it."""
    classes, names = dict(registered._CLASSES), dict(registered._NAMES)
    yield
    for now, before in ((registered._CLASSES, classes), (registered._NAMES, names)):
        now.clear()  # type: ignore[attr-defined]
        now.update(before)  # type: ignore[attr-defined]


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, "x")
    CRIMSON = "red"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    A = "a"


class Mode(enum.Flag):
    R = 1
    W = 2
    X = 4
    RW = 3


class Bits(enum.IntFlag, boundary=enum.KEEP):
    ONE = 1
    TWO = 2


@dataclass
class Progress:
    step: int
    best: float = float("inf")
    history: list[Any] = field(default_factory=list)
    kind: ClassVar[str] = "x"

    def __post_init__(self) -> None:
        if self.step == 13:
            raise RuntimeError("__post_init__ ran")


@dataclass(frozen=True)
class Frozen:
    weights: torch.Tensor
    name: str = "f"


@dataclass(slots=True)
class Slotted(Generic[T]):
    x: T
    y: Any = field(default=3, init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    inner: Any


@dataclass
class Job:
    model: Any
    optimizer: Any


ALL = (Colour, Level, Word, Mode, Bits, Progress, Frozen, Slotted, Both)


def of_all_kinds() -> dict[str, Any]:
    weights = torch.arange(3.0)
    thirteen = Progress(12, 0.5, [1, (2, torch.ones(2)), Both(inner={"a": Level.HIGH})])
    thirteen.step = 13
    return {
        "enums": [
            *Colour,
            *Level,
            *Word,
            *Mode,
            Mode.RW,
            Mode(0),
            Mode.R | Mode.X,
            Bits.ONE | Bits.TWO,
            Bits(0),
        ],
        "progress": thirteen,
        "tied": [Frozen(weights), Frozen(weights, "second")],
        "slotted": Slotted(np.arange(3)),
        "deque": deque([Level.LOW, Slotted([])], maxlen=3),
        "dict": {"__ckptd__": Progress(1), "tag": {"__ckptd__": "dataclass", "class": "x"}},
        "empty": Both(inner=None),
    }


def test_instances_and_members_come_back_in_value_and_type_without_init(tmp_path: Path) -> None:
    for cls in ALL:
        ckptd.register_type(cls)
    state = {"s": of_all_kinds()}
    for sharding in LAYOUTS:
        loaded = through_disk(tmp_path, state, sharding)["s"]
        assert same(loaded, state["s"])
        assert loaded["enums"][0] is Colour.RED
        assert loaded["tied"][0].weights.data_ptr() == loaded["tied"][1].weights.data_ptr()


def test_files_with_registered_classes_open_with_plain_torch(tmp_path: Path) -> None:
    for cls in ALL:
        ckptd.register_type(cls)
    path = ckptd.save(tmp_path / "c", {"s": of_all_kinds()}, step=1)
    plain = torch.load(path / "ckpt.pt", weights_only=True)
    assert plain["s"]["progress"]["fields"] == ["step", "best", "history"]


@pytest.mark.parametrize(
    "value", [Colour.RED, Level.LOW, Word.A, Mode.R, Progress(1), Slotted(1)], ids=lambda v: type(v).__name__
)
def test_without_registration_it_is_refused_by_key_path_with_the_call_that_helps(value: Any) -> None:
    with pytest.raises(UnstorableState) as caught:
        capture({"a": [value]})
    assert caught.value.where == "state['a'][0]"
    assert caught.value.todo == f"ckptd.register_type({type(value).__name__})"


def test_the_decorator_returns_the_class_and_may_name_it(tmp_path: Path) -> None:
    @ckptd.register_type(name="ours.Named")
    @dataclass
    class Named:
        a: int

    @ckptd.register_type
    class Local(enum.Enum):
        X = 1

    assert registered.class_of("ours.Named") is Named
    loaded = through_disk(tmp_path, {"v": [Named(1), Local.X]})["v"]
    assert loaded == [Named(1), Local.X]
    assert ckptd.register_type(Named, name="ours.Named") is Named  # again the same: nothing to do


def test_two_classes_of_one_name_and_two_names_of_one_class_are_refused() -> None:
    ckptd.register_type(Progress, name="one")
    with pytest.raises(InvalidArgument, match="another class"):
        ckptd.register_type(Frozen, name="one")
    with pytest.raises(InvalidArgument, match="another name"):
        ckptd.register_type(Progress)
    assert registered.class_of("one") is Progress
    assert registered.name_of(Frozen) is None


@dataclass
class Dict(dict):  # type: ignore[type-arg]
    a: int = 1


@dataclass
class Fault(Exception):
    a: int = 1


@dataclass
class Module(nn.Module):
    a: int = 1


@dataclass
class Abstract(abc.ABC):
    a: int

    @abc.abstractmethod
    def run(self) -> None: ...


class Tensors(enum.Enum):
    ONE = torch.float32


class NoMembers(enum.Enum):
    pass


class Plain:
    pass


@pytest.mark.parametrize(
    "cls",
    [
        Dict,
        Fault,
        Module,
        Abstract,
        Tensors,
        NoMembers,
        Plain,
        dict,
        nn.Linear,
        Progress(1),
        3,
        None.__class__,
    ],
    ids=str,
)
def test_what_fields_or_names_couldnt_say_is_refused_when_registered(cls: Any) -> None:
    with pytest.raises(InvalidArgument):
        ckptd.register_type(cls)
    assert cls not in list(registered._NAMES)


@pytest.mark.parametrize("name", ["", "x" * 501, "\ud800", 3, b"x"])
def test_a_name_that_no_file_could_hold_is_refused(name: Any) -> None:
    with pytest.raises(InvalidArgument):
        ckptd.register_type(Progress, name=name)


class Ghost:
    __slots__ = ("spook",)


@dataclass
class Haunted(Ghost):
    a: int = 1


@dataclass
class Cached:
    a: int = 1

    @functools.cached_property
    def b(self) -> int:
        return 2


def haunted() -> Haunted:
    value = Haunted()
    value.spook = 1
    return value


def more_than_fields() -> Progress:
    value = Progress(1)
    value.extra = 2  # type: ignore[attr-defined]
    return value


def cached() -> Cached:
    value = Cached()
    assert value.b == 2
    return value


def without_value() -> Slotted[int]:
    value = Slotted(1)
    del value.x
    return value


REFUSED = {
    "attribute": (more_than_fields, "extra"),
    "slot": (haunted, "spook"),
    "cached property": (cached, "b"),
    "no value": (without_value, "x"),
    "below": (lambda: Progress(1, history=[object()]), "history"),
    "keep": (lambda: Bits(8), ""),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_lost_of_an_instance_is_refused_by_key_path(kind: str) -> None:
    make, key = REFUSED[kind]
    for cls in (*ALL, Haunted, Cached):
        ckptd.register_type(cls)
    with pytest.raises(UnstorableState) as caught:
        capture({"a": make()})
    assert caught.value.where.startswith(f"state['a']['{key}']" if key else "state['a']")


class Gaps(enum.IntFlag):
    A = 1
    X = 6
    NONE = 0


class Masks(enum.Flag):
    AB = 3
    BC = 6
    D = 8
    ALSO_D = 8


class Kept(enum.IntFlag, boundary=enum.KEEP):
    A = 1
    BC = 6


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (Gaps.X, ["X"]), (Gaps.A | Gaps.X, ["A", "X"]), (Gaps(0), []),
        (Masks.AB, ["AB"]), (Masks(4), None), (Masks.AB | Masks.BC, ["AB", "BC"]),
        (Masks.AB | Masks.D, ["D", "AB"]), (Kept(7), ["A", "BC"]), (Mode.RW, ["R", "W"]), (~Mode.R, ["W", "X"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_flag_comes_back_whatever_members_its_bits_have(
    value: enum.Flag, names: list[str] | None, tmp_path: Path
) -> None:
    ckptd.register_type(type(value))
    if names is None:  # bits that no member has
        with pytest.raises(UnstorableState, match="no name") as caught:
            capture({"a": [value]})
        assert caught.value.where == "state['a'][0]"
        assert caught.value.todo
        return
    assert capture({"a": value}).state["a"]["members"] == names
    assert through_disk(tmp_path, {"a": value})["a"] is value


@dataclass
class Box(Generic[T]):
    x: T


def test_type_arguments_that_typing_notes_on_an_instance_are_no_data(tmp_path: Path) -> None:
    ckptd.register_type(Box)
    boxed = Box[int](3)
    assert "__orig_class__" in vars(boxed)
    loaded = through_disk(tmp_path, {"b": boxed}, rng=False)
    assert loaded["b"] == Box(3)
    assert vars(loaded["b"]) == {"x": 3}
    live = Box[int](4)
    apply_state({"b": live}, loaded)
    assert live.x == 3
    assert "__orig_class__" in vars(live)


def test_what_to_do_about_a_cached_property_is_said() -> None:
    ckptd.register_type(Cached)
    with pytest.raises(UnstorableState) as caught:
        capture({"a": cached()})
    assert "a cached_property a property" in caught.value.todo


def saved_then(tmp_path: Path, value: Any, forget: type, now: type | None, name: str) -> Path:
    """A checkpoint with value in it, after which the class of this name is another one, or none."""
    path = ckptd.save(tmp_path / "c", {"v": {"in": [value]}, "rest": 5}, step=1)
    del registered._CLASSES[name], registered._NAMES[forget]
    if now is not None:
        ckptd.register_type(now, name=name)
    return path


def test_a_process_that_hasnt_registered_the_class_gets_the_rest_and_a_stand_in(tmp_path: Path) -> None:
    ckptd.register_type(Progress, name="p")
    path = saved_then(tmp_path, Progress(3), Progress, None, "p")
    loaded = ckptd.load(path)
    assert loaded["rest"] == 5
    found = loaded["v"]["in"][0]
    assert isinstance(found, Unbuilt)
    assert (found.class_name, found.content) == ("p", {"step": 3, "best": float("inf"), "history": []})
    assert "register_type" in repr(found)
    with pytest.raises(UnstorableState):
        capture(loaded)
    live = {"v": {"in": [None]}, "rest": 0}
    with pytest.raises(StateMismatch, match=r"state\['v'\]\['in'\]\[0\] is a p, which isn't registered"):
        apply_state(live, loaded)
    assert live == {"v": {"in": [None]}, "rest": 0}
    apply_state(live, loaded, only=["rest"])
    assert live == {"v": {"in": [None]}, "rest": 5}


@dataclass
class Renamed:
    step: int
    best: float
    log: list[Any] = field(default_factory=list)


class Recoloured(enum.Enum):
    RED = "crimson"


class Unred(enum.Enum):
    BLUE = "red"


class OneAsFloat(enum.Enum):
    LOW = 1.0


class Fewer(enum.Flag):
    R = 1


CHANGED = {
    "fields": (Progress(1), Renamed, "added log; removed history"),
    "value": (Colour.RED, Recoloured, "RED is 'crimson' today, was 'red'"),
    "member": (Colour.RED, Unred, "no member RED"),
    "type of value": (Level.LOW, OneAsFloat, "LOW is 1.0 today, was 1 "),
    "flag": (Mode.RW, Fewer, r"no member R\|W"),
    "kind": (Progress(1), Colour, "an enum today"),
    "other kind": (Colour.RED, Progress, "a dataclass today"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_class_that_changed_since_the_save_is_refused_with_the_difference(
    what: str, tmp_path: Path
) -> None:
    value, now, said = CHANGED[what]
    ckptd.register_type(type(value), name="k")
    path = saved_then(tmp_path, value, type(value), now, "k")
    with pytest.raises(StateMismatch, match=said) as caught:
        ckptd.load(path)
    assert "state['v']['in'][0]" in str(caught.value)
    assert ckptd.load(path, only=["rest"]) == {"rest": 5}
    live: dict[str, Any] = {"v": {}, "rest": 0}
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        with pytest.raises(StateMismatch, match=said):
            client.restore(live, source=path)
        assert live == {"v": {}, "rest": 0}
        with pytest.raises(StateMismatch, match=said):
            client.restore(live, source=path, strict=False)


def test_fields_in_another_order_still_fit(tmp_path: Path) -> None:
    @dataclass
    class Turned:
        history: list[Any]
        best: float
        step: int

    ckptd.register_type(Progress, name="p")
    path = saved_then(tmp_path, Progress(3, 0.5, [1]), Progress, Turned, "p")
    assert ckptd.load(path)["v"]["in"] == [Turned([1], 0.5, 3)]


HOSTILE: list[dict[str, Any]] = [
    {"class": "known", "fields": ["__class__", "a"], "items": [1, 2]},
    {"class": "known", "fields": ["__dict__"], "items": [{}]},
    {"class": "os.system", "fields": ["a"], "items": ["true"]},
    {"class": 3, "fields": [], "items": []},
    {"class": "known", "fields": ["a", "a"], "items": [1, 2]},
    {"class": "known", "fields": ["a"], "items": []},
    {"class": "known", "fields": "a", "items": ["x"]},
    {"class": "known", "fields": [1], "items": ["x"]},
    {"class": "known", "fields": ["a"]},
]


@pytest.mark.parametrize("keys", HOSTILE, ids=str)
def test_a_tag_that_no_writer_makes_builds_nothing(keys: dict[str, Any]) -> None:
    @dataclass
    class Known:
        a: int

    ckptd.register_type(Known, name="known")
    for tag in (
        {"__ckptd__": "dataclass", **keys},
        {"__ckptd__": "enum", "members": ["a"], "value": 1, **keys},
    ):
        try:
            found = decode([tag])[0]
        except CorruptCheckpoint:
            continue
        assert isinstance(found, Unbuilt)


def test_nothing_is_imported_by_a_name_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for kind, rest in (("dataclass", {"fields": [], "items": []}), ("enum", {"members": ["A"], "value": 1})):
        found = decode({"__ckptd__": kind, "class": "evil_module.Evil", **rest})
        assert isinstance(found, Unbuilt)
    assert "evil_module" not in sys.modules


def test_a_live_instance_is_restored_in_place_and_a_frozen_one_replaced_in_its_parent(tmp_path: Path) -> None:
    for cls in ALL:
        ckptd.register_type(cls)
    weights = torch.arange(3.0)
    state = {"p": Progress(5, 0.5, [weights, Level.LOW]), "f": (Frozen(weights), {"b": Both(inner=[1])})}
    loaded = through_disk(tmp_path, state)
    live_weights = torch.zeros(3)
    progress, frozen, history = Progress(0), Frozen(live_weights), [live_weights, Level.HIGH]
    progress.history = history
    live: dict[str, Any] = {"p": progress, "f": (frozen, {"b": Both(inner=[])})}
    apply_state(live, loaded)
    assert same(live, state)
    assert live["p"] is progress and progress.history is history and history[0] is live_weights
    assert live["f"][0] is not frozen and live["f"][0].weights is live_weights
    renamed: dict[str, Any] = {
        "p": Progress(0),
        "f": (Frozen(live_weights, "other"), {"b": Both(inner=None)}),
    }
    apply_state(renamed, through_disk(tmp_path, state))
    assert same(renamed, state)
    assert renamed["f"][0].weights is live_weights


def test_objects_in_a_registered_instance_are_restored_in_place(tmp_path: Path) -> None:
    ckptd.register_type(Job)

    def fresh() -> Job:
        model = nn.Linear(500, 500)
        return Job(model, torch.optim.Adam(model.parameters()))

    def job() -> Job:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return Job(model, optimizer)

    saved, live = {"job": job()}, {"job": job()}
    assert capture(saved, rng=False).state["job"]["items"][1]["param_groups"][0]["params"] == [
        "job.model.weight", "job.model.bias",
    ]  # fmt: skip
    assert foresee({"job": Job(nn.Linear(500, 500), None)}) + 2_000_000 < foresee({"job": fresh()})
    apply_state(live, through_disk(tmp_path, saved))
    assert torch.equal(live["job"].model.weight, saved["job"].model.weight)
    assert same(live["job"].optimizer.state_dict(), saved["job"].optimizer.state_dict())


def test_another_kind_where_an_instance_is_live_is_refused(tmp_path: Path) -> None:
    ckptd.register_type(Progress)
    live: dict[str, Any] = {"p": Progress(0)}
    with pytest.raises(StateMismatch, match=r"state\['p'\]"):
        apply_state(live, through_disk(tmp_path, {"p": {"step": 1}}))
    assert live == {"p": Progress(0)}


def test_tensors_in_instances_and_deques_move_to_the_device_asked_for(tmp_path: Path) -> None:
    ckptd.register_type(Frozen)
    state = {"v": [Frozen(torch.ones(2)), deque([torch.ones(2)]), {"d": Frozen(torch.ones(1))}]}
    path = ckptd.save(tmp_path / "c", state, step=1)
    first, second, third = ckptd.load(path, map_location="meta")["v"]
    assert {x.device.type for x in (first.weights, second[0], third["d"].weights)} == {"meta"}


def test_registered_values_go_through_the_daemonless_client_and_isolation_holds(tmp_path: Path) -> None:
    ckptd.register_type(Progress)
    state = {"p": Progress(1, 0.5, [torch.ones(2)])}
    captured = capture(state, rng=False)
    state["p"].history.append(3)
    state["p"].step = 9
    assert captured.state["p"]["items"][0] == 1
    assert len(captured.state["p"]["items"][2]) == 1


def test_every_refusal_of_the_registry_is_one_of_ours() -> None:
    for value in (Dict(), Fault(), Plain()):
        with pytest.raises(CkptdError):
            capture({"x": value})


def test_registering_needs_no_torch() -> None:
    script = (
        "import sys, ckptd, enum\nckptd.register_type(enum.Enum('E', 'A'))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=250)


def test_dataclasses_made_at_run_time_work(tmp_path: Path) -> None:
    made = ckptd.register_type(dataclasses.make_dataclass("Made", ["a", "b"]), name="made")
    assert same(through_disk(tmp_path, {"v": made(1, [2])})["v"], made(1, [2]))


@pytest.mark.slow
def test_through_the_daemon_and_into_a_process_that_knows_no_such_class(places: Path) -> None:
    for cls in ALL:
        ckptd.register_type(cls)
    state = of_all_kinds()
    with ckptd.Client(places) as client:
        path = client.snapshot(1, {"s": state}).wait("verified", timeout_s=30).path
        assert path is not None and same(ckptd.load(path)["s"], state)
        live: dict[str, Any] = {"s": {"progress": Progress(0)}}
        assert client.restore(live) is not None
        assert same(live["s"]["progress"], state["progress"])
    script = (
        "import sys, ckptd\n"
        "s = ckptd.load(sys.argv[1])['s']\n"
        "print(s['progress'], s['progress'].content['best'], s['tied'][0].content['weights'].tolist(), s['empty'])\n"
        "assert 'test_registered' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=True, timeout=250, capture_output=True, text=True
    )
    assert done.stdout.count("isn't registered in this process") == 2
    assert "0.5 [0.0, 1.0, 2.0]" in done.stdout

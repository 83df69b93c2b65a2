from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import SWALR

from ckptd.errors import CorruptCheckpoint, UnstorableState, UnsupportedTorch
from ckptd.tensors import tags
from ckptd.tensors.capture import capture
from ckptd.tensors.tag_reader import GeneratorElsewhere, decode
from ckptd.tensors.torch_support import DTYPE_BY_NAME, check_torch
from round_trip import same

HOSTILE: list[Any] = [
    {"__ckptd__": "eval", "code": "1"},
    {"__ckptd__": None},
    {"__ckptd__": ["dict"]},
    {"__ckptd__": "dict"},
    {"__ckptd__": "dict", "items": [1]},
    {"__ckptd__": "dict", "items": [[[], 1]]},
    {"__ckptd__": "defaultdict", "factory": "eval", "items": []},
    {"__ckptd__": "defaultdict", "factory": "__import__", "items": []},
    {"__ckptd__": "namedtuple", "module": "m", "name": "n", "fields": ["a"], "items": []},
    {"__ckptd__": "namedtuple", "module": "m", "name": "n", "fields": ["a b"], "items": [1]},
    {"__ckptd__": "namedtuple", "module": "m", "name": "import os", "fields": ["a"], "items": [1]},
    {
        "__ckptd__": "ndarray",
        "dtype": "O",
        "shape": [1],
        "order": "C",
        "data": torch.zeros(8, dtype=torch.uint8),
    },
    {
        "__ckptd__": "ndarray",
        "dtype": "f8",
        "shape": [3],
        "order": "C",
        "data": torch.zeros(8, dtype=torch.uint8),
    },
    {"__ckptd__": "ndarray", "dtype": "f8", "shape": [1], "order": "C", "data": 3},
    {
        "__ckptd__": "ndarray",
        "dtype": "x",
        "shape": [1],
        "order": "C",
        "data": torch.zeros(8, dtype=torch.uint8),
    },
    {"__ckptd__": "numpy-scalar", "dtype": "O", "data": b"12345678"},
    {"__ckptd__": "numpy-scalar", "dtype": "f8", "data": b"1"},
    {"__ckptd__": "numpy-scalar", "dtype": "f8", "data": b"1" * 16},
    {"__ckptd__": "torch-generator", "device": "cpu", "state": b"x"},
    {"__ckptd__": "torch-generator", "device": "nowhere", "state": b"x"},
    {"__ckptd__": "numpy-generator", "bit_generator": "default_rng", "state": {}},
    {"__ckptd__": "numpy-generator", "bit_generator": "PCG64", "state": {}},
    {"__ckptd__": "python-random", "state": (3, (1, 2), None)},
    {"__ckptd__": "torch-function", "name": "SWALR.__init__"},
    {"__ckptd__": "torch-function", "name": "os.system"},
    {"__ckptd__": "torch-function", "name": []},
    {"__ckptd__": "deque", "items": [], "maxlen": "x"},
    {"__ckptd__": "frozenset", "items": [[]]},
    {"__ckptd__": "bytearray", "data": "x"},
]


@pytest.mark.parametrize("tag", HOSTILE, ids=lambda tag: str(tag)[:60])
def test_a_tag_that_no_writer_makes_is_refused(tag: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode({"a": [tag]})


def test_a_class_named_in_a_tag_is_neither_imported_nor_run(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    tag = {"__ckptd__": "namedtuple", "module": "evil_module", "name": "T", "fields": ["a"], "items": [1]}
    assert tuple(decode(tag)) == (1,)
    assert "evil_module" not in sys.modules


def test_a_class_in_memory_that_is_no_such_namedtuple_is_not_used() -> None:
    for module, name in (
        ("os", "stat_result"),
        ("builtins", "tuple"),
        ("pathlib", "Path"),
        ("os", "path.join"),
    ):
        tag = {"__ckptd__": "namedtuple", "module": module, "name": name, "fields": ["a"], "items": [1]}
        value = decode(tag)
        assert value._fields == ("a",)


@pytest.mark.parametrize(
    "value",
    [b"", b"\0", b"ab\0", b"\0\0", b"\0a", "", "\0", "a\0\0", "\0é\U0001f600\0", "\ud800\0"],
    ids=ascii,
)
def test_a_numpy_string_keeps_its_length(value: str | bytes) -> None:
    scalar = np.str_(value) if isinstance(value, str) else np.bytes_(value)
    tag = tags.encode(scalar, ())
    assert tag is not None
    back = decode(tag)
    assert type(back) is type(scalar)
    assert back == scalar
    assert len(back) == len(value)
    assert back.dtype == scalar.dtype


@pytest.mark.parametrize("kind", ["S0", "U0"])
def test_an_empty_string_of_an_older_file_is_read(kind: str) -> None:
    tag = {"__ckptd__": "numpy-scalar", "dtype": kind, "data": b"\0"}
    assert decode(tag) == ("" if kind == "U0" else b"")


def unknown(name: str, fields: list[str]) -> Any:
    """A namedtuple of a class that nobody finds by its name."""
    return namedtuple(name, fields, rename=True)(*range(len(fields)))  # type: ignore[misc]


@pytest.mark.parametrize("fields", [["a", "class", "a"], ["_x"], [], ["é", "_1"]], ids=str)
def test_a_namedtuple_with_renamed_fields_comes_back(fields: list[str]) -> None:
    value = unknown("Unknown", fields)
    tag = tags.encode(value, ())
    assert tag is not None
    back = decode(tag)
    assert back == value
    assert back._fields == value._fields


class Longer(tuple):  # type: ignore[type-arg]
    _fields = ("a",)


class Private(tuple):  # type: ignore[type-arg]
    _fields = ("_a",)


class Own(NamedTuple):
    a: int
    b: int = 2

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Any:
        return iter("xyz")


def noted() -> Longer:
    value = Longer((1,))
    value.note = [1]  # type: ignore[attr-defined]
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda: Longer((1, 2)), lambda: Longer(()), noted, lambda: Private((1,)),
        lambda: type("no name", (tuple,), {"_fields": ("a",)})((1,)),
        lambda: type("T", (tuple,), {"_fields": ("a", "a")})((1, 2)),
        lambda: type("T", (tuple,), {"_fields": ("a",), "__module__": None})((1,)),
    ],
)  # fmt: skip
def test_a_tuple_that_only_looks_like_a_namedtuple_is_refused(make: Any) -> None:
    with pytest.raises(UnstorableState, match=r"state\['a'\]") as caught:
        capture({"a": make()})
    assert caught.value.todo == "store tuple(value)"


def test_a_namedtuple_is_stored_by_its_items_whatever_it_iterates_over() -> None:
    tag = tags.encode(Own(1), ())
    assert tag is not None
    back = decode(tag)
    assert type(back) is Own
    assert (back.a, back.b) == (1, 2)


@pytest.mark.parametrize("fields", [["_a"], ["a", "a"], ["class"], ["a b"], [""], ["_0", "_0"]], ids=str)
def test_fields_that_no_namedtuple_has_are_refused_when_read(fields: list[str]) -> None:
    tag = {
        "__ckptd__": "namedtuple",
        "module": "m",
        "name": "T",
        "fields": fields,
        "items": [1] * len(fields),
    }
    with pytest.raises(CorruptCheckpoint):
        decode(tag)


def test_an_array_of_a_dtype_that_numpy_doesnt_know_by_its_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tags, "_dtype_name", lambda dtype: "<f1")  # as an extension's float8 may call itself
    with pytest.raises(UnstorableState, match="dtype"):
        tags.encode(np.ones(3), ())


def test_encoding_and_decoding_are_inverse_by_themselves() -> None:
    for value in (np.float32(2.0), bytearray(b"x"), frozenset({1}), np.arange(3)):
        assert same(decode(tags.encode(value, ())), value)
    assert tags.encode(5, ()) is None
    with pytest.raises(UnstorableState, match=r"state\['x'\]"):
        tags.encode(np.array([None]), ("x",))


@pytest.mark.parametrize("name", ["_cosine_anneal", "_linear_anneal"])
def test_the_function_that_an_old_torchs_swalr_keeps_in_its_state_dict_comes_back(name: str) -> None:
    function = getattr(SWALR, name)
    state = {"anneal_func": function, "anneal_epochs": 3}  # torch 2.6; newer ones keep the strategy's name
    stored = capture({"swa": state}).state["swa"]
    assert stored["anneal_func"] == {"__ckptd__": "torch-function", "name": f"SWALR.{name}"}
    assert decode(stored)["anneal_func"] is function


def test_no_other_function_is_stored_though_its_name_is_that_of_one() -> None:
    def _cosine_anneal(t: float) -> float:
        return t

    _cosine_anneal.__qualname__ = "SWALR._cosine_anneal"
    assert tags.encode(_cosine_anneal, ()) is None
    with pytest.raises(UnstorableState, match=r"state\['f'\]"):
        capture({"f": _cosine_anneal})


def test_decoding_keeps_metadata_and_order() -> None:
    value = OrderedDict(b=1, a={"__ckptd__": "bytearray", "data": b"x"})
    value._metadata = {"": {}}  # type: ignore[attr-defined]
    decoded = decode(value)
    assert list(decoded.items()) == [("b", 1), ("a", bytearray(b"x"))]
    assert decoded._metadata == {"": {}}


def test_the_generator_of_a_device_that_isnt_here_is_kept_as_its_state() -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has CUDA")
    value = decode({"__ckptd__": "torch-generator", "device": "cuda:3", "state": b"abc"})
    assert isinstance(value, GeneratorElsewhere)
    assert (value.device, value.state) == ("cuda:3", b"abc")


@pytest.mark.parametrize("version", ["2.5.1", "1.13.0+cu117", "2.0", "x", ""])
def test_a_torch_older_than_2_6_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedTorch, match=r"2\.6"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "3.0", "2.7.0a0+git123"])
def test_newer_ones_are_taken(version: str) -> None:
    check_torch(version)


def test_dtypes_are_known_by_the_name_torch_prints() -> None:
    assert all(str(dtype) == f"torch.{name}" for name, dtype in DTYPE_BY_NAME.items())

"""What usually lies behind a difference, in words for the person whose job it is. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from ckptd.proof.comparing import Finding

Phase: TypeAlias = Literal["repeat", "restore", "resumed"]

_GENERATOR: Final = {
    "python": ("Python's random", "random.seed(0)"),
    "numpy": ("NumPy's global generator", "numpy.random.seed(0)"),
}

_SEEDS: Final = (
    "seeds: torch.manual_seed(0), random.seed(0), numpy.random.seed(0), before the model and data are made"
)
_OTHER_SOURCES: Final = (
    "time, os.urandom or uuid; a folder listed without sorted(); the order of a set of strings "
    "(PYTHONHASHSEED=0)"
)
_OWN_GENERATORS: Final = "a generator made without a seed: numpy.random.default_rng(), random.Random()"
_KERNELS: Final = (
    "kernels: torch.use_deterministic_algorithms(True), on CUDA with CUBLAS_WORKSPACE_CONFIG=:4096:8; threads: "
    "torch.set_num_threads(1)"
)
_DIFFER_WHEN_MADE: Final = (
    "the suspects, which differ as soon as make_job() is done: give them a seed, such as default_rng(0)"
)
_SOURCES: Final = (
    "takes numbers that no seed decides; where training uses them (not only a log), draw them from a seeded "
    "generator in the state"
)
_SUSPECTS: Final = "the suspects: put them into the state, or compute them from what is in it"
_MADE_ANEW: Final = (
    "variables that the loop makes anew: count in ckptd.TrainState, keep the rest in the state too"
)
_LOADER: Final = "a DataLoader, if there is one: wrap it, state['loader'] = ckptd.ResumableLoader(loader)"
_SEEDED_AGAIN: Final = "a seed that is set when the loop starts: set it in make_job()"
_OUTSIDE_GENERATOR: Final = (
    "a generator of its own (torch.Generator, numpy Generator, random.Random): put it into the state"
)
_OUTSIDE: Final = (
    "an EMA, a running mean, a counter, a cache: put it into the state (ckptd.TrainState for counters)"
)
_BUFFER: Final = (
    "a buffer that isn't persistent or a plain attribute of a module: register_buffer(name, tensor)"
)
_DATASET: Final = "a dataset or sampler that changes while it is read: put what it remembers into the state"
_MOMENTS: Final = "the optimizer: without it in the state its moments start from zero"
_SCHEDULER: Final = "the learning rate: is the scheduler in the state, and stepped before the yield?"
_YIELD: Final = "code after the yield: at the snapshot it hasn't run; do everything of a step before it"
_GRADIENTS: Final = (
    "gradients accumulated over several steps: put them in, state['gradients'] = ckptd.Gradients(model)"
)
_COUNTS: Final = (
    "steps counted from the start again, or from a count that make_job() read before the restore: "
    "`while train.step < total` in the loop, train = ckptd.TrainState() in the state"
)

#: For each kind that beside.look_around names.
_NAMED: Final = {
    "left_out": "a ResumableLoader that isn't in the state, so it starts again: put it in, state['loader'] = it",
    "loaders": "a DataLoader that isn't in the state: wrap it, state['loader'] = ckptd.ResumableLoader(loader)",
    "in_workers": "a module's generator, of which each DataLoader worker has a copy that no checkpoint reaches: make it "
    "an attribute of the dataset, where ckptd.ResumableLoader records it in every worker",
    "ranges": "made in make_job(), before the restore: if the loop counts its steps by it, a resumed run starts again. Make "
    "it in the loop, range(train.step, total), or `while train.step < total`",
}


def of_unseeded(part: str, step: int) -> tuple[str, tuple[str, ...]]:
    """For a draw from a generator that the job never seeded: why, and what to do."""
    name, seed = _GENERATOR[part]
    why = f"step {step} draws from {name}, which the job never seeds: each run draws other numbers"
    return why, (f"call {seed} in make_job()",)


def of_refusal() -> tuple[str, tuple[str, ...]]:
    """For a checkpoint that doesn't fit what make_job() makes."""
    why = "the state that make_job() makes doesn't fit the one of the same job some steps later"
    return why, (
        "names that the loop adds to the state: make them in make_job()",
        "shapes or sizes that depend on what was trained: put what decides them into make_job()",
    )


def explain(
    phase: Phase,
    found: Finding,
    *,
    cut: int | None,
    kinds: Mapping[str, str],
    from_start: bool = False,
    suspected: bool = False,
    anew: bool = False,
    around: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[str, tuple[str, ...]]:
    """Why the runs differ, as far as that is certain, and where to look, the likeliest first.

    Args:
        phase: repeat: two uninterrupted runs differ. restore: the state right after the restore isn't the
            snapshot's. resumed: a step after it differs.
        found: What differs.
        cut: The step that was restored.
        kinds: Component → what it is.
        from_start: Whether the first loss after the resume is the one of step 1.
        suspected: Whether something beside the state wasn't brought back (for a repeat: was made otherwise).
        anew: Whether the loop makes variables anew.
        around: What else the job has, by name; see beside.look_around.
    """
    if phase == "repeat":
        return _of_repeat(found, suspected, around.get("sources", ()))
    if phase == "restore":
        return _of_restore(found)
    why = _what_is_certain(found, cut or 0)
    if from_start:
        return (
            f"{why}; its first loss is the one of step 1",
            (
                "a loop that trains other objects than those in the state: make them in make_job() only",
                _SEEDED_AGAIN,
            ),
        )
    named = _of_names(around)
    if suspected:
        return why, (_SUSPECTS, *named, *([_MADE_ANEW] if anew else []))
    return why, (*named, *_of_resumed(found, set(kinds.values()), anew, loader_named=_loader_named(around)))


def _loader_named(around: Mapping[str, Sequence[str]]) -> bool:
    return bool(around.get("loaders") or around.get("left_out"))


def _of_names(around: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What is there for certain, so it comes before what only may be."""
    for kind, advice in _NAMED.items():
        if names := around.get(kind):
            yield f"{', '.join(names)}: {advice}"


def _of_repeat(found: Finding, suspected: bool, sources: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    why = "two uninterrupted runs differ already: the job itself isn't deterministic, and no checkpoint can help it"
    named = [_DIFFER_WHEN_MADE] if suspected else []
    named += [f"{', '.join(sources)}: {_SOURCES}"] if sources else []
    if found.step == 0:
        return why, (*named, _SEEDS, _OTHER_SOURCES)
    # The global generators are seeded, if they are equal all the same.
    seeds = [_SEEDS] if found.rng_differs or not found.extents else []
    return why, (*named, *seeds, _OWN_GENERATORS, _OTHER_SOURCES, _KERNELS)


def _of_restore(found: Finding) -> tuple[str, tuple[str, ...]]:
    why = (
        "the state right after the restore isn't the one that was saved: "
        "load_state_dict() doesn't take back what state_dict() gave"
    )
    look = {
        "module": "hooks on load_state_dict or state_dict, buffers that are computed, parametrizations",
        "optimizer": "an optimizer with a load_state_dict of its own",
        "scheduler": "what the scheduler computes when it is made or loaded",
        "rng": "something that draws random numbers while it is loaded: load_state_dict() mustn't",
    }.get(found.kind, "the state_dict() and load_state_dict() of the object there")
    return why, (look,)


def _what_is_certain(found: Finding, cut: int) -> str:
    if found.kind == "end":
        return f"all was equal up to step {found.step - 1}; then the loop ended by a count that isn't in the state"
    if found.step == cut + 1:
        return f"right after the restore all of the state was equal, so step {found.step} uses something beside the state"
    return (
        f"the restored state and steps {cut + 1} to {found.step - 1} were equal, so step {found.step} uses something "
        "beside the state that comes only now and then (a new epoch, every n-th step, a warm-up)"
    )


def _of_resumed(found: Finding, kinds: set[str], anew: bool, *, loader_named: bool) -> tuple[str, ...]:
    looks = _of_kind(found, kinds, anew)
    # One that the job reaches was named; one that it may have all the same is the least likely.
    return tuple(looks) if loader_named or "loader" in kinds or found.kind == "end" else (*looks, _LOADER)


def _of_kind(found: Finding, kinds: set[str], anew: bool) -> list[str]:
    if found.kind == "end":
        return [_COUNTS]
    looks: list[str] = []
    if "optimizer" not in kinds:
        looks.append(_MOMENTS)
    if found.kind == "loss":
        looks += _of_loss(found)
    elif found.kind in ("module", "optimizer", "scheduler", "gradients"):
        # The loss was equal, so it is what is done with its gradients.
        looks += [] if "gradients" in kinds else [_GRADIENTS]
        looks += [_MADE_ANEW] if anew else []
        looks += [] if "scheduler" in kinds else [_SCHEDULER]
        looks.append(_YIELD)
    elif found.kind == "rng":
        looks += [_SEEDED_AGAIN, _OUTSIDE]
    else:
        looks += [_COUNTS, _YIELD]
    return looks


def _of_loss(found: Finding) -> list[str]:
    if found.rng_differs:
        return [_SEEDED_AGAIN, _DATASET, _OUTSIDE]
    return [_MADE_ANEW, _OUTSIDE_GENERATOR, _OUTSIDE, _BUFFER, _DATASET, _YIELD]

# ruff: noqa: TID253
"""The random generators of the process: Python's, NumPy's, torch's on the CPU and on every CUDA device.

Nothing here draws a number: reading a state doesn't move it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from ckptd.errors import StateMismatch
from ckptd.tensors.generator_places import check_numpy_place, check_torch_place
from ckptd.tensors.number_lists import packed_array, packed_ints
from ckptd.warning import warn

_PARTS = ("python", "numpy", "torch", "cuda")


def capture_rng_state() -> dict[str, Any]:
    """The state of every global generator, in types that `torch.load(weights_only=True)` accepts.

    Returns:
        `python`: [version, list of 625 ints, gauss or None]; `numpy`: ["MT19937", list of 624 ints, pos,
        has_gauss, cached_gaussian] (a dict with `bit_generator` when another one is installed globally);
        `torch`: uint8 tensor on the CPU; `cuda`: one uint8 CPU tensor per device, empty when CUDA
        isn't in use.

    CUDA is not started by asking: as long as this process hasn't used it, there is no state to keep.
    """
    return _captured(list, numpy.ndarray.tolist)


def packed_rng_state() -> dict[str, Any]:
    """The same as a snapshot takes it, the words of Python's and NumPy's packed: out of lists that would take far longer."""
    return _captured(packed_ints, packed_array)


def _captured(
    of_python: Callable[[tuple[int, ...]], Any], of_numpy: Callable[[numpy.ndarray], Any]
) -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    return {
        "python": [version, of_python(internal), gauss],
        "numpy": _numpy_state(of_numpy),
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all())
        if torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        else [],
    }


def _numpy_state(words: Callable[[numpy.ndarray], Any]) -> Any:
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return plain_numpy(state)
    inner = state["state"]
    return [
        "MT19937",
        words(inner["key"]),
        int(inner["pos"]),
        int(state["has_gauss"]),
        float(state["gauss"]),
    ]


def plain_numpy(value: Any) -> Any:
    """NumPy's state dicts with lists and Python numbers for arrays and scalars; the values are the same."""
    if isinstance(value, Mapping):
        return {str(key): plain_numpy(item) for key, item in value.items()}
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, numpy.generic) else value


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Set every generator to a captured state; the next draws are those that followed the capture.

    Accepts what `capture_rng_state` gives and the plain lists of format v1. CUDA states go to the devices of the
    same number. Where this host has fewer devices, or more, than the checkpoint has states, one warning says
    which were skipped, or which go on with the generators they have; a checkpoint without any changes none.

    Raises:
        StateMismatch: A part is missing or isn't a generator state. Nothing was set.
    """
    apply = plan_rng(state)
    apply()
    for text in unlike_devices(state):
        warn(text)


def plan_rng(state: Mapping[str, Any], cuda: Any = torch.cuda) -> Any:
    """Check a captured state wholly and return the function that sets it.

    Args:
        state: As for restore_rng_state.
        cuda: Where the devices are: torch.cuda, or what has its is_available, device_count and set_rng_state.

    Raises:
        StateMismatch: As for restore_rng_state.
    """
    _check_parts(state)
    try:
        python, legacy = _python_state(state["python"]), _numpy_legacy(state["numpy"])
        cpu = _bytes_tensor(state["torch"], "torch")
        on_devices = [_bytes_tensor(item, "cuda") for item in state.get("cuda") or []]
        _try_out(python, legacy, cpu)
    except StateMismatch:
        raise
    except (ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:
        raise StateMismatch(
            "not a generator state", where="state['rng']", seen=(str(error).splitlines() or ["?"])[0]
        ) from error

    def apply() -> None:
        random.setstate(python)
        numpy.random.set_state(legacy)
        torch.set_rng_state(cpu)
        _set_cuda(on_devices, cuda)

    return apply


def _check_parts(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise StateMismatch(
            "not an RNG state", where="state['rng']", seen=type(state).__name__, wanted="a dict"
        )
    missing = [part for part in _PARTS[:3] if part not in state]
    if missing:
        raise StateMismatch(
            "the RNG state lacks parts",
            where="state['rng']",
            seen=f"no {', '.join(missing)}",
            wanted=", ".join(_PARTS),
        )


def _python_state(value: Any) -> tuple[Any, ...]:
    version, internal, gauss = value
    return (int(version), tuple(int(word) for word in internal), gauss)


def _numpy_legacy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _with_arrays(value)
    name, key, pos, has_gauss, cached = value
    return (str(name), numpy.asarray(key, dtype=numpy.uint32), int(pos), int(has_gauss), float(cached))


def _with_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_arrays(item) for key, item in value.items()}
    return numpy.asarray(value, dtype=numpy.uint64) if isinstance(value, list) else value


def _bytes_tensor(value: Any, part: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device="cpu", dtype=torch.uint8).contiguous()
    if isinstance(value, (bytes, bytearray)):
        return torch.tensor(list(value), dtype=torch.uint8, device="cpu")
    if isinstance(value, (list, tuple, numpy.ndarray)):
        return torch.tensor([int(byte) for byte in value], dtype=torch.uint8, device="cpu")
    raise StateMismatch(
        "not a generator state",
        where=f"state['rng'][{part!r}]",
        seen=type(value).__name__,
        wanted="uint8 tensor",
    )


def _try_out(python: Any, legacy: Any, cpu: torch.Tensor) -> None:
    """Set the states on generators of our own first: a state refused must not half-change the process."""
    check_numpy_place(_as_mapping(legacy))
    random.Random().setstate(python)
    numpy.random.RandomState(type(_global_bit_generator())()).set_state(legacy)
    torch.Generator().set_state(cpu)
    check_torch_place(cpu.numpy().tobytes())


def _as_mapping(legacy: Any) -> Any:
    return (
        legacy if isinstance(legacy, Mapping) else {"bit_generator": legacy[0], "state": {"pos": legacy[2]}}
    )


def _global_bit_generator() -> Any:
    return numpy.random.get_bit_generator()  # type: ignore[attr-defined]


def _set_cuda(states: list[torch.Tensor], cuda: Any) -> None:
    for device, saved in enumerate(states[: _present(cuda)] if states else ()):
        cuda.set_rng_state(saved, device)


def _present(cuda: Any) -> int:
    return cuda.device_count() if cuda.is_available() else 0


def unlike_devices(state: Mapping[str, Any], cuda: Any = torch.cuda) -> list[str]:
    """What to warn of before a state is set that plan_rng found right: another number of CUDA devices."""
    states = state.get("cuda") or []
    present = _present(cuda) if states else 0
    if len(states) == present:
        return []
    rest = (
        "the others are skipped: random draws on them don't continue where they stopped"
        if len(states) > present
        else "the further devices keep the generators they have"
    )
    return [
        f"state['rng']['cuda']: the checkpoint holds the RNG states of {len(states)} CUDA devices, "
        f"this host has {present}; {rest}"
    ]

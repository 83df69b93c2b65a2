# ruff: noqa: TID253
"""What a DataLoader is, as plain values: what must be the same in a resumed run, and what changes its draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from torch.utils.data import DataLoader

from ckptd.errors import StateMismatch
from ckptd.loop.loader_way import has_own_iter, is_iterable

Kind: TypeAlias = dict[str, Any]

_WANTED: Final = {
    "batch_size": "batch size",
    "length": "length",
    "sampler": "sampler",
    "dataset": "kind of dataset",
    "iter": "__iter__",
}
_SIZED: Final = ("dataset", "sampler")
_LENGTHS: Final = frozenset({int, type(None)})


class Kinds:
    """The kind of one DataLoader, now and later.

    Its dataset and its sampler may grow or shrink meanwhile, so how long they were at first is kept too.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._at_first = [_size(each) for each in self._sized()]

    def _sized(self) -> Iterator[Any]:
        return (None if is_iterable(self._loader) else getattr(self._loader, name) for name in _SIZED)

    def now(self) -> Kind:
        """What it is like now."""
        loader = self._loader
        return {
            "workers": loader.num_workers,
            "prefetch": loader.prefetch_factor,
            "persistent": bool(loader.persistent_workers),
            "batch_size": loader.batch_size,
            # Not len(loader) of an iterable dataset: torch counts from then on, and warns.
            "length": _size(loader.dataset if is_iterable(loader) else loader),
            "sizes": [
                [first, _size(each)] for first, each in zip(self._at_first, self._sized(), strict=True)
            ],
            "sampler": _sampler(loader),
            "dataset": "iterable" if is_iterable(loader) else "map",
            "iter": type(loader).__qualname__ if has_own_iter(loader) else "",
        }

    def compare(self, stored: Mapping[str, Any]) -> None:
        """Whether a position inside an epoch of a loader of the stored kind can be one of this loader.

        Raises:
            StateMismatch: It can't.
        """
        live = self.now()
        stored = {"iter": live["iter"], "sizes": live["sizes"], **stored}  # older positions lack it
        for name, said in _WANTED.items():
            if stored.get(name) != live[name]:
                raise _other(said, name, live[name], stored.get(name))
        for name, now, before in zip(_SIZED, live["sizes"], _checked(stored["sizes"]), strict=True):
            if now[0] != before[0] and now[1] != before[1]:
                raise _other(f"length of the {name}", name, now[1], before[1])


def _checked(sizes: Any) -> list[list[Any]]:
    pairs = sizes if isinstance(sizes, list) and len(sizes) == len(_SIZED) else [None]
    if not all(
        isinstance(pair, list) and len(pair) == 2 and _LENGTHS.issuperset(map(type, pair)) for pair in pairs
    ):
        raise StateMismatch(
            "damaged position of a loader", where="loader['kind']", seen=f"sizes: {sizes!r:.60}"
        )
    return list(sizes)


def _other(said: str, name: str, live: Any, stored: Any) -> StateMismatch:
    return StateMismatch(
        f"the checkpoint is in the middle of an epoch of a loader with another {said}",
        where=f"loader.{name}", seen=str(live or None), wanted=str(stored or None),
        todo="give the DataLoader the checkpoint's value, or restore without the loader",
    )  # fmt: skip


def _size(of: Any) -> int | None:
    try:
        return len(of)
    except Exception:  # noqa: BLE001 - no length, or not yet, or its own code failed: nobody needed it so far
        return None


def _sampler(loader: DataLoader[Any]) -> str:
    outer, inner = loader.batch_sampler, loader.sampler
    names = [type(sampler).__qualname__ for sampler in (outer, inner) if sampler is not None]
    return " of ".join(names)

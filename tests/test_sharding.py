"""Which tensor goes into which file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.format.sharding import assign, shard_key
from ckptd.limits import MIB
from ckptd.snapshot.descriptor import Sharding


@st.composite
def components(draw: st.DrawFn) -> list[Any]:
    count = draw(st.integers(1, 40))
    groups = draw(st.lists(st.integers(0, count), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(0, 10_000), min_size=count + 1, max_size=count + 1))
    return [
        (10 * i, (f"h.{i}.{'weight' if i % 2 else 'bias'}",), sizes[groups[i]], groups[i])
        for i in range(count)
    ]


SHARDINGS = st.one_of(
    st.builds(Sharding, by=st.sampled_from(["size", "round-robin"]), shards=st.integers(1, 12)),
    st.just(Sharding(by="param-group")), st.just(Sharding()),
)  # fmt: skip


@given(components(), SHARDINGS)
def test_every_tensor_is_in_one_file_with_its_ties_and_no_file_is_empty(
    rows: list[Any], how: Sharding
) -> None:
    files = assign(rows, how, cores=4)
    assert sorted(index for file in files for index in file) == [row[0] for row in rows]
    assert all(files) and all(file == sorted(file) for file in files)
    place = {index: number for number, file in enumerate(files) for index in file}
    homes: dict[int, set[int]] = {}
    for index, _, _, group in rows:
        homes.setdefault(group, set()).add(place[index])
    assert all(len(numbers) == 1 for numbers in homes.values())
    if how.shards != "auto":
        assert len(files) == min(how.shards, len(homes))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 8))
def test_by_size_no_file_is_heavier_than_the_lightest_by_more_than_one_tensor(
    sizes: list[int], count: int
) -> None:
    rows = [(i, (f"t{i}",), size, i) for i, size in enumerate(sizes)]
    loads = [sum(sizes[i] for i in file) for file in assign(rows, Sharding(shards=count), cores=1)]
    assert max(loads) - min(loads) <= max(sizes)


def test_round_robin_deals_the_sorted_keys() -> None:
    rows = [(i, (name,), 1, i) for i, name in enumerate(["c", "a", "d", "b", "e"])]
    assert assign(rows, Sharding(by="round-robin", shards=2), cores=1) == [[0, 1, 4], [2, 3]]


def test_param_group_makes_weights_biases_and_the_rest() -> None:
    names = ["h.weight", "h.bias", "scale", "weight", "bias", "weighty", "x.weight"]
    rows: list[Any] = [(i, (name,), 1, i) for i, name in enumerate(names)]
    rows.append((7, ("state", "h.bias", "exp_avg"), 1, 7))
    assert assign(rows, Sharding(by="param-group"), cores=1) == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert assign(rows[:1], Sharding(by="param-group"), cores=1) == [[0]]


@pytest.mark.parametrize(
    ("mib", "cores", "files"),
    [(1, 8, 1), (8, 8, 2), (64, 2, 2), (64, 8, 8), (300, 1, 2), (1024, 2, 4), (1024, 6, 6), (100_000, 8, 64)],
)
def test_auto_makes_files_of_256_mib_and_as_many_as_cores(mib: int, cores: int, files: int) -> None:
    rows = [(i, (f"t{i}",), mib * MIB // 128, i) for i in range(128)]
    assert len(assign(rows, Sharding(), cores=cores)) == files


@pytest.mark.parametrize("nbytes", [0, 5])
def test_a_thousand_shards_of_three_tensors_are_three(nbytes: int) -> None:
    rows = [(i, (f"t{i}",), nbytes, i) for i in range(3)]
    assert assign(rows, Sharding(shards=1000), cores=1) == [[0], [1], [2]]


def test_shard_keys_of_different_paths_differ() -> None:
    paths: list[Any] = [
        ("a",),
        ("[]",),
        (),
        ("a", "b"),
        ("a.b",),
        ('["a","b"]',),
        (1,),
        ("1",),
        (True,),
        (1.0,),
        (None,),
    ]
    assert len({shard_key(path) for path in paths}) == len(paths)
    assert shard_key(("h.0.weight",)) == "h.0.weight"
    assert shard_key(("state", "w", 0)) == '["state","w",0]'

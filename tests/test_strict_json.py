from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import CorruptCheckpoint
from ckptd.format import strict_json
from ckptd.format.strict_json import canonical, compact, float_from_json, float_to_json, parse

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
)
_TREES = st.recursive(
    _LEAVES | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


def _refused(data: bytes) -> str:
    with pytest.raises(CorruptCheckpoint) as caught:
        parse(data, where="here.json", max_bytes=1000)
    assert caught.value.where == "here.json"
    return str(caught.value)


@given(_TREES)
def test_what_is_written_comes_back_and_has_one_spelling(tree: object) -> None:
    for spell in (canonical, compact):
        data = spell(tree)
        back = parse(data, where="", max_bytes=10**9)
        assert back == tree
        assert spell(back) == data


def test_the_canonical_form_is_what_the_design_says() -> None:
    obj = {"b": [1, 2.5], "a": "é"}
    assert canonical(obj) == (json.dumps(obj, sort_keys=True, indent=2) + "\n").encode()


def test_a_key_given_twice_is_refused_by_name() -> None:
    assert "'step'" in _refused(b'{"step": 1, "step": 2}')


def test_finding_the_key_given_twice_takes_one_pass_however_many_keys_there_are() -> None:
    compared = 0

    class Key(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)  # type: ignore[no-any-return]

    names = [*range(1000), 999]
    with pytest.raises(ValueError, match="'k999'"):
        strict_json._unique([(Key(f"k{number}"), None) for number in names])
    assert compared < 20 * len(names)


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_no_json_are_refused(token: str) -> None:
    _refused(f'{{"x": {token}}}'.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nul",
        b"\xff{}",
        b"\xef\xbb\xbf{}",
        b'{"a": 1} x',
        b'["\\ud800"]',
        b'{"\\udfff": 1}',
        b'"\x00"',
    ],
)
def test_what_is_no_strict_json_is_refused(data: bytes) -> None:
    _refused(data)


def test_a_surrogate_pair_is_text() -> None:
    assert parse(b'"\\ud83d\\ude00"', where="", max_bytes=100) == "\U0001f600"


def test_a_file_over_its_limit_is_refused_before_it_is_parsed() -> None:
    assert "at most 1000" in _refused(b" " * 1001)


@pytest.mark.parametrize("depth", [40, 400])
def test_deep_nesting_is_refused(depth: int) -> None:
    _refused(b"[" * depth + b"]" * depth)


def test_very_deep_nesting_is_refused_too() -> None:
    with pytest.raises(CorruptCheckpoint):
        parse(b"[" * 200_000, where="", max_bytes=10**6)


def test_writing_nan_is_refused() -> None:
    with pytest.raises(ValueError):
        canonical({"x": math.nan})


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, 5e-324, math.nan, math.inf, -math.inf])
def test_every_metric_comes_back_from_strict_json(value: float) -> None:
    back = float_from_json(parse(canonical(float_to_json(value)), where="", max_bytes=100))
    assert math.copysign(1, back) == math.copysign(1, value) or math.isnan(value)
    assert back == value or (math.isnan(back) and math.isnan(value))


@pytest.mark.parametrize(
    "obj", [None, True, "nan", {"__float__": "NaN"}, {"__float__": ["nan"]}, {}, 10**400]
)
def test_what_is_no_float_is_refused(obj: object) -> None:
    with pytest.raises(CorruptCheckpoint):
        float_from_json(obj)

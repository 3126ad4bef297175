"""Numbers between bounds: a grammar writes all integers within them, and none outside."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine.llama.ranges import MOST, bounded, has_bounds

BOUND = st.integers(-1200, 1200)


def matches(grammar: str, text: str) -> bool:
    """Whether alternatives of literals, classes and groups write a text, by Python's regular expressions."""
    pattern = re.sub(r'"([^"]*)"', lambda found: re.escape(found[1]), grammar).replace(" ", "")
    return re.fullmatch(pattern, text) is not None


@given(BOUND, BOUND, st.lists(st.integers(-1500, 1500), min_size=20, max_size=20))
@settings(max_examples=100)
def test_integers_are_those_within_the_bounds(low: int, high: int, tried: list[int]) -> None:
    grammar = bounded({"minimum": low, "maximum": high}, is_integer=True)
    for n in (*tried, low - 1, low, low + 1, high - 1, high, high + 1, 0):
        assert matches(grammar, str(n)) == (low <= n <= high) if grammar else low > high


@given(BOUND, BOUND, st.lists(st.floats(-1500, 1500), min_size=20, max_size=20))
@settings(max_examples=100)
def test_numbers_that_are_written_lie_within_the_bounds(low: int, high: int, tried: list[float]) -> None:
    grammar = bounded({"minimum": low, "maximum": high}, is_integer=False)
    for x in tried:
        text = f"{x:.3f}"
        assert not (grammar and matches(grammar, text)) or low <= float(text) <= high
        if low <= x <= high - 1 and x >= 0:
            assert matches(grammar, text)


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"minimum": 1}, ["1", "77", str(MOST)], ["0", "-1"]),
        ({"exclusiveMinimum": 0, "type": "number"}, ["0.5", "1", "2.25"], ["0", "0.0", "-1"]),
        ({"minimum": 0, "maximum": 1, "type": "number"}, ["0", "0.25", "1"], ["1.5", "-0.5", "2"]),
        ({"minimum": -90, "maximum": 90, "type": "number"}, ["-89.5", "-0.5", "-90", "90", "0.5"], ["-90.5", "91"]),
        ({"exclusiveMaximum": 10}, ["9", "-3"], ["10"]),
        ({"minimum": 2.5, "maximum": 7.5}, ["3", "7"], ["2", "8"]),
    ],
)  # fmt: skip
def test_bounds_as_tools_have_them(schema: dict[str, Any], yes: list[str], no: list[str]) -> None:
    grammar = bounded(schema, is_integer=schema.get("type") != "number")
    assert [text for text in (*yes, *no) if matches(grammar, text)] == yes


def test_bounds_that_are_no_numbers_are_none() -> None:
    assert not has_bounds({"minimum": "1", "maximum": True})
    assert bounded({"minimum": 3, "maximum": 2}, is_integer=True) == ""

"""Numbers between bounds, and multiples: an automaton writes those that JSON Schema means, and no other."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from disco_daemon.engine.json_schema.automaton import Automaton
from disco_daemon.engine.json_schema.keywords import shapes_of
from disco_daemon.engine.json_schema.negation import contrary
from disco_daemon.engine.json_schema.numbers import DIGITS, Numbers
from disco_daemon.engine.json_schema.reading import SchemaReading
from disco_daemon.engine.json_schema.shapes import SchemaPart
from disco_daemon.tools.references import Document

DECIMALS = (
    st.decimals(-1200, 1200, places=3).map(str) | st.decimals(-2, 2, places=2).map(str) | st.integers(-30, 30).map(str)
)
TRIED = st.lists(
    DECIMALS | st.from_regex(r"-?(0|[1-9][0-9]{0,4})(\.[0-9]{1,5})?", fullmatch=True), min_size=10, max_size=10
)


def numbers_of(schema: dict[str, Any]) -> Numbers:
    (shape,) = SchemaReading(Document(schema), shapes_of, contrary).shapes((SchemaPart.of(schema),))
    found = shape.kinds["number"]
    assert isinstance(found, Numbers)
    return found


def writes(automaton: Automaton, text: str) -> bool:
    return automaton.accepts(text)


@given(DECIMALS, DECIMALS, st.booleans(), st.booleans(), st.booleans(), TRIED)
@settings(max_examples=40)
def test_numbers_are_those_within_the_bounds(
    low: str, high: str, open_low: bool, open_high: bool, is_integer: bool, tried: list[str]
) -> None:
    numbers = Numbers(Fraction(low), Fraction(high), open_low, open_high, is_integer)
    automaton = numbers.automaton()
    for text in (*tried, low, high):
        value = Fraction(text)
        is_written = re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", text) and not (text[0] == "-" and not value)
        if is_integer and "." in text:
            assert not writes(automaton, text)
        elif is_written:
            assert writes(automaton, text) is numbers.has(value), (numbers, text)
    assert not is_integer or automaton.is_empty is not bool(some_of(numbers))


def some_of(numbers: Numbers) -> list[int]:
    assert numbers.low is not None
    assert numbers.high is not None
    return [n for n in range(int(numbers.low) - 1, int(numbers.high) + 2) if numbers.has(Fraction(n))]


@given(st.sampled_from(["2", "3", "7", "0.5", "0.25", "0.01", "1.5", "10", "100"]), DECIMALS, TRIED)
@settings(max_examples=25)
def test_multiples_are_multiples(divisor: str, low: str, tried: list[str]) -> None:
    numbers = Numbers(low=Fraction(low), divisors=frozenset({Fraction(divisor)}))
    automaton = numbers.automaton()
    places = len(divisor.partition(".")[2])
    for text in tried:
        assume(not re.fullmatch(r"-[0.]+", text))
        if len(text.partition(".")[2]) <= places:
            assert writes(automaton, text) is numbers.has(Fraction(text)), text
        else:
            assert not writes(automaton, text)


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"minimum": 1, "type": "integer"}, ["1", "77", "9" * DIGITS], ["0", "-1", "1.5"]),
        ({"exclusiveMinimum": 0, "type": "number"}, ["0.5", "1", "2.25"], ["0", "0.0", "-1"]),
        ({"minimum": 0, "maximum": 1, "type": "number"}, ["0", "0.25", "1", "1.0"], ["1.5", "-0.5", "2", "1.01"]),
        ({"minimum": -90, "maximum": 90, "type": "number"}, ["-89.5", "-0.5", "-90", "90", "0.5"], ["-90.5", "91"]),
        ({"exclusiveMaximum": 10, "type": "integer"}, ["9", "-3"], ["10"]),
        ({"minimum": 2.5, "maximum": 7.5}, ["3", "7", "2.5", "7.50"], ["2", "8", "2.4999", "7.51"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5", "0.001", "0.999"], ["0", "1", "0.0", "1.0", "-0.5"]),
        ({"minimum": 0, "exclusiveMaximum": 1}, ["0", "0.75", "0.0"], ["1", "1.0", "-0.1"]),
        ({"exclusiveMinimum": -1, "exclusiveMaximum": 1}, ["-0.5", "0", "0.5"], ["-1", "1", "-1.0"]),
        ({"minimum": 0.5, "maximum": 0.9}, ["0.5", "0.75", "0.9", "0.90"], ["0.4", "0.91", "1", "0"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.1"], ["0", "0.51"]),
        ({"minimum": 0.001, "maximum": 0.002}, ["0.001", "0.0015", "0.002"], ["0.0009", "0.0021", "0"]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 2}, ["1.5", "1.01"], ["1", "2", "1.0"]),
        ({"minimum": 1, "exclusiveMinimum": True}, ["1.1", "2"], ["1", "0"]),
        ({"minimum": 10**18, "type": "integer"}, [str(10**18), str(2 * 10**18)], [str(10**18 - 1)]),
        ({"maximum": 1e300}, ["5", "-5"], []),
    ],
)  # fmt: skip
def test_bounds_as_tools_have_them(schema: dict[str, Any], yes: list[str], no: list[str]) -> None:
    automaton = numbers_of(schema).automaton()
    assert [text for text in (*yes, *no) if writes(automaton, text)] == yes


@given(st.floats(-1e6, 1e6), st.booleans())
@settings(max_examples=25)
def test_no_digits_round_to_the_other_side_of_a_bound(bound: float, is_open: bool) -> None:
    """The nearest texts with as many digits as are written are on the right side as floating-point numbers as well."""
    numbers = Numbers(low=Fraction(repr(bound)), without_low=is_open)
    automaton = numbers.automaton()
    for step in range(-3, 4):
        text = f"{bound + step * abs(bound) * 1e-15:.{DIGITS}f}".rstrip("0").rstrip(".")
        if writes(automaton, text):
            assert float(text) > bound or (float(text) == bound and not is_open)
        assert json.loads(text) == float(text)

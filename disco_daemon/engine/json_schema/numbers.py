"""Numbers between bounds, and multiples, by the digits in which they are written. Pure.

All is exact: a bound of 0.1 is a tenth. A number has so few digits that its floating-point number lies on the same side
of each bound as itself. Exponents are not written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from .automaton import Automaton, explored
from .characters import Ranges
from .expressions import Texts

DIGITS = 15  # of a number with decimals, in all: as many as each floating-point number keeps
MAX_DIGITS = 20  # in front of the point, of bounds: 64 bits have 19
MAX_DIVISOR = 2000  # of what a number has to be a multiple of, by its last decimal: each remainder is a state


class NumberError(ValueError):
    """No grammar can be made of a bound; the message names the keyword, and is fit for a user."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A set of numbers."""

    low: Fraction | None = None
    high: Fraction | None = None
    without_low: bool = False
    without_high: bool = False
    is_integer: bool = False
    divisors: frozenset[Fraction] = frozenset()  # of all of which it has the multiples
    but: frozenset[Fraction] = frozenset()  # what it has not
    only: frozenset[Fraction] | None = None  # and it has no others

    def has(self, value: Fraction) -> bool:
        """Whether a number is in it."""
        return (
            (self.low is None or value > self.low or (value == self.low and not self.without_low))
            and (self.high is None or value < self.high or (value == self.high and not self.without_high))
            and (not self.is_integer or value.denominator == 1)
            and all((value / divisor).denominator == 1 for divisor in self.divisors)
            and value not in self.but
            and (self.only is None or value in self.only)
        )

    def narrowed(self, other: Numbers) -> Numbers:
        """Return what is in both."""
        lows = [(bound, without) for bound, without in
                ((self.low, self.without_low), (other.low, other.without_low)) if bound is not None]  # fmt: skip
        highs = [(-bound, without) for bound, without in
                 ((self.high, self.without_high), (other.high, other.without_high)) if bound is not None]  # fmt: skip
        low = max(lows) if lows else (None, False)
        high = max(highs) if highs else (None, False)
        made = Numbers(
            low[0],
            None if high[0] is None else -high[0],
            low[1],
            high[1],
            self.is_integer or other.is_integer,
            self.divisors | other.divisors,
            self.but | other.but,
        )
        listed = [some for some in (self.only, other.only) if some is not None]
        if not listed:
            return made
        return Numbers(only=frozenset(filter(made.has, listed[0].intersection(*listed[1:]))))

    def automaton(self) -> Automaton:
        """Return how its numbers are written. Raises NumberError, TooManyStates."""
        if self.only is not None:
            texts = Texts()
            return texts.automaton(texts.ended(texts.words(map(written, self.only))))
        return _Writing.of(_usual(self)).automaton()


def _usual(numbers: Numbers) -> Numbers:
    """Leave out bounds beyond all numbers that are written. Raises NumberError where only such numbers are left."""
    most = 10**MAX_DIGITS
    for name, bound, way in (("minimum", numbers.low, 1), ("maximum", numbers.high, -1)):
        if bound is not None and bound * way >= most:
            raise NumberError(f"'{name}' is {_show(bound)}: at most {MAX_DIGITS} digits are possible.")
        if bound is not None and bound * way <= -most:
            numbers = replace(numbers, low=None) if way > 0 else replace(numbers, high=None)
    return numbers


def written(value: Fraction) -> str:
    """Write a number as JSON."""
    return str(value) if value.denominator == 1 else json.dumps(float(value))


ALL = Numbers()
INTEGERS = Numbers(is_integer=True)
PLAIN = frozenset({ALL, INTEGERS})  # which need no automaton of their own


def exactly(value: Any) -> Fraction | None:
    """Return a JSON number as it is written; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        return None
    return Fraction(repr(value))


@dataclass(frozen=True, slots=True)
class _State:
    """Where in a number a writer is."""

    phase: str = "begin"  # then sign, zero, whole, point, part
    is_negative: bool = False
    n: int = 0  # digits in front of the point, or behind it
    n_whole: int = 0
    sides: tuple[int, ...] = ()  # of each mark: whether the digits so far are below (-1), alike (0) or above it (1)
    rest: tuple[int, ...] = ()  # of each divisor
    is_zero: bool = True


@dataclass(frozen=True, slots=True)
class _Mark:
    """The amount of a bound, by its digits."""

    whole: str
    part: str
    value: Fraction


@dataclass(slots=True)
class _Writing:
    numbers: Numbers
    marks: tuple[_Mark, ...]
    factors: tuple[int, ...]  # of the last decimal, for each divisor
    n_decimals: int
    n_whole: int

    @classmethod
    def of(cls, numbers: Numbers) -> _Writing:
        bounds = [bound for bound in (numbers.low, numbers.high) if bound is not None]
        marks = tuple(_mark(value) for value in sorted({*map(abs, bounds), *map(abs, numbers.but)}))
        n_decimals = 0 if numbers.is_integer else DIGITS
        factors = []
        for divisor in sorted(numbers.divisors):
            places = _places(divisor)
            if places is None:
                raise NumberError("'multipleOf' is no number with at most 15 decimals: no grammar can say it.")
            n_decimals = min(n_decimals, places)
        for divisor in sorted(numbers.divisors):
            factor = divisor * 10**n_decimals
            whole = factor if factor.denominator == 1 else Fraction(factor.numerator)
            if whole > MAX_DIVISOR:
                msg = f"'multipleOf' is {_show(divisor)}: at most {MAX_DIVISOR} of its last decimal are possible."
                raise NumberError(msg)
            factors.append(int(whole))
        n_whole = max([DIGITS, *(len(mark.whole) for mark in marks)])
        return cls(numbers, marks, tuple(factors), n_decimals, n_whole)

    def automaton(self) -> Automaton:
        first = _State(sides=(0,) * len(self.marks), rest=(0,) * len(self.factors))
        return explored(first, self._steps, self._is_end)

    def _steps(self, state: _State) -> list[tuple[Ranges, _State]]:
        made: list[tuple[Ranges, _State]] = []
        if state.phase == "begin" and (self.numbers.low is None or self.numbers.low < 0):
            made.append((_one("-"), replace(state, phase="sign", is_negative=True)))
        if state.phase in ("begin", "sign"):
            made.append((_one("0"), self._digit(replace(state, phase="zero"), 0)))
            made += self._digits(replace(state, phase="whole"))[1:]
        elif state.phase == "whole" and state.n < self.n_whole:
            made += self._digits(state)
        elif state.phase in ("point", "part") and self._has_room(state):
            made += self._digits(replace(state, phase="part"))
        if state.phase in ("zero", "whole") and self.n_decimals:
            sides = tuple(
                (len(mark.whole) < state.n) - (len(mark.whole) > state.n) or side
                for mark, side in zip(self.marks, state.sides, strict=True)
            )
            n_whole = state.n if state.phase == "whole" else 0
            after = replace(state, phase="point", n=0, n_whole=n_whole, sides=sides)
            if self._has_room(after):
                made.append((_one("."), after))
        return made

    def _digits(self, state: _State) -> list[tuple[Ranges, _State]]:
        """Return the digits that may follow, 0 by itself, and with others those that lead to the same."""
        if self.factors:
            cuts = set(range(10))
        else:
            cuts = {0, 1}
            for mark, side in zip(self.marks, state.sides, strict=True):
                if not side:
                    there = self._there(mark, state)
                    cuts |= {there, there + 1}
        listed = sorted(cuts - {10})
        ends = [*listed[1:], 10]
        return [(((0x30 + d, 0x2F + end),), self._digit(state, d)) for d, end in zip(listed, ends, strict=True)]

    @staticmethod
    def _there(mark: _Mark, state: _State) -> int:
        digits = mark.part if state.phase == "part" else mark.whole
        return int(digits[state.n]) if state.n < len(digits) else 0

    def _has_room(self, state: _State) -> bool:
        return state.n < self.n_decimals and state.n + state.n_whole < DIGITS

    def _digit(self, state: _State, digit: int) -> _State:
        """Write one more digit."""
        sides = []
        for mark, side in zip(self.marks, state.sides, strict=True):
            there = self._there(mark, state)
            sides.append(side or (digit > there) - (digit < there))
        if state.phase == "part" and all(sides) and not self.factors:  # only how many more there may be matters
            state = replace(
                state,
                n=DIGITS - 1 - min(self.n_decimals - state.n - 1, DIGITS - state.n - state.n_whole - 1),
                n_whole=0,
            )
        rest = tuple(
            _alike((r * 10 + digit) % factor, factor) for r, factor in zip(state.rest, self.factors, strict=True)
        )
        is_zero = state.is_zero and not digit
        return replace(state, n=state.n + 1, sides=tuple(sides), rest=rest, is_zero=is_zero)

    def _is_end(self, state: _State) -> bool:
        if state.phase not in ("zero", "whole", "part") or (state.is_negative and state.is_zero):
            return False
        n_missing = self.n_decimals - (state.n if state.phase == "part" else 0)
        if any(r * 10**n_missing % factor for r, factor in zip(state.rest, self.factors, strict=True)):
            return False
        found = dict(
            zip(
                (mark.value for mark in self.marks),
                map(self._side, self.marks, state.sides, [state] * len(self.marks)),
                strict=True,
            )
        )
        numbers = self.numbers
        for bound, without, way in ((numbers.low, numbers.without_low, 1), (numbers.high, numbers.without_high, -1)):
            if bound is not None:
                side = self._compared(bound, state.is_negative, found)
                if side == -way or (side == 0 and without):
                    return False
        return all(self._compared(value, state.is_negative, found) for value in numbers.but)

    @staticmethod
    def _side(mark: _Mark, side: int, state: _State) -> int:
        """Return on which side of a mark an amount is that ends here."""
        if state.phase == "part":
            return side or (-1 if mark.part[state.n :].strip("0") else 0)
        if len(mark.whole) != state.n:
            return 1 if state.n > len(mark.whole) else -1
        return side or (-1 if mark.part else 0)

    @staticmethod
    def _compared(bound: Fraction, is_negative: bool, sides: dict[Fraction, int]) -> int:
        """Return whether a number is below a bound (-1), the same (0) or above it (1)."""
        if is_negative != (bound < 0):
            return -1 if is_negative else 1
        return -sides[abs(bound)] if is_negative else sides[abs(bound)]


def _one(sign: str) -> Ranges:
    return ((ord(sign), ord(sign)),)


@lru_cache(MAX_DIVISOR)
def _alike(rest: int, factor: int) -> int:
    """Return the least remainder after which all digits lead to the same, and which is as much an end."""
    return next(r for r in range(rest + 1) if (r == 0) == (rest == 0) and r * 10 % factor == rest * 10 % factor)


def _places(value: Fraction) -> int | None:
    """Return how many decimals a number has."""
    return next((n for n in range(DIGITS + 1) if (value * 10**n).denominator == 1), None)


def _mark(value: Fraction) -> _Mark:
    whole = str(int(value))
    rest, part = value - int(value), ""
    while rest and len(part) < 400:
        rest *= 10
        part += str(int(rest))
        rest -= int(rest)
    return _Mark(whole, part, value)


def _show(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else str(float(value))


def fractions(values: Iterable[Any]) -> frozenset[Fraction]:
    """Return the numbers among some values."""
    return frozenset(found for value in values if (found := exactly(value)) is not None)

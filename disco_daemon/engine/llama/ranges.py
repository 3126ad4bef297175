"""Numbers between two bounds, as llama.cpp's grammars write them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

MOST = 10**15 - 1  # of an integer's amount, as llama.cpp's converter has it
DECIMALS = 15  # digits behind the point
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def has_bounds(schema: Mapping[str, Any]) -> bool:
    """Whether a schema of a number bounds it by numbers."""
    return any(_is_number(schema.get(name)) for name in _BOUNDS)


def bounded(schema: Mapping[str, Any], *, is_integer: bool) -> str:
    """Return the alternatives that the numbers of a schema are; empty if there is none that can be written.

    Of numbers that are no integers those with a fraction lie between two integers within the bounds.
    """
    low, high = _bounds(schema)
    if is_integer:
        return " | ".join(_signed(low, high, _integers))
    if schema.get("exclusiveMinimum") == 0 and low == 1 and high >= 1:  # all that is positive is often asked for
        return " | ".join([f'"0." [0-9]{{0,{DECIMALS - 1}}} [1-9]', *_signed(low, high, _reals)])
    return " | ".join(_signed(low, high, _reals))


def _bounds(schema: Mapping[str, Any]) -> tuple[int, int]:
    """Return the least and the largest integer within the bounds."""
    lows, highs = [-MOST], [MOST]
    if _is_number(least := schema.get("minimum")):
        lows.append(math.ceil(least))
    if _is_number(below := schema.get("exclusiveMinimum")):
        lows.append(math.floor(below) + 1)
    if _is_number(most := schema.get("maximum")):
        highs.append(math.floor(most))
    if _is_number(above := schema.get("exclusiveMaximum")):
        highs.append(math.ceil(above) - 1)
    return max(lows), min(highs)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _signed(low: int, high: int, alternatives: Callable[[int, int], Iterator[str]]) -> Iterator[str]:
    """Yield what is below 0, with its sign, and what is not."""
    if low < 0 and low <= high:
        yield f'"-" ({" | ".join(alternatives(max(1, -high), -low))})'
        if alternatives is _reals and high >= 0:
            yield f'"-0." [0-9]{{1,{DECIMALS}}}'
    if high >= max(low, 0):
        yield from alternatives(max(low, 0), high)


def _reals(low: int, high: int) -> Iterator[str]:
    """Yield integers from 0 on, with fractions between them."""
    if low < high:
        yield f'({" | ".join(_integers(low, high - 1))}) ("." [0-9]{{1,{DECIMALS}}})?'
    yield f'"{high}"'


def _integers(low: int, high: int) -> Iterator[str]:
    """Yield integers from 0 on, those of each number of digits by themselves."""
    for n_digits in range(len(str(low)), len(str(high)) + 1):
        least, most = (10 ** (n_digits - 1) if n_digits > 1 else 0), 10**n_digits - 1
        yield from _alike(str(max(low, least)), str(min(high, most)))


def _alike(low: str, high: str) -> Iterator[str]:
    """Yield the numbers from one to the other, which has as many digits."""
    if not low:
        yield '""'
        return
    n_rest = len(low) - 1
    if low[1:] == "0" * n_rest and high[1:] == "9" * n_rest:
        yield _digits(low[0], high[0]) + _any(n_rest)
    elif low[0] == high[0]:
        yield f'"{low[0]}" ({" | ".join(_alike(low[1:], high[1:]))})'
    else:
        yield f'"{low[0]}" ({" | ".join(_alike(low[1:], "9" * n_rest))})'
        if int(high[0]) - int(low[0]) > 1:
            yield _digits(str(int(low[0]) + 1), str(int(high[0]) - 1)) + _any(n_rest)
        yield f'"{high[0]}" ({" | ".join(_alike("0" * n_rest, high[1:]))})'


def _digits(first: str, last: str) -> str:
    return f'"{first}"' if first == last else f"[{first}-{last}]"


def _any(n: int) -> str:
    return f" [0-9]{{{n}}}" if n else ""

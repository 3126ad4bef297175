"""Numbers and names as the reports of measurements show them."""

from __future__ import annotations

import math
from collections.abc import Iterable


def unique(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of its first place."""
    return list(dict.fromkeys(names))


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean; NaN of nothing, or where a value is not defined."""
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else math.nan


def number(value: float, digits: int, sign: str = "") -> str:
    """Format a number with `digits` digits, "-" where it is not defined."""
    return "-" if math.isnan(value) else f"{value:{sign}z.{digits}f}"

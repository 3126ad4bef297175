"""Draws with characters: curves on two axes, and bars. Pure; a picture is text with styles, and reads without colour.

Every mark of a picture is a character of its own, so that two curves are told apart where there is no colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from textual.content import Content

Cells = list[list[tuple[str, str]]]  # character and style
BLOCKS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) drawn with one character; `joined` fills the columns between them."""

    points: Sequence[tuple[float, float]]
    mark: str
    style: str = ""
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Axes:
    """What lies where. `y_names` are the labels of the lowest and the highest line."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_names: tuple[str, str]
    y_names: tuple[str, str]
    log_x: bool = False


def plot(curves: Iterable[Curve], axes: Axes, width: int, height: int) -> Content:
    """`height` lines of at most `width` characters: the field, and below it the axis with its ends named."""
    margin = max(len(name) for name in axes.y_names)
    columns, rows = max(2, width - margin - 2), max(2, height - 2)
    field: Cells = [[(" ", "")] * columns for _ in range(rows)]
    for curve in curves:
        _put(field, curve, axes)
    names = {0: axes.y_names[1], rows - 1: axes.y_names[0]}
    lines = [Content.assemble(f"{names.get(i, ''):>{margin}} |", _line(row)) for i, row in enumerate(field)]
    low, high = axes.x_names
    below = [" " * (margin + 1) + "+" + "-" * columns, " " * (margin + 2) + low + high.rjust(columns - len(low))]
    return Content("\n").join([*lines, *below])


def _put(field: Cells, curve: Curve, axes: Axes) -> None:
    places = [(_place(x, axes.x, len(field[0]), log=axes.log_x), y) for x, y in curve.points]
    if curve.joined:
        places = _filled(places)
    for column, y in places:
        row = _place(y, axes.y, len(field))
        field[len(field) - 1 - row][column] = (curve.mark, curve.style)


def _filled(places: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """A point in every column between the first and the last, on straight lines."""
    filled = list(places[:1])
    for (a, low), (b, high) in pairwise(places):
        filled += [(c, low + (high - low) * (c - a) / (b - a)) for c in range(a + 1, b + 1)] if b > a else [(b, high)]
    return filled


def _place(value: float, ends: tuple[float, float], n: int, *, log: bool = False) -> int:
    """The cell of a value, 0 to n - 1; what lies beyond the ends stands at them."""
    low, high, at = (math.log(max(x, 1e-12)) if log else x for x in (*ends, value))
    if not high > low:
        return 0
    return round(min(1.0, max(0.0, (at - low) / (high - low))) * (n - 1))


def _line(row: Sequence[tuple[str, str]]) -> Content:
    """A row of cells, neighbours of one style together."""
    parts: list[tuple[str, str]] = []
    for mark, style in row:
        if parts and parts[-1][1] == style:
            parts[-1] = (parts[-1][0] + mark, style)
        else:
            parts.append((mark, style))
    return Content.assemble(*(Content.styled(text, style) if style else text for text, style in parts))


def bar(share: float, width: int, *, plain: bool = False) -> str:
    """A bar of `width` characters, filled to a share; more than all of it is all of it."""
    share = min(1.0, max(0.0, share))
    if plain:
        full = round(share * width)
        return "#" * full + "." * (width - full)
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (BLOCKS[rest] if rest else "")).ljust(width, "░")


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values, oldest first, as heights; nothing is lower than all others."""
    newest, top = values[-width:], max(values, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[round(v / top * 7) if top > 0 else 0] for v in newest)

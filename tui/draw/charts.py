"""Draws curves on two axes (by plotext) and bars with characters. Pure; a picture is text with styles.

Each curve has a character of its own, so that curves differ without colour, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import plotext
from textual.content import Content

BLOCKS = " ▏▎▍▌▋▊▉█"
LEAST_HEIGHT = 4  # lines: two of the field, the axis, its names
# plotext writes colours as terminal codes. Curve i gets colour i, by which it is found again here.
_PAINTED = re.compile(r"\x1b\[([\d;]*)m")
_COLOUR = re.compile(r"^38;5;(\d+)$")


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) drawn with one character; `joined` draws lines between them, `filled` all below them."""

    points: Sequence[tuple[float, float]]
    mark: str
    style: str = ""
    joined: bool = True
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Axes:
    """The range of both axes. `y_names` label the lowest and the highest line."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_names: tuple[str, str]
    y_names: tuple[str, str]
    log_x: bool = False


def plot(curves: Iterable[Curve], axes: Axes, width: int, height: int) -> Content:
    """Draw `height` lines of `width` characters: the field, its axes and their ends. Later curves lie on top."""
    drawn = list(curves)
    _begin(axes, width, max(LEAST_HEIGHT, height))
    for i, curve in enumerate(drawn):
        _draw(curve, axes, i)
    return _content(plotext.build(), [curve.style for curve in drawn])


def _begin(axes: Axes, width: int, height: int) -> None:
    """Begin an empty field. plotext has one figure for the whole process, so all of it is set each time.

    Both axes go from 0 to 1, and `_share` places the values: plotext's logarithmic axis takes its limits for exponents,
    and it leaves out what lies beyond the ends.
    """
    plotext.clear_figure()
    plotext.limit_size(False, False)  # the size of the widget counts, not that of the terminal
    plotext.plot_size(width, height)
    plotext.theme("clear")
    plotext.xaxes(True, False)
    plotext.yaxes(True, False)
    plotext.xlim(0, 1)
    plotext.ylim(0, 1)
    plotext.xticks([0, 1], list(axes.x_names))
    plotext.yticks([0, 1], list(axes.y_names))
    plotext.scatter([0, 1], [0, 1], marker=" ")  # without a point it draws no axis


def _draw(curve: Curve, axes: Axes, colour: int) -> None:
    if not curve.points:
        return
    xs = [_share(x, axes.x, log=axes.log_x) for x, _ in curve.points]
    ys = [_share(y, axes.y) for _, y in curve.points]
    draw = plotext.plot if curve.joined else plotext.scatter
    draw(xs, ys, marker=curve.mark, color=colour, fillx=curve.filled)


def _share(value: float, ends: tuple[float, float], *, log: bool = False) -> float:
    """Return the place of a value between the ends, 0 to 1; values beyond an end are placed at it."""
    low, high, at = (math.log(max(x, 1e-12)) if log else x for x in (*ends, value))
    return min(1.0, max(0.0, (at - low) / (high - low))) if high > low else 0.0


def _content(drawn: str, styles: Sequence[str]) -> Content:
    """Return plotext's picture with our styles in place of its colours."""
    lines = [Content.assemble(*_parts(line, styles)) for line in drawn.rstrip("\n").split("\n")]
    return Content("\n").join(lines)


def _parts(line: str, styles: Sequence[str]) -> Iterator[Content | str]:
    """Yield the parts of a line with their styles. `split` returns a text, a code, a text, and so on."""
    style = ""
    for i, piece in enumerate(_PAINTED.split(line)):
        if i % 2:
            found = _COLOUR.match(piece)
            style = styles[int(found[1])] if found else ""
        elif piece:
            yield Content.styled(piece, style) if style else piece


def bar(share: float, width: int, *, plain: bool = False) -> str:
    """Draw a bar of `width` characters, filled to a share between 0 and 1."""
    share = min(1.0, max(0.0, share))
    if plain:
        full = round(share * width)
        return "#" * full + "." * (width - full)
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (BLOCKS[rest] if rest else "")).ljust(width, "░")


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the newest `width` values, oldest first, as heights between 0 and the maximum."""
    newest, top = values[-width:], max(values, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[round(v / top * 7) if top > 0 else 0] for v in newest)

"""Tables as plain text and figures as files: what all reports of the simulators are made with."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
PANEL = (2.7, 2.1)  # inches
LEGEND_ENTRY = 1.7  # inches: the longest name of a policy with its line


def align(head: Sequence[str], rows: Sequence[Sequence[str]], n_left: int = 1) -> str:
    """Columns two spaces apart: the first `n_left` flush left, numbers flush right."""
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            f"{x:{'<' if i < n_left else '>'}{w}}" for i, (x, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def require_plots() -> None:
    """Raise ConfigError where matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as e:
        raise ConfigError('drawing needs matplotlib: pip install "disco-daemon[plots]"') from e


def panels(rows: int, columns: int, size: tuple[float, float] = PANEL) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure with its panels; kept apart from pyplot, whose state is the whole process's."""
    from matplotlib.figure import Figure

    width = max(size[0] * columns + 0.4, 3 * LEGEND_ENTRY)
    figure = Figure(figsize=(width, size[1] * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
    panels: list[list[Axes]] = [list(row) for row in axes]
    for panel in (p for row in panels for p in row):
        panel.grid(color="#DDDDDD", lw=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    return figure, panels


def label(figure: Figure, axes: Sequence[Sequence[Axes]], above: Sequence[str], beside: Sequence[str]) -> None:
    """Titles of columns and rows, and one legend for all panels."""
    for panel, text in zip(axes[0], above, strict=True):
        panel.set_title(text, fontsize=8)
    for row, text in zip(axes, beside, strict=True):
        row[0].set_ylabel(text, fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = int(figure.get_figwidth() / LEGEND_ENTRY)
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=8, frameon=False)


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as a PNG file; return its path."""
    figure.savefig(path, dpi=DPI)
    return path

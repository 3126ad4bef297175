"""Labels for words of others: what stands in them is neither markup nor anything that a terminal would obey.

All of the screens' labels are of these kinds: in a daemon's words are names of models and errors of servers, and a
program that has taken its port may say anything.
"""

from __future__ import annotations

from typing import Any

from textual.containers import Vertical
from textual.widget import Widget
from textual.widgets import Label, Static

from ..draw.theme import fit


class PlainStatic(Static):
    """A `Static` whose texts are shown as they are."""

    def __init__(self, content: Any = "", **options: Any) -> None:
        super().__init__(_safe(content), markup=False, **options)

    def update(self, content: Any = "", *, layout: bool = True) -> None:
        """Show something else."""
        super().update(_safe(content), layout=layout)


class PlainLabel(PlainStatic, Label):
    """A `Label` whose texts are shown as they are."""


def _safe(content: Any) -> Any:
    return fit(content) if isinstance(content, str) else content


def block(words: str, *widgets: Widget) -> Vertical:
    """Return widgets below the words that say what they are for."""
    return Vertical(PlainLabel(words, classes="words"), *widgets, classes="block")

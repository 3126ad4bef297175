"""The line that is always there: each side with its health, what today has cost, whether nothing leaves this machine.

In a narrow window the least important goes first: what today has cost, the models of sides that are well, those of
others, then that the well are well. How a side is ill is said to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.style import Style
from rich.text import Text

from disco_daemon.client.amounts import dollars
from disco_daemon.client.side_health import SideHealth, sides_of

from ..draw.theme import TextTheme, fit
from .words import PlainStatic

GAP = "   "
LEVELS = 6  # from all that there is to what has to be there


def status_text(state: Mapping[str, Any] | None, trouble: str, theme: TextTheme, width: int) -> Text:
    """Draw a daemon's state in at most `width` cells; where there is none, the `trouble`."""
    if state is None:
        return Text(fit(trouble), theme.dim, no_wrap=True, overflow="ellipsis")
    sides, line = sides_of(state), Text()
    spent = (state.get("money") or {}).get("spent") or {}
    today = f"{dollars(spent.get('usd_today', 0.0))} today" if "server" in sides else ""
    for level in range(LEVELS):
        parts = [_side(side, health, theme, level) for side, health in sides.items()]
        parts.append(Text(today if level < 1 else "", theme.dim))
        parts.append(Text("private" if state.get("private") and level < 5 else "", theme.strong))
        line = Text(", " if theme.plain else GAP).join(part for part in parts if part)
        if line.cell_len <= width:
            break
    line.truncate(max(1, width), overflow="ellipsis")
    line.no_wrap = True
    return line


def _side(side: str, health: SideHealth, theme: TextTheme, level: int) -> Text:
    """Draw one side; the higher the `level`, the fewer words."""
    mark = Text(theme.mark(side), theme.tints.get(side, Style()))
    if health.is_well:
        model = health.model if level < 2 else ""
        words = health.words if level < 4 else ""
        between = " " if theme.plain else " · "
        return mark.append(f" {fit(between.join(word for word in (model, words) if word))}".rstrip(), theme.dim)
    model = f" {fit(health.model)}" if level < 3 and health.model else ""
    mark.append(model)
    mark.append(f"{':' if theme.plain else ' ✗'} {fit(health.words)}", theme.error)
    key = health.key if level < 5 else ""
    return mark.append(f"{' ' if theme.plain else ' · '}{key}" if key else "", theme.dim)


class StatusLine(PlainStatic):
    """Shows the state of the daemon, as the application last saw it."""

    def __init__(self, theme: Callable[[], TextTheme], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._theme = theme
        self._state: Mapping[str, Any] | None = None
        self._trouble = "looking for the daemon …"

    def show(self, state: Mapping[str, Any] | None, trouble: str = "") -> None:
        """Show a state, or why there is none."""
        self._state, self._trouble = state, trouble or self._trouble
        self.draw()

    def draw(self) -> None:
        """Draw the line for the present width and theme."""
        self.update(status_text(self._state, self._trouble, self._theme(), self.size.width), layout=False)

    def on_resize(self) -> None:
        self.draw()

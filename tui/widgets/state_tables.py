"""Tables of several servers and of keys with names, which are there while there is something in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.app import ComposeResult
from textual.containers import Vertical

from ..data.servers import key_lines, server_lines
from .words import PlainStatic, block

MARGIN = 4  # columns of the screen beside them: the padding, and the scroll bar
WORDS = {
    "servers": "Servers: the best by first token, tail and price is asked (F5 adds one)",
    "keys": "Keys with names: what others have spent, and may (`disco keys`)",
}


class StateTables(Vertical):
    """Shows a daemon's state; `#servers` and `#keys` have the lines."""

    DEFAULT_CSS = "StateTables { height: auto; }"

    def compose(self) -> ComposeResult:
        for name, words in WORDS.items():
            (table := block(words, PlainStatic(id=name))).id = f"{name}-block"
            table.display = False
            yield table

    def show(self, state: Mapping[str, Any]) -> None:
        """Show what the daemon has said."""
        width = self.screen.size.width - MARGIN
        lines = {"servers": server_lines(state, width), "keys": key_lines(state.get("keys") or ())}
        for name, found in lines.items():
            self.query_one(f"#{name}", PlainStatic).update("\n".join(found))
            self.query_one(f"#{name}-block").display = bool(found)

"""The prompt: a text of several lines. Enter sends it, Up and Down bring earlier ones back."""

from __future__ import annotations

from collections.abc import Sequence

from textual.events import Key
from textual.message import Message
from textual.widgets import TextArea

REMEMBERED = 200  # questions
NEWLINE = ("shift+enter", "ctrl+j", "alt+enter")  # most terminals can tell Enter from Ctrl+J only


class Prompt(TextArea):
    """The input. `history_of` has the earlier questions, oldest first; `_at` is the one on show, if any."""

    class Sent(Message):
        """The user has sent a text."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class PastEnd(Message):
        """The user has pressed End where the cursor was at the end already: they mean the conversation's."""

    class PastStart(Message):
        """The user has pressed Up where no earlier question is."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, placeholder="Ask something. Enter sends, Ctrl+J begins a line, F1 helps.")
        self.highlight_cursor_line = False
        self.history_of: list[str] = []
        self._at: int | None = None
        self._draft = ""

    def remember(self, asked: Sequence[str]) -> None:
        """Set the earlier questions, oldest first."""
        self.history_of = list(asked)[-REMEMBERED:]
        self._at = None

    def put(self, text: str) -> None:
        """Set the text, with the cursor at its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)

    def clear_text(self) -> None:
        """Remove the text."""
        self._at, self._draft = None, ""
        self.put("")

    async def _on_key(self, event: Key) -> None:
        if event.key in ("enter", *NEWLINE):
            event.stop()
            event.prevent_default()
            if event.key == "enter":
                self._send()
            else:
                self.insert("\n")
            return
        await super()._on_key(event)

    def _send(self) -> None:
        text = self.text.strip()
        if not text:
            return
        self.post_message(self.Sent(text))

    def accept(self, text: str) -> None:
        """Take note that `text` was accepted: remember it, and clear the input."""
        if not self.history_of or self.history_of[-1] != text:
            self.history_of = [*self.history_of, text][-REMEMBERED:]
        self.clear_text()

    def action_cursor_up(self, select: bool = False) -> None:
        """Move up a line; from the first line, go to the question before."""
        if select or self.cursor_location[0] > 0:
            super().action_cursor_up(select)
        else:
            self._leaf(-1)

    def action_cursor_down(self, select: bool = False) -> None:
        """Move down a line; from the last line, go to the question after, and in the end to the draft."""
        if select or self.cursor_location[0] < self.document.line_count - 1:
            super().action_cursor_down(select)
        else:
            self._leaf(1)

    def action_cursor_line_end(self, select: bool = False) -> None:
        """Move to the end of the line; from the end of the text, say so."""
        if not select and self.cursor_location == self.document.end:
            self.post_message(self.PastEnd())
        super().action_cursor_line_end(select)

    def _leaf(self, step: int) -> None:
        n = len(self.history_of)
        at = (n if self._at is None else self._at) + step
        if at < 0:
            self.post_message(self.PastStart())
        if not 0 <= at <= n or (self._at is None and step > 0):
            return
        if self._at is None:
            self._draft = self.text
        self._at = None if at == n else at
        self.put(self._draft if self._at is None else self.history_of[at])

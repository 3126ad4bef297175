"""From token bytes to text for a reader: whole code points, nothing past a stop string. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class CallText(NamedTuple):
    """A piece of the call `number`, from 0: its name, which begins it, and text of its arguments."""

    number: int
    name: str
    arguments: str


class TextStream:
    """Joins token bytes into text.

    Holds back an incomplete UTF-8 sequence, and any tail that may still grow into a stop string. With `n_indent` it
    ends in front of the text of a line, but for the first, that is indented by fewer spaces and tabs, as in
    llama-server; an empty line is one.
    """

    def __init__(self, stop: Sequence[str] = (), n_indent: int = 0) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self._faithful = True
        self._n_indent = n_indent
        self._column: int | None = None  # how far the line is indented that the shown text ends with; None: it has text
        self.stopped = False
        self.stop: str | None = None  # the stop string that has ended it
        self.is_outdented = False  # whether it is the indentation that has ended it

    @property
    def whole(self) -> bool:
        """Whether the text shown is exactly that of the bytes taken: nothing held back, cut off or replaced."""
        return self._faithful and not self.stopped and not self._held and not self._utf8.getstate()[0]

    @property
    def left(self) -> bytes:
        """The bytes behind the text shown: what is held back, or the stop string and what came with it."""
        return self._held.encode() + self._utf8.getstate()[0]

    def take_thought(self) -> str:
        """Return text that is not part of the answer, since the last call; here none (see `thinking`)."""
        return ""

    def take_calls(self) -> list[CallText]:
        """Return the pieces of calls of tools since the last call; here none (see `calls`)."""
        return []

    def feed(self, piece: bytes) -> str:
        """Take one token's bytes; return what may be shown now. Sets `stopped` when a stop string is complete."""
        text = self._utf8.decode(piece)
        self._faithful = self._faithful and REPLACEMENT not in text  # a true U+FFFD is rare: ids are then not known
        self._held += text
        return self._release()

    def flush(self) -> str:
        """Return all that is left at the regular end of the answer; half a character is no text and is dropped."""
        out = self._release()
        if not self.stopped:
            out, self._held = out + self._held, ""
        return out

    def _release(self) -> str:
        if not (self._stop or self._n_indent):  # most answers, at each token
            out, self._held = self._held, ""
            return out
        hits = [(at, len(s), s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if hits:
            self.stopped = True
            cut, _, self.stop = min(hits)  # of two that begin at one place, the shorter was complete first
        else:
            cut = len(self._held) - max((_overlap(self._held, s) for s in self._stop), default=0)
        if self._n_indent and (end := self._outdent(self._held[:cut])) is not None:
            self.stopped = self.is_outdented = True
            cut = end
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _outdent(self, text: str) -> int | None:
        """Return where the first line begins its text that is indented too little; None where none is."""
        for at, char in enumerate(text):
            if self._column is not None and char in " \t":
                self._column += 1
                continue
            if self._column is not None and self._column < self._n_indent:
                return at
            self._column = 0 if char == "\n" else None
        return None


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

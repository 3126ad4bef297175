"""What a server sends, made fit to be written again: no half characters, no numbers that JSON lacks. Pure."""

from __future__ import annotations

import math
from typing import Any

from ..plain import is_writable, writable_text

MAX_DEPTH = 32  # levels of a server's own fields that are kept; those known have five


def writable(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a JSON value that can be written; what is nested too deeply, and what is no number, is null."""
    if isinstance(value, str):
        return writable_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {writable_text(key): writable(one, depth - 1) for key, one in value.items()} if depth else None
    if isinstance(value, list):
        return [writable(one, depth - 1) for one in value] if depth else None
    return value


class Halves:
    """Joins a text that comes in pieces, where a server has cut a character of two UTF-16 halves in two."""

    def __init__(self) -> None:
        self.half = ""

    def is_whole(self, text: str) -> bool:
        """Whether the next piece has text, and none that has to be joined."""
        return not self.half and text != "" and is_writable(text)

    def joined(self, text: str) -> str:
        """Return the next piece, with the half that was kept before it, and without one at its own end."""
        if not self.half and is_writable(text):
            return text
        if not text:
            return ""
        text, self.half = self.half + text, ""
        if "\ud800" <= text[-1] <= "\udbff":
            text, self.half = text[:-1], text[-1]
        return writable_text(text)

    def rest(self) -> str:
        """Return what stands for a half whose other one has not come."""
        half, self.half = self.half, ""
        return writable_text(half)

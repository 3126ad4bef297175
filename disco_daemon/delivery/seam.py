"""Where two endpoints' texts meet. Pure."""

from __future__ import annotations


class Diverged(ValueError):
    """The continuation repeats the answer from its beginning and then says something else: it cannot be joined."""


class Seam:
    """Joins a continuation to the text already delivered, and never doubles a word.

    A server that knows how to continue sends what comes next. One that does not may start its answer again from the
    beginning (`python -m llama_cpp.server` does); then the part the reader already has is swallowed. Text is held back
    only while it could still be such a repetition.
    """

    # A continuation that agrees with the answer's beginning for this many characters and then differs is a second,
    # different answer; fewer are chance (" the", "1. ").
    MIN_RESTART = 16

    def __init__(self, delivered: str) -> None:
        self._delivered = delivered
        self._held = ""
        self.swallowed = False
        self._open = len(delivered) < self.MIN_RESTART  # too short to tell a repetition from chance

    def feed(self, text: str) -> str:
        """Take the next piece of the continuation; return what may be delivered. Raises Diverged."""
        if self._open:
            return text
        self._held += text
        agreed = _common_prefix(self._held, self._delivered)
        if agreed == len(self._held) < len(self._delivered):
            return ""
        self._open = True
        if agreed < self.MIN_RESTART:
            return self._held
        if agreed == len(self._delivered):
            self.swallowed = True
            return self._held[agreed:]
        msg = f"the continuation starts the answer again and differs after {agreed} characters"
        raise Diverged(msg)

    def flush(self) -> str:
        """What is left at the end: a whole repetition is dropped, a short chance agreement is text."""
        if self._open or len(self._held) >= self.MIN_RESTART:
            return ""
        self._open = True
        return self._held


def _common_prefix(a: str, b: str) -> int:
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)

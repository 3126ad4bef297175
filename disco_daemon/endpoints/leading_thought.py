"""A thought that a server without a reasoning parser writes into its text, told from the answer. Pure.

As the device does (`engine.llama.thinking`): a thought is one only where it begins the answer, the marks belong to
neither, nor does white space around the thought. Marks by which only a template can be known are not looked for.
"""

from __future__ import annotations

from ..types.thought_marks import TAGS

MAX_SPACE = 256  # characters of white space in front of a thought


class LeadingThought:
    """Divides the text of one answer, in pieces; `is_over` once all that comes is the answer's."""

    __slots__ = ("_closing", "_has_begun", "_held", "_is_closed", "_space", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        self._held = ""  # what may be a mark, or a part of one
        self._closing = ""  # the mark behind the thought that has begun
        self._has_begun = self._is_closed = False
        self._space = ""  # behind what is said of the thought: none of it, if that ends here

    def divided(self, piece: str) -> tuple[str, str]:
        """Take the next piece; return what is known by it of the answer's text, and of the thought's."""
        if self.is_over:
            return piece, ""
        self._held += piece
        return self._behind() if self._is_closed else self._within() if self._closing else self._before()

    def rest(self) -> tuple[str, str]:
        """Return what was held back, of both, where the answer ends."""
        held, self._held, self.is_over = self._held, "", True
        if self._closing and not self._is_closed:
            return "", self._thought(held)
        return held, ""

    def _before(self) -> tuple[str, str]:
        text = self._held.lstrip()
        found = next((tags for tags in TAGS if text.startswith(tags[0])), None)
        if found is not None:
            self._held, self._closing = text[len(found[0]) :], found[1]
            return self._within()
        if len(self._held) - len(text) <= MAX_SPACE and any(opening.startswith(text) for opening, _ in TAGS):
            return "", ""
        return self._answer(self._held)

    def _within(self) -> tuple[str, str]:
        text, mark = self._held, self._closing
        if (at := text.find(mark)) >= 0:
            thought = self._thought(text[:at])
            self._is_closed, self._held = True, text[at + len(mark) :]
            return self._behind()[0], thought
        n_held = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
        self._held = text[len(text) - n_held :]
        return "", self._thought(text[: len(text) - n_held])

    def _behind(self) -> tuple[str, str]:
        self._held = self._held.lstrip()
        return self._answer(self._held) if self._held else ("", "")

    def _answer(self, text: str) -> tuple[str, str]:
        self._held, self.is_over = "", True
        return text, ""

    def _thought(self, text: str) -> str:
        text = self._space + (text if self._has_begun else text.lstrip())
        said = text.rstrip()
        self._space = text[len(said) :]
        self._has_begun = self._has_begun or bool(said)
        return said

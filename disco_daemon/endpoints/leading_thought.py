"""A thought that a server without a reasoning parser writes into its text, told from the answer. Pure.

As the device does (`engine.llama.thinking`): a thought is one only where it begins the answer, the marks belong to
neither, nor does white space around the thought. Marks by which only a template can be known are not looked for, nor
are those that agents ask any model for and read themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import GenerationRequest
from ..types.content import text_of
from ..types.thought_marks import EXAONE_DEEP, MAX_SPACE, MISTRAL, TAGS, ThoughtText

Tags = Sequence[tuple[str, str]]  # marks that open a thought, each with the one that closes it

_PROMPTED = (EXAONE_DEEP.opening, MISTRAL.opening)
_OWN = tuple(tags for tags in TAGS if tags[0] not in _PROMPTED)


def tags_for(request: GenerationRequest) -> Tags:
    """Return the marks of a thought that may begin the answer to a request, none that its messages mention.

    The rest of an answer, and the answer to a raw prompt, are text whatever they begin with.
    """
    if request.prompt is not None or request.answer_so_far or request.extra.get("reasoning_format") == "none":
        return ()
    texts = [text_of(message.get("content")) for message in request.messages]
    return [tags for tags in _OWN if not any(tags[0] in text for text in texts)]


class LeadingThought:
    """Divides the text of one answer, in pieces; `is_over` once all that comes is the answer's."""

    __slots__ = ("_closing", "_held", "_is_closed", "_tags", "_thought", "is_over")

    def __init__(self, tags: Tags) -> None:
        self.is_over = False
        self._tags = tags
        self._held = ""  # what may be a mark, or a part of one
        self._closing = ""  # the mark behind the thought that has begun
        self._is_closed = False
        self._thought = ThoughtText()

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
            return "", self._thought.add(held)
        return held, ""

    def _before(self) -> tuple[str, str]:
        text = self._held.lstrip()
        tags = self._tags if len(self._held) - len(text) <= MAX_SPACE else ()
        found = next((pair for pair in tags if text.startswith(pair[0])), None)
        if found is not None:
            self._held, self._closing = text[len(found[0]) :], found[1]
            return self._within()
        if any(opening.startswith(text) for opening, _ in tags):
            return "", ""
        return self._answer(self._held)

    def _within(self) -> tuple[str, str]:
        text, mark = self._held, self._closing
        if (at := text.find(mark)) >= 0:
            thought = self._thought.add(text[:at])
            self._is_closed, self._held = True, text[at + len(mark) :]
            return self._behind()[0], thought
        n_held = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
        self._held = text[len(text) - n_held :]
        return "", self._thought.add(text[: len(text) - n_held])

    def _behind(self) -> tuple[str, str]:
        self._held = self._held.lstrip()
        return self._answer(self._held) if self._held else ("", "")

    def _answer(self, text: str) -> tuple[str, str]:
        self._held, self.is_over = "", True
        return text, ""

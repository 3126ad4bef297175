"""Models that think before they answer: dividing their text into thought and answer. Pure.

The thought stands between marks (`types.thought_marks`). Either the chat template has opened it already, or the model
opens it at the very beginning of its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

from ...types.thought_marks import THINK, ThoughtMarks, ThoughtText
from .text import TextStream


class _Phase(Enum):
    START = auto()  # a mark may still come
    THOUGHT = auto()
    GAP = auto()  # white space and marks between the thought and the answer
    ANSWER = auto()


class ThinkingText(TextStream):
    """A TextStream of the answer alone; `take_thought` returns the thought.

    The marks belong to neither, nor does white space around the thought. Stop strings count in the answer only.
    """

    def __init__(
        self, stop: Sequence[str] = (), n_indent: int = 0, *, inside: bool = False, marks: ThoughtMarks = THINK
    ) -> None:
        """Begin a stream; `inside`: the thought has begun already."""
        super().__init__(stop, n_indent)
        self._phase = _Phase.THOUGHT if inside else _Phase.START
        self._opening, self._closing = marks.opening.encode(), marks.closing.encode()
        self._leads = tuple(lead.encode() for lead in marks.leads)
        self._start = b""  # of the answer, as long as it may be a mark
        self._thinking = TextStream([marks.closing])
        self._wrapped = TextStream([marks.ending]) if marks.ending else None  # an answer that a mark may end
        self._is_marked = inside  # whether something is left out
        self._thought, self._trimmed = "", ThoughtText()

    @property
    def whole(self) -> bool:
        """Whether the text shown is that of the bytes taken; never after a thought, whose ids are not the answer's."""
        return self._phase is _Phase.ANSWER and super().whole and not self._is_marked

    @property
    def is_within(self) -> bool:
        """Whether a thought has begun and is not over."""
        return self._phase is _Phase.THOUGHT

    @property
    def is_cut(self) -> bool:
        """Whether the thought so far ends within a character, or within what may be the mark that closes it."""
        return bool(self._thinking.left)

    @property
    def is_over(self) -> bool:
        """Whether no thought can come any more."""
        return self._phase is _Phase.ANSWER

    def feed(self, piece: bytes) -> str:
        """Take one token's bytes; return what may be shown of the answer now."""
        match self._phase:
            case _Phase.ANSWER:
                return self._say(piece)
            case _Phase.THOUGHT:
                return self._think(piece)
            case _:
                return self._begin(piece)

    def take_thought(self) -> str:
        """Return the text of the thought since the last call."""
        out, self._thought = self._thought, ""
        return out

    def flush(self) -> str:
        """Return the rest of the answer at its regular end; `take_thought` returns that of an unfinished thought."""
        if self._phase is _Phase.THOUGHT:
            self._note(self._thinking.flush())
            return ""
        start, self._start = self._start, b""
        shown = self._say(start.lstrip() if self._phase is _Phase.GAP else start)
        if self._is_marked and self._wrapped is not None:
            shown += super().feed(self._wrapped.flush().encode("utf-8", "surrogatepass"))
        return shown + super().flush()

    def _begin(self, piece: bytes) -> str:
        """Leave out marks, and white space in front of them and behind; return what follows."""
        self._start += piece
        is_first = self._phase is _Phase.START
        text = self._start.lstrip()
        # A closing mark in front of everything is an empty thought: some templates open it unseen.
        marks = (self._opening, self._closing, *self._leads) if is_first else self._leads
        if (mark := next((mark for mark in marks if text.startswith(mark)), None)) is not None:
            self._start, self._is_marked = b"", True
            if mark == self._opening and is_first:
                self._phase = _Phase.THOUGHT
                return self._think(text[len(mark) :])
            self._phase = _Phase.GAP
            return self._begin(text[len(mark) :])
        if any(mark.startswith(text) for mark in marks) or not (text or is_first):
            return ""
        said, self._start = self._start if is_first else text, b""
        self._phase = _Phase.ANSWER
        return self._say(said)

    def _think(self, piece: bytes) -> str:
        self._note(self._thinking.feed(piece))
        if not self._thinking.stopped:
            return ""
        self._phase, self._is_marked = _Phase.GAP, True
        return self._begin(self._thinking.left[len(self._closing) :])

    def _note(self, text: str) -> None:
        self._thought += self._trimmed.add(text)

    def _say(self, piece: bytes) -> str:
        if self._is_marked and self._wrapped is not None:
            return super().feed(self._wrapped.feed(piece).encode("utf-8", "surrogatepass"))
        return super().feed(piece)


class ThoughtBudget:
    """The tokens that a thought may still have; behind them the text that closes it is forced, token by token."""

    def __init__(
        self, stream: ThinkingText, n_tokens: int, closer: Sequence[int], piece: Callable[[int], bytes]
    ) -> None:
        """Count from the beginning of an answer; `stream` makes text of the `piece` of each token."""
        self._stream, self._n_left, self._closer, self._piece = stream, n_tokens, closer, piece
        self._at: int | None = None  # of the closing text, the token that is forced next
        self._look()

    @property
    def forced(self) -> int | None:
        """The token that has to come next, None for any."""
        return None if self._at is None else self._closer[self._at]

    @property
    def is_over(self) -> bool:
        """Whether nothing will be forced any more."""
        return self._at is None and self._stream.is_over

    def push(self, token: int) -> None:
        """Take the next token of the answer, which may have been drawn elsewhere."""
        was_within = self._stream.is_within
        self._stream.feed(self._piece(token))
        self._stream.take_thought()
        if self._at is not None:
            self._at = self._at + 1 if token == self._closer[self._at] else 0
            if self._at == len(self._closer) or (self._at == 0 and not self._stream.is_within):
                self._at = None
            return
        self._n_left -= was_within and self._stream.is_within
        self._look()

    def _look(self) -> None:
        """Begin to close the thought if it is too long, and ends nowhere in the middle of a character or mark."""
        if self._n_left <= 0 and self._stream.is_within and not self._stream.is_cut:
            self._at = 0

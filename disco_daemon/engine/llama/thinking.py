"""Models that think before they answer: dividing their text into thought and answer. Pure.

The thought stands between `<think>` and `</think>`, as Qwen3, DeepSeek-R1 and its distillates, SmolLM3 and others write
it. Either the chat template has opened it already, or the model opens it at the very beginning of its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from .text import TextStream

OPEN, CLOSE = "<think>", "</think>"
TAGS = (OPEN, CLOSE)
NO_THOUGHT = f"\n{CLOSE}\n\n"  # behind a prompt that opens a thought: with its "<think>\n", Qwen3's empty thought

_OPEN, _CLOSE = OPEN.encode(), CLOSE.encode()


def opens_thought(prompt: str) -> bool:
    """Whether a rendered prompt ends with the beginning of a thought."""
    return prompt.rstrip().endswith(OPEN)


def is_answer(text: str) -> bool:
    """Whether a partial answer comes without its thought: then the thought is over, wherever it is."""
    return bool(text) and CLOSE not in text and not text.lstrip().startswith(OPEN)


def within(text: str) -> bool:
    """Whether a partial answer ends within a thought."""
    return text.lstrip().startswith(OPEN) and CLOSE not in text


class _Phase(Enum):
    START = auto()  # it may still begin with <think>
    THOUGHT = auto()
    GAP = auto()  # the white space behind </think>
    ANSWER = auto()


class ThinkingText(TextStream):
    """A TextStream of the answer alone; `take_thought` returns the thought.

    The tags belong to neither, nor does white space around the thought. Stop strings count in the answer only.
    """

    def __init__(self, stop: Sequence[str] = (), n_indent: int = 0, *, inside: bool = False) -> None:
        """Begin a stream; `inside`: the thought has begun already."""
        super().__init__(stop, n_indent)
        self._phase = _Phase.THOUGHT if inside else _Phase.START
        self._start = b""  # of the answer, as long as it may be <think>
        self._thinking = TextStream([CLOSE])
        self._thought = self._space = ""
        self._begun = False  # the thought, behind its leading white space

    @property
    def whole(self) -> bool:
        """Whether the text shown is that of the bytes taken; never after a thought, whose ids are not the answer's."""
        return self._phase is _Phase.ANSWER and super().whole and not self._thinking.stopped

    def feed(self, piece: bytes) -> str:
        """Take one token's bytes; return what may be shown of the answer now."""
        match self._phase:
            case _Phase.ANSWER:
                return super().feed(piece)
            case _Phase.START:
                return self._begin(piece)
            case _Phase.THOUGHT:
                return self._think(piece)
            case _Phase.GAP:
                return self._skip(piece)

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
        return (super().feed(start) if start else "") + super().flush()

    def _begin(self, piece: bytes) -> str:
        self._start += piece
        text = self._start.lstrip()
        if text != _OPEN and _OPEN.startswith(text):
            return ""
        start, self._start = self._start, b""
        if not text.startswith(_OPEN):
            self._phase = _Phase.ANSWER
            return super().feed(start)
        self._phase = _Phase.THOUGHT
        return self._think(text[len(_OPEN) :])

    def _think(self, piece: bytes) -> str:
        self._note(self._thinking.feed(piece))
        if not self._thinking.stopped:
            return ""
        self._phase = _Phase.GAP
        return self._skip(self._thinking.left[len(_CLOSE) :])

    def _note(self, text: str) -> None:
        """Add to the thought. White space at its end is held back: it may be the end of the thought."""
        text = self._space + (text if self._begun else text.lstrip())
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._thought += kept
        self._begun = self._begun or bool(kept)

    def _skip(self, piece: bytes) -> str:
        piece = piece.lstrip()
        if not piece:
            return ""
        self._phase = _Phase.ANSWER
        return super().feed(piece)

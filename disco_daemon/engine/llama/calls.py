"""Answers that may call tools: dividing their text into text and calls, and finding where a call begins. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...tools.format import Arguments, CallBegun, Event, Text, Thought, ToolFormat, ToolParser
from .text import CallText, TextStream


class CallingText(TextStream):
    """A TextStream of what is no call; `take_calls` returns the pieces of calls.

    `inner` makes text of bytes, and keeps thoughts apart. Stop strings count in what is no call only.
    """

    def __init__(self, inner: TextStream, parser: ToolParser, stop: Sequence[str] = (), given: str = "") -> None:
        """Begin behind the text `given`, which may have begun a call; it is not shown again."""
        super().__init__(stop)
        self._inner, self._parser = inner, parser
        self._calls: list[CallText] = []
        self._n_withheld = 0  # characters that the parser has, and has not given back
        self._n_given = len(given)  # characters of what was given that the parser has not given back
        self._has_called = False
        self._thought = ""
        if given:
            self._show(parser.push(given))

    @property
    def whole(self) -> bool:
        """Whether the text shown is that of the bytes taken; never behind a call."""
        return self._inner.whole and super().whole and not (self._n_withheld or self._has_called)

    def take_thought(self) -> str:
        """Return the text of the thought since the last call."""
        out, self._thought = self._inner.take_thought() + self._thought, ""
        return out

    def take_calls(self) -> list[CallText]:
        """Return the pieces of calls since the last call."""
        out, self._calls = self._calls, []
        return out

    def feed(self, piece: bytes) -> str:
        """Take one token's bytes; return what may be shown now as text."""
        return self._push(self._inner.feed(piece))

    def flush(self) -> str:
        """Return the rest of the text at the regular end of the answer; `take_calls` returns that of a call."""
        shown = self._push(self._inner.flush())
        return shown + self._show(self._parser.finish()) + super().flush()

    def _push(self, text: str) -> str:
        if not text:
            return ""
        self._n_withheld += len(text)
        return self._show(self._parser.push(text))

    def _show(self, events: Iterable[Event]) -> str:
        """Note the pieces of calls; return the text among them."""
        shown = ""
        for event in events:
            match event:
                case Text(text=text):
                    n_given = min(self._n_given, len(text))
                    self._n_given -= n_given
                    self._n_withheld -= len(text) - n_given
                    shown += super().feed(text[n_given:].encode("utf-8", "surrogatepass"))
                case Thought(text=text):
                    self._has_called = True  # as far as token ids are concerned
                    self._thought += text
                case CallBegun(index=index, name=name):
                    self._has_called = True
                    self._n_given = 0
                    self._calls.append(CallText(index, name, ""))
                case Arguments(index=index, text=text):
                    self._add_arguments(index, text)
        return shown

    def _add_arguments(self, index: int, text: str) -> None:
        """Join pieces of one token."""
        if self._calls and self._calls[-1].number == index:
            last = self._calls.pop()
            self._calls.append(last._replace(arguments=last.arguments + text))
        else:
            self._calls.append(CallText(index, "", text))


class OpeningMark:
    """Looks in what is drawn for a mark by which a call begins; thoughts do not count."""

    def __init__(
        self,
        form: ToolFormat,
        stream: TextStream,
        piece: Callable[[int], bytes],
        tokens: Callable[[str], list[int]],
    ) -> None:
        """Look from the beginning of an answer; `stream` makes text of the `piece` of each token.

        `tokens` makes tokens of a text.
        """
        self._marks, self._at_start = form.opening, form.opening_at_start
        self._stream, self._piece = stream, piece
        self.tokens = tokens
        self._n_kept = max(map(len, self._marks), default=1) - 1
        self._is_start = True
        self._tail = ""

    def push(self, token: int) -> str:
        """Take a token; return the text from the mark on if that is complete now, else nothing."""
        return self._look(self._stream.feed(self._piece(token)))

    def _look(self, text: str) -> str:
        """Return what has come of a call, if one has begun."""
        self._tail += text
        if self._is_start:
            begun = self._tail.lstrip()
            if any(begun.startswith(mark) for mark in self._at_start):
                return self._take(len(self._tail) - len(begun))
            self._is_start = any(mark.startswith(begun) for mark in self._at_start)
        places = [at for mark in self._marks if (at := self._tail.find(mark)) >= 0]
        if places:
            return self._take(min(places))
        if not self._is_start:
            self._tail = self._tail[max(0, len(self._tail) - self._n_kept) :]
        return ""

    def _take(self, at: int) -> str:
        found, self._tail, self._is_start = self._tail[at:], "", False
        return found

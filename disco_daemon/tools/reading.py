"""What parsers of calls share: text that arrives in pieces is read as if it were there, or taken back. Pure.

A parser is written as if it had the whole answer: each step that needs more text than there is waits by a bare
`yield`, and goes on when the next piece is pushed. As long as a call has not begun, all that was read since its opening
mark is kept; if it is no call after all, the first character is text, and the search goes on behind it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

from .format import Arguments, CallBegun, CallEnded, Event, Text, Thought, Tool

T = TypeVar("T")
Steps = Generator[None, None, T]

MAX_HEADER = 16 * 1024  # characters from an opening mark to where a call is known to be one
_SPACE = " \t\r\n"
_UNICODE = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class NoCall(Exception):
    """What was read since the opening mark is no call, or no more of one."""


class CallReader(ABC):
    """A parser of answers with calls of the given tools; what an answer looks like is for `_answer` to say."""

    def __init__(self, tools: Iterable[Tool], marks: Iterable[str], marks_at_start: Iterable[str] = ()) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self._marks, self._marks_at_start = tuple(marks), tuple(marks_at_start)
        self._mark = re.compile("|".join(map(re.escape, self._marks)) or r"(?!)")
        self._text, self._at = "", 0
        self._kept: int | None = None  # where the text begins that is not known yet to be part of a call
        self._has_ended = False
        self._gap = ""  # white space behind a call, which counts only if text follows
        self._n_calls = 0
        self._open: int | None = None  # the call that has begun and not ended
        self._events: list[Event] = []
        self._steps = self._answer()

    def push(self, text: str) -> list[Event]:
        """Take the next piece of the answer; return what is known by it."""
        self._text += text
        return self._go_on()

    def finish(self) -> list[Event]:
        """Return what was held back, after the last piece."""
        self._has_ended = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        read = self._at if self._kept is None else self._kept
        self._text, self._at = self._text[read:], self._at - read
        self._kept = None if self._kept is None else 0
        return _joined(events)

    # --- for formats to define -----------------------------------------------------------------------------------

    @abstractmethod
    def _answer(self) -> Steps[None]:
        """Read the whole answer."""

    def _give_back(self, *, has_begun: bool) -> None:
        """Make text of what was read for a call that is none, at least its first character."""
        if self._open is not None and self._has_ended:  # the call was cut: what is left of it is nothing else
            self._at = len(self._text)
            return
        assert self._kept is not None
        self._at = self._kept
        if not has_begun:
            self._text_read(min(self._at + 1, len(self._text)))

    # --- text ----------------------------------------------------------------------------------------------------

    def _next_mark(self, *, at_start: bool = False) -> Steps[bool]:
        """Let text pass up to an opening mark, and return whether there is one."""
        if at_start:
            yield from self._more_than_space()
            n = len(self._text) - self._at - len(self._text[self._at :].lstrip())
            for mark in self._marks_at_start:
                if (yield from self._has(mark, n)):
                    self._gap, self._at = self._text[self._at : self._at + n], self._at + n
                    return True
        yield from self._space_behind_a_call()
        while True:
            if found := self._mark.search(self._text, self._at):
                self._text_read(found.start())
                return True
            if self._has_ended:
                self._text_read(len(self._text))
                return False
            self._text_read(len(self._text) - _begun(self._text[self._at :], self._marks))
            yield

    def _more_than_space(self) -> Steps[None]:
        while not self._has_ended and not self._text[self._at :].strip():
            yield

    def _space_behind_a_call(self) -> Steps[None]:
        """Hold the white space behind a call back: it is text only if text follows."""
        if self._n_calls:
            yield from self._more_than_space()
            rest = self._text[self._at :]
            n = len(rest) - len(rest.lstrip())
            self._gap += rest[:n]
            self._at += n

    def _text_read(self, to: int) -> None:
        """Let text up to a place pass as what it is."""
        if to > self._at:
            self._events.append(Text(self._gap + self._text[self._at : to]))
            self._gap, self._at = "", to

    def _thought_read(self, to: int) -> None:
        """Let text up to a place pass as a thought."""
        if to > self._at:
            self._events.append(Thought(self._text[self._at : to]))
            self._at = to

    def _string_read(self, to: int) -> None:
        """Say text up to a place as part of a JSON string in the arguments."""
        text, self._at = self._text[self._at : to], to
        self.argue(quoted(text))

    def _until(self, passes: Callable[[int], None], *marks: str) -> Steps[str]:
        """Let text pass up to the first of some marks, as it arrives; return the mark, which is read, or "" at the end.

        The longer one of two marks that begin at one place has to be named first.
        """
        mark = re.compile("|".join(map(re.escape, marks)))
        while not (found := mark.search(self._text, self._at)):
            n_held = _begun(self._text[self._at :], marks)
            if self._has_ended:  # in a call the beginning of a mark is one that was cut
                passes(len(self._text) - (n_held if self._open is not None else 0))
                return ""
            passes(len(self._text) - n_held)
            yield
        n = len(found[0])
        passes(found.start())
        self._at += n
        return found[0]

    # --- calls ---------------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Begin a call: what was read is part of it, whatever comes."""
        self._gap = ""
        self._open = self._n_calls
        self._n_calls += 1
        self._events.append(CallBegun(self._open, name))
        self.keep()

    def argue(self, text: str) -> None:
        """Say a piece of the JSON text of the arguments, which has been read."""
        assert self._open is not None
        if text:
            self._events.append(Arguments(self._open, text))
        self.keep()

    def end(self) -> None:
        """End a call whose arguments are whole."""
        assert self._open is not None
        self._events.append(CallEnded(self._open))
        self._open = None
        self.keep()

    def keep(self) -> None:
        """Note that all that was read is part of a call: it is never text."""
        self._kept = self._at

    def close(self, mark: str) -> Steps[bool]:
        """Read a mark behind a call, and white space before it; return whether it is there, or was cut."""
        self.keep()
        yield from self.space()
        while not self._text.startswith(mark, self._at):
            if not mark.startswith(self._text[self._at :]):
                assert self._kept is not None
                self._at = self._kept
                return False
            if self._has_ended:
                self._at = len(self._text)
                break
            yield
        else:
            self._at += len(mark)
        self.keep()
        return True

    def follows(self, *first: str) -> Steps[str]:
        """Return which of some texts comes next, behind white space that is read only then; "" if none does."""
        self.keep()
        yield from self.space()
        for text in first:
            if (yield from self._has(text)):
                return text
        assert self._kept is not None
        self._at = self._kept
        return ""

    # --- reading -------------------------------------------------------------------------------------------------

    def _wait(self) -> Steps[None]:
        """Wait for more text. Raises NoCall if there is none, or too much was held back."""
        if self._has_ended or (self._open is None and len(self._text) - (self._kept or 0) > MAX_HEADER):
            raise NoCall
        yield

    def peek(self) -> Steps[str]:
        """Return the next character. Raises NoCall at the end."""
        while self._at == len(self._text):
            yield from self._wait()
        return self._text[self._at]

    def take(self, text: str) -> Steps[None]:
        """Read exactly this text. Raises NoCall."""
        if not (yield from self._has(text)):
            raise NoCall
        self._at += len(text)

    def try_take(self, *texts: str) -> Steps[str]:
        """Read one of some texts, the first that fits; return "" if none does."""
        for text in texts:
            if (yield from self._has(text)):
                self._at += len(text)
                return text
        return ""

    def _has(self, text: str, ahead: int = 0) -> Steps[bool]:
        """Return whether this text comes next, or so many characters ahead; the end of the answer is a no."""
        while True:  # what was read goes away while it waits: a place in the text is one relative to `_at`
            there = self._text[self._at + ahead : self._at + ahead + len(text)]
            if self._has_ended or len(there) == len(text) or not text.startswith(there):
                return there == text
            yield

    def space(self) -> Steps[None]:
        """Read white space, none too, up to something else or to the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or self._has_ended:
                return
            yield

    def word(self, characters: str) -> Steps[str]:
        """Read as many characters of a regular expression's class as there are. Raises NoCall at the end."""
        some = re.compile(f"[{characters}]*")
        word = ""
        while True:
            yield from self.peek()
            found = some.match(self._text, self._at)
            assert found is not None
            word, self._at = word + found[0], found.end()
            if self._at < len(self._text):
                return word

    def until(self, mark: str) -> Steps[str]:
        """Read up to a mark and over it; return what is before it. Raises NoCall at the end."""
        while (found := self._text.find(mark, self._at)) < 0:
            yield from self._wait()
        text, self._at = self._text[self._at : found], found + len(mark)
        return text

    # --- JSON ----------------------------------------------------------------------------------------------------

    def json_string(self) -> Steps[str]:
        """Read a JSON string; return what it says. Raises NoCall."""
        yield from self.take('"')
        text = ""
        while (c := (yield from self.peek())) != '"':
            self._at += 1
            if c == "\\":
                escape = yield from self.peek()
                self._at += 1
                c = (yield from self._code()) if escape == "u" else _ESCAPES.get(escape, "")
                if not c:
                    raise NoCall
            elif c < " ":
                raise NoCall
            text += c
        self._at += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _code(self) -> Steps[str]:
        digits = ""
        for _ in range(4):
            digits += yield from self.peek()
            self._at += 1
        return chr(int(digits, 16)) if _UNICODE.fullmatch(digits) else ""

    def json_value(self, *, is_argument: bool) -> Steps[str]:
        """Read a JSON value as it is written; said as an argument in pieces, or returned whole. Raises NoCall.

        Only strings and brackets are looked at: what stands between is for whoever reads the JSON.
        """
        said = ""
        depth = 0
        in_string = False
        while True:
            c = yield from self.peek()
            start = self._at
            while self._at < len(self._text):
                c = self._text[self._at]
                if in_string:
                    if c == "\\":
                        if self._at + 1 == len(self._text):
                            break
                        self._at += 1
                    in_string = c != '"'
                elif c == '"':
                    in_string = True
                elif c in "{[":
                    depth += 1
                elif c in "}]" or (not depth and c in ", \t\r\n"):
                    if not depth:
                        return self._said(said, start, is_argument)
                    depth -= 1
                self._at += 1
                if not depth and c in '"}]' and not in_string:
                    return self._said(said, start, is_argument)
            said = self._said(said, start, is_argument)
            if self._at < len(self._text):  # a backslash, whose character is still to come
                n = len(self._text) - self._at
                while len(self._text) - self._at == n:
                    yield from self._wait()

    def _said(self, said: str, start: int, is_argument: bool) -> str:
        text = self._text[start : self._at]
        if is_argument:
            self.argue(text)
            return ""
        return said + text


class MarkedReader(CallReader):
    """A reader of answers whose calls begin with a mark in the midst of text; what follows is for `_call` to say."""

    @abstractmethod
    def _call(self) -> Steps[None]:
        """Read one or more calls from an opening mark on. Raises NoCall."""

    def _answer(self) -> Steps[None]:
        """Read the whole answer."""
        at_start = bool(self._marks_at_start)
        while (yield from self._next_mark(at_start=at_start)):
            at_start = False
            self._kept = self._at
            n_before = self._n_calls
            try:
                yield from self._call()
            except NoCall:
                self._give_back(has_begun=self._n_calls > n_before)
            self._kept = self._open = None


def quoted(text: str) -> str:
    """Return the inside of a JSON string that says a text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _begun(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    begins, longest = _begins(marks)
    return next((n for n in range(min(longest, len(text)), 0, -1) if text[-n:] in begins), 0)


@lru_cache(256)
def _begins(marks: tuple[str, ...]) -> tuple[frozenset[str], int]:
    return frozenset(mark[:n] for mark in marks for n in range(1, len(mark))), max(map(len, marks), default=1) - 1


def _joined(events: list[Event]) -> list[Event]:
    """Join pieces of one kind that follow each other."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            case Text(before), Text(text):
                joined[-1] = Text(before + text)
            case Thought(before), Thought(text):
                joined[-1] = Thought(before + text)
            case Arguments(index, before), Arguments(_, text) if index == event.index:
                joined[-1] = Arguments(index, before + text)
            case _:
                joined.append(event)
    return joined

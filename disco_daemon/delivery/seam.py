"""The seam where two endpoints' texts meet. Pure.

A *target* goes on with an answer from a place p; `before` is the text up to there. Meanwhile the source may have gone
on too, and of what it generated beyond p, the reader may have got the text `committed`. The target's text is joined
where it covers `committed`: text delivered is never changed, lost or doubled.

What a target sends first:

- the continuation; nothing is to be done;
- `before` once more, and then the continuation: an echo, or a server that knows of no continuation and starts the
  answer again (`python -m llama_cpp.server` does). A `guarded` seam swallows that;
- the last words again, as it was asked to (`overlap`): they are found and trimmed;
- something else, which cannot be joined: `Diverged`.
"""

from __future__ import annotations

import re

from ..types import Token
from .cut import split

_QUOTES = "\"'\u00ab\u00bb\u2018\u2019\u201a\u201c\u201d\u201e"  # opening and closing ones, as languages differ


class Diverged(ValueError):
    """The target's text cannot be joined to the answer.

    `reason`: `restart` (the answer again, then different), `mismatch` (not the text the reader has), `overlap` (the
    words it was asked to repeat are not there), `short` (it ended before all that the reader has), `delta` (a tool call
    or hidden thought, where the reader has text).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Seam:
    """Joins a target's tokens to an answer; text is held only while it could still be a repetition."""

    # A continuation that agrees with the answer's beginning for this many characters and then differs is a second,
    # different answer; fewer are chance (" the", "1. ").
    MIN_RESTART = 16
    # Characters of preamble ("Sure, here it goes on:") before the words that a target was asked to repeat.
    MAX_PREAMBLE = 64

    def __init__(self, before: str, *, guarded: bool, overlap: str | None = None, least: int = MIN_RESTART) -> None:
        """`least`: at least this many characters of `before`, repeated as a whole, are no chance."""
        self._before = before
        self._guarded = guarded
        self._least = least
        self._tokens: list[Token] = []
        self._text = ""
        self._delta_at: int | None = None  # characters of text before the first token that is more than text
        self._overlap = _loosely(overlap) if overlap and overlap.strip() else None
        self._reach = len(overlap or "") + self.MAX_PREAMBLE
        self.swallowed = False  # a repetition of the whole of `before`

    def feed(self, token: Token) -> None:
        """Take the target's next token."""
        if token.delta is not None and self._delta_at is None:
            self._delta_at = len(self._text)
        self._tokens.append(token)
        self._text += token.text

    def join(self, committed: str) -> list[Token] | None:
        """The target's tokens after `committed`, once its text covers that and says something; None: not yet.

        A token that lies across the border is trimmed, and has no ids then. Raises Diverged.
        """
        start = self._start(committed)
        if start is None:
            return None
        n_more = len(self._text) - start - len(committed)
        self._check(start, committed)
        if n_more < 0 or not (n_more or committed or self._delta_at is not None):
            return None
        return self._after(start + len(committed))

    def ended(self, committed: str) -> list[Token]:
        """The target has finished: its tokens after `committed`. Raises Diverged if it does not cover that.

        What could still have become a repetition is text if it is short, and dropped otherwise.
        """
        start = self._start(committed)
        if start is None:
            start = self._start_at_end()
        self._check(start, committed)
        if len(self._text) - start < len(committed):
            raise Diverged("short", "the continuation ended before all that the reader has")
        return self._after(start + len(committed))

    def _start(self, committed: str) -> int | None:
        """Return where in the target's text the continuation begins; None while that is open."""
        if self._overlap is not None:
            return self._after_overlap()
        if not self._guarded or not self._text:
            return 0
        # Of a very short beginning a restart cannot be told from chance; of all that the reader has it may be.
        known = self._before if len(self._before) >= self._least else self._before + committed
        if len(known) < self._least or not self._before:
            return 0
        if self._text.startswith(known):
            self.swallowed = True
            return len(self._before)
        if known.startswith(self._text):
            return self._start_of_beginning(committed)
        agreed = _common_prefix(self._text, known)
        if agreed < self.MIN_RESTART:
            return 0
        raise Diverged("restart", f"the continuation starts the answer again and differs after {agreed} characters")

    def _start_of_beginning(self, committed: str) -> int | None:
        """The whole text so far is the beginning of the answer: a repetition, unless something speaks against it."""
        if self._delta_at is None:
            return None
        if len(self._text) < self.MIN_RESTART:
            return 0
        raise Diverged("delta", "the continuation starts the answer again and breaks off with something else than text")

    def _start_at_end(self) -> int:
        if self._overlap is not None:
            match = self._overlap.search(self._text, 0, self._reach)
            if match is None:
                raise Diverged("overlap", "the continuation does not repeat the last words")
            return match.end()
        return 0 if len(self._text) < self.MIN_RESTART else len(self._text)

    def _after_overlap(self) -> int | None:
        assert self._overlap is not None
        match = self._overlap.search(self._text, 0, self._reach)
        if match is None:
            if len(self._text) >= self._reach or self._delta_at is not None:
                raise Diverged("overlap", "the continuation does not repeat the last words")
            return None
        # The next character tells whether a quotation mark or space belongs to the repetition.
        return match.end() if match.end() < len(self._text) else None

    def _check(self, start: int, committed: str) -> None:
        n = min(len(committed), len(self._text) - start)
        if not self._text.startswith(committed[:n], start):
            at = _common_prefix(self._text[start : start + n], committed)
            raise Diverged("mismatch", f"the continuation differs from what the reader has after {at} characters")
        if self._delta_at is not None and self._delta_at < start + len(committed):
            raise Diverged("delta", "the continuation has something else than text where the reader has text")

    def _after(self, at: int) -> list[Token]:
        """The tokens from character `at` on."""
        if at == 0:
            return list(self._tokens)
        before, after = split(self._tokens, at)
        # `split` puts what has no text before the border; here it comes after what the reader has.
        while before and not before[-1].text:
            after.insert(0, before.pop())
        if after and before and len(before) + len(after) > len(self._tokens):
            after[0] = _trimmed(after[0], len(before[-1].text))
        return after


class StopScan:
    """Finds stop strings that end in new text, also those that begin in the text before it."""

    def __init__(self, stop: tuple[str, ...], before: str) -> None:
        self._stop = tuple(s for s in stop if s)
        longest = max((len(s) for s in self._stop), default=1)
        # What may be a stop string's beginning: text already shown, and behind it text held back.
        self._text = before[max(0, len(before) - longest + 1) :]
        self._shown = len(self._text)
        self._room = longest
        self._waiting: list[Token] = []
        self.stopped = False
        self.stop: str | None = None  # the stop string that has ended the answer

    @property
    def n_waiting(self) -> int:
        """Tokens held back."""
        return sum(token.n_tokens for token in self._waiting)

    @property
    def waiting(self) -> str:
        """The text held back."""
        return "".join(token.text for token in self._waiting)

    def take(self, token: Token) -> tuple[list[Token], bool]:
        """Return the tokens that may be shown now, and whether a stop string has ended the answer.

        What is held back stays with its tokens, which are cut where a stop string begins. A token that is cut there
        counts; those that are wholly part of the stop string do not.
        """
        if self.stopped:
            return [], True
        if token.delta is not None:
            return [*self.rest(), token], False
        self._waiting.append(token)
        text, stopped = self._feed(token.text)
        out, self._waiting = split(self._waiting, len(text))
        if stopped and out and not out[-1].n_tokens and self._waiting:
            out[-1] = Token(out[-1].text, self._waiting[0].n_tokens)
        return out, stopped

    def rest(self) -> list[Token]:
        """Return the tokens held back, at the regular end of the answer."""
        self._shown = len(self._text)
        out, self._waiting = ([] if self.stopped else self._waiting), []
        return out

    def _feed(self, text: str) -> tuple[str, bool]:
        if not self._stop:
            return text, False
        n_old = len(self._text)
        self._text += text
        end = len(self._text)
        hit = self._first(n_old)
        if hit is not None:
            self.stopped = True
            begin, self.stop = hit
            end = max(self._shown, begin)
        else:
            end = max(self._shown, end - max(_overlap(self._text, s) for s in self._stop))
        out = self._text[self._shown : end]
        forget = max(0, end - self._room)
        self._text, self._shown = self._text[forget:], end - forget
        return out, self.stopped

    def _first(self, n_old: int) -> tuple[int, str] | None:
        """Return where the stop string begins that is complete first, of those that end beyond `n_old`, and itself."""
        hits = []
        for s in self._stop:
            at = self._text.find(s, max(0, n_old - len(s) + 1))
            if at >= 0:
                hits.append((at + len(s), at, s))
        return min(hits)[1:] if hits else None


def _trimmed(token: Token, n_cut: int) -> Token:
    """The rest of a token that has lost its first `n_cut` characters; it counts in proportion, and at least as one."""
    share = len(token.text) / (n_cut + len(token.text))
    return Token(token.text, min(token.n_tokens, max(1, round(token.n_tokens * share))), token.delta, token.logprobs)


def _loosely(words: str) -> re.Pattern[str]:
    """Return a pattern for `words` with any white space between them, in quotation marks or not.

    White space at their end is repeated as it is or not at all: any other belongs to the continuation.
    """
    core = r"\s+".join(re.escape(word) for word in words.split())
    tail = f"(?:{re.escape(words[len(words.rstrip()) :])})?"
    return re.compile(rf"""(?:["'“‘«„]{core}["'”’»“]|{core}){tail}""")  # noqa: RUF001


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _common_prefix(a: str, b: str) -> int:
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)

"""The number of tokens in a text that comes in pieces, where nobody tells it. Pure.

A piece of a server's stream is a token, or a letter, a word, a line, or whatever came of a quarter of a second: only
the server knows, and few tell. So the *text* is counted, and the same text counts the same however it is cut. What can
be told from it are the parts that tokenizers never join: words, each with a mark before it, and runs of marks. So this
counts cautiously, English prose 5 to 10 %, code 30 % and German 50 % too low, and hardly ever one token as two.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import regex

LONGEST_TOKEN = 20  # characters of one word that are taken for one token; vocabularies have hardly any longer
WIDE_CHARS = 2  # ideographs, kana or syllables to a token, in scripts without spaces; hardly any has four
LONGEST_RUN = 128  # spaces, or marks in a row, that are taken for one token: indents and lines of dashes
SHORT = 12  # characters of a piece that are looked at one by one, if it is no word: more are quicker by an expression
MAX_DEPTH = 4  # levels of a delta that are looked at: tool_calls[0].function.arguments
MAX_TEXTS = 256  # of one answer that are counted apart: calls, thoughts, choices; those beyond are taken for one

_WORD = r"\p{L}\p{M}\p{N}"
_JOINS = r"'\u2019\p{Cf}"  # within a word: don't, and what holds a Hindi word or a family of emoji together
_RUN = regex.compile(rf"([{_WORD}]+)|(\s+)|([{_JOINS}]+)|([^\s{_WORD}{_JOINS}]+)")
_WIDE = regex.compile(r"[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")
_SPOKEN = frozenset({"content", "reasoning_content", "reasoning", "thinking", "refusal", "arguments", "name", "text"})
_WORDS, _SPACE, _JOINER, _MARKS = 1, 2, 3, 4  # groups of _RUN; the text ends with the first, the second or the last
_LONGEST = {_WORDS: LONGEST_TOKEN, _SPACE: LONGEST_RUN, _MARKS: LONGEST_RUN}
_ASCII = {c: found.lastindex or _SPACE for c in map(chr, range(128)) if (found := _RUN.match(c))}


class TextCount:
    """Counts the tokens of one text. A token counts where it begins, so that no later piece can change the count."""

    __slots__ = ("_kind", "_length")

    def __init__(self) -> None:
        self._kind = _SPACE  # what the text ends with …
        self._length = 0  # … and how long that is by now

    def add(self, piece: str) -> int:
        """Take the next piece; return how many tokens begin in it."""
        word = piece[1:] if piece[:1] == " " else piece
        if ends_in_space := word[-1:] == " ":
            word = word[:-1]
        if not word.isascii():
            return self._add_runs(piece)
        if word.isalnum() and (self._kind != _SPACE or self._length < LONGEST_RUN - 1):  # what most pieces are
            if self._kind == _SPACE or piece[0] == " ":
                n = 1 if len(word) <= LONGEST_TOKEN else _upwards(len(word), LONGEST_TOKEN)
                self._kind, self._length = _WORDS, len(word)
            else:
                n = self._add_word(len(word))
            if ends_in_space:
                self._kind, self._length = _SPACE, 1
            return n
        return self._add_ascii(piece) if len(piece) <= SHORT else self._add_runs(piece)

    def _add_ascii(self, piece: str) -> int:
        """Take a short piece, character by character: in a third of the time."""
        n, before, length = 0, self._kind, self._length
        for character in piece:
            kind = _ASCII[character]
            if kind == _JOINER:
                kind = _WORDS if before == _WORDS else _MARKS
            if kind == before:
                length += 1
                n += (length if kind == _SPACE else length - 1) % _LONGEST[kind] == 0
            else:
                n += kind == _MARKS or (kind == _WORDS and not (before == _MARKS and length == 1))
                before, length = kind, 1
        self._kind, self._length = before, length
        return n

    def _add_runs(self, piece: str) -> int:
        n = 0
        for found in _RUN.finditer(piece):
            kind, run = found.lastindex or _SPACE, found[0]
            if kind == _WORDS or (kind == _JOINER and self._kind == _WORDS):
                n_wide = 0 if run.isascii() else len(_WIDE.findall(run))
                n += self._add_word(len(run) + n_wide * (LONGEST_TOKEN // WIDE_CHARS - 1))
            else:
                n += self._add_run(_SPACE if kind == _SPACE else _MARKS, len(run))
        return n

    def _add_run(self, kind: int, length: int) -> int:
        before = self._length if self._kind == kind else 0
        self._kind, self._length = kind, before + length
        if kind == _SPACE:
            return self._length // LONGEST_RUN - before // LONGEST_RUN
        return _upwards(self._length, LONGEST_RUN) - _upwards(before, LONGEST_RUN)

    def _add_word(self, length: int) -> int:
        """Take a part of a word. It goes on with the word before it, or with the one mark that it is a token with."""
        if self._kind == _WORDS:
            n_counted = _upwards(self._length, LONGEST_TOKEN)
            self._length += length
        else:
            n_counted = 1 if self._kind == _MARKS and self._length == 1 else 0
            self._kind, self._length = _WORDS, length
        return _upwards(self._length, LONGEST_TOKEN) - n_counted


class TextCounts:
    """The counts of the other texts of an answer, each for itself: thoughts, names and arguments of calls."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, TextCount] = {}

    def add(self, delta: Mapping[str, Any], index: object = None) -> int:
        """Take what a delta says of the choice `index` beside its text; return how many tokens begin in it."""
        return sum(self._count((index, *where)).add(text) for where, text in _texts(delta, (), MAX_DEPTH))

    def _count(self, key: Hashable) -> TextCount:
        if key not in self._counts and len(self._counts) >= MAX_TEXTS:
            key = None
        return self._counts.setdefault(key, TextCount())


def beginning(text: str, n_tokens: int, n: int, before: str = "") -> str:
    """Return of a piece behind `before` what stands before its token `n`, the first one being 0.

    Returns all of it where its text is not what was counted: it has fewer tokens than `n_tokens`.
    """
    count = TextCount()
    count.add(before)
    begins = [i for i, character in enumerate(text) if count.add(character)]
    at = n + len(begins) - n_tokens
    return text[: begins[at]] if n <= at < len(begins) else text


def _upwards(length: int, most: int) -> int:
    return -(-length // most)


def _texts(value: object, where: tuple[object, ...], depth: int) -> Iterator[tuple[tuple[object, ...], str]]:
    """Yield what is said in a delta, each with where it stands: a call by its index, if it has one."""
    if depth == 0:
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, str):
                if key in _SPOKEN and inner:
                    yield (*where, key), inner
            else:
                yield from _texts(inner, (*where, key), depth - 1)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            at = inner.get("index") if isinstance(inner, Mapping) else None
            yield from _texts(inner, (*where, at if type(at) is int else i), depth - 1)

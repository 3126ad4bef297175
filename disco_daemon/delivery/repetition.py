"""Whether a text that grows has got into a loop: it says the same again and again, and will not stop. Pure.

A loop is text that is periodic to its end: a unit of up to MAX_PERIOD characters, which follows on itself exactly. The
numbers of a list do not count ("11. " is as good as "12. "); a loop that varies in anything else is none here. How long
it has to be depends on what the unit is made of, for honest answers repeat themselves too:

- sentences, lines and words: three times, and LEAST characters more;
- data, which are rules, tables, drawings, arrays, base64, genes, notes: DATA characters more in place of LEAST. They
  are told by their looks: few letters, no spaces or hardly a letter between them, long words, or many marks;
- empty lines: BLANK_LINES of them.

`python -m benchmarks.repetition` measures how many honest answers are taken for a loop, and those bounds come from
there. The text is looked at every STEP characters, whatever pieces it comes in, so that these change nothing.
"""

from __future__ import annotations

import re

MAX_PERIOD = 4096  # characters of a unit; a thousand tokens: agents were seen to repeat a whole file of 92 lines
STEP = 64  # characters from look to look, some fifteen tokens: a look takes 3 us, and more where text was said before
ANCHOR = 96  # characters that have to be there twice before anything is compared
REPEATS = 3  # times that a unit is there at least …
LEAST = 96  # … and characters beyond that, some twenty tokens: choruses and lists of equal words stay below
DATA = 3072  # the same for data: an array of 512 equal bytes has 3,072, honest rules and empty tables have 1,200
BLANK = 64  # characters of nothing but white space, of which
BLANK_LINES = 32  # are ends of lines: no program and no letter has so many
STRICT_REPEATS = 8  # times, where data are what was asked for: a schema, a call …
STRICT = 4  # … and times as many characters more
FEW_LETTERS = 2  # different ones; "0x00, ", "na na", "[x] " and rows of zeros in base64 have no more
SHORT_WORD = 2  # characters of a word on average; "C D E F G A B " has fewer
LONG_WORD = 24  # characters; hardly any longer one is a word
MARKS_SHARE = 0.125  # of all that is no space: sentences have less, lists of numbers or of quoted words more

_NUMBERED = re.compile(r"\n[ \t]{0,16}\d{1,6}(?=[.):])")  # a line of a list
_APOSTROPHE = re.compile(r"(?<=[^\W\d_])['\u2019](?=[^\W\d_])")  # of a word, which is no mark
_OPEN = re.compile(r"\n[ \t]{0,16}\d{0,6}\Z")  # what may still become the beginning of one


class Repetition:
    """Looks for a loop in one text. `strict`: the text is data by what its client asks for.

    Nothing is found before `n_left` characters have been added.
    """

    def __init__(self, *, strict: bool = False, before: str = "") -> None:
        """`before` is the text so far, which was looked at already."""
        self._repeats, self._strict = (STRICT_REPEATS, STRICT) if strict else (REPEATS, 1)
        self._keep = self._repeats * MAX_PERIOD + self._strict * DATA
        self._tail = self._held = ""  # without the numbers of lists; what may still become one
        self._waiting = ""  # for the next look
        self.n_left = STEP  # characters until the next look
        self.is_likely = False  # the text ends with the same twice: a loop may be about to be
        at = len(before) - len(before) % STEP
        self._append(before[max(0, at - self._keep) : at])
        if at < len(before):
            self.add(before[at:])

    def add(self, text: str) -> int | None:
        """Take the next piece; return how many of its characters there are when the loop is certain, None for no loop.

        After a loop nothing more may come.
        """
        n_old, text = len(self._waiting), self._waiting + text
        at = 0
        while len(text) - at >= STEP:
            self._append(text[at : at + STEP])
            at += STEP
            if self._is_loop():
                return at - n_old
        self._waiting, self.n_left = text[at:], STEP - (len(text) - at)
        return None

    def _append(self, text: str) -> None:
        text, self._held = self._held + text, ""
        if "\n" in text:
            if found := _OPEN.search(text, max(0, len(text) - 24)):
                text, self._held = text[: found.start()], found[0]
            text = _NUMBERED.sub("\n0", text)
        tail = self._tail + text
        self._tail = tail[-self._keep :] if len(tail) > 2 * self._keep else tail

    def _is_loop(self) -> bool:
        """Whether the text is periodic for long enough, by its shortest period first.

        A loop of the period p has its last ANCHOR characters p before its end, too. Where they are there for another
        reason, at a distance d, what is periodic by d is shorter than p + d, and one character more of it is found at
        p, and not at d: so each period is found by a search for more text than the last one explains.
        """
        text, n = self._tail, len(self._tail)
        self.is_likely = False
        if text[-BLANK:].isspace() and text.count("\n", n - BLANK) >= BLANK_LINES:
            return True
        n_same = ANCHOR
        while n_same < n:
            at = text.rfind(text[n - n_same :], max(0, n - n_same - MAX_PERIOD), n - 1)
            if at < 0:
                return False
            p = n - n_same - at
            if self._is_periodic(p, self._repeats * p + self._strict * LEAST):
                more = DATA if _is_data(text[n - p :]) else LEAST
                if more is LEAST or self._is_periodic(p, self._repeats * p + self._strict * more):
                    return True
            n_run = self._run(p, n_same + p)
            self.is_likely |= n_run >= 2 * p
            n_same = n_run - p + 1
        return False

    def _is_periodic(self, p: int, length: int) -> bool:
        text, n = self._tail, len(self._tail)
        return length <= n and text.startswith(text[n - length : n - p], n - length + p)

    def _run(self, p: int, least: int) -> int:
        """Return how many characters at the end are periodic by `p`: `least` are known to be."""
        most = least
        while self._is_periodic(p, 2 * most):
            most *= 2
        low, high = most, min(2 * most, len(self._tail) + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_periodic(p, middle) else (low, middle)
        return low


def _is_data(unit: str) -> bool:
    """Whether a unit looks like data; letters beyond ASCII are words, with spaces or without."""
    letters = {c for c in unit if c.isalpha()}
    if len(letters) <= FEW_LETTERS:
        return True
    n_full = len(unit) - sum(map(str.isspace, unit))
    n_marks = n_full - sum(map(str.isalnum, unit)) - len(_APOSTROPHE.findall(unit))
    if n_marks > MARKS_SHARE * n_full:
        return True
    if not unit.isascii():
        return False
    words = (unit + unit).split()
    return n_full == len(unit) or n_full <= SHORT_WORD * len(unit.split()) or max(map(len, words)) > LONG_WORD

r"""A schema's regular expression, as ECMA-262 reads it, as an expression of automata. Pure.

Where ECMA-262 and Python, whose `re` most validators use, differ (`\d` and `\w` of other scripts, what `.` and `$`
take for the end of a line), an answer holds by both: a class has what is in both where it is asked for, and what is in
either where it is forbidden.
"""

from __future__ import annotations

from .characters import EVERY, LAST, Ranges, both, of_text, other, ranges
from .expressions import END, START, Expression, Texts

MAX_COUNT = 2000  # of one quantifier: each is a state of its own
HALF = "'pattern' has half of a character (a surrogate): write the character itself."
MAX_NESTED = 40  # groups within each other
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ranges((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ranges((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                        (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))  # fmt: skip
# What any of the two dialects counts as one, and what may be one: scripts that have digits of their own.
_ANY_DIGIT = ranges(*_DIGIT, (0x660, 0x1FFF), (0xA620, 0xABFF), (0xFF10, 0xFF19), (0x10000, 0x1F2FF), (0x1FBF0, LAST))
_ANY_WORD = both(ranges(*_WORD, (0x80, LAST)), other(((0x2010, 0x2027), (0x2030, 0x205E), (0x1F300, 0x1F64F))))
_ANY_SPACE = ranges(*_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF))
_CLASSES = {"d": (_DIGIT, _ANY_DIGIT), "w": (_WORD, _ANY_WORD), "s": (_SPACE, _ANY_SPACE)}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_LINE_ENDS = of_text("\n\r\u2028\u2029")


class PatternError(ValueError):
    """No grammar can be made of a pattern; the message is fit for a user."""


def pattern_of(texts: Texts, pattern: str, *, forbidden: bool = False) -> Expression:
    """Return the texts in which a pattern is found, as `Texts.automaton` has it. Raises PatternError.

    `forbidden`: those of which it cannot be said that none is.
    """
    return texts.within(_Reader(texts, pattern, is_wide=forbidden).whole())


class _Reader:
    def __init__(self, texts: Texts, pattern: str, *, is_wide: bool) -> None:
        self._texts, self._pattern, self._at, self._is_wide, self._depth = texts, pattern, 0, is_wide, 0

    def whole(self) -> Expression:
        """Read all of it."""
        if any(0xD800 <= ord(c) <= 0xDFFF for c in self._pattern):
            raise PatternError(HALF)
        found = self._alternatives(self._texts.everything)
        if self._at < len(self._pattern):
            raise PatternError("'pattern' has a ) that closes nothing: put \\ before it.")
        return found

    def _peek(self, n: int = 1) -> str:
        return self._pattern[self._at : self._at + n]

    def _take(self, text: str) -> bool:
        if self._pattern.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    # An expression is read from behind: a lookahead is a bound on all that follows it. So each part is first read as
    # what it does with its rest.

    def _alternatives(self, rest: Expression) -> Expression:
        self._depth += 1
        if self._depth > MAX_NESTED:
            raise PatternError(f"'pattern' nests more than {MAX_NESTED} groups: make it simpler.")
        found = [self._sequence(rest)]
        while self._take("|"):
            found.append(self._sequence(rest))
        self._depth -= 1
        return self._texts.either(*found)

    def _sequence(self, rest: Expression) -> Expression:
        """Read parts up to a `|`, a `)` or the end, in front of `rest`."""
        parts: list[tuple[str, Expression]] = []
        while self._at < len(self._pattern) and self._peek() not in "|)":
            found = self._part()
            is_first = found[0] == "start" and all(kind == "ahead" for kind, _ in parts)
            parts.insert(0 if is_first else len(parts), found)  # what is looked at before the begin stands behind it
        made = rest
        for kind, part in reversed(parts):
            made = self._texts.all_of(part, made) if kind == "ahead" else self._texts.sequence(part, made)
        if any(kind == "start" for kind, _ in parts[1:]):
            raise PatternError("'pattern' has a ^ behind its begin, which no answer could hold to: leave it out.")
        return made

    def _part(self) -> tuple[str, Expression]:
        texts = self._texts
        if self._take("^"):
            return "start", texts.one_of(((START, START),))
        if self._take("$"):
            end = texts.one_of(((END, END),))
            if self._is_wide:
                end = texts.sequence(texts.repeated(texts.words(["\n"]), 0, 1), end)
            return "end", end
        for sign, is_wanted in (("(?=", True), ("(?!", False)):
            if self._take(sign):
                return "ahead", self._ahead(is_wanted=is_wanted)
        return "text", self._repeated(self._atom())

    def _ahead(self, *, is_wanted: bool) -> Expression:
        before, self._is_wide = self._is_wide, self._is_wide ^ (not is_wanted)
        found = self._alternatives(self._texts.everything)
        self._is_wide = before
        self._close()
        if self._peek() and self._peek() in "*+?{":
            raise PatternError("'pattern' repeats a lookahead, which says nothing: leave the repetition out.")
        return found if is_wanted else self._texts.complement(found)

    def _close(self) -> None:
        if not self._take(")"):
            raise PatternError("'pattern' has a ( that nothing closes: put \\ before it.")

    def _atom(self) -> Expression:
        texts = self._texts
        if self._take("("):
            if self._take("?"):
                self._group_sign()
            start = self._at
            found = self._alternatives(texts.empty)
            self._close()
            inner = self._pattern[start : self._at]
            if "(?=" in inner or "(?!" in inner:
                raise PatternError("'pattern' has a lookahead within a group, which no grammar can say.")
            return found
        if self._take("["):
            return texts.one_of(self._class())
        if self._take("."):
            return texts.one_of(other(of_text("\n") if self._is_wide else _LINE_ENDS))
        if self._peek() in ("*", "+", "?"):
            raise PatternError(f"'pattern' has a {self._peek()} with nothing before it: put \\ before it.")
        c = self._peek()
        self._at += 1
        return texts.one_of(self._escape() if c == "\\" else of_text(c))

    def _group_sign(self) -> None:
        if self._take(":"):
            return
        if self._peek() == "<" and self._peek(2) not in ("<=", "<!"):
            self._at = self._pattern.find(">", self._at) + 1
            if self._at:
                return
        raise _meaningless(f"(?{self._peek(2)}")

    def _repeated(self, found: Expression) -> Expression:
        least, most = 1, 1
        if self._take("*"):
            least, most_or_none = 0, None
        elif self._take("+"):
            least, most_or_none = 1, None
        elif self._take("?"):
            least, most_or_none = 0, 1
        elif self._peek() == "{" and (count := self._count()):
            least, most_or_none = count
        else:
            return found
        self._take("?")  # the shortest text, or the longest: all are texts
        if self._peek() in ("*", "+", "?"):
            raise PatternError(f"'pattern' repeats a repetition by {self._peek()}: put it into a group.")
        most = most_or_none if most_or_none is not None else least
        if max(least, most) > MAX_COUNT:
            msg = f"'pattern' repeats something {max(least, most)} times; at most {MAX_COUNT} is possible."
            raise PatternError(msg)
        if most < least:
            raise PatternError("'pattern' has a {m,n} whose m is above n.")
        return self._texts.repeated(found, least, most_or_none)

    def _count(self) -> tuple[int, int | None] | None:
        """Read `{m}`, `{m,}` or `{m,n}`; None where `{` is only a character."""
        end = self._pattern.find("}", self._at)
        least, comma, most = self._pattern[self._at + 1 : end].partition(",")
        if end < 0 or not _is_count(least) or (most and not _is_count(most)):
            return None
        self._at = end + 1
        return int(least), (int(most) if most else None if comma else int(least))

    # --- characters ----------------------------------------------------------------------

    def _escape(self, *, in_class: bool = False) -> Ranges:
        r"""Return what a \ and what follows stand for."""
        c = self._peek()
        self._at += 1
        if c and c.lower() in _CLASSES and c in "dDwWsS":
            narrow, wide = _CLASSES[c.lower()]
            if c.islower():
                return wide if self._is_wide else narrow
            return other(narrow if self._is_wide else wide)
        if c == "b" and in_class:
            return of_text("\b")
        if c in _CONTROLS and not (c == "0" and self._peek().isdigit()):
            return of_text(_CONTROLS[c])
        if c == "c" and self._peek().isascii() and self._peek().isalpha():
            self._at += 1
            return of_text(chr(ord(self._pattern[self._at - 1]) % 32))
        if c in ("x", "u"):
            return self._by_number(c)
        if not c or c.isalnum() or c == "_":
            raise _meaningless(f"\\{c}")
        return of_text(c)

    def _by_number(self, kind: str) -> Ranges:
        if kind == "u" and self._take("{"):
            end = self._pattern.find("}", self._at)
            digits, self._at = self._pattern[self._at : end], end + 1
        else:
            n = 2 if kind == "x" else 4
            digits = self._peek(n)
            self._at += n
            if len(digits) < n:
                digits = ""
        if not digits or not all(c in "0123456789abcdefABCDEF" for c in digits) or len(digits) > 6:
            raise _meaningless(f"\\{kind}")
        code = int.from_bytes(bytes.fromhex(digits.zfill(8)))
        if 0xD800 <= code <= 0xDBFF and self._peek(2) == "\\u":
            low = self._peek(6)[2:]
            if len(low) == 4 and low[:2].lower() in ("dc", "dd", "de", "df"):
                self._at += 6
                code = 0x10000 + ((code - 0xD800) << 10) + int.from_bytes(bytes.fromhex(low)) - 0xDC00
        if 0xD800 <= code <= 0xDFFF or code > LAST:
            raise PatternError(HALF)
        return ((code, code),)

    def _class(self) -> Ranges:
        """Read up to the `]`."""
        is_but = self._take("^")
        before, self._is_wide = self._is_wide, self._is_wide ^ is_but
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            if self._at >= len(self._pattern):
                raise PatternError("'pattern' has a [ that nothing closes: put \\ before it.")
            first = self._sign()
            if self._peek() == "-" and self._peek(2) not in ("-]", "-") and _is_single(first):
                self._at += 1
                last = self._sign()
                if not _is_single(last):
                    found += [*first, *of_text("-"), *last]
                    continue
                if last[0][0] < first[0][0]:
                    raise PatternError("'pattern' has a range in [ ] whose end is before its begin.")
                found.append((first[0][0], last[0][0]))
            else:
                found += first
        self._is_wide = before
        return other(ranges(*found)) if is_but else both(ranges(*found), EVERY)

    def _sign(self) -> Ranges:
        c = self._peek()
        self._at += 1
        return self._escape(in_class=True) if c == "\\" else of_text(c)


def _is_single(found: Ranges) -> bool:
    return len(found) == 1 and found[0][0] == found[0][1]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _meaningless(sign: str) -> PatternError:
    return PatternError(
        f"'pattern' has a {sign}, which no grammar can say: possible are plain characters, classes, groups, |, "
        "*, +, ?, {m,n}, lookaheads outside of groups and \\d, \\w, \\s."
    )

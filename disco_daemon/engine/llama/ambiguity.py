"""In how many ways at once a grammar may have to be read. Pure.

llama.cpp's grammar sampler keeps a stack for each reading of what was drawn so far, and tries every token of the
vocabulary against every stack. Ten alternatives that all begin with `[` and hold themselves make ten stacks of each
one at every `[`, in C code that nothing interrupts. So a grammar is walked here first, over the text that leaves most
readings open, from each place where two of them may begin.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

MAX_READINGS = 2000  # at once; twice what an enum of schema.MAX_CHOICES needs; llama.cpp takes 0.2 s a token for them
MAX_NESTED = 4  # levels of [ or of { that a walk goes down: four alternatives like that are let through, five not
MAX_WALK = 300  # characters of a walk: five levels of objects with some properties each
MAX_WORK = 60_000  # stacks looked at, in all walks of one grammar; 0.1 s
MAX_ANEW = 300_000  # the same of another machine's, whose levels are walked one by one; 0.5 s
MAX_KNOWN = 16  # grammars whose walks need not be taken again; 4 MiB at most
WIDE = 4  # readings that may begin alike in a grammar whose walks were not finished

MAX_WRITTEN_OUT = 10  # repetitions that are walked one by one: those that large counts are made of

_BOUNDS = re.compile(r"\{(\d{1,3})(?:,(\d{1,3}))?\}")
_NOTE = re.compile(r" # readings: (\d+)\Z")  # no text of a client's ends so: it would be in quotes or brackets
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|#[^\n]*', re.DOTALL)  # or a text, which stays
_SIGN = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[A-Za-z0-9-]+\s*::=|[A-Za-z0-9-]+|\{[^}]*\}|[()|*+?.]', re.DOTALL
)
_CHARACTER = re.compile(r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\.|.", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_GOES_ON = '[{":,'  # what leads on to the next value of a JSON text, most of all first
_USUAL = "ax1 -"  # of what a class like [^"] allows
_END = 0  # the stack of a text that is whole

Class = tuple[bool, tuple[tuple[str, str], ...]]  # whether all but these, and ranges of characters
Item = Class | str  # or the name of a rule


class _Enough(Exception):
    """The walks have looked at enough stacks, and end here."""


@lru_cache(MAX_KNOWN)  # clients send the same schema again and again
def readings(grammar: str) -> int:
    """Count the readings of an answer that llama.cpp may have to track where a list or object begins.

    Beyond MAX_READINGS it may be any number. Takes 0.1 s or so at most.
    """
    note = _NOTE.search(grammar)
    return int(note[1]) if note else _count(grammar, MAX_WORK)


@lru_cache(MAX_KNOWN)
def counted_anew(grammar: str) -> tuple[str, int]:
    """Count the readings of a grammar that another machine has sent, whatever its note says.

    Returns it without comments, which could hide a rule here and not from llama.cpp, and with a note of our own; and
    the readings. Takes 1 s or so at most.
    """
    bare = _COMMENT.sub(lambda found: found[1] or "", grammar)
    n = _count(bare, MAX_ANEW)
    return noted(bare, n), n


def _count(grammar: str, most_work: int) -> int:
    walks = _Walks(*_parse(grammar), most_work)
    width = 0
    try:
        for width, name, start in sorted(walks.starts(), reverse=True):  # noqa: B007 — asked for below
            if name not in walks.covered and walks.walk(start):
                return MAX_READINGS + 1
    except _Enough:
        if width > WIDE or not width:
            return MAX_READINGS + 1
    return walks.most


def noted(grammar: str, n: int) -> str:
    """Return a grammar with a note, which llama.cpp skips, that it has at most `n` readings."""
    return f"{grammar.rstrip()} # readings: {n}"


# --- walking -----------------------------------------------------------------------------------------------------


class _Walks:
    """All stacks that were seen, as numbers. A stack is a place in an alternative, and what comes after its end."""

    def __init__(self, rules: dict[str, list[int]], alternatives: list[tuple[Item, ...]], most_work: int) -> None:
        self._rules, self._alternatives, self._most_work = rules, alternatives, most_work
        self._stacks: list[tuple[int, int, int]] = [(-1, 0, _END)]
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._n_seen = 0
        self._first: dict[str, str] = {}  # where a walk of a rule would go first
        self._entered: set[str] = set()  # rules, since the last character
        self.covered: set[str] = set()  # rules that a walk has gone through as their own walk would begin
        self.most = 0  # readings that were open in front of a [ or {
        self._found: dict[tuple[Class, str], bool] = {}

    def starts(self) -> Iterable[tuple[int, str, int]]:
        """Yield rules in which several readings begin alike: how many, its name, and a stack with only that rule."""
        begun = set[tuple[tuple[int, int], ...]]()
        for name, numbers in list(self._rules.items()):
            bodies = [self._alternatives[number] for number in numbers]
            if not any(isinstance(item, str) for body in bodies for item in body):
                continue  # only words, as of an enum: they end, and do not multiply
            start = self._stack(self._alternative((name,)), 0, _END)
            stacks = self._open([start])
            choices = self._choices(stacks)
            if not choices or max(choices.values()) == 1:
                continue
            self._first[name] = first = _worst(choices)
            matching = (stack for stack in stacks if self._matches(self._next(stack), first))
            places = tuple(sorted(self._stacks[stack][:2] for stack in matching))
            if places not in begun:  # else it is another name for the same alternatives
                begun.add(places)
                yield max(choices.values()), name, start

    def walk(self, start: int) -> bool:
        """Whether a text from here on leaves too many readings open."""
        self._entered.clear()
        stacks, nested = self._open([start]), Counter[str]()
        for _ in range(MAX_WALK):
            choices = self._choices(stacks)
            if not choices:
                return False
            character = _worst(choices)
            self.covered.update(name for name in self._entered if self._first.get(name) == character)
            self._entered.clear()
            if choices[character] > MAX_READINGS:
                return True
            nested[character] += 1
            if character in "[{":
                self.most = max(self.most, choices[character])
            if max(nested["["], nested["{"]) > MAX_NESTED:
                return False
            matching = [stack for stack in stacks if self._matches(self._next(stack), character)]
            stacks = self._open(self._after(stack) for stack in matching)
        return False

    def _open(self, stacks: Iterable[int]) -> set[int]:
        """Advance stacks until a character is next, as llama.cpp's `llama_grammar_advance_stack`."""
        todo, found = list(stacks), set[int]()
        seen = set(todo)
        while todo:
            self._n_seen += 1
            if self._n_seen > self._most_work:
                raise _Enough
            stack = todo.pop()
            if stack == _END:
                continue
            item = self._next(stack)
            if not isinstance(item, str):
                found.add(stack)
                continue
            self._entered.add(item)
            after = self._after(stack)
            for number in self._rules.get(item, ()):
                reached = self._stack(number, 0, after)
                if reached not in seen:
                    seen.add(reached)
                    todo.append(reached)
        return found

    def _alternative(self, body: tuple[Item, ...]) -> int:
        self._alternatives.append(body)
        return len(self._alternatives) - 1

    def _stack(self, number: int, place: int, rest: int) -> int:
        """Return the stack that goes on there; at an alternative's end it goes on with the rest."""
        if place == len(self._alternatives[number]):
            return rest
        key = (number, place, rest)
        if key not in self._numbers:
            self._numbers[key] = len(self._stacks)
            self._stacks.append(key)
        return self._numbers[key]

    def _next(self, stack: int) -> Item:
        number, place, _ = self._stacks[stack]
        return self._alternatives[number][place]

    def _after(self, stack: int) -> int:
        number, place, rest = self._stacks[stack]
        return self._stack(number, place + 1, rest)

    def _choices(self, stacks: Iterable[int]) -> dict[str, int]:
        """Return the characters that may come next, each with the number of stacks that it leaves."""
        classes = Counter(self._next(stack) for stack in stacks)
        likely = {character for found in classes for character in _some(found)}
        return {c: sum(n for found, n in classes.items() if self._matches(found, c)) for c in likely}

    def _matches(self, found: Item, character: str) -> bool:
        assert not isinstance(found, str)
        key = (found, character)
        if key not in self._found:
            but, ranges = found
            self._found[key] = but != any(first <= character <= last for first, last in ranges)
        return self._found[key]


def _worst(choices: dict[str, int]) -> str:
    """Return the character that leads on soonest, of those that leave most readings open; loops lead nowhere."""
    enough = max(choices.values()) / 2
    rank = {character: len(_GOES_ON) - i for i, character in enumerate(_GOES_ON)}
    closing = {"]": -1, "}": -1, "\\": -2, " ": -2}
    return max(
        (c for c, n in choices.items() if n >= enough), key=lambda c: (rank.get(c, closing.get(c, 0)), choices[c], c)
    )


def _some(found: Item) -> list[str]:
    """Return a few characters of a class."""
    assert not isinstance(found, str)
    but, ranges = found
    if not but:
        return [first for first, _ in ranges[:8]]
    return [c for c in _USUAL if not any(first <= c <= last for first, last in ranges)][:2]


# --- reading GBNF ------------------------------------------------------------------------------------------------


class _Rules:
    """The rules read so far; a group or a repetition is a rule of its own, with a name that no other can have."""

    def __init__(self) -> None:
        self.named: dict[str, list[int]] = {}
        self.bodies: list[tuple[Item, ...]] = []

    def add(self, name: str, bodies: Iterable[tuple[Item, ...]]) -> None:
        """Add alternatives to a rule."""
        numbers = self.named.setdefault(name, [])
        for body in bodies:
            numbers.append(len(self.bodies))
            self.bodies.append(body)

    def anonymous(self, bodies: Iterable[tuple[Item, ...]]) -> str:
        """Add a rule without a name of its own."""
        name = f"#{len(self.named)}"
        self.add(name, bodies)
        return name

    def repeat(self, what: tuple[Item, ...], sign: str) -> tuple[Item, ...]:
        """Add a repetition as llama.cpp writes it: `?` is once or nothing, `*` is once and again, or nothing."""
        if sign == "?":
            return (self.anonymous([what, ()]),)
        if (bounds := _BOUNDS.fullmatch(sign)) and int(most := bounds[2] or bounds[1]) <= MAX_WRITTEN_OUT:
            more: tuple[Item, ...] = ()
            for _ in range(int(most) - int(bounds[1])):
                more = (self.anonymous([(*what, *more), ()]),)
            return (*what * int(bounds[1]), *more)
        name = self.anonymous([()])  # also what may be there more often: it is walked as if it had no end
        self.add(name, [(*what, name)])
        return (*what, name) if sign == "+" else (name,)


def _parse(grammar: str, into: _Rules | None = None) -> tuple[dict[str, list[int]], list[tuple[Item, ...]]]:
    """Parse a grammar into rules and alternatives; if it is none, llama.cpp will refuse it."""
    rules = into or _Rules()
    name = ""
    groups: list[list[list[tuple[Item, ...]]]] = [[[]]]  # for each open bracket its alternatives, of pieces
    for sign in _SIGN.findall(grammar):
        pieces = groups[-1][-1]
        if sign.endswith("::="):
            rules.add(name, map(_join, groups[0]))
            name, groups = sign[:-3].strip(), [[[]]]
        elif sign == "(":
            groups.append([[]])
        elif sign == ")" and len(groups) > 1:
            inner = groups.pop()
            groups[-1][-1].append((rules.anonymous(map(_join, inner)),))
        elif sign == "|":
            groups[-1].append([])
        elif sign[0] in "*+?{" and pieces:
            pieces[-1] = rules.repeat(pieces[-1], sign)
        elif sign[0] in '"[.':
            pieces.append(_terminals(sign))
        elif sign[0] not in ")*+?{":
            pieces.append((sign,))
    rules.add(name, map(_join, groups[0]))
    return rules.named, rules.bodies


def _join(pieces: Iterable[tuple[Item, ...]]) -> tuple[Item, ...]:
    return tuple(item for piece in pieces for item in piece)


def _terminals(sign: str) -> tuple[Item, ...]:
    """Return the characters of a literal, one after the other, or a class of characters."""
    if sign == ".":
        return ((True, ()),)
    but = sign.startswith("[^")
    inner = [_character(found) for found in _CHARACTER.findall(sign[2 if but else 1 : -1])]
    if sign[0] == '"':
        return tuple((False, ((c, c),)) for c, _ in inner)
    ranges = []
    while inner:
        first, _ = inner.pop(0)
        last = first
        if len(inner) > 1 and inner[0] == ("-", False):
            last = inner[1][0]
            del inner[:2]
        ranges.append((first, last))
    return ((but, tuple(ranges)),)


def _character(found: str) -> tuple[str, bool]:
    """Return the character that stands here, and whether it was escaped."""
    if len(found) == 1:
        return found, False
    if len(found) == 2:
        return _ESCAPED.get(found[1], found[1]), True
    number = int(found[2:], 16)  # noqa: FURB166 — \x41 is no number for Python
    return chr(number) if number <= 0x10FFFF else "\U0010ffff", True

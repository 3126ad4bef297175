"""Grammars whose rules hold themselves, written out to a depth, so that every answer ends. Pure.

A small model that may open one more object does so until its limit cuts the answer, which is then no JSON. So each
circle of rules is written once for every level of objects in it; at the last level what would open another one is left
out: a property that may be missing, the items of a list, an alternative. What such a grammar allows, the one it is made
of allows as well.

A level is told by the text alone, for it is the number of `{` that are open in the circle. So a grammar that is written
out has never more readings at once than the one it is made of (`ambiguity`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter

LEVELS = 24  # objects within each other by one recursive schema; lists and trees of people have fewer
LEAST_LEVELS = 6  # where a schema is too large for more; with fewer, an answer would rather be cut than made to end
MAX_WRITTEN = 128 * 1024  # characters of the rules that are written out; llama.cpp reads them in a few ms
MAX_KNOWN = 8  # grammars that need not be written out again; 10 MiB at most, and most have a hundredth of that

_RULE = re.compile(r"^([A-Za-z0-9-]+) ::= (.*)$", re.MULTILINE)
_WORDS = r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\{[^}]*\}'  # what is no name, whatever stands in it
_SIGN = re.compile(rf"{_WORDS}|[A-Za-z0-9-]+|[()|*+?.]")
_NAME = re.compile(rf"{_WORDS}|([A-Za-z0-9-]+)")
_MAY_MISS = re.compile(r"[*?]|\{\s*0+\s*[,}]")
# What opens and closes a level: objects; lists as well in a circle that has a way round without an object.
_OPENING = ({'"{"': 1, '"}"': -1}, {'"{"': 1, '"}"': -1, '"["': 1, '"]"': -1})

# A name or another sign, and the brackets that are open in front of it: what stands there, None if nothing can.
Renamed = Callable[[str, int], str | None]


@lru_cache(MAX_KNOWN)  # clients send the same schema again and again
def bounded(grammar: str, levels: int = LEVELS) -> str:
    """Return a grammar that allows the answers of this one, but for those with more than `levels` in a circle of rules.

    It has one rule a line. There are fewer levels where that is too large. A circle without brackets, one that cannot
    end, and all where even the least is too large, stay as they are.
    """
    rules: dict[str, str] = dict(_RULE.findall(grammar))
    if len(rules) <= grammar.strip().count("\n"):
        return grammar  # of which this would lose something
    refers = {
        name: [word for word in dict.fromkeys(_NAME.findall(body)) if word in rules] for name, body in rules.items()
    }
    circles = [circle for names in _components(refers) if (circle := _circle(names, rules, refers))]
    of = {name: circle for circle in circles for name in circle.bodies}
    for name, words in {"": ["root"], **refers}.items():
        for word in words:
            if word in of and of.get(name) is not of[word]:
                of[word].entered.add(word)
    run = max((len(hyphens) for name in rules for hyphens in re.findall("-+", name)), default=0)
    mark = "-" * (run + 1)  # no rule has a name with it
    circles.sort(key=lambda circle: circle.size(mark))
    size = sum(circle.size(mark) for circle in circles)
    while size > MAX_WRITTEN // (LEAST_LEVELS + 1):
        size -= circles.pop().size(mark)
    copies: dict[str, str] = {}
    for circle in circles:
        if written := circle.written(min(levels, MAX_WRITTEN // size - 1), mark):
            copies |= written
            for name in circle.bodies:
                del rules[name]
    if not copies:
        return grammar
    return "\n".join(f"{name} ::= {body}" for name, body in (rules | copies).items())


@dataclass(slots=True)
class _Part:
    """A sign of a rule's body, or a group of alternatives, with how often it may stand there."""

    sign: str | list[list[_Part]]
    n_open: int  # brackets that are open in front of it
    times: str = ""

    def text(self, renamed: Renamed) -> str | None:
        """Return its text with other names; nothing if it can be left out, and None if it cannot end."""
        if not isinstance(self.sign, str):
            inner = _text(self.sign, renamed)
            found = f"({inner})" if inner else inner
        else:
            found = renamed(self.sign, self.n_open)
        if found:
            return found + self.times
        return "" if _MAY_MISS.match(self.times) else found


@dataclass(slots=True)
class _Circle:
    """Rules that hold one another, those they need before them."""

    bodies: dict[str, list[list[_Part]]]
    opening: Mapping[str, int]
    n_characters: int
    n_names: int
    entered: set[str] = field(default_factory=set)  # rules that others refer to

    def size(self, mark: str) -> int:
        """Return how many characters a level has."""
        return self.n_characters + self.n_names * (len(mark) + 2)

    def written(self, levels: int, mark: str) -> dict[str, str]:
        """Return the rules for so many levels; outside them they keep their names. None if it cannot end so."""
        made: dict[str, str] = {}

        def name_at(name: str, level: int) -> str:
            return f"{name}{mark}{level}" if level else name

        for level in reversed(range(levels + 1)):  # the last one is within the last bracket

            def renamed(sign: str, n_open: int, level: int = level) -> str | None:
                if sign not in self.bodies:
                    return None if level + n_open + self.opening.get(sign, 0) > levels else sign
                copy = name_at(sign, level + n_open)
                return copy if copy in made else None

            for name, body in self.bodies.items():
                if (text := _text(body, renamed)) is not None:
                    made[name_at(name, level)] = text or '""'
        return _reached(self.entered, made) if self.entered <= made.keys() else {}


def _circle(names: frozenset[str], rules: Mapping[str, str], refers: Mapping[str, Sequence[str]]) -> _Circle | None:
    """Make a circle of rules, if they are one, and if each way round opens a bracket."""
    n_characters = sum(len(name) + len(rules[name]) for name in names)
    if n_characters > MAX_WRITTEN // (LEAST_LEVELS + 1) or not any(
        word in names for name in names for word in refers[name]
    ):
        return None
    for opening in _OPENING:
        bodies = {name: _parse(rules[name], opening) for name in sorted(names)}
        needed = {name: [word for word, n in _named(body) if n == 0 and word in names] for name, body in bodies.items()}
        try:
            order = list(TopologicalSorter(needed).static_order())
        except CycleError:
            continue
        return _Circle(
            {name: bodies[name] for name in order},
            opening,
            n_characters,
            len(names) + sum(word in names for body in bodies.values() for word, _ in _named(body)),
        )
    return None


def _text(alternatives: Iterable[Iterable[_Part]], renamed: Renamed) -> str | None:
    """Return the text of the alternatives that can end, None if there is none."""
    kept = dict[str, None]()
    for parts in alternatives:
        texts = [part.text(renamed) for part in parts]
        if None not in texts:
            kept[" ".join(filter(None, texts))] = None
    if not kept:
        return None
    return " | ".join(text or '""' for text in kept) if len(kept) > 1 else next(iter(kept))


def _is_name(sign: str) -> bool:
    return sign[0] not in '"[.'


def _named(alternatives: Iterable[Iterable[_Part]]) -> Iterator[tuple[str, int]]:
    """Yield the names in a body, each with how many brackets are open in front of it."""
    for part in itertools.chain.from_iterable(alternatives):
        if not isinstance(part.sign, str):
            yield from _named(part.sign)
        elif _is_name(part.sign):
            yield part.sign, part.n_open


def _parse(body: str, opening: Mapping[str, int]) -> list[list[_Part]]:
    """Parse the body of a rule; if it is none, llama.cpp will refuse it."""
    groups: list[tuple[list[list[_Part]], int]] = [([[]], 0)]  # with the brackets that are open in front of each
    n_open = 0
    for sign in _SIGN.findall(body):
        alternatives, n_before = groups[-1]
        parts = alternatives[-1]
        if sign == "(":
            inner: list[list[_Part]] = [[]]
            parts.append(_Part(inner, n_open))
            groups.append((inner, n_open))
        elif sign == ")" and len(groups) > 1:
            groups.pop()
            n_open = n_before
        elif sign == "|":
            alternatives.append([])
            n_open = n_before
        elif sign[0] in "*+?{" and parts:
            parts[-1].times += sign
        elif sign[0] not in ")*+?{":
            parts.append(_Part(sign, n_open))
            n_open = max(0, n_open + opening.get(sign, 0))
    return groups[0][0]


def _reached(entered: Iterable[str], rules: dict[str, str]) -> dict[str, str]:
    """Return the rules that are needed where these ones are entered."""
    todo, reached = list(entered), set(entered)
    while todo:
        more = {name for name in _NAME.findall(rules[todo.pop()]) if name in rules} - reached
        reached |= more
        todo += more
    return {name: body for name, body in rules.items() if name in reached}


def _components(refers: Mapping[str, Sequence[str]]) -> Iterator[frozenset[str]]:
    """Yield sets of rules that all lead to one another.

    Source: Sharir (1981), "A strong-connectivity algorithm and its applications in data flow analysis".
    """
    back: dict[str, list[str]] = {name: [] for name in refers}
    for name, words in refers.items():
        for word in words:
            back[word].append(name)
    seen, taken = set[str](), set[str]()
    last = [name for start in refers for name in _left(start, refers, seen)]
    for name in reversed(last):
        if found := frozenset(_left(name, back, taken)):
            yield found


def _left(start: str, refers: Mapping[str, Sequence[str]], seen: set[str]) -> Iterator[str]:
    """Yield what a walk from a rule finds, each when all behind it was found; `seen` is not walked again."""
    if start in seen:
        return
    seen.add(start)
    way = [(start, iter(refers[start]))]
    while way:
        name, words = way[-1]
        for word in words:
            if word not in seen:
                seen.add(word)
                way.append((word, iter(refers[word])))
                break
        else:
            way.pop()
            yield name

"""A finite automaton over sets of characters, and its rules in a grammar. Pure.

A grammar made of one has never more than one reading of a text: each character leads to one state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .characters import Ranges, ranges

_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"')
MAX_STATES = 4000  # of one automaton: 2,000 repetitions of something, or a pattern with a length; some 100 KB of rules
MAX_ROUNDS = 24  # in which states that are alike are looked for: numbers take one a digit, and of a chain none are


State = TypeVar("State", bound=Hashable)


class TooManyStates(ValueError):
    """An automaton would have more states than a grammar can hold."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """States by number, 0 the first: where each set of characters leads, and where a text may end."""

    steps: Sequence[Mapping[int, Ranges]]
    ends: frozenset[int]

    @property
    def is_empty(self) -> bool:
        """Whether there is no text at all."""
        return not self.ends

    def accepts(self, text: str) -> bool:
        """Whether a text is one of them."""
        state = 0
        for code in map(ord, text):
            for target, found in self.steps[state].items():
                if any(first <= code <= last for first, last in found):
                    state = target
                    break
            else:
                return False
        return state in self.ends

    def rules(self, name: str, write: Callable[[Ranges], str], begin: str, end: str) -> dict[str, str]:
        """Return its rules, the first of this name; `write` writes a character between `begin` and `end`."""
        entered = [0] * len(self.steps)
        for step in self.steps:
            for target in step:
                entered[target] += 1
        is_own = [
            not i or bool(step and (n > 1 or len(step) + (i in self.ends) > 1))
            for i, (n, step) in enumerate(zip(entered, self.steps, strict=True))
        ]
        names = {i: f"{name}-{i}" if i else name for i, own in enumerate(is_own) if own}
        made = {}
        if entered[0] and begin:  # which stands before the first state only
            made[name] = f"{begin} {name}-0"
            names[0] = f"{name}-0"
        for i in names:
            first = begin if names[i] == name else ""
            bodies = [
                self._sequence(first, found, target, names, write, end) for target, found in self.steps[i].items()
            ]
            if i in self.ends:
                bodies.append(" ".join(joined([first, *split(end)])))
            made[names[i]] = " | ".join(bodies)
        return made

    def _sequence(
        self, first: str, found: Ranges, target: int, names: Mapping[int, str], write: Callable[[Ranges], str], end: str
    ) -> str:
        """Write what follows in one way only, up to a state with a rule of its own."""
        parts = [first, write(found)]
        while target not in names and self.steps[target]:
            ((target, found),) = self.steps[target].items()
            parts.append(write(found))
        parts += [names[target]] if target in names else split(end)
        return " ".join(joined(parts))


def split(text: str) -> list[str]:
    """Return a literal, and what stands behind it."""
    if found := _LITERAL.match(text):
        return [found[0], *([text[found.end() :].strip()] if found.end() < len(text) else [])]
    return [text]


def joined(parts: Sequence[str]) -> list[str]:
    """Write literals that follow each other as one."""
    made: list[str] = []
    for part in filter(None, parts):
        if made and _LITERAL.fullmatch(part) and _LITERAL.fullmatch(made[-1]):
            made[-1] = made[-1][:-1] + part[1:]
        else:
            made.append(part)
    return [part for part in made if part != '""'] or made


def explored(
    first: State, steps: Callable[[State], Sequence[tuple[Ranges, State]]], ends: Callable[[State], bool]
) -> Automaton:
    """Make an automaton of what can be reached from a state. Raises TooManyStates."""
    numbers, found = {first: 0}, [first]
    made: list[dict[int, list[tuple[int, int]]]] = []
    for state in found:
        made.append({})
        for characters, target in steps(state):
            if target not in numbers:
                numbers[target] = len(found)
                found.append(target)
                if len(found) > MAX_STATES:
                    raise TooManyStates
            made[-1].setdefault(numbers[target], []).extend(characters)
    merged = [{target: ranges(*spans) for target, spans in step.items()} for step in made]
    return _least(_living(merged, {i for i, state in enumerate(found) if ends(state)}))


def _living(steps: Sequence[Mapping[int, Ranges]], ends: set[int]) -> Automaton:
    """Return an automaton without states that lead to no end."""
    back: list[list[int]] = [[] for _ in steps]
    for i, step in enumerate(steps):
        for target in step:
            back[target].append(i)
    alive, todo = set(ends), list(ends)
    while todo:
        more = set(back[todo.pop()]) - alive
        alive |= more
        todo += more
    if 0 not in alive:
        return Automaton(({},), frozenset())
    numbers = {i: n for n, i in enumerate(sorted(alive))}
    kept = [{numbers[t]: found for t, found in steps[i].items() if t in numbers} for i in numbers]
    return Automaton(tuple(kept), frozenset(numbers[i] for i in ends))


def _least(automaton: Automaton) -> Automaton:
    """Return the same with states that are alike as one.

    Source: Moore (1956), "Gedanken-experiments on sequential machines".
    """
    n = len(automaton.steps)
    kind = [int(i in automaton.ends) for i in range(n)]
    for _ in range(MAX_ROUNDS):
        seen: dict[Hashable, int] = {}
        found = []
        for i, step in enumerate(automaton.steps):
            ways: dict[int, list[tuple[int, int]]] = {}
            for target, spans in step.items():
                ways.setdefault(kind[target], []).extend(spans)
            key = (kind[i], frozenset((target, ranges(*spans)) for target, spans in ways.items()))
            found.append(seen.setdefault(key, len(seen)))
        if len(seen) == len(set(kind)):
            break
        kind = found
    else:
        return automaton
    kind = found
    steps: list[dict[int, Ranges]] = [{} for _ in seen]
    for i, step in enumerate(automaton.steps):
        ways = {}
        for target, spans in step.items():
            ways.setdefault(kind[target], []).extend(spans)
        steps[kind[i]] = {target: ranges(*spans) for target, spans in ways.items()}
    return Automaton(tuple(steps), frozenset(kind[i] for i in automaton.ends))

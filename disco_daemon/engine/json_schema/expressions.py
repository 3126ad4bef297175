"""Sets of texts by regular expressions, with `and` and `not`, as automata. Pure.

Source: Brzozowski (1964), "Derivatives of regular expressions": what may still follow a character is an expression
again. So intersection and complement cost no more than alternatives do, and lengths, several patterns, lookaheads and
forbidden words are one automaton.
"""

from __future__ import annotations

from collections.abc import Iterable

from .automaton import Automaton, TooManyStates, explored
from .characters import EVERY, LAST, Ranges

START, END = LAST + 1, LAST + 2  # what stands before and behind a text: `^` and `$` are these
MAX_WORK = 60_000  # expressions looked at for one automaton; 0.3 s at most, and a usual one takes some hundred


class Expression:
    """An expression; the same one is always the same object, by the Texts that it belongs to."""

    __slots__ = ("has_empty", "kind", "of", "parts")

    def __init__(self, kind: str, parts: tuple[Expression, ...], of: tuple[object, ...], *, has_empty: bool) -> None:
        self.kind, self.parts, self.of, self.has_empty = kind, parts, of, has_empty


class Texts:
    """Makes expressions, and an automaton of one."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Expression] = {}
        self._derived: dict[tuple[int, int], Expression] = {}
        self._n_looked_at = 0
        self.none = self._made("set", (), ((),), has_empty=False)
        self.empty = self._made("empty", (), (), has_empty=True)
        self.everything = self._made("not", (self.none,), (), has_empty=True)
        self.character = self.one_of(EVERY)

    # --- expressions, as simple as they can be made cheaply -----------------------------------------------------------

    def one_of(self, characters: Ranges) -> Expression:
        """Return one character of a set."""
        return self._made("set", (), (characters,), has_empty=False)

    def words(self, words: Iterable[str]) -> Expression:
        """Return one of these texts."""
        listed = frozenset(words)
        if not listed:
            return self.none
        return self.empty if listed == {""} else self._made("words", (), (listed,), has_empty="" in listed)

    def sequence(self, *parts: Expression) -> Expression:
        """Return one after the other."""
        made = parts[-1] if parts else self.empty
        for part in reversed(parts[:-1]):
            made = self._pair(part, made)
        return made

    def _pair(self, one: Expression, other: Expression) -> Expression:
        if self.none in (one, other):
            return self.none
        if one is self.empty:
            return other
        if other is self.empty:
            return one
        if one.kind == "pair":
            return self._pair(one.parts[0], self._pair(one.parts[1], other))
        if one is self.everything and (other is one or (other.kind == "pair" and other.parts[0] is one)):
            return other
        return self._made("pair", (one, other), (), has_empty=one.has_empty and other.has_empty)

    def either(self, *parts: Expression) -> Expression:
        """Return one of these."""
        return self._several("or", parts, self.none, self.everything)

    def all_of(self, *parts: Expression) -> Expression:
        """Return what is each of these."""
        return self._several("and", parts, self.everything, self.none)

    def _several(self, kind: str, parts: Iterable[Expression], nothing: Expression, settled: Expression) -> Expression:
        listed: dict[int, Expression] = {}
        todo = list(reversed(list(parts)))
        while todo:
            part = todo.pop()
            if part.kind == kind:
                todo += reversed(part.parts)
            elif part is settled:
                return settled
            elif part is not nothing:
                listed[id(part)] = part
        ordered = tuple(listed[i] for i in sorted(listed))
        if len(ordered) < 2:
            return ordered[0] if ordered else nothing
        has_empty = (any if kind == "or" else all)(part.has_empty for part in ordered)
        return self._made(kind, ordered, (), has_empty=has_empty)

    def complement(self, part: Expression) -> Expression:
        """Return all texts but these."""
        if part.kind == "not":
            return part.parts[0]
        return self._made("not", (part,), (), has_empty=not part.has_empty)

    def repeated(self, part: Expression, least: int, most: int | None) -> Expression:
        """Return one after the other, so often."""
        if most == 0 or part is self.empty:
            return self.empty
        if part is self.none:
            return self.none if least else self.empty
        if part.has_empty:
            least = 0
        if least == most == 1:
            return part
        if part.kind == "repeated" and part.of == (0, None):
            return part
        return self._made("repeated", (part,), (least, most), has_empty=least == 0)

    def _made(self, kind: str, parts: tuple[Expression, ...], of: tuple[object, ...], *, has_empty: bool) -> Expression:
        key = (kind, *map(id, parts), of)
        if key not in self._known:
            self._known[key] = Expression(kind, parts, of, has_empty=has_empty)
        return self._known[key]

    def _work(self) -> None:
        self._n_looked_at += 1
        if self._n_looked_at > MAX_WORK:
            raise TooManyStates

    # --- derivatives ----------------------------------------------------------------------

    def after(self, found: Expression, code: int) -> Expression:
        """Return what may follow this character."""
        key = (id(found), code)
        if key not in self._derived:
            self._work()
            self._derived[key] = self._after(found, code)
        return self._derived[key]

    def _after(self, found: Expression, code: int) -> Expression:
        match found.kind:
            case "set":
                (characters,) = found.of
                is_in = any(first <= code <= last for first, last in characters)  # type: ignore[attr-defined]
                return self.empty if is_in else self.none
            case "words":
                (words,) = found.of
                c = chr(code) if code <= LAST else ""
                return self.words(word[1:] for word in words if c and word[:1] == c)  # type: ignore[attr-defined]
            case "pair":
                one, other = found.parts
                made = self._pair(self.after(one, code), other)
                return self.either(made, self.after(other, code)) if one.has_empty else made
            case "repeated":
                (part,) = found.parts
                least, most = found.of
                assert isinstance(least, int)
                assert most is None or isinstance(most, int)
                rest = self.repeated(part, max(0, least - 1), None if most is None else most - 1)
                return self._pair(self.after(part, code), rest)
            case "or":
                return self.either(*(self.after(part, code) for part in found.parts))
            case "and":
                return self.all_of(*(self.after(part, code) for part in found.parts))
            case "not":
                return self.complement(self.after(found.parts[0], code))
        return self.none

    def _firsts(self, found: Expression, sets: set[Ranges]) -> None:
        """Collect the sets by which the next character matters."""
        self._work()
        if found.kind == "set":
            sets.add(found.of[0])  # type: ignore[arg-type]
        elif found.kind == "words":
            sets.update(((ord(word[0]), ord(word[0])),) for word in found.of[0] if word)  # type: ignore[attr-defined]
        elif found.kind == "pair":
            self._firsts(found.parts[0], sets)
            if found.parts[0].has_empty:
                self._firsts(found.parts[1], sets)
        else:
            for part in found.parts:
                self._firsts(part, sets)

    def _steps(self, found: Expression) -> list[tuple[Ranges, Expression]]:
        """Return what may follow each set of characters that are alike here."""
        sets: set[Ranges] = set()
        self._firsts(found, sets)
        cuts = sorted({0, *(a for spans in (*sets, EVERY) for a, _ in spans), *(b + 1 for s in sets for _, b in s)})
        spans = [(first, after - 1) for first, after in zip(cuts, [*cuts[1:], END + 1], strict=True)]
        alike: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
        listed = list(sets)
        for first, last in spans:
            if first > LAST or 0xD800 <= first <= 0xDFFF:
                continue
            key = tuple(any(a <= first <= b for a, b in known) for known in listed)
            alike.setdefault(key, []).append((first, min(last, 0xD7FF if first < 0xD800 else LAST)))
        made = []
        for group in alike.values():
            rest = self.after(found, group[0][0])
            if rest is not self.none:
                made.append((tuple(group), rest))
        return made

    def automaton(self, found: Expression) -> Automaton:
        """Return the texts that an expression, followed by END, allows. Raises TooManyStates."""
        return explored(found, self._steps, lambda rest: self.after(rest, END).has_empty)

    def ended(self, found: Expression) -> Expression:
        """Return an expression of whole texts as `automaton` has it: with END behind it."""
        return self.sequence(found, self.one_of(((END, END),)))

    def within(self, found: Expression) -> Expression:
        """Return texts of which an expression is some end, as `automaton` has it; `^` is START, and `$` is END."""
        return self.after(self.sequence(self.everything, found), START)

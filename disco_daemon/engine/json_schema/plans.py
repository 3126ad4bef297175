"""In which order an object's members and an array's items are written, and which can be at all. Pure.

An object has its named members in their order, and all others behind them. Where no schema says anything of members
without a name, there are none, unless a reading is whole or an object could not be without: a small model would never
stop adding some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from .shapes import Arrays, Contained, Kind, Objects, Parts, SchemaPart, Strings, ValueShape, narrowed

MAX_PATTERNS = 4  # whose combinations are told apart; of more, a name has exactly one
MAX_PLACES = 1000  # items that are told apart by their place or by what the array has to contain


class SchemaReader(Protocol):
    """Whoever knows what schemas allow."""

    is_whole: bool

    def shapes(self, parts: Parts) -> tuple[ValueShape, ...]: ...  # noqa: D102 — as SchemaReading's
    def allows(self, parts: Parts, value: object) -> bool: ...  # noqa: D102
    def is_possible(self, parts: Parts) -> bool: ...  # noqa: D102
    def is_some(self, kind: Kind) -> bool: ...  # noqa: D102
    def item(self, kind: Arrays, i: int) -> Parts: ...  # noqa: D102
    def member(self, kind: Objects, name: str) -> Parts: ...  # noqa: D102
    @staticmethod
    def plain(parts: Iterable[SchemaPart]) -> Parts: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Named:
    """A member by its name."""

    name: str
    parts: Parts
    is_required: bool


@dataclass(frozen=True, slots=True)
class Free:
    """Members whose names are of a kind."""

    names: Strings
    parts: Parts


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """The members of an object."""

    named: tuple[Named, ...]
    free: tuple[Free, ...]
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Layout:
    """The items of an array: those by their place, and all behind them."""

    first: tuple[Parts, ...]
    rest: Parts | None
    least: int
    most: int | None
    contained: tuple[Contained, ...]


def planned(reading: SchemaReader, kind: Objects) -> MemberPlan | None:
    """Return the members of objects of a kind; None if there can be no such object."""
    listed = named_in(kind)
    named = []
    for name in listed:
        parts = reading.member(kind, name)
        if not any(0xD800 <= ord(c) <= 0xDFFF for c in name) and (
            reading.allows(kind.names, name) and reading.is_possible(parts)
        ):
            named.append(Named(name, parts, name in kind.required))
        elif name in kind.required:
            return None
    with_others = reading.is_whole or not is_closed(kind, len(named))
    free = tuple(_free(reading, kind, frozenset(listed), with_others=with_others))
    n_required = sum(member.is_required for member in named)
    if kind.least > len(named) + bool(free) or (kind.most is not None and n_required > kind.most):
        return None  # several without a name may be one: nothing keeps their names apart
    return MemberPlan(tuple(named), free, kind.least, kind.most)


def named_in(kind: Objects) -> list[str]:
    """Return the names that schemas say something of, in their order."""
    named = (name for members in kind.members for name, _ in members.named)
    return list(dict.fromkeys([*named, *kind.required]))


def is_closed(kind: Objects, n_named: int) -> bool:
    """Whether objects are left without members that no schema says anything of, where there are some that one names."""
    return (
        kind.least <= n_named
        and bool(n_named or any(members.patterns for members in kind.members))
        and all(members.rest is None for members in kind.members)
    )


def _free(reading: SchemaReader, kind: Objects, taken: frozenset[str], *, with_others: bool) -> Iterator[Free]:
    """Yield members that are not named: by which patterns their names have, and which they have not."""
    patterns = list(dict.fromkeys(pattern for members in kind.members for pattern, _ in members.patterns))
    sizes = range(0 if with_others else 1, (len(patterns) if len(patterns) <= MAX_PATTERNS else 1) + 1)
    names = [shape.kinds.get("string") for shape in reading.shapes(kind.names)]
    for there in (set(some) for size in sizes for some in combinations(patterns, size)):
        found: list[SchemaPart] = []
        for members in kind.members:
            parts = [part for pattern, part in members.patterns if pattern in there]
            if not parts and members.rest is not None:
                parts = [members.rest]
            found += parts
        parts_of = reading.plain(found)
        wanted = Strings(patterns=frozenset((pattern, pattern not in there) for pattern in patterns), but=taken)
        for allowed in names:
            key = narrowed(allowed, wanted) if isinstance(allowed, Strings) else None
            if isinstance(key, Strings) and reading.is_some(key) and reading.is_possible(parts_of):
                yield Free(key, parts_of)


def laid_out(reading: SchemaReader, kind: Arrays) -> Layout | None:
    """Return the items of arrays of a kind; None if there can be no such array."""
    contained = tuple(of for of in kind.contained if of.least or of.most is not None)
    least = max([kind.least, *(of.least for of in contained)])
    most = kind.most
    n_first = max((len(places.prefix) for places in kind.places), default=0)
    first = []
    for i in range(n_first):
        if most is not None and i >= most:
            break
        parts = reading.item(kind, i)
        if not reading.is_possible(parts):
            most = i
            break
        first.append(parts)
    rest: Parts | None = None
    if most is None or most > len(first):
        rest = reading.item(kind, n_first)
        if not reading.is_possible(rest):
            rest, most = None, len(first)
    if most is not None and least > most:
        return None
    everywhere = [*first, *([rest] if rest is not None else [])]
    for of in contained:
        if of.most is not None and of.most < of.least:
            return None
        if of.least and not any(reading.is_possible((*parts, of.part)) for parts in everywhere):
            return None
    return Layout(tuple(first), rest, least, most, contained)

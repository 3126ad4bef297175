"""What values a schema allows, by their type: the conjunction of all that keywords ask for. Pure.

A schema is a list of shapes, one of which a value has. What is within objects and arrays stays schemas: `SchemaPart`s.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ...tools.references import Schema
from .numbers import ALL, Numbers

Item = TypeVar("Item")
TYPES = ("null", "boolean", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """A schema, or its contrary; the same one by its place in a document."""

    schema: Schema = field(hash=False, compare=False)
    is_not: bool = False
    key: int = 0  # of the schema

    @classmethod
    def of(cls, schema: Schema, *, is_not: bool = False) -> SchemaPart:
        """Return the part of a schema."""
        return cls(schema, is_not, int(schema) if isinstance(schema, bool) else id(schema))


Parts = tuple[SchemaPart, ...]  # all of which a value holds to
ANYTHING = SchemaPart.of(True)
NOTHING = SchemaPart.of(False)


@dataclass(frozen=True, slots=True)
class Booleans:
    """Some of true and false."""

    values: frozenset[bool] = frozenset({True, False})


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings by their length, by patterns that they have (or have not), and words."""

    least: int = 0
    most: int | None = None
    patterns: frozenset[tuple[str, bool]] = frozenset()  # and whether it is forbidden
    formats: frozenset[str] = frozenset()
    words: frozenset[str] | None = None
    but: frozenset[str] = frozenset()

    @property
    def is_any_text(self) -> bool:
        """Whether only the length matters."""
        return not self.patterns and not self.formats and self.words is None and not self.but


@dataclass(frozen=True, slots=True)
class Places:
    """What one schema says of an array's items by their place."""

    prefix: Parts = ()
    rest: SchemaPart | None = None
    evaluates: bool = True  # for `unevaluatedItems`


@dataclass(frozen=True, slots=True)
class Contained:
    """How many items there are by a schema."""

    part: SchemaPart
    least: int = 1
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays by all that schemas say of them."""

    places: tuple[Places, ...] = ()
    least: int = 0
    most: int | None = None
    contained: tuple[Contained, ...] = ()
    is_unique: bool = False


@dataclass(frozen=True, slots=True)
class Members:
    """What one schema says of an object's members by their names."""

    named: tuple[tuple[str, SchemaPart], ...] = ()
    patterns: tuple[tuple[str, SchemaPart], ...] = ()
    rest: SchemaPart | None = None  # of all others
    evaluates: bool = True  # for `unevaluatedProperties`


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects by all that schemas say of them."""

    members: tuple[Members, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: Parts = ()


@dataclass(frozen=True, slots=True)
class Values:
    """Arrays, or objects, one by one, as JSON."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Null:
    """Nothing but null."""


Kind = Null | Booleans | Numbers | Strings | Arrays | Objects | Values


@dataclass(frozen=True, slots=True)
class ValueShape:
    """One way in which a value may hold to a schema: what it is, by the type that it has."""

    kinds: Mapping[str, Kind]
    is_typed: bool = False  # whether a schema says the type
    touched: frozenset[str] = frozenset()  # types of which keywords say something

    def likely(self) -> Iterable[str]:
        """Return the types. Where no schema says the type, it is the one that keywords say something of."""
        if self.is_typed:
            return self.kinds
        return [type_ for type_ in TYPES if type_ in self.kinds and type_ in self.touched] or self.kinds

    def key(self) -> tuple[object, ...]:
        """Return what is the same for shapes that are the same."""
        return (self.is_typed, self.touched, tuple(sorted(self.kinds.items(), key=lambda item: item[0])))


BLANK: Mapping[str, Kind] = {
    "null": Null(),
    "boolean": Booleans(),
    "number": ALL,
    "string": Strings(),
    "array": Arrays(),
    "object": Objects(),
}
ANY = ValueShape(BLANK)


def of_type(*names: str) -> ValueShape:
    """Return values of these types. `integer` is one."""
    kinds = {name: BLANK[name] for name in TYPES if name in names}
    if "integer" in names and "number" not in names:
        kinds["number"] = Numbers(is_integer=True)
    return ValueShape(kinds, is_typed=True)


def only(name: str, kind: Kind) -> ValueShape:
    """Return values of one type."""
    return ValueShape({name: kind}, is_typed=True, touched=frozenset({name}))


def said(name: str, kind: Kind) -> ValueShape:
    """Return values of which something is said if they are of one type."""
    return ValueShape({**BLANK, name: kind}, touched=frozenset({name}))


def of_values(values: Iterable[Any], numbers: Iterable[Any]) -> ValueShape:
    """Return these values; `numbers` are those of them that are numbers, exactly."""
    listed = list(values)
    kinds: dict[str, Kind] = {}
    if any(value is None for value in listed):
        kinds["null"] = Null()
    if booleans := frozenset(value for value in listed if isinstance(value, bool)):
        kinds["boolean"] = Booleans(booleans)
    if exact := frozenset(numbers):
        kinds["number"] = Numbers(only=exact)
    if words := frozenset(value for value in listed if isinstance(value, str)):
        kinds["string"] = Strings(words=words)
    for name, of in (("array", list), ("object", dict)):
        if texts := dict.fromkeys(
            json.dumps(v, ensure_ascii=False, separators=(",", ":")) for v in listed if isinstance(v, of)
        ):
            kinds[name] = Values(tuple(texts))
    return ValueShape(kinds, is_typed=True, touched=frozenset(kinds))


def least_of(*most: int | None) -> int | None:
    """Return the smallest of some bounds."""
    return min((n for n in most if n is not None), default=None)


def narrowed(one: Kind, other: Kind) -> Kind | None:
    """Return what is in both kinds of one type; None for nothing. Values it leaves as they are."""
    match one, other:
        case Null(), Null():
            return one
        case Booleans(), Booleans():
            values = one.values & other.values
            return Booleans(values) if values else None
        case Numbers(), Numbers():
            return one.narrowed(other)
        case Strings(), Strings():
            return _strings(one, other)
        case Arrays(), Arrays():
            return Arrays(
                _joined(one.places, other.places),
                max(one.least, other.least),
                least_of(one.most, other.most),
                _joined(one.contained, other.contained),
                one.is_unique or other.is_unique,
            )
        case Objects(), Objects():
            return Objects(
                _joined(one.members, other.members),
                _joined(one.required, other.required),
                max(one.least, other.least),
                least_of(one.most, other.most),
                _joined(one.names, other.names),
            )
        case Values(), Values():
            both = tuple(text for text in one.texts if json.loads(text) in map(json.loads, other.texts))
            return Values(both) if both else None
    return None


def _strings(one: Strings, other: Strings) -> Strings:
    words = one.words if other.words is None else other.words if one.words is None else one.words & other.words
    return replace(
        one,
        least=max(one.least, other.least),
        most=least_of(one.most, other.most),
        patterns=one.patterns | other.patterns,
        formats=one.formats | other.formats,
        words=words,
        but=one.but | other.but,
    )


def _joined(one: tuple[Item, ...], other: tuple[Item, ...]) -> tuple[Item, ...]:
    return tuple(dict.fromkeys((*one, *other)))


def unseen(shape: ValueShape) -> ValueShape:
    """Return a shape whose schemas evaluate nothing: what is within a `not` does not, twice neither."""
    kinds = dict(shape.kinds)
    if isinstance(arrays := kinds.get("array"), Arrays):
        kinds["array"] = replace(arrays, places=tuple(replace(p, evaluates=False) for p in arrays.places))
    if isinstance(objects := kinds.get("object"), Objects):
        kinds["object"] = replace(objects, members=tuple(replace(m, evaluates=False) for m in objects.members))
    return ValueShape(kinds, shape.is_typed, shape.touched)

"""What does not hold to a schema, keyword by keyword. Pure.

Not all of it can be said: what no grammar can say is left out, so that what is left does not hold to the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from .keywords import arrays_of, count, listed, numbers_of, objects_of, part_of, plain_of, referred, rewritten
from .numbers import Numbers, fractions
from .reading import MAX_CONTRARY, GrammarError, SchemaReading, contrary_of
from .shapes import (
    ANY,
    ANYTHING,
    BLANK,
    NOTHING,
    TYPES,
    Arrays,
    Booleans,
    Contained,
    Members,
    Objects,
    Places,
    SchemaPart,
    Strings,
    ValueShape,
    of_type,
    of_values,
    only,
    unseen,
)

Schema = Mapping[str, Any]
Shapes = tuple[ValueShape, ...]


def contrary(reading: SchemaReading, schema: Schema) -> Shapes:
    """Return values that do not hold to a schema; not all of them, where a keyword's contrary cannot be said."""
    if "$ref" in schema and reading.document.refers_alone:
        return referred(reading, schema, "$ref", is_not=True)
    found: list[ValueShape] = []
    for make in _CONTRARIES:
        with suppress(GrammarError):
            found += make(reading, schema)
    return tuple({shape.key(): shape for shape in map(unseen, found)}.values())[:MAX_CONTRARY]


def _contrary_references(reading: SchemaReading, schema: Schema) -> Iterator[ValueShape]:
    for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
        if keyword in schema:
            yield from referred(reading, schema, keyword, is_not=True)


def _contrary_types(reading: SchemaReading, schema: Schema) -> Iterator[ValueShape]:
    for shape in plain_of(reading, {name: schema[name] for name in ("type",) if name in schema}):
        rest = [name for name in TYPES if name not in shape.kinds]
        if rest:
            yield of_type(*rest)
    for keyword in ("enum", "const"):
        if keyword in schema:
            yield from _but(schema[keyword] if keyword == "enum" else [schema[keyword]])


def _but(values: list[Any]) -> Iterator[ValueShape]:
    """Yield all values but these. What arrays or objects it forbids, it forbids as a type."""
    shape = of_values(values, fractions(values))
    kinds = dict(BLANK)
    for name in shape.kinds:
        kinds.pop(name, None)
    booleans = shape.kinds.get("boolean")
    if isinstance(booleans, Booleans) and len(booleans.values) == 1:
        kinds["boolean"] = Booleans(frozenset({True, False}) - booleans.values)
    if "number" in shape.kinds:
        kinds["number"] = Numbers(but=fractions(values))
    strings = shape.kinds.get("string")
    if isinstance(strings, Strings) and strings.words is not None:
        kinds["string"] = Strings(but=strings.words)
    if values == [[]]:
        kinds["array"] = Arrays(least=1)
    if values == [{}]:
        kinds["object"] = Objects(least=1)
    yield ValueShape(kinds, is_typed=True, touched=frozenset(kinds))


def _contrary_plain(reading: SchemaReading, schema: Schema) -> Iterator[ValueShape]:
    _, numbers = numbers_of(reading, schema)
    if numbers.low is not None:
        yield only("number", Numbers(high=numbers.low, without_high=not numbers.without_low))
    if numbers.high is not None:
        yield only("number", Numbers(low=numbers.high, without_low=not numbers.without_high))
    for name, make in (("string", Strings), ("array", Arrays), ("object", Objects)):
        what = {"string": "Length", "array": "Items", "object": "Properties"}[name]
        least, most = (count(reading, schema, f"{way}{what}") for way in ("min", "max"))
        if least:
            yield only(name, make(most=least - 1))
        if most is not None:
            yield only(name, make(least=most + 1))
    if isinstance(pattern := schema.get("pattern"), str):
        reading.is_found(pattern, "")
        yield only("string", Strings(patterns=frozenset({(pattern, True)})))


def _contrary_items(reading: SchemaReading, schema: Schema) -> Iterator[ValueShape]:
    _, arrays = arrays_of(reading, schema)
    for places in arrays.places:
        for i, part in enumerate(places.prefix):
            prefix = (*(ANYTHING,) * i, contrary_of(part))
            yield only("array", Arrays((Places(prefix, evaluates=False),), least=i + 1))
        if places.rest is not None and not places.prefix:
            yield only("array", Arrays(contained=(Contained(contrary_of(places.rest)),)))
        elif places.rest is not None:
            n = len(places.prefix)
            prefix = (*(ANYTHING,) * n, contrary_of(places.rest))
            yield only("array", Arrays((Places(prefix, evaluates=False),), least=n + 1))
    for contained in arrays.contained:
        if contained.least == 1:
            yield only("array", Arrays((Places((), contrary_of(contained.part), evaluates=False),)))
        elif contained.least > 1:
            yield only("array", Arrays(contained=(Contained(contained.part, 0, contained.least - 1),)))
        if contained.most is not None:
            yield only("array", Arrays(contained=(Contained(contained.part, contained.most + 1),)))


def _contrary_members(reading: SchemaReading, schema: Schema) -> Iterator[ValueShape]:
    _, objects = objects_of(reading, schema)
    for name in objects.required:
        yield only("object", Objects((Members(((name, NOTHING),), evaluates=False),)))
    for members in objects.members:
        for name, part in members.named:
            if part is not ANYTHING:
                wrong = Members(((name, contrary_of(part)),), evaluates=False)
                yield only("object", Objects((wrong,), required=(name,)))
        if members.rest is not None and not members.named and not members.patterns and members.rest is NOTHING:
            yield only("object", Objects(least=1))


def _contrary_alternatives(reading: SchemaReading, schema: Schema) -> Iterator[ValueShape]:
    for part in listed(reading, schema, "allOf"):
        yield from reading.shapes((contrary_of(part),))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            parts = listed(reading, schema, keyword)
            yield from _none_of(reading, parts)
            if keyword == "oneOf":
                for i, one in enumerate(parts):
                    for other in parts[:i]:
                        yield from reading.shapes((one, other))
    if "not" in schema:
        yield from reading.shapes((part_of(reading, schema, "not", schema["not"]),))
    for same in rewritten(schema):
        yield from reading.shapes((contrary_of(reading.written(same, schema)),))


def _none_of(reading: SchemaReading, parts: list[SchemaPart]) -> Shapes:
    found: Shapes = (ANY,)
    for part in parts:
        found = reading.product(found, reading.shapes((contrary_of(part),)), MAX_CONTRARY)
    return found


_CONTRARIES: tuple[Callable[[SchemaReading, Schema], Iterator[ValueShape]], ...] = (
    _contrary_references,
    _contrary_types,
    _contrary_members,
    _contrary_plain,
    _contrary_items,
    _contrary_alternatives,
)

"""What each keyword of JSON Schema asks for, in drafts 4 to 2020-12. Pure.

Those that are not here are annotations, or nothing: `title`, `default`, `nullable` of OpenAPI (null is no value of such
a schema for a validator), a `format` that is not in `formats`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .formats import FORMATS
from .numbers import Numbers, exactly, fractions
from .reading import MAX_CONTRARY, GrammarError, SchemaReading, contrary_of
from .shapes import (
    ANY,
    ANYTHING,
    BLANK,
    NOTHING,
    TYPES,
    Arrays,
    Contained,
    Members,
    Objects,
    Places,
    SchemaPart,
    Strings,
    Values,
    ValueShape,
    of_type,
    of_values,
    said,
)

Schema = Mapping[str, Any]
Shapes = tuple[ValueShape, ...]


def shapes_of(reading: SchemaReading, schema: Schema) -> Shapes:
    """Return the shapes that a schema allows."""
    if "$ref" in schema and reading.document.refers_alone:
        return referred(reading, schema, "$ref")
    found: Shapes = (ANY,)
    for shapes in _all_of(reading, schema):
        found = reading.product(found, shapes)
    for keyword in ("unevaluatedItems", "unevaluatedProperties"):
        if keyword in schema:
            found = _unevaluated(reading, schema, keyword, found)
    return found


def _all_of(reading: SchemaReading, schema: Schema) -> Iterator[Shapes]:
    """Yield for each keyword, or for several that belong together, the shapes that it allows."""
    yield from ((shape,) for shape in plain_of(reading, schema))
    for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
        if keyword in schema:
            yield referred(reading, schema, keyword)
    for part in listed(reading, schema, "allOf"):
        yield reading.shapes((part,))
    if "anyOf" in schema:
        yield tuple(shape for part in listed(reading, schema, "anyOf") for shape in reading.shapes((part,)))
    if "oneOf" in schema:
        yield _one_of(reading, listed(reading, schema, "oneOf"))
    if "not" in schema:
        yield _not(reading, schema)
    yield from (reading.shapes((reading.written(other, schema),)) for other in rewritten(schema))


def referred(reading: SchemaReading, schema: Schema, keyword: str, *, is_not: bool = False) -> Shapes:
    """Return the shapes of what a reference leads to, or of all else."""
    found, why = _target(reading, schema, keyword)
    if found is None:
        return reading.unsayable(schema, keyword, why)
    return reading.shapes(
        (SchemaPart.of(found, is_not=is_not) if not isinstance(found, bool) else _boolean(found is not is_not),)
    )


def _boolean(value: bool) -> SchemaPart:
    return ANYTHING if value else NOTHING


def _target(reading: SchemaReading, schema: Schema, keyword: str) -> tuple[Schema | bool | None, str]:
    """Return what a reference leads to, or why it leads nowhere."""
    document, reference = reading.document, schema[keyword]
    if not isinstance(reference, str):
        raise _malformed(reading, schema, keyword, "a text")
    dynamic = document.dynamic.get("" if keyword == "$recursiveRef" else reference.rpartition("#")[2], [])
    if keyword != "$ref" and len(dynamic) > 1:
        return None, f"is {reference[:80]!r}, which several schemas may be meant by: use $ref."
    found = document.find(reference, document.base(schema))
    if found is not None:
        return found, ""
    if document.is_own(reference, document.base(schema)):
        why = f"is {reference[:80]!r}, which is not in the schema: put what it names into $defs."
        if not reading.forgets:
            raise GrammarError(f"'{keyword}' in the JSON schema{reading.place(schema)} {why}")
        return None, why
    return None, f"is {reference[:80]!r}, which is in another document: put what it names into $defs."


def listed(reading: SchemaReading, schema: Schema, keyword: str) -> list[SchemaPart]:
    """Return the schemas that a keyword lists."""
    if keyword not in schema:
        return []
    if not isinstance(schema[keyword], list):
        raise _malformed(reading, schema, keyword, "a list of schemas")
    if not schema[keyword] and keyword != "allOf":
        raise GrammarError(f"The JSON schema has an '{keyword}' of no values{reading.place(schema)}: {_NOTHING}")
    return [part_of(reading, schema, keyword, inner) for inner in schema[keyword]]


def part_of(reading: SchemaReading, schema: Schema, keyword: str, inner: Any) -> SchemaPart:
    """Return what a keyword has as a schema."""
    if isinstance(inner, bool):
        return _boolean(inner)
    if isinstance(inner, Mapping):
        return SchemaPart.of(inner)
    raise _malformed(reading, schema, keyword, "a schema: an object, true or false")


def _one_of(reading: SchemaReading, parts: list[SchemaPart]) -> Shapes:
    """Return what is one, and none of the others."""
    found: list[ValueShape] = []
    for i, part in enumerate(parts):
        shapes = reading.shapes((part,))
        for other in parts[:i] + parts[i + 1 :]:
            if reading.is_possible((part, other)):
                shapes = reading.product(shapes, reading.shapes((contrary_of(other),)), MAX_CONTRARY)
        found += shapes
    return tuple(found)


def _not(reading: SchemaReading, schema: Schema) -> Shapes:
    part = part_of(reading, schema, "not", schema["not"])
    found = reading.shapes((contrary_of(part),))
    if not found and isinstance(part.schema, Mapping) and not _is_anything(part.schema):
        return reading.unsayable(schema, "not", "forbids what no grammar can tell: leave it out.")
    return found


def _is_anything(schema: Schema) -> bool:
    return not schema.keys() - {"title", "description", "$comment", "default", "examples"}


def rewritten(schema: Schema) -> Iterator[Schema]:
    """Yield schemas that say the same as keywords by which one thing follows from another."""
    if "if" in schema and ("then" in schema or "else" in schema):
        yes, no = schema.get("then", True), schema.get("else", True)
        yield {"anyOf": [{"allOf": [schema["if"], yes]}, {"allOf": [{"not": schema["if"]}, no]}]}
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        named = schema.get(keyword)
        for name, then in named.items() if isinstance(named, Mapping) else ():
            wanted = {"required": [name, *then]} if isinstance(then, list) else {"required": [name], "allOf": [then]}
            yield {"anyOf": [{"properties": {name: False}}, wanted]}


# --- keywords of one type ------------------------------------------------------------------------------------------


def plain_of(reading: SchemaReading, schema: Schema) -> Iterator[ValueShape]:
    """Yield what keywords ask for that hold no alternatives."""
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not isinstance(kinds, list) or not all(kind in (*TYPES, "integer") for kind in kinds):
            raise _malformed(reading, schema, "type", "one of JSON's types, or a list of them")
        yield of_type(*kinds)
    if "enum" in schema:
        if not isinstance(schema["enum"], list):
            raise _malformed(reading, schema, "enum", "a list")
        if not schema["enum"]:
            raise GrammarError(f"The JSON schema has an 'enum' of no values{reading.place(schema)}: {_NOTHING}")
        yield of_values(schema["enum"], fractions(schema["enum"]))
    if "const" in schema:
        yield of_values([schema["const"]], fractions([schema["const"]]))
    for make in (numbers_of, _strings, arrays_of, objects_of):
        name, kind = make(reading, schema)
        if kind != BLANK[name]:
            yield said(name, kind)


def numbers_of(reading: SchemaReading, schema: Schema) -> tuple[str, Numbers]:
    """Return the numbers that a schema allows."""
    found = Numbers()
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if isinstance(schema.get(keyword), bool) or (bound := _exact(reading, schema, keyword)) is None:
            continue
        without = keyword.startswith("exclusive") or schema.get(f"exclusive{keyword.capitalize()}") is True
        if keyword.lower().endswith("minimum"):
            found = found.narrowed(Numbers(low=bound, without_low=without))
        else:
            found = found.narrowed(Numbers(high=bound, without_high=without))
    if (divisor := _exact(reading, schema, "multipleOf")) is not None:
        if divisor <= 0:
            raise _malformed(reading, schema, "multipleOf", "above 0")
        found = found.narrowed(Numbers(divisors=frozenset({divisor})))
    return "number", found


def _exact(reading: SchemaReading, schema: Schema, keyword: str) -> Any:
    if keyword not in schema:
        return None
    if (found := exactly(schema[keyword])) is None:
        raise _malformed(reading, schema, keyword, "a number")
    return found


def _strings(reading: SchemaReading, schema: Schema) -> tuple[str, Strings]:
    patterns, formats = frozenset[tuple[str, bool]](), frozenset[str]()
    if "pattern" in schema:
        pattern = schema["pattern"]
        if not isinstance(pattern, str):
            raise _malformed(reading, schema, "pattern", "a text")
        try:
            reading.is_found(pattern, "")
            patterns = frozenset({(pattern, False)})
        except GrammarError as e:
            reading.unsayable(schema, "pattern", f"cannot be kept: {e}")
    if schema.get("format") in FORMATS:
        formats = frozenset({schema["format"]})
    return "string", Strings(
        count(reading, schema, "minLength") or 0, count(reading, schema, "maxLength"), patterns, formats
    )


def arrays_of(reading: SchemaReading, schema: Schema) -> tuple[str, Arrays]:
    """Return the arrays that a schema allows."""
    items, prefix, after = schema.get("items"), schema.get("prefixItems"), "items"
    if isinstance(items, list):  # of drafts before 2020-12
        items, prefix, after = schema.get("additionalItems"), items, "additionalItems"
    if prefix is not None and not isinstance(prefix, list):
        raise _malformed(reading, schema, "prefixItems", "a list of schemas")
    firsts = tuple(part_of(reading, schema, "prefixItems", inner) for inner in prefix or ())
    rest = None if items is None else part_of(reading, schema, after, items)
    contained: tuple[Contained, ...] = ()
    if "contains" in schema:
        least = count(reading, schema, "minContains")
        part = part_of(reading, schema, "contains", schema["contains"])
        contained = (Contained(part, 1 if least is None else least, count(reading, schema, "maxContains")),)
    places = (Places(firsts, rest),) if firsts or rest is not None else ()
    return "array", Arrays(
        places,
        count(reading, schema, "minItems") or 0,
        count(reading, schema, "maxItems"),
        contained,
        schema.get("uniqueItems") is True,
    )


def objects_of(reading: SchemaReading, schema: Schema) -> tuple[str, Objects]:
    """Return the objects that a schema allows."""
    named, patterns = (
        tuple(
            (name, part_of(reading, schema, keyword, inner)) for name, inner in _names(reading, schema, keyword).items()
        )
        for keyword in ("properties", "patternProperties")
    )
    required = schema.get("required", [])
    if isinstance(required, bool):
        required = []  # of draft 3
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _malformed(reading, schema, "required", "a list of names")
    rest = schema.get("additionalProperties")
    more = None if rest is None else part_of(reading, schema, "additionalProperties", rest)
    members = (Members(named, patterns, more),) if named or patterns or more is not None else ()
    names = (part_of(reading, schema, "propertyNames", schema["propertyNames"]),) if "propertyNames" in schema else ()
    return "object", Objects(
        members,
        tuple(dict.fromkeys(required)),
        count(reading, schema, "minProperties") or 0,
        count(reading, schema, "maxProperties"),
        names,
    )


def _names(reading: SchemaReading, schema: Schema, keyword: str) -> Mapping[str, Any]:
    named = schema.get(keyword, {})
    if not isinstance(named, Mapping):
        raise _malformed(reading, schema, keyword, "an object")
    return named


def count(reading: SchemaReading, schema: Schema, keyword: str) -> int | None:
    """Return the value of a keyword that counts."""
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise _malformed(reading, schema, keyword, "an integer of at least 0")
    return int(value)


_NOTHING = "no answer could hold to it."


def _malformed(reading: SchemaReading, schema: Schema, keyword: str, what: str) -> GrammarError:
    shown = json.dumps(schema[keyword], ensure_ascii=False, default=str)[:40] if keyword in schema else "missing"
    return GrammarError(f"'{keyword}' is {shown} in the JSON schema{reading.place(schema)}: it has to be {what}.")


# --- what has not been looked at ------------------------------------------------------------------------------------


def _unevaluated(reading: SchemaReading, schema: Schema, keyword: str, found: Shapes) -> Shapes:
    """Add what holds for items or members that no other keyword beside it says anything of."""
    part = part_of(reading, schema, keyword, schema[keyword])
    make, name = (_unevaluated_items, "array") if keyword == "unevaluatedItems" else (_unevaluated_members, "object")
    made = []
    for shape in found:
        kind = shape.kinds.get(name)
        if isinstance(kind, Values):
            reading.unsayable(schema, keyword, "stands beside an enum: leave one of them out.")
            made.append(shape)
            continue
        kinds = dict(shape.kinds) if kind is None else {**shape.kinds, name: make(kind, part)}  # type: ignore[arg-type]
        made.append(ValueShape(kinds, shape.is_typed, shape.touched | {name}))
    return reading.product((ANY,), made)


def _unevaluated_items(kind: Arrays, part: SchemaPart) -> Arrays:
    known = [places for places in kind.places if places.evaluates]
    if any(places.rest is not None for places in known):
        return kind
    n = max((len(places.prefix) for places in known), default=0)
    places = Places((ANYTHING,) * n, part)
    return Arrays((*kind.places, places), kind.least, kind.most, kind.contained, kind.is_unique)


def _unevaluated_members(kind: Objects, part: SchemaPart) -> Objects:
    known = [members for members in kind.members if members.evaluates]
    if any(members.rest is not None for members in known):
        return kind
    named = {name: ANYTHING for members in known for name, _ in members.named}
    patterns = {pattern: ANYTHING for members in known for pattern, _ in members.patterns}
    members = Members(tuple(named.items()), tuple(patterns.items()), part)
    return Objects((*kind.members, members), kind.required, kind.least, kind.most, kind.names)

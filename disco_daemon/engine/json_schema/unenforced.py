"""Which keywords of a request's schemas an answer does not keep, or keeps too well, to tell the client. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from ...tools.references import Document
from .keywords import shapes_of
from .negation import contrary
from .plans import MAX_PLACES, is_closed, named_in
from .reading import GrammarError, SchemaReading, contrary_of
from .rules import rules_of
from .shapes import Arrays, Kind, Objects, Parts, SchemaPart

MAX_KNOWN = 64  # schemas whose keywords need not be looked for again; clients send the same ones
_MAY_BE = ("uniqueItems", "$ref", "$dynamicRef", "$recursiveRef", "pattern", '"not"', "unevaluated")


def left_out(form: Mapping[str, Any] | None, tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keywords that an answer of the device does not keep, with where they stand."""
    found: list[str] = []
    schema, is_strict = _schema_of(form)
    if schema is not None and not is_strict:
        found += [f"response_format.{keyword}" for keyword in _of(schema)]
    for tool in tools:
        match tool:
            case {"function": {"name": str() as name, "parameters": dict() as schema}}:
                found += [f"tools.{name}.{keyword}" for keyword in _of(schema, forgets=True)]
    return found


def narrowed(form: Mapping[str, Any] | None) -> list[str]:
    """Return what a schema allows that an answer of the device never has, by the keyword that would ask for it."""
    schema, _ = _schema_of(form)
    if form is None or schema is None or form.get("whole") is True:
        return []
    try:
        return [f"response_format.{keyword}" for keyword in _narrowed(json.dumps(schema))]
    except (TypeError, ValueError, RecursionError):
        return []


def _schema_of(form: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, bool]:
    """Return the schema of an answer, and whether all of it is to be kept."""
    match form:
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema} as shape}:
            return schema, shape.get("strict") is True
        case {"type": "json_object", "schema": dict() as schema}:
            return schema, False
    return None, False


@lru_cache(MAX_KNOWN)
def _narrowed(text: str) -> tuple[str, ...]:
    """As rules are written, but without their automata: this is asked where nothing may take long."""
    root: Parts = (SchemaPart.of(json.loads(text)),)
    reading = SchemaReading(Document(root[0].schema), shapes_of, contrary, lenient=True)
    found: set[str] = set()
    todo, seen = [root], {root}
    try:
        while todo:
            parts = todo.pop()
            for shape in reading.shapes(parts):
                types = tuple(reading.likely(parts, shape, is_root=parts == root))
                found |= {"type"} if len(types) < len(shape.kinds) else set()
                for inner in _within(reading, [shape.kinds[name] for name in types], found):
                    reading.step()
                    if inner not in seen:
                        seen.add(inner)
                        todo.append(inner)
    except (GrammarError, RecursionError):
        return ()  # the engine refuses it, or says less still
    return tuple(sorted(found))


def _within(reading: SchemaReading, kinds: Iterable[Kind], found: set[str]) -> Iterator[Parts]:
    """Yield what the items and members of values hold to; add to `found` where there may be no other members."""
    for kind in kinds:
        if isinstance(kind, Arrays):
            n_first = max((len(places.prefix) for places in kind.places), default=0)
            yield from (reading.item(kind, i) for i in range(min(n_first, MAX_PLACES) + 1))
            yield from ((part,) for of in kind.contained for part in (of.part, contrary_of(of.part)))
        elif isinstance(kind, Objects):
            names = named_in(kind)
            if is_closed(kind, len(names)) and (kind.most is None or kind.most > len(names)):
                found.add("additionalProperties")
            yield from (reading.member(kind, name) for name in names)
            yield from ((part,) for members in kind.members for _, part in members.patterns)
            yield from ((members.rest,) for members in kind.members if members.rest is not None)


def _of(schema: Mapping[str, Any], *, forgets: bool = False) -> tuple[str, ...]:
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        return ()
    return _of_text(text, forgets=forgets) if any(word in text for word in _MAY_BE) else ()


@lru_cache(MAX_KNOWN)
def _of_text(text: str, *, forgets: bool) -> tuple[str, ...]:
    try:
        return tuple(rules_of(json.loads(text), lenient=True, forgets=forgets)[1])
    except (GrammarError, RecursionError):
        return ()  # the engine refuses it

"""What a tool's JSON schema says of its arguments, for formats in which these are no JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
MAX_REFERENCES = 16  # one inside the other
_DEFINITIONS = ("$defs", "definitions")
_HINTS = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
_ANYTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Property:
    """An argument; its schema stands for itself: the definitions that it refers to are in it."""

    name: str
    schema: Mapping[str, Any]
    is_required: bool


def properties(parameters: Mapping[str, Any]) -> list[Property]:
    """List the arguments of a tool in their order."""
    root = resolved(parameters, parameters)
    shared = {name: parameters[name] for name in _DEFINITIONS if name in parameters}
    required = root.get("required", ())
    return [
        Property(name, {**shared, **schema} if isinstance(schema, Mapping) else shared, name in required)
        for name, schema in root.get("properties", {}).items()
        if "\0" not in name  # which no grammar can spell
    ]


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow `$ref`s within a document; an empty schema, which allows all, where they lead nowhere."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        found: Any = root if reference.startswith("#") else None
        for part in filter(None, reference[1:].split("/")):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            break
        schema = found
    return _ANYTHING


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return which of JSON's types a value by a schema may have; all of them where it does not say."""
    return _types_of(schema, root, {})


def _types_of(schema: object, root: Mapping[str, Any], known: dict[int, frozenset[str]]) -> frozenset[str]:
    """As `types_of`; `known` has each part of a schema once, by its id, so that references end."""
    if not isinstance(schema, Mapping):
        return TYPES
    schema = resolved(schema, root)
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = found = TYPES
    if isinstance(kinds := schema.get("type"), str | list):
        found = frozenset([kinds] if isinstance(kinds, str) else map(str, kinds)) & TYPES
    elif isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
        found = frozenset(map(type_of, values))
    elif hints := {kind for keyword, kind in _HINTS.items() if keyword in schema}:
        found = frozenset(hints)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(keyword), list) and options:
            found &= frozenset().union(*(_types_of(option, root, known) for option in options))
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            found &= _types_of(part, root, known)
    known[id(schema)] = found or TYPES
    return known[id(schema)]


def python_words(schema: Mapping[str, Any]) -> list[str]:
    """Return which of Python's words a value by a schema may be."""
    if "enum" in schema or "const" in schema:
        return []
    kinds = types_of(schema, schema)
    return ["True", "False"] * ("boolean" in kinds) + ["None"] * ("null" in kinds)


def type_of(value: object) -> str:
    """Return JSON's name for the type of a value."""
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
        case list():
            return "array"
        case _:
            return "object"

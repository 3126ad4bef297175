"""What a tool's JSON schema says of its arguments, for formats in which these are no JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from .references import Document

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
MAX_REFERENCES = 16  # one inside the other
_HINTS = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
_ANYTHING: Mapping[str, Any] = {}
_ADDRESS = "tool:parameters"  # of a tool's schema that has none


@dataclass(frozen=True, slots=True)
class Property:
    """An argument. Its `schema` stands for itself: what it refers to is in it; what this leads to is `found`."""

    name: str
    schema: Mapping[str, Any]
    is_required: bool
    found: Mapping[str, Any]
    types: frozenset[str]

    @property
    def python_words(self) -> list[str]:
        """Which of Python's words its value may be."""
        if "enum" in self.found or "const" in self.found:
            return []
        return ["True", "False"] * ("boolean" in self.types) + ["None"] * ("null" in self.types)


def properties(parameters: Mapping[str, Any]) -> list[Property]:
    """List the arguments of a tool in their order."""
    document = Document(parameters)
    root = resolved(parameters, document)
    required, pointer = root.get("required", ()), document.pointer(root)
    made = []
    for name, schema in root.get("properties", {}).items():
        if "\0" in name:
            continue  # which no grammar can spell
        schema = schema if isinstance(schema, Mapping) else _ANYTHING
        alone = _alone(schema, f"{pointer}/properties/{name.replace('~', '~0').replace('/', '~1')}", parameters)
        found = resolved(schema, document)
        made.append(Property(name, alone, name in required, found, types_of(schema, document)))
    return made


def _alone(schema: Mapping[str, Any], pointer: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of a tool's schema as one that stands for itself: if it refers to others, all of it is within."""
    if '"$' not in json.dumps(schema, default=str):
        return schema
    named = parameters.get("$id")
    address = named if isinstance(named, str) and not named.startswith("#") else _ADDRESS
    return {"$ref": f"{address}#{quote(pointer)}", "$defs": {"tool": {**parameters, "$id": address}}}


def resolved(schema: Mapping[str, Any], document: Document) -> Mapping[str, Any]:
    """Follow `$ref`s within a document; an empty schema, which allows all, where they lead nowhere."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        found = document.find(reference, document.base(schema))
        if not isinstance(found, Mapping):
            break
        schema = found
    return _ANYTHING


def types_of(schema: object, document: Document) -> frozenset[str]:
    """Return which of JSON's types a value by a schema may have; all of them where it does not say."""
    return _types_of(schema, document, {})


def _types_of(schema: object, document: Document, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """As `types_of`; `known` has each part of a schema once, by its id, so that references end."""
    if not isinstance(schema, Mapping):
        return TYPES
    schema = resolved(schema, document)
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
            found &= frozenset().union(*(_types_of(option, document, known) for option in options))
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            found &= _types_of(part, document, known)
    known[id(schema)] = found or TYPES
    return known[id(schema)]


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

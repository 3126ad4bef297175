"""A document with JSON schemas, and what its references lead to. Pure.

Source: JSON Schema 2020-12, "8.2 Identifiers, references"; RFC 6901 (JSON Pointer); RFC 3986 (relative references).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

Schema = Mapping[str, Any] | bool

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_INNER = frozenset({
    "items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf", "not", "if", "then",
    "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
})  # fmt: skip
_OLD = ("draft-03", "draft-04", "draft-06", "draft-07")  # whose `$ref` is alone: what stands beside it says nothing


class Document:
    """The schemas of one document, by address."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        named = root.get("$schema") if isinstance(root, Mapping) else None
        self.draft = named if isinstance(named, str) else ""  # empty: the newest, and what older ones had
        self.refers_alone = any(old in self.draft for old in _OLD)
        self._bases: dict[int, str] = {}
        self._beside: dict[int, Schema] = {}
        self._resources: dict[str, Any] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self.dynamic: dict[str, list[Any]] = {}  # what `$dynamicAnchor`s name
        self._resources[""] = root
        self._learn(root, "")

    def base(self, schema: Schema) -> str:
        """Return the address that a schema's references are relative to."""
        return self._bases.get(id(schema), "")

    def adopt(self, schema: Schema, beside: Schema) -> None:
        """Let a schema that is not in the document be read as if it stood where another one stands."""
        self._bases[id(schema)] = self.base(beside)
        self._beside[id(schema)] = beside

    def pointer(self, schema: Schema) -> str:
        """Return the JSON pointer of a schema; empty for the root, and for what is not in the document."""
        schema = self._beside.get(id(schema), schema)
        todo: list[tuple[Any, str]] = [(self.root, "")]
        while todo:
            found, pointer = todo.pop()
            if found is schema:
                return pointer
            inner = found.items() if isinstance(found, Mapping) else enumerate(found) if isinstance(found, list) else ()
            for name, value in inner:
                todo.append((value, f"{pointer}/{str(name).replace('~', '~0').replace('/', '~1')}"))
        return ""

    def find(self, reference: str, base: str) -> Schema | None:
        """Return what a reference leads to; None if that is not in the document, or no schema."""
        address, _, fragment = _joined(base, reference).partition("#")
        if address not in self._resources:
            return None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((address, fragment))
        else:
            found = self._pointed(self._resources[address], fragment, address)
        return found if isinstance(found, Mapping | bool) else None

    def is_own(self, reference: str, base: str) -> bool:
        """Whether a reference is to this document, or to one within it."""
        return _joined(base, reference).partition("#")[0] in self._resources

    def _pointed(self, found: Any, pointer: str, base: str) -> Any:
        """Follow a JSON pointer."""
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
            base = self._bases.get(id(found), base)
        if isinstance(found, Mapping) and id(found) not in self._bases:  # where nobody looks for a schema
            self._learn(found, base)
        return found

    def _learn(self, schema: Any, base: str) -> None:
        """Learn the addresses of a schema, and of those in it."""
        todo = [(schema, base)]
        while todo:
            schema, base = todo.pop()
            if isinstance(schema, bool) or not isinstance(schema, Mapping) or id(schema) in self._bases:
                continue
            base = self._named(schema, base)
            self._bases[id(schema)] = base
            todo += [(inner, base) for inner in _inner(schema)]

    def _named(self, schema: Mapping[str, Any], base: str) -> str:
        """Learn a schema's own names; return the base of what is in it."""
        if "$ref" in schema and self.refers_alone:
            return base
        named = schema.get("$id", schema.get("id") if not self.draft or "draft-04" in self.draft else None)
        if isinstance(named, str):
            address, _, fragment = _joined(base, named).partition("#")
            if fragment:
                self._anchors.setdefault((address, unquote(fragment)), schema)
            if not named.startswith("#"):
                base = address
                self._resources.setdefault(base, schema)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self._anchors.setdefault((base, anchor), schema)
                if keyword == "$dynamicAnchor":
                    self.dynamic.setdefault(anchor, []).append(schema)
        if schema.get("$recursiveAnchor") is True:
            self.dynamic.setdefault("", []).append(schema)
        return base


def _joined(base: str, reference: str) -> str:
    """Return an absolute address; Python's own joins those of known schemes only."""
    if reference.startswith("#") or not reference:
        return base + reference
    return urljoin(base, reference)


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas that stand in one."""
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            yield from value.values()
        elif name in _INNER:
            yield from value if isinstance(value, list) else (value,)

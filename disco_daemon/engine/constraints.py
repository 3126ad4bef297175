"""Bounds on a `response_format`, or on tools, checked before use; without llama.cpp, for both processes. Pure.

What is larger than a grammar can be is refused before the first rule is written. OpenAI's own bounds for structured
outputs are of the same order (1,000 enum values, 10 levels).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_SCHEMA = 64 * 1024  # characters; grammars grow with their schema, and so does the time that a token takes
MAX_TOOLS = 256 * 1024  # characters of the schemas of all tools; an agent's come to 60,000 with their descriptions
MAX_DEPTH = 64  # levels of a response format; people's schemas have 10
MAX_LEAST = 1_000_000  # of what an answer has to have: no model writes more
MAX_CHOICES = 1000  # in one list or object: values of an enum, properties, alternatives
MAX_OPTIONAL = 100  # properties of one object that may be left out: the grammar grows with their square
MAX_INT = 2**63 - 1  # integers to the engine have 64 bits
MAX_PATTERN = 1000  # characters of a schema's regular expression

_COUNTS = {"minLength": "maxLength", "maxLength": "", "minItems": "maxItems", "maxItems": ""}
_DATA = frozenset({"const", "enum", "default", "examples"})  # their values are no schemas
_NAMED = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})  # names to schemas


class SchemaError(ValueError):
    """A response format or a tool is out of bounds; the message names the keyword, and is fit for a user."""


@dataclass(slots=True)
class _Sum:
    """The sums of one response format so far, or of all tools; `whose` says of what in messages."""

    whose: str = "the response format"
    most: int = MAX_SCHEMA
    lenient: bool = False  # what only a grammar cannot have is noted in `is_costly`, and not refused
    is_costly: bool = False
    characters: int = 0

    @property
    def title(self) -> str:
        """`whose` at the beginning of a sentence."""
        return self.whose[:1].upper() + self.whose[1:]

    def text(self, n: int) -> None:
        """Count `n` more characters of JSON, at least."""
        self.characters += n
        if self.characters > self.most:
            raise SchemaError(f"{self.title} is larger than {self.most} characters of JSON: make it smaller.")

    def costs(self, msg: str) -> None:
        """Refuse what would make a grammar too large, or note that it would."""
        if not self.lenient:
            raise SchemaError(msg)
        self.is_costly = True


def check(response_format: Mapping[str, Any]) -> None:
    """Refuse a response format that would cost too much to obey. Takes microseconds. Raises SchemaError."""
    found = _Sum()
    shape = response_format.get("json_schema")
    schema = shape.get("schema") if isinstance(shape, Mapping) else None
    # The schema's place is known: only what is there is read as a schema, all the rest as data.
    rest = {name: value for name, value in response_format.items() if name != "json_schema"}
    if isinstance(rest.get("schema"), Mapping):  # beside json_object
        _walk(rest.pop("schema"), "schema", 0, found)
    if isinstance(shape, Mapping):
        rest["json_schema"] = {name: value for name, value in shape.items() if name != "schema"}
    else:
        rest["json_schema"] = shape
    _walk_data(rest, "response_format", found)
    if schema is not None:
        _walk(schema, "schema", 0, found)


def check_tools(schemas: Mapping[str, Any], *, lenient: bool = False) -> frozenset[str]:
    """Refuse schemas of tools, by their names, that would cost too much to obey. Raises SchemaError.

    `lenient`: return the names of those whose counts, choices or patterns no grammar can have, and refuse only what is
    out of bounds as JSON. Agents offer such tools: Claude Code has a `maxLength` of 524,288.
    """
    found, costly = _Sum(most=MAX_TOOLS, lenient=lenient), set()
    for name, schema in schemas.items():
        found.whose, found.is_costly = f"the tool {name}", False
        _walk(schema, "parameters", 0, found)
        if found.is_costly:
            costly.add(name)
    return frozenset(costly)


def _walk(schema: Any, keyword: str, depth: int, found: _Sum) -> None:
    """Add up a schema, or a list of schemas, below `keyword`."""
    if not isinstance(schema, Mapping):
        _walk_list(schema, keyword, depth, found)
        return
    _deep(keyword, depth, found)
    _many(keyword, len(schema), found)
    for name, value in schema.items():
        found.text(len(str(name)) + 4)
        if name in _COUNTS:
            _count(name, value, schema, found)
        elif name == "pattern" and isinstance(value, str):
            _pattern(value, found)
            found.text(len(value))
        elif name in _DATA:
            _walk_data(value, name, found, depth + 1)
        elif name in _NAMED and isinstance(value, Mapping):
            _walk_named(value, name, schema, depth, found)
        else:
            _walk(value, name, depth + 1, found)


def _walk_named(named: Mapping[str, Any], keyword: str, schema: Mapping[str, Any], depth: int, found: _Sum) -> None:
    """Add up schemas by their names, such as an object's properties."""
    _many(keyword, len(named), found)
    if keyword == "properties":
        required = schema.get("required")
        n_required = len(required) if isinstance(required, list) else 0
        if len(named) - n_required > MAX_OPTIONAL:
            msg = (
                f"'properties' has {len(named)} names in {found.whose}'s schema, most of which may be left out; "
                f"at most {MAX_OPTIONAL} may: list the others under 'required'."
            )
            found.costs(msg)
    for name, value in named.items():
        found.text(len(str(name)) + 4)
        _walk(value, keyword, depth + 2, found)


def _walk_list(value: Any, keyword: str, depth: int, found: _Sum) -> None:
    if isinstance(value, list | tuple):
        _many(keyword, len(value), found)
        for item in value:
            _walk(item, keyword, depth + 1, found)
    else:
        _leaf(value, keyword, found)


def _walk_data(value: Any, keyword: str, found: _Sum, depth: int = 0) -> None:
    """Add up JSON that is no schema: only its size, its depth and its integers matter."""
    _deep(keyword, depth, found)
    if isinstance(value, Mapping):
        _many(keyword, len(value), found)
        for name, inner in value.items():
            found.text(len(str(name)) + 4)
            _walk_data(inner, keyword if keyword in _DATA else str(name), found, depth + 1)
    elif isinstance(value, list | tuple):
        _many(keyword, len(value), found)
        for inner in value:
            _walk_data(inner, keyword, found, depth + 1)
    else:
        _leaf(value, keyword, found)


def _leaf(value: Any, keyword: str, found: _Sum) -> None:
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise SchemaError(f"'{_show(keyword)}' is {_show(value)} in {found.whose}: integers have at most 64 bits.")
    found.text(len(value) + 2 if isinstance(value, str) else 2)


def _deep(keyword: str, depth: int, found: _Sum) -> None:
    if depth > MAX_DEPTH:
        msg = f"{found.title} is nested more than {MAX_DEPTH} levels deep, at '{_show(keyword)}': flatten it."
        raise SchemaError(msg)


def _many(keyword: str, n: int, found: _Sum) -> None:
    if n > MAX_CHOICES:
        msg = f"'{_show(keyword)}' has {n} entries in {found.whose}; at most {MAX_CHOICES} are possible."
        found.costs(msg)


def _count(name: str, value: Any, schema: Mapping[str, Any], found: _Sum) -> None:
    """Look at one of _COUNTS."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
        msg = f"'{name}' is {_show(value)} in {found.whose}'s schema: it has to be an integer of at least 0."
        found.costs(msg)
        return
    if isinstance(value, int) and value > MAX_INT:
        _leaf(value, name, found)
    if name.startswith("min") and value > MAX_LEAST:
        found.costs(f"'{name}' is {_show(value)} in {found.whose}'s schema; at most {MAX_LEAST} is possible.")
    most = schema.get(_COUNTS[name])
    if isinstance(most, int) and value > most:
        msg = f"'{name}' is {value} in {found.whose}'s schema, and '{_COUNTS[name]}' only {_show(most)}."
        found.costs(msg)


def _pattern(pattern: str, found: _Sum) -> None:
    """Look at a regular expression."""
    if len(pattern) > MAX_PATTERN:
        msg = f"'pattern' has {len(pattern)} characters in {found.whose}'s schema; {MAX_PATTERN} are possible."
        found.costs(msg)


def _show(value: object) -> str:
    """Show a foreign value in a message: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"

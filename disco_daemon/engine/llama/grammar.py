"""The grammar, in llama.cpp's GBNF, of the answers that a `response_format` allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llama_cpp.llama_grammar import INVALID_RULE_CHARS_RE, JSON_GBNF, PRIMITIVE_RULES, SchemaConverter

from ..schema import SchemaError, check
from .patterns import PatternError, spell
from .readings import MAX_READINGS, readings

MAX_GRAMMAR = 256 * 1024  # characters of what a schema is turned into; llama.cpp reads that in milliseconds
MAX_STEPS = 10_000  # schemas and rules looked at: references may lead to the same ones again and again
MAX_ALIKE = 300  # rules whose names differ in nothing but signs; the converter tries one number after the other
MAX_REASON = 200  # characters of what a converter says of a strange schema
AMBIGUOUS = (
    "The JSON schema allows too many readings of an answer at once: let the alternatives of an anyOf or oneOf that "
    "hold one another begin differently, with a const as their first property for instance, merge those that are "
    "alike, shorten long enums, and nest fewer repetitions in a pattern."
)


# What stands in a string, as JSON has it: no control characters, and no escape of half a character beyond U+FFFF, which
# a model would have to complete. llama.cpp's converter allows both.
_ESCAPE = '"u" [0-9a-fA-F]{4}'
_WHOLE = '"u" ([0-9a-cA-Ce-fE-F] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2})'
_CHAR = rf'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | {_WHOLE})'


class GrammarError(ValueError):
    """A response format that cannot be obeyed; the message is fit for a user."""


class _Converter(SchemaConverter):  # type: ignore[misc]
    """llama.cpp's converter, which gives up where a schema's grammar grows beyond all bounds."""

    def __init__(self) -> None:
        super().__init__(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        self._n_steps = self._n_characters = 0

    def visit(self, schema: Any, name: str) -> Any:
        """Make the rules of one schema."""
        self._step(0)
        return super().visit(schema, name)

    def _format_literal(self, literal: str) -> str:
        """Return a JSON text, of a constant or a property's name, as a literal.

        Models write characters as they are; an escape of JSON's would be read as one of the grammar's, and half an
        emoji's is no character there.
        """
        return _literal(json.dumps(json.loads(literal), ensure_ascii=False))

    def _visit_pattern(self, pattern: str, name: str) -> Any:
        return super()._visit_pattern(spell(pattern), name)

    def _add_rule(self, name: str, rule: str) -> Any:
        n_before = len(self._rules)
        if rule == PRIMITIVE_RULES["char"].content:
            rule = _CHAR
        if f"{INVALID_RULE_CHARS_RE.sub('-', name)}{MAX_ALIKE}" in self._rules:
            raise GrammarError("The JSON schema has too many names that differ in no letter and no digit.")
        key = super()._add_rule(name, rule)
        self._step(len(name) + len(rule) if len(self._rules) > n_before else 0)
        return key

    def _step(self, n_characters: int) -> None:
        self._n_steps += 1
        self._n_characters += n_characters
        if self._n_steps > MAX_STEPS or self._n_characters > MAX_GRAMMAR:
            raise GrammarError(
                "The JSON schema makes too large a grammar: lower its counts, or name fewer properties and $refs."
            )


def grammar_of(response_format: Mapping[str, Any]) -> str:
    """Make the grammar of OpenAI's `json_object` or `json_schema`, or of a choice of texts. Raises GrammarError."""
    try:
        check(response_format)
    except SchemaError as e:
        raise GrammarError(str(e)) from e
    match response_format:
        case {"type": "json_object"}:
            return str(JSON_GBNF).replace(_ESCAPE, _WHOLE)
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return _of_schema(schema)
        case {"type": "choice", "choice": [*texts]}:
            return _of_choice(texts)
        case {"type": "json_schema"}:
            raise GrammarError("response_format.json_schema.schema is missing: it has to be a JSON schema.")
    msg = f"response_format.type must be text, json_object or json_schema, not {response_format.get('type')!r:.60}."
    raise GrammarError(msg)


def _of_choice(texts: list[Any]) -> str:
    if any("\0" in text for text in texts):  # it ends a text in C
        raise GrammarError("A text to choose cannot have a NUL character.")
    grammar = f"root ::= {' | '.join(map(_literal, dict.fromkeys(texts)))}"
    if readings(grammar) > MAX_READINGS:
        raise GrammarError("Too many of the texts to choose from begin alike: give fewer of them.")
    return grammar


def _literal(text: str) -> str:
    """Return a text as a literal of a grammar."""
    return '"' + "".join(map(_spelled, text)) + '"'


def _spelled(sign: str) -> str:
    if sign in '"\\':
        return f"\\{sign}"
    return sign if sign.isprintable() else f"\\U{ord(sign):08X}"


def _of_schema(schema: dict[str, Any]) -> str:
    converter = _Converter()
    try:
        # As `json_schema_to_gbnf`: the converter writes into what it reads, so it gets a copy.
        converter.visit(_resolve(converter, json.loads(json.dumps(schema))), "")
        grammar = str(converter.format_grammar())
        too_many = readings(grammar) > MAX_READINGS
    except GrammarError:
        raise
    except PatternError as e:
        raise GrammarError(str(e)) from e
    except Exception as e:  # whatever a strange schema makes of it: KeyError, RecursionError, AssertionError …
        msg = f"The JSON schema cannot be turned into a grammar: {type(e).__name__}: {str(e)[:MAX_REASON]}"
        raise GrammarError(msg) from e
    if too_many:
        raise GrammarError(AMBIGUOUS)
    return grammar


def _resolve(converter: _Converter, schema: dict[str, Any]) -> Any:
    """Resolve a schema's references. The converter looks for none beside a reference: not in its $defs."""
    if "$ref" not in schema:
        return converter.resolve_refs(schema, "stdin")
    root = {"$ref": schema.pop("$ref")}
    converter.resolve_refs(schema | {"": root}, "stdin")
    return root

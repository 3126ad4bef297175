"""The grammar, in llama.cpp's GBNF, of the answers that a `response_format` allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...tools.grammar import Grammar, gbnf
from ..constraints import SchemaError, check
from ..json_schema.characters import literal
from ..json_schema.reading import GrammarError
from ..json_schema.rules import MAX_GRAMMAR as MAX_GRAMMAR
from ..json_schema.rules import SHARED, rules_of
from .ambiguity import MAX_READINGS, counted_anew, noted, readings
from .recursion import bounded

MAX_CALLS = 2 * MAX_GRAMMAR  # the same of all tools together
MAX_REASON = 200  # characters of what a converter says of a strange schema
AMBIGUOUS = (
    "The JSON schema allows too many readings of an answer at once: let the alternatives of an anyOf or oneOf that "
    "hold one another begin differently, with a const as their first property for instance, merge those that are "
    "alike, shorten long enums, and nest fewer repetitions in a pattern."
)

_ANY = {"type": "object"}
# A word of a rule's body: the name of a rule, or something in quotes or brackets.
_WORD = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\{[^}]*\}|[A-Za-z0-9-]+', re.DOTALL)


def grammar_of(response_format: Mapping[str, Any]) -> str:
    """Make the grammar of OpenAI's `json_object` or `json_schema`, or of a choice of texts. Raises GrammarError."""
    try:
        check(response_format)
    except SchemaError as e:
        raise GrammarError(str(e)) from e
    whole = response_format.get("whole") is True  # `disco.whole_schema`
    match response_format:
        case {"type": "json_object", "schema": dict() as schema}:
            return _of_schema(schema, whole=whole)
        case {"type": "json_object"}:
            return _of_schema(_ANY)
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema} as shape}:
            return _of_schema(schema, lenient=shape.get("strict") is not True, whole=whole)
        case {"type": "choice", "choice": [*texts]}:
            return _of_choice(texts)
        case {"type": "json_schema"}:
            raise GrammarError("response_format.json_schema.schema is missing: it has to be a JSON schema.")
    msg = f"response_format.type must be text, json_object or json_schema, not {response_format.get('type')!r:.60}."
    raise GrammarError(msg)


def _of_choice(texts: list[Any]) -> str:
    if any("\0" in text for text in texts):  # it ends a text in C
        raise GrammarError("A text to choose cannot have a NUL character.")
    grammar = f"root ::= {' | '.join(map(literal, dict.fromkeys(texts)))}"
    if readings(grammar) > MAX_READINGS:
        raise GrammarError("Too many of the texts to choose from begin alike: give fewer of them.")
    return grammar


def _of_schema(schema: dict[str, Any], *, lenient: bool = True, whole: bool = False) -> str:
    with strange_schemas():
        rules, _ = rules_of(schema, lenient=lenient, whole=whole)
        grammar = "\n".join(f"{name} ::= {body}" for name, body in rules.items())
        too_many = readings(grammar) > MAX_READINGS
    if too_many:
        raise GrammarError(AMBIGUOUS)
    return _written_out(grammar)


def _written_out(grammar: str) -> str:
    """Return a grammar whose recursion ends. It has no more readings, and a walk through all its levels takes long."""
    written = bounded(grammar)
    return grammar if written == grammar else noted(written, readings(grammar))


def grammar_of_calls(calls: Grammar, *, lenient: bool = False) -> str:
    """Make the grammar of calls of tools, each with arguments by its schema. Raises GrammarError.

    `lenient`: where no grammar can say what a schema does, the arguments are any object.
    """
    found = _joined(calls, _any_if_strange if lenient else _rules_of)
    if readings(found) <= MAX_READINGS:
        return _written_out(found)
    if lenient:
        found = _joined(calls, _any_if_ambiguous)
        if readings(found) <= MAX_READINGS:
            return _written_out(found)
    raise GrammarError(AMBIGUOUS)


def grammar_of_others(text: str) -> str:
    """Return a grammar that another machine has sent, for llama.cpp. Raises GrammarError for too many readings.

    Readings that multiply hold llama.cpp's C code within a token, where nothing can look at the clock.
    """
    if not text:
        return ""
    grammar, n = counted_anew(text)
    if n > MAX_READINGS:
        raise GrammarError(AMBIGUOUS)
    return grammar


def _joined(calls: Grammar, rules_of: Callable[[Mapping[str, Any]], dict[str, str]]) -> str:
    """Write calls and the schemas of their arguments as one grammar."""
    lines: dict[str, str] = {}

    def name_of(schema: Mapping[str, Any], name: str) -> str:
        rules = rules_of(schema)
        names = {rule: rule if rule in SHARED else f"{name}-{rule}" for rule in rules}
        for rule, body in rules.items():
            lines[names[rule]] = _WORD.sub(lambda word: names.get(word[0], word[0]), body)
        return names["root"]

    with strange_schemas():
        text = gbnf(calls, name_of)
    text += "".join(f"{name} ::= {body}\n" for name, body in lines.items())
    if len(text) > MAX_CALLS:
        raise GrammarError("The schemas of the tools make too large a grammar: offer fewer of them, or simpler ones.")
    return text


def _rules_of(schema: Mapping[str, Any]) -> dict[str, str]:
    with strange_schemas():
        return rules_of(schema)[0]


def _any_if_strange(schema: Mapping[str, Any]) -> dict[str, str]:
    try:
        return rules_of(schema, lenient=True, forgets=True)[0]
    except GrammarError:
        return _rules_of(_ANY)


def _any_if_ambiguous(schema: Mapping[str, Any]) -> dict[str, str]:
    try:
        _of_schema(dict(schema))
    except GrammarError:
        return _rules_of(_ANY)
    return _rules_of(schema)


@contextmanager
def strange_schemas() -> Iterator[None]:
    """Raise GrammarError for whatever a strange schema makes of a converter."""
    try:
        yield
    except GrammarError:
        raise
    except Exception as e:  # KeyError, RecursionError, AssertionError …
        msg = f"The JSON schema cannot be turned into a grammar: {type(e).__name__}: {str(e)[:MAX_REASON]}"
        raise GrammarError(msg) from e

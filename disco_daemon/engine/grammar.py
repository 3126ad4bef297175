"""Which answers a `response_format` allows, as a grammar in llama.cpp's GBNF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llama_cpp.llama_grammar import JSON_GBNF, json_schema_to_gbnf

MAX_SCHEMA = 64 * 1024  # characters; grammars grow with their schema, and so does the time that a token takes


class GrammarError(ValueError):
    """A response format that cannot be obeyed; the message is fit for a user."""


def grammar_of(response_format: Mapping[str, Any]) -> str:
    """The grammar of OpenAI's `json_object` or `json_schema`. Raises GrammarError."""
    match response_format:
        case {"type": "json_object"}:
            return str(JSON_GBNF)
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return _of_schema(schema)
        case {"type": "json_schema"}:
            raise GrammarError("response_format.json_schema.schema is missing: it has to be a JSON schema.")
    msg = f"response_format.type must be text, json_object or json_schema, not {response_format.get('type')!r}."
    raise GrammarError(msg)


def _of_schema(schema: dict[str, Any]) -> str:
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA:
        msg = f"The JSON schema has {len(text)} characters; at most {MAX_SCHEMA} are possible."
        raise GrammarError(msg)
    try:
        return str(json_schema_to_gbnf(text))
    except Exception as e:  # whatever a strange schema makes of it: KeyError, RecursionError, AssertionError …
        msg = f"The JSON schema cannot be turned into a grammar: {type(e).__name__}: {e}"
        raise GrammarError(msg) from e

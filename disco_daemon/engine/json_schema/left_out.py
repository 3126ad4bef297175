"""Which keywords of a request's schemas are read as if they were not there, to tell the client. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from .reading import GrammarError
from .rules import rules_of

MAX_KNOWN = 64  # schemas whose keywords need not be looked for again; clients send the same ones
_MAY_BE = ("uniqueItems", "$ref", "$dynamicRef", "$recursiveRef", "pattern", '"not"', "unevaluated")


def left_out(form: Mapping[str, Any] | None, tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keywords that an answer of the device does not keep, with where they stand."""
    found: list[str] = []
    match form:
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema} as shape} if (
            shape.get("strict") is not True
        ):
            found += [f"response_format.{keyword}" for keyword in _of(schema)]
        case {"type": "json_object", "schema": dict() as schema}:
            found += [f"response_format.{keyword}" for keyword in _of(schema)]
    for tool in tools:
        match tool:
            case {"function": {"name": str() as name, "parameters": dict() as schema}}:
                found += [f"tools.{name}.{keyword}" for keyword in _of(schema)]
    return found


def _of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        return ()
    return _of_text(text) if any(word in text for word in _MAY_BE) else ()


@lru_cache(MAX_KNOWN)
def _of_text(text: str) -> tuple[str, ...]:
    try:
        return tuple(rules_of(json.loads(text), lenient=True)[1])
    except (GrammarError, RecursionError):
        return ()  # the engine refuses it

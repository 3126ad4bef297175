"""The parts of docs/reference/api.md that are made of /openapi.json's document: docs/generate.py writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from docs.generate import display_path, link
from docs.openapi.document import WITH_STATUS, described, everywhere
from docs.openapi.operations import OPERATIONS, Fields, Operation

MOST_NAMED = 3  # routes in one cell
SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TYPES = {"string": "text", "boolean": "true or false"}
# What travels beside the fields of a body.
BESIDE = {
    Fields.CHAT: "; those of [the table](#fields)",
    Fields.RAW: "; those of [the table](#fields) that say how tokens are drawn",
    Fields.RESPONSES: "; [as it says there](#responses)",
    Fields.MESSAGES: "; [as it says there](#messages)",
}


def of_type(name: str, prefix: str = "") -> str:
    """The fields of one of its types: what they may be, and what they mean."""
    lines = ["| field | values | meaning |", "| --- | --- | --- |"]
    for key, schema in described()["components"]["schemas"][name]["properties"].items():
        lines.append(f"| `{prefix}{key}` | {values(schema)} | {here(schema['description'])} |")
    return "\n".join(lines)


def here(text: str) -> str:
    """Return a text with links, those to this very page by its headings alone."""
    return re.sub(r"\[api\.md(#[\w-]+)\]\(api\.md\1\)", r"[below](\1)", link(text))


def values(schema: Mapping[str, Any]) -> str:
    """Return what a JSON Schema allows, in a few words."""
    if kinds := schema.get("anyOf"):
        return " or ".join(values(kind) for kind in kinds)
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {values(schema['items'])}"
    bounds = [f"{sign} {schema[key]:,.10g}" for key, sign in SIGNS.items() if key in schema]
    return " ".join([TYPES.get(schema["type"], schema["type"]), ", ".join(bounds)]).strip()


def headers() -> str:
    """The headers of answers."""
    lines = ["| header of the answer | meaning |", "| --- | --- |"]
    for name, header in described()["components"]["headers"].items():
        lines.append(f"| `{name}` | {here(header['description'])} |")
    return "\n".join(lines)


def bodies() -> str:
    """What each route takes, gives and refuses with, as far as there is something to say."""
    lines = ["| route | takes | gives | refuses with |", "| --- | --- | --- | --- |"]
    for (method, path), operation in OPERATIONS.items():
        told = described()["paths"][path][method.lower()]
        gives = ""
        if isinstance(operation.gives, type):
            properties = described()["components"]["schemas"][operation.gives.__name__]["properties"]
            gives = ", ".join(f"`{key}`" for key in properties)
        refusals = sorted({int(status) for status in told["responses"]} - {200} - everywhere(method, path))
        cells = (", ".join(_taken(operation, told)), gives, ", ".join(str(status) for status in refusals))
        if any(cells):
            lines.append(f"| `{method} {display_path(path)}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _taken(operation: Operation, told: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a route reads: of its body, or of the query."""
    for one in told["parameters"]:
        if one["in"] == "query":
            yield _name(f"?{one['name']}", needed=one["required"])
    if isinstance(operation.takes, type):
        schema = told["requestBody"]["content"]["application/json"]["schema"]
        own = [key for key in schema["properties"] if key in operation.takes.__struct_fields__]
        *some, last = sorted(own, key=lambda key: key not in schema["required"])
        yield from (_name(key, needed=key in schema["required"]) for key in some)
        yield _name(last, needed=last in schema["required"]) + BESIDE.get(operation.fields, "")


def _name(name: str, *, needed: bool) -> str:
    return f"**`{name}`**" if needed else f"`{name}`"


def errors() -> str:
    """The statuses of errors, and which routes may answer with each."""
    lines = ["| status | why | routes |", "| --- | --- | --- |"]
    for status, why in WITH_STATUS.items():
        lines.append(f"| {status} | {why} | {_routes_with(str(status))} |")
    return "\n".join(lines)


def _routes_with(status: str) -> str:
    """Return the routes that may answer with a status: all, all but some, or else that the other table has them."""
    paths = described()["paths"]
    rest = [(method, path) for method, path in OPERATIONS if status not in paths[path][method.lower()]["responses"]]
    if set(rest) == {route for route in OPERATIONS if route[0] == "GET"}:
        return "all but `GET`"
    if len(rest) > MOST_NAMED:
        return "[some](#bodies)"
    names = ", ".join(f"`{method} {display_path(path)}`" for method, path in rest)
    return f"all but {names}" if rest else "all"


BLOCKS: dict[str, Callable[[], str]] = {
    "asked": lambda: of_type("DiscoOptions", "disco."),
    "bodies": bodies,
    "errors": errors,
    "headers": headers,
    "outcome": lambda: of_type("DiscoOutcome"),
}

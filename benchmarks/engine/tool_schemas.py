"""Twenty tools as agents have them, and a check of arguments against their JSON schemas.

The shapes are those of public tools: OpenAI's and Anthropic's guides, the reference servers of the Model Context
Protocol, coding agents, issue trackers, calendars. Texts and lists are bounded, since the embedded model would go on
for ever; nothing else is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "null": (type(None),), "integer": (int,), "number": (int, float),
    "object": (dict,), "array": (list,),
}  # fmt: skip


def _text(description: str = "", most: int = 16, **more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": most} | ({"description": description} if description else {}) | more


def _list(of: Schema, most: int = 2, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, "maxItems": most} | more


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def _tool(name: str, description: str, parameters: Schema) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_BYTE = {"type": "integer", "minimum": 0, "maximum": 255}
_ADDRESS = _object("street city", street=_text(), city=_text(), zip={"type": ["string", "null"], "maxLength": 8})
_NODE = {
    "type": "object",
    "properties": {
        "op": {"enum": ["and", "or"]}, "field": _text(), "children": _list({"$ref": "#/$defs/node"}, 1),
    },
    "required": ["op", "field"],
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    _tool("get_weather", "Get the current weather of a place.",
          _object("location unit", location=_text("City and country"), unit={"enum": ["celsius", "fahrenheit"]})),
    _tool("send_email", "Send an e-mail.",
          _object("to subject body", to=_list(_text(most=12), minItems=1), subject=_text(), body=_text(most=30),
                  attachments=_list(_object("path", path=_text(), inline={"type": "boolean"}), 1))),
    _tool("read_file", "Read lines of a text file.",
          _object("path", path=_text("Absolute path"), offset={"type": "integer", "minimum": 1},
                  limit={"type": "integer", "minimum": 1, "maximum": 2000})),
    _tool("edit_file", "Replace texts in a file.",
          _object("path edits dry_run", path=_text(), dry_run={"type": "boolean"},
                  edits=_list(_object("old_text new_text", old_text=_text(), new_text=_text()), minItems=1))),
    _tool("todo_write", "Write down the list of what is to be done.",
          _object("todos", todos=_list(_object("content status", content=_text(),
                                              status={"enum": ["pending", "in_progress", "completed"]})))),
    _tool("grep", "Search files for a regular expression.",
          _object("pattern", pattern=_text(), glob=_text(), output_mode={"enum": ["content", "files", "count"]},
                  **{"-i": {"type": "boolean"}, "-A": {"type": "integer"}})),
    _tool("create_issue", "Open an issue in a repository.",
          _object("owner repo title", owner=_text(), repo=_text(), title=_text(), labels=_list(_text(most=8)),
                  milestone={"anyOf": [{"type": "integer"}, {"type": "null"}]})),
    _tool("create_event", "Put an event into the calendar.",
          _object("title start end", title=_text(), start={"type": "string", "format": "date-time"},
                  end={"type": "string", "format": "date-time"},
                  attendees=_list(_object("name", name=_text(most=10), optional={"type": "boolean"})))),
    _tool("query_database", "Run a query.",
          _object("sql parameters", sql=_text(most=30), timeout_s={"type": "number"},
                  parameters=_list({"type": ["string", "number", "boolean", "null"], "maxLength": 8}))),
    _tool("ship_order", "Ship an order.",
          {"$defs": {"address": _ADDRESS}} | _object("order_id to", order_id={"type": "integer"},
              to={"$ref": "#/$defs/address"}, bill_to={"$ref": "#/$defs/address"})),
    _tool("filter_records", "Filter records by a tree of conditions.",
          {"$defs": {"node": _NODE}} | _object("where", where={"$ref": "#/$defs/node"})),
    _tool("set_light", "Set a lamp.",
          _object("entity", entity=_text(), color={"anyOf": [{"enum": ["warm", "cold"]}, _object("r g b",
              r=_BYTE, g=_BYTE, b=_BYTE)]}, brightness={"type": "number", "minimum": 0, "maximum": 1})),
    _tool("refund", "Refund a payment.",
          _object("payment reason", payment={"type": "string", "pattern": "^pay_[a-z0-9]{6}$"},
                  reason={"enum": ["duplicate", "fraudulent", "requested_by_customer"]},
                  amount={"anyOf": [{"type": "integer"}, {"type": "null"}]})),
    _tool("draw_chart", "Draw a chart.",
          _object("kind series", kind={"const": "line"},
                  series=_list(_object("name points", name=_text(most=8),
                                       points=_list(_list({"type": "number"}, 2, minItems=2), 2))))),
    _tool("run_command", "Run a command in a shell.",
          _object("command", command=_text(most=24), timeout_ms={"type": "integer"},
                  env={"type": "object", "additionalProperties": _text(most=6)})),
    _tool("search", "Search the web.",
          _object("query", query=_text(), recency_days={"enum": [1, 7, 30, None]}, domains=_list(_text(most=10)))),
    _tool("move", "Move a robot.",
          _object("steps", steps=_list({"oneOf": [
              _object("kind metres", kind={"const": "forward"}, metres={"type": "number"}),
              _object("kind degrees", kind={"const": "turn"}, degrees={"type": "integer"})]}, minItems=1))),
    _tool("translate", "Translate a text.",
          _object("text to", text=_text('What, such as "deja vu"'), to={"enum": ["de", "fr", "\u65e5\u672c\u8a9e"]},
                  formality={"type": ["string", "null"], "enum": ["formal", "informal", None]})),
    _tool("page_update", "Update a page's properties.",
          _object("page properties", page={"type": "string", "format": "uuid"},
                  properties=_object("title", title=_text(), tags=_list({"enum": ["a", "b", "c"]}, 3),
                                     done={"type": "boolean"}))),
    _tool("pick", "Pick one of two ways to name a user.",
          {"type": "object", "properties": {"id": {"type": "integer"}, "login": _text(most=10)},
           "anyOf": [{"required": ["id"]}, {"required": ["login"]}], "additionalProperties": False}),
]  # fmt: skip


def problems(value: Any, schema: Any, root: Schema, where: str = "$") -> Iterator[str]:
    """Yield what of a value is not as its JSON schema says; of the keywords that the tools here have."""
    if "$ref" in schema:
        found: Any = root
        for part in filter(None, schema["$ref"].removeprefix("#").split("/")):
            found = found[part]
        yield from problems(value, found, root, where)
    for alternatives in (schema[kind] for kind in ("anyOf", "oneOf") if kind in schema):
        if not any(not list(problems(value, each, root)) for each in alternatives):
            yield f"{where} is none of the alternatives"
    if "const" in schema and value != schema["const"]:
        yield f"{where} is not {schema['const']!r}"
    if "enum" in schema and not any(type(value) is type(each) and value == each for each in schema["enum"]):
        yield f"{where} is none of {schema['enum']}"
    kinds = schema.get("type", list(_TYPES))
    if not any(_is_a(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        yield f"{where} is no {kinds}"
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{where} is {value}"
    if isinstance(value, dict):
        yield from _of_object(value, schema, root, where)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{where} has {len(value)} items"
        for i, item in enumerate(value):
            yield from problems(item, schema.get("items", {}), root, f"{where}[{i}]")
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            yield f"{where} has {len(value)} characters"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where} does not match {schema['pattern']}"


def _of_object(value: dict[str, Any], schema: Schema, root: Schema, where: str) -> Iterator[str]:
    known = schema.get("properties", {})
    yield from (f"{where} lacks {name}" for name in schema.get("required", ()) if name not in value)
    rest = schema.get("additionalProperties", True)
    for name, inner in value.items():
        if name not in known and rest is False:
            yield f"{where} has {name}"
        yield from problems(inner, known.get(name, rest if isinstance(rest, dict) else {}), root, f"{where}.{name}")


def _is_a(value: object, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))

"""Bodies of requests for /openapi.json: their types, with the fields of the table that travel beside them. Pure.

Types say `dict` where a route checks by hand; `REFINED` says what it then takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from disco_daemon.api.openai.chat_messages import ROLES
from disco_daemon.api.openai.openai_request import MAX_STOP, MAX_TOKEN_ID, AnswerRequest, ChatRequest, CompletionRequest
from disco_daemon.api.responses.responses_items import (
    GivenCall,
    GivenCustomCall,
    GivenMessage,
    GivenOutput,
    GivenThought,
)
from disco_daemon.api.responses.responses_request import OF_CHATS
from disco_daemon.types import FIELDS, Field, Treatment
from disco_daemon.types.drawing import Wishes

from .operations import Fields, Operation, Schema

REF = "#/components/schemas/{name}"
# Of the Responses API's items, those that are read; others are left out by name.
ITEMS: dict[str, type[msgspec.Struct]] = {
    "message": GivenMessage,
    "reasoning": GivenThought,
    "function_call": GivenCall,
    "custom_tool_call": GivenCustomCall,
    "function_call_output": GivenOutput,
    "custom_tool_call_output": GivenOutput,
}
_TEXT: Schema = {"type": "string", "minLength": 1}
_NAME: Schema = {"type": "string", "minLength": 1}


def _object(required: str, **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _list(items: Schema) -> Schema:
    return {"anyOf": [{"type": "array", "items": items}, {"type": "null"}]}


_PART = _object("type", type={"type": "string"}, text={"type": "string"})
_TEXT_PART = _object("type text", type={"const": "text"}, text={"type": "string"})
_FUNCTION = _object("name", name=_NAME, arguments={"type": "string"})
_CALL = _object("id function", id={"type": "string"}, type={"const": "function"}, function=_FUNCTION)
_SAID: Schema = {
    "anyOf": [
        _object(
            "role content",
            role={"enum": [role for role in ROLES if role != "assistant"]},
            content={"anyOf": [{"type": "string"}, _array({"anyOf": [_TEXT_PART, _PART]})]},
            tool_call_id={"type": "string"},
        ),
        _object(
            "role",
            role={"const": "assistant"},
            content={"anyOf": [{"type": "string"}, {"type": "null"}, _array(_TEXT_PART)]},
            tool_calls={"type": "array", "items": _CALL},
        ),
    ]
}
_TOOL = _object(
    "type function", type={"const": "function"}, function=_object("name", name=_NAME, parameters={"type": "object"})
)
_BLOCK: Schema = {
    "anyOf": [
        _TEXT_PART,
        _object("type thinking", type={"const": "thinking"}, thinking={"type": "string"}),
        _object("type id name", type={"const": "tool_use"}, id=_NAME, name=_NAME, input={"type": "object"}),
        _object(
            "type tool_use_id", type={"const": "tool_result"}, tool_use_id=_NAME,
            is_error={"type": "boolean"},
            content={"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
        ),
        _object(
            "type source", type={"const": "image"},
            source=_object("type url", type={"const": "url"}, url={"type": "string"}),
        ),
    ]
}  # fmt: skip
_BLOCKS: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}
_TOKENS = _array({"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID})
_PROMPT: Schema = {"anyOf": [_TEXT, _TOKENS]}

# By the name of a type, what its fields take where the type says less than the code.
REFINED: dict[str, dict[str, Schema]] = {
    "ChatRequest": {"messages": _array(_SAID), "tools": _list(_TOOL)},
    "CompletionRequest": {"prompt": _PROMPT, "echo": {"enum": [None, False]}, "best_of": {"enum": [None, 1]}},
    "EmbeddingsRequest": {"input": {"anyOf": [_TEXT, _array(_TEXT), _TOKENS]}},
    "ResponsesRequest": {
        "tools": _list(_object("type name", type={"enum": ["function", "custom", "web_search"]}, name=_NAME)),
        "previous_response_id": {"type": "null"},
        "conversation": {"type": "null"},
        "prompt": {"type": "null"},
        "background": {"enum": [None, False]},
    },
    "MessagesRequest": {
        "messages": _array(_object("role content", role={"enum": ["user", "assistant", "system"]}, content=_BLOCKS)),
        "system": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]},
        "tools": _list(_object("name input_schema", name=_NAME, input_schema={"type": "object"})),
    },
}  # fmt: skip


def types_of(operation: Operation) -> Iterator[type[msgspec.Struct]]:
    """Yield the types that a body and what travels beside it are made of."""
    if isinstance(operation.takes, type):
        yield operation.takes
    if operation.fields:
        yield from (AnswerRequest, Wishes, ChatRequest, CompletionRequest)
    if operation.fields is Fields.RESPONSES:
        yield from ITEMS.values()


def body_schema(operation: Operation, schemas: dict[str, Schema]) -> Schema:
    """Return the schema of a body; `schemas` has those of all types, by their names."""
    if not isinstance(operation.takes, type):
        return operation.takes or {"type": "object"}
    name = operation.takes.__name__
    found = schemas[name]
    properties = {key: _described(key, schema) for key, schema in found.get("properties", {}).items()}
    for row in _beside(operation):
        if row.name not in properties:
            properties[row.name] = _described(row.name, _typed(row.name, schemas))
    for key, schema in REFINED.get(name, {}).items():
        about = properties[key].get("description")
        properties[key] = schema | ({} if about is None else {"description": about})
    if operation.fields is Fields.RESPONSES:
        properties["input"] = {"anyOf": [{"type": "string"}, _array(_item())]}
    if "stop" in properties and operation.fields:
        properties["stop"] = {
            "anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT, "maxItems": MAX_STOP}, {"type": "null"}]
        }
    for key in operation.requires:
        properties[key] = _present(properties[key])
    required = [*found.get("required", ()), *operation.requires]
    return {key: value for key, value in found.items() if key != "title"} | {
        "properties": properties, "required": required,
    }  # fmt: skip


def _present(schema: Schema) -> Schema:
    """Return the schema of a field that may not be null, and has no default."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    found = {key: value for key, value in schema.items() if key != "default"}
    return found | {"anyOf": kinds} if kinds else found


def _beside(operation: Operation) -> Iterator[Field]:
    """Yield the rows of the fields' table that may stand in a body beside its own fields."""
    chats_own = set(ChatRequest.__struct_fields__) - set(AnswerRequest.__struct_fields__)
    raws_own = set(CompletionRequest.__struct_fields__) - set(AnswerRequest.__struct_fields__)
    for row in FIELDS.values():
        if Treatment.IGNORED in (row.device, row.server):
            continue  # nobody heeds it, and it is named: none is to be sent
        match operation.fields:
            case Fields.CHAT if row.name not in raws_own:
                yield row
            case Fields.RAW if (row.draws or row.own or row.name == "logprobs") and row.name not in chats_own:
                yield row
            case Fields.RESPONSES if row.name not in {*OF_CHATS, *chats_own, *raws_own, "stop"}:
                yield row
            case Fields.MESSAGES if row.name in ("temperature", "top_p", "top_k", "disco", "metadata", "service_tier"):
                yield row


def _typed(name: str, schemas: dict[str, Schema]) -> Schema:
    """Return the schema of a field that travels beside a type; {} for one that is passed on as it is."""
    for kind in (AnswerRequest, ChatRequest, CompletionRequest, Wishes):
        if name in kind.__struct_fields__:
            found: Schema = schemas[kind.__name__]["properties"][name]
            return found
    return {}


def _described(name: str, schema: Schema) -> Schema:
    """Return the schema of a field with what becomes of it."""
    row = FIELDS.get(name)
    if row is None:
        return schema
    told = [f"device: {row.device.value}", f"server: {row.server.value}", row.note]
    return schema | {"description": "; ".join(part for part in told if part)}


def _item() -> Schema:
    """Return the schema of one item of the Responses API's input."""
    known: list[Any] = [
        {"allOf": [{"$ref": REF.format(name=kind.__name__)}, _object("type", type={"const": name})]}
        for name, kind in ITEMS.items()
    ]
    return {"anyOf": known}

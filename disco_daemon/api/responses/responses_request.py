"""A request of the Responses API as a chat: items become messages, what no chat has is left out by name. Pure.

Nothing is stored: each request brings its whole conversation, as Codex does, and what would need an earlier answer is
refused. docs/reference/api.md#responses says what becomes of each field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import DiscoError, RequestError
from ..http.bodies import convert
from ..openai.openai_request import MAX_INT
from ..openai.shapes import error_body
from .responses_items import messages_of
from .responses_tools import ChatTools, tools_of

MAX_TOP_LOGPROBS = 20  # as OpenAI


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The fields that mean something else in a chat, or nothing; all others travel as they are."""

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    client_metadata: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = False
    store: bool | None = None
    truncation: str | None = None


@dataclass(frozen=True, slots=True)
class ResponsesAsked:
    """A request as a chat, with what the answer's shape has to know of it.

    `left_out` names what the chat lacks; `echoed` are the fields that a response repeats; `custom` are the names of
    tools that take a text instead of JSON; with `carries_thoughts` the client gives a thought back as it got it.
    """

    chat: dict[str, Any]
    left_out: tuple[str, ...] = ()
    echoed: dict[str, Any] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    carries_thoughts: bool = False


# Fields that need an answer that was stored, or a place to store this one; with the reason that the client reads.
_STORED = {
    "previous_response_id": "no response is stored here: send the whole conversation as 'input', with store=false",
    "conversation": "no conversation is stored here: send all of it as 'input', with store=false",
    "prompt": "no prompt is stored here: send its text as 'instructions'",
    "background": "no response is stored here, so none can be asked for later: leave it out",
}
# Of the Responses API, and of no chat.
_UNHEARD = (
    "access_programs", "background_options", "context_management", "image", "max_tool_calls", "moderation",
    "personality",
)  # fmt: skip
# Of a chat, and not of the Responses API: it has other names for them, which are translated.
OF_CHATS = (
    "messages", "max_tokens", "max_completion_tokens", "response_format", "reasoning_effort", "logprobs", "n",
    "functions", "function_call", "verbosity",
)  # fmt: skip
# The names of what a chat calls otherwise, for errors that are found further on.
_PARAMS = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
_ENCRYPTED, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
_USUAL = {"type": "text"}


def responses_error(error: DiscoError) -> dict[str, Any]:
    """Return an error in OpenAI's shape, by the parameter's name in this API."""
    told = error_body(error)
    param = told["error"]["param"]
    if isinstance(param, str):
        told["error"]["param"] = _PARAMS.get(param.partition("[")[0].partition(".")[0], param)
    return told


def to_chat(raw: dict[str, Any]) -> ResponsesAsked:
    """Return a Responses request as a chat. Raises RequestError, which names the parameter."""
    asked = convert(raw, ResponsesRequest)
    _refuse_stored(asked)
    left_out = [name for name in (*_UNHEARD, *OF_CHATS) if raw.get(name) is not None]
    left_out += ["store"] if asked.store else []
    left_out += ["truncation"] if asked.truncation not in (None, "disabled") else []
    found = messages_of(asked.instructions, asked.input)
    tools = tools_of(asked.tools or [], asked.tool_choice)
    text, thought = asked.text or {}, asked.reasoning or {}
    left_out += [*found.left_out, *tools.left_out]
    left_out += _others("text", text, ("format", "verbosity")) + _others("reasoning", thought, ("effort",))
    included = set(asked.include or ())
    left_out += [f"include.{name}" for name in sorted(included - {_ENCRYPTED, _LOGPROBS})]
    own = ResponsesRequest.__struct_fields__
    chat = {k: v for k, v in raw.items() if k not in own and k not in _UNHEARD and k not in OF_CHATS}
    chat |= {"model": asked.model, "messages": found.messages, "stream": bool(asked.stream)}
    chat |= tools.as_chat(parallel=asked.parallel_tool_calls) | _form(text) | _effort(thought)
    if asked.max_output_tokens is not None:
        chat["max_completion_tokens"] = asked.max_output_tokens
    if _LOGPROBS in included or asked.top_logprobs:
        chat |= {"logprobs": True} | ({"top_logprobs": asked.top_logprobs} if asked.top_logprobs else {})
    return ResponsesAsked(
        chat, tuple(dict.fromkeys(left_out)), _echoed(raw, asked, tools), tools.custom, _ENCRYPTED in included
    )


def _refuse_stored(asked: ResponsesRequest) -> None:
    """Raise RequestError for what can be done only where answers are stored."""
    for name, why in _STORED.items():
        if getattr(asked, name):
            raise RequestError(f"'{name}' is not supported: {why}.", param=name, code="unsupported_parameter")


def _others(where: str, given: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Return the keys of an object that nobody reads here, dotted."""
    return [f"{where}.{key}" for key, value in given.items() if key not in known and value is not None]


def _form(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the answer's text is to look, as a chat says it. Raises RequestError."""
    verbosity = text.get("verbosity")
    said = {} if verbosity in (None, "medium") else {"verbosity": verbosity}  # medium is as usual
    form = text.get("format")
    if form is None or form == _USUAL:
        return said
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        return said | {"response_format": {"type": "json_object"}}
    if kind != "json_schema":
        msg = f"Invalid value for 'text.format.type': {kind!r}; expected text, json_object or json_schema."
        raise RequestError(msg, param="text.format.type", code="invalid_value")
    if not isinstance(form.get("schema"), dict):
        msg = "Invalid value for 'text.format.schema': expected a JSON schema, an object."
        raise RequestError(msg, param="text.format.schema", code="invalid_type")
    keys = ("name", "description", "schema", "strict")
    schema = {key: form[key] for key in keys if form.get(key) is not None}
    return said | {"response_format": {"type": "json_schema", "json_schema": {"name": "answer"} | schema}}


def _effort(reasoning: Mapping[str, Any]) -> dict[str, Any]:
    """Return how much is to be thought, as a chat says it. Raises RequestError."""
    effort = reasoning.get("effort")
    if effort is None:
        return {}
    if not isinstance(effort, str):
        msg = "Invalid type for 'reasoning.effort': expected a string."
        raise RequestError(msg, param="reasoning.effort", code="invalid_type")
    return {"reasoning_effort": effort}


def _echoed(raw: dict[str, Any], asked: ResponsesRequest, tools: ChatTools) -> dict[str, Any]:
    """Return the fields that a response repeats: as they were asked, but for what was left out."""
    text, reasoning = asked.text or {}, asked.reasoning or {}
    passed = ("temperature", "top_p", "user", "service_tier", "prompt_cache_key", "safety_identifier")
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "text": {"format": text.get("format") or _USUAL},
        "tool_choice": tools.choice_asked,
        "tools": tools.asked,
        "top_logprobs": asked.top_logprobs or 0,
        "truncation": "disabled",
        "background": False,
    } | {name: raw.get(name) for name in passed}

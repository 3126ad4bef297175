"""OpenAI's wire format: requests in, chunks and bodies out. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..errors import DiscoError, RequestError
from ..types import GenerationRequest, Sampling, Side, Token

MAX_INT = 2**63 - 1
MAX_STOP = 4  # as OpenAI


class DiscoOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The `disco` object of a request (DESIGN §9)."""

    route: Literal["device", "server"] | None = None
    private: bool = False


class ChatRequest(msgspec.Struct):
    """What of a chat completion request this daemon reads itself; the rest travels in `extra`."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None
    stop: str | list[str] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    disco: DiscoOptions | UnsetType = UNSET


_decoder = msgspec.json.Decoder(dict[str, Any])
_OWN = frozenset(ChatRequest.__struct_fields__)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def parse(body: bytes) -> ChatRequest:
    """Decode and check a request body. Raises RequestError in OpenAI's terms."""
    try:
        raw = _decoder.decode(body)
    except msgspec.MsgspecError as e:
        msg = f"We could not parse the JSON body of your request: {e}"
        raise RequestError(msg) from e
    except UnicodeDecodeError as e:
        raise RequestError("The request body is not UTF-8.") from e
    except RecursionError as e:
        raise RequestError("The request body is nested too deeply.") from e
    try:
        request = msgspec.convert(raw, ChatRequest)
    except msgspec.ValidationError as e:
        param = _param(str(e))
        msg = f"Invalid value for '{param}': {e}" if param else str(e)
        raise RequestError(msg, param=param, code="invalid_type") from e
    for index, message in enumerate(request.messages):
        _check_message(index, message)
    if request.n not in (None, 1):
        raise RequestError("Only n = 1 is supported: a race has one winner.", param="n", code="unsupported_value")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stop) > MAX_STOP:
        msg = f"At most {MAX_STOP} stop sequences are supported, got {len(stop)}."
        raise RequestError(msg, param="stop")
    return request


def extra_of(body: bytes) -> dict[str, Any]:
    """The parameters of a request that only a server understands."""
    return {k: v for k, v in _decoder.decode(body).items() if k not in _OWN}


def to_generation(
    request: ChatRequest, extra: dict[str, Any], request_id: str, allowed: frozenset[Side]
) -> GenerationRequest:
    """The endpoint-neutral form."""
    options = DiscoOptions() if request.disco is UNSET else request.disco
    if options.route is not None:
        allowed &= {Side(options.route)}
    if options.private:
        allowed &= {Side.DEVICE}
    if not allowed:
        raise RequestError("'model', 'disco.route' and 'disco.private' contradict each other.", param="disco")
    messages = [_flattened(m) for m in request.messages]
    answer_so_far = ""
    if request.continue_final_message and messages[-1]["role"] == "assistant":
        said = messages.pop()
        answer_so_far = said.get("content") or ""
        if not isinstance(answer_so_far, str) or said.get("tool_calls"):
            raise RequestError("Only a message of plain text can be continued.", param="messages")
        if not messages:
            raise RequestError("There is no message before the one to continue.", param="messages")
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    sampling = Sampling(
        max_tokens=request.max_completion_tokens or request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop=stop,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
    )
    return GenerationRequest(
        request_id=request_id,
        messages=tuple(messages),
        sampling=sampling,
        extra=extra,
        allowed=allowed,
        text_only=all(_text_only(m) for m in messages),
        max_tokens_key="max_completion_tokens" if request.max_completion_tokens else "max_tokens",
        answer_so_far=answer_so_far,
    )


def _check_message(index: int, message: dict[str, Any]) -> None:
    role = message.get("role")
    if role not in ROLES:
        msg = f"Invalid value for 'messages[{index}].role': {role!r}; expected one of {', '.join(ROLES)}."
        raise RequestError(msg, param=f"messages[{index}].role", code="invalid_value")
    content = message.get("content")
    if content is None and role == "assistant" and (message.get("tool_calls") or message.get("function_call")):
        return
    if not isinstance(content, str | list):
        msg = f"Invalid type for 'messages[{index}].content': expected a string or an array of content parts."
        raise RequestError(msg, param=f"messages[{index}].content", code="invalid_type")
    if isinstance(content, list) and not all(isinstance(p, dict) and isinstance(p.get("type"), str) for p in content):
        msg = f"Invalid 'messages[{index}].content': each part must be an object with a 'type'."
        raise RequestError(msg, param=f"messages[{index}].content", code="invalid_type")


def _flattened(message: dict[str, Any]) -> dict[str, Any]:
    """Text parts joined into one string, so that every chat template understands them."""
    content = message.get("content")
    if isinstance(content, list) and all(p["type"] == "text" and isinstance(p.get("text"), str) for p in content):
        return {**message, "content": "".join(p["text"] for p in content)}
    return message


def _text_only(message: dict[str, Any]) -> bool:
    role, content = message["role"], message.get("content")
    return (
        isinstance(content, str)
        and role in ("system", "developer", "user", "assistant")
        and not message.get("tool_calls")
    )


def _param(text: str) -> str | None:
    """Msgspec's `… - at `$.messages[0].role`` as OpenAI's `messages[0].role`."""
    if at := re.search(r"at `\$\.([^`]+)`", text):
        return at[1].replace("[...]", "")
    if missing := re.search(r"missing required field `([^`]+)`", text):
        return missing[1]
    return None


# --- out ----------------------------------------------------------------------------------------------------------


def error_body(error: DiscoError) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {"error": {"message": str(error), "type": error.type, "param": error.param, "code": error.code}}


def delta_of(token: Token, *, first: bool) -> dict[str, Any]:
    """The `delta` of a chunk."""
    delta: dict[str, Any] = {"role": "assistant"} if first else {}
    if token.text or first:
        delta["content"] = token.text
    return delta | dict(token.delta or {})


def chunk(
    head: dict[str, Any], delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
) -> dict[str, Any]:
    """One `chat.completion.chunk`."""
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return head | {"object": "chat.completion.chunk", "choices": [choice]}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's usage block."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }

"""Requests of Ollama's API as a chat, or as a raw prompt: what neither has is left out by name. Pure.

docs/reference/api.md#ollama says what becomes of each field.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from ...errors import RequestError
from ...types import FIELDS, Given
from ..http.bodies import convert
from ..openai.openai_request import MAX_INT

_ROLES = ("system", "user", "assistant", "tool")
_PASSED = ("model", "disco")
_DRAWN = frozenset({"temperature", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty"})
_OTHERWISE = frozenset({"n"})  # fields that say how tokens are drawn, and are no options of this API
_COUNTS = frozenset({"num_predict", "top_k", "repeat_last_n", "seed", "mirostat"})  # whole, however they are written
# How a model is loaded and computed, which the daemon's settings say, and which changes no answer.
_LOADING = frozenset({
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "embedding_only", "num_thread",
})  # fmt: skip
_NO_LIMITS = (-1, -2)  # of num_predict: none, and until the context is full
# The kinds of images by how their base64 begins: a chat has to name them.
_IMAGES = {"iVBOR": "png", "/9j/": "jpeg", "R0lGO": "gif", "UklGR": "webp"}
_UNLOAD = ("0", "0s")  # of keep_alive


class _Request(msgspec.Struct, kw_only=True):
    """The fields that chats and prompts share. `keep_alive` is a number of seconds, or a text such as `5m`."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: int | float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    disco: dict[str, Any] | None = None


class OllamaChatRequest(_Request, kw_only=True):
    """A conversation; without messages only a model is loaded or unloaded."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(_Request, kw_only=True):
    """One prompt."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """Texts for vectors; older clients write `prompt`."""

    model: Annotated[str, Meta(min_length=1)]
    input: str | list[str] | None = None
    prompt: str | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    options: dict[str, Any] | None = None
    keep_alive: int | float | str | None = None


class OllamaShowRequest(msgspec.Struct):
    """Which model to show; `name` is what older clients call the model."""

    model: Annotated[str, Meta(min_length=1)] | None = None
    name: Annotated[str, Meta(min_length=1)] | None = None


class OllamaPullRequest(OllamaShowRequest):
    """Which model to fetch. `insecure`, for registries of others, has no meaning: the Hub alone is asked."""

    stream: bool = True
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the JSON object of a chat, or of a text completion where it `is_raw`; `left_out` names the rest.

    With nothing to answer it only has a model loaded or unloaded: `only` is that word, and else empty.
    """

    body: dict[str, Any]
    left_out: tuple[str, ...] = ()
    is_raw: bool = False
    only: str = ""


# --- in -----------------------------------------------------------------------------------------------------------


def to_chat(raw: dict[str, Any]) -> Asked:
    """Return a request of /api/chat. Raises RequestError."""
    asked = convert(raw, OllamaChatRequest)
    left_out = _unknown(raw, OllamaChatRequest)
    body = _common(raw, asked, left_out) | _thinking(asked.think) | _likelihoods(asked)
    if asked.tools:
        body["tools"] = asked.tools
    if not asked.messages:
        return Asked(body, only=_loading(asked))
    return Asked(body | {"messages": _messages(asked.messages)}, tuple(left_out))


def to_generation(raw: dict[str, Any]) -> Asked:
    """Return a request of /api/generate: a chat of one turn, or with `raw` or `suffix` a raw prompt.

    Raises RequestError.
    """
    asked = convert(raw, OllamaGenerateRequest)
    left_out = _unknown(raw, OllamaGenerateRequest)
    body = _common(raw, asked, left_out)
    if not asked.prompt and not asked.suffix and not asked.images:
        return Asked(body, only=_loading(asked))
    if asked.raw or asked.suffix:
        return _raw(asked, body, left_out)
    body |= _thinking(asked.think) | _likelihoods(asked)
    said = [{"role": "system", "content": asked.system}] if asked.system else []
    user = {"role": "user", "content": _content(asked.prompt or "", asked.images, "images")}
    return Asked(body | {"messages": [*said, user]}, tuple(left_out))


def to_inputs(raw: dict[str, Any]) -> tuple[str, list[Given], int | None]:
    """Return the model, the texts and the dimensions of a request for vectors; no texts only load it.

    Raises RequestError.
    """
    asked = convert(raw, OllamaEmbedRequest)
    given = asked.prompt if asked.input is None else asked.input
    texts: list[Given] = [given] if isinstance(given, str) else list(given or ())
    if texts == [""]:
        texts = []
    if any(not text for text in texts):
        raise RequestError("'input' cannot have an empty text among others.", param="input")
    return asked.model, texts, asked.dimensions


def _raw(asked: OllamaGenerateRequest, body: dict[str, Any], left_out: list[str]) -> Asked:
    if asked.images:
        msg = "'images' belong to messages, and a raw prompt has none: leave out 'raw' and 'suffix', or the images."
        raise RequestError(msg, param="images", code="unsupported_value")
    left_out += [name for name in ("system", "think") if getattr(asked, name)]
    body |= {"prompt": asked.prompt or "", "max_tokens": body.get("max_tokens")}  # null: else it has a low limit
    if asked.suffix:
        body["suffix"] = asked.suffix
    if asked.logprobs:
        body["logprobs"] = asked.top_logprobs or 0  # as text completions have it: how many in a token's place
    return Asked(body, tuple(left_out), is_raw=True)


def _common(raw: dict[str, Any], asked: _Request, left_out: list[str]) -> dict[str, Any]:
    """Return what chats and raw prompts have alike; this API streams unless it is told not to."""
    body = {name: raw[name] for name in _PASSED if raw.get(name) is not None}
    body["stream"] = asked.stream is not False
    return body | _options(asked.options or {}, left_out) | _form(asked.format)


def _options(options: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Return the options that say how tokens are drawn, by the fields' table; others are named."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or name in _LOADING:
            continue
        given = int(value) if name in _COUNTS and isinstance(value, float) and value.is_integer() else value
        row = FIELDS.get(name)
        if name == "num_predict":
            found["max_tokens"] = _limit(given)
        elif name in _DRAWN or (row is not None and row.draws and name not in _OTHERWISE):
            found[name] = given
        else:
            left_out.append(f"options.{name}")
    return found


def _limit(value: object) -> int:
    if type(value) is not int or value == 0 or value < min(_NO_LIMITS) or value > MAX_INT:
        _refuse("options.num_predict", "a number of tokens, at least 1, or -1 for no limit")
    return -1 if value in _NO_LIMITS else value


def _form(form: str | dict[str, Any] | None) -> dict[str, Any]:
    if form is None or form == "":
        return {}
    if form == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(form, dict):
        _refuse("format", "'json', or a JSON schema as an object")
    named = {"name": "answer", "schema": form, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _thinking(think: bool | str | None) -> dict[str, Any]:
    """Return whether to think, and how much. Not to is what many clients say by default, and what few servers know."""
    if think is None or think == "":
        return {}
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {"reasoning_effort": "medium"} if think else {"think": False}


def _likelihoods(asked: _Request) -> dict[str, Any]:
    if not asked.logprobs:
        return {}
    return {"logprobs": True} | ({"top_logprobs": asked.top_logprobs} if asked.top_logprobs else {})


def _loading(asked: _Request) -> str:
    alive = asked.keep_alive
    return "unload" if alive in _UNLOAD or (alive is not None and alive == 0) else "load"


def _unknown(raw: dict[str, Any], kind: type[_Request]) -> list[str]:
    """Return the fields that nobody here reads."""
    return [name for name, value in raw.items() if name not in kind.__struct_fields__ and value is not None]


# --- messages -----------------------------------------------------------------------------------------------------


def _messages(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation; a last message of the assistant is the begin of the answer."""
    made: list[dict[str, Any]] = []
    calls = _Calls()
    for i, message in enumerate(said):
        role, where = message.get("role"), f"messages[{i}]"
        if role not in _ROLES:
            msg = f"Invalid value for '{where}.role': {role!r}; expected one of {', '.join(_ROLES)}."
            raise RequestError(msg, param=f"{where}.role", code="invalid_value")
        text = message.get("content") or ""
        if not isinstance(text, str):
            _refuse(f"{where}.content", "a text")
        match role:
            case "assistant":
                made.append(_answered(message, text, calls, where))
            case "tool":
                made.append({"role": role, "tool_call_id": calls.answered_by(message, where), "content": text})
            case _:
                images = message.get("images")
                made.append({"role": role, "content": _content(text, images, f"{where}.images")})
    if made[-1]["role"] == "assistant" and not made[-1].get("tool_calls") and made[-1]["content"]:
        made[-1]["prefix"] = True
    return made


def _answered(message: Mapping[str, Any], text: str, calls: _Calls, where: str) -> dict[str, Any]:
    """Return a message of the assistant: what it thought, said and called."""
    made: dict[str, Any] = {"role": "assistant", "content": text}
    thought = message.get("thinking") or ""
    if not isinstance(thought, str):
        _refuse(f"{where}.thinking", "a text")
    if thought:
        made["reasoning_content"] = thought
    if called := [*calls.made_by(message.get("tool_calls") or [], f"{where}.tool_calls")]:
        made |= {"tool_calls": called, "content": text or None}
    return made


class _Calls:
    """The calls of a conversation, each with an id, which a chat's results name, and those of this API may not have."""

    def __init__(self) -> None:
        self._n = 0
        self._open: deque[tuple[str, str]] = deque()  # ids and names of calls that have no result yet

    def made_by(self, calls: object, where: str) -> Iterator[dict[str, Any]]:
        """Yield the calls of one message as a chat has them, with their arguments as text."""
        if not isinstance(calls, list):
            _refuse(where, "an array of calls")
        self._open.clear()
        for number, call in enumerate(calls):
            match call:
                case {"function": {"name": str(name), **function}}:
                    pass
                case _:
                    _refuse(f"{where}[{number}]", "an object with a function, which has a name and arguments")
            arguments = function.get("arguments")
            if not isinstance(arguments, dict | None):
                _refuse(f"{where}[{number}].function.arguments", "an object")
            id_ = self._id(call.get("id"), f"{where}[{number}].id")
            self._open.append((id_, name))
            told = msgspec.json.encode(arguments or {}).decode()
            yield {"id": id_, "type": "function", "function": {"name": name, "arguments": told}}

    def answered_by(self, message: Mapping[str, Any], where: str) -> str:
        """Return the id of the call that a result is of: as it says, or the next open one of its tool, or of any."""
        if (given := message.get("tool_call_id")) not in (None, ""):
            id_ = self._id(given, f"{where}.tool_call_id")
            self._open = deque(one for one in self._open if one[0] != id_)
            return id_
        tool = message.get("tool_name") or message.get("name")
        found = next((one for one in self._open if one[1] == tool), None)
        if found is None:
            found = next(iter(self._open), None)
        if found is None:
            return self._id(None, where)
        self._open.remove(found)
        return found[0]

    def _id(self, given: object, where: str) -> str:
        if not isinstance(given, str | None):
            _refuse(where, "the id of a call")
        self._n += 1
        return given or f"call_{self._n}"


def _content(text: str, images: object, where: str) -> str | list[dict[str, Any]]:
    """Return a text, and images in base64, as the content of a message."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        _refuse(where, "an array of images in base64")
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    return parts + [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]


def _url(image: str) -> str:
    if image.startswith("data:"):
        return image
    kind = next((kind for begin, kind in _IMAGES.items() if image.startswith(begin)), "png")
    return f"data:image/{kind};base64,{image}"


def _refuse(where: str, expected: str) -> NoReturn:
    raise RequestError(f"Invalid value for '{where}': expected {expected}.", param=where, code="invalid_type")

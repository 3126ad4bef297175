"""What a server's refusal says that it lacks: a capability, a name of the limit, room for so long a prompt. Pure.

Servers word it each in their own way, and words such as "tools" and "not supported" stand in many other errors too (a
schema with an error in it). So only what is known to be said of a lack counts, and only for what the request asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..types import Capability

STATUSES = (400, 404, 422, 500, 501)  # llama-server has a 500 for an image that it cannot see
MAX_SAID = 2048  # characters of a refusal that are looked at; 3 ms at most
LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}  # each, and its other name
_CODES = ("unsupported_parameter", "unknown_parameter")
_TOO_LONG = ("context_length_exceeded", "exceed_context_size_error")  # OpenAI's code, llama-server's type
_LENGTHS = range(16, 1 << 30)  # tokens of a context that may be true

_TOOLS = r"(?:tools?|tool[_ ](?:choice|use|calls?|calling)|functions?|function[_ ]calls?|function calling)"
_NAMES = {
    Capability.TOOLS: _TOOLS,
    Capability.FORCED_TOOLS: _TOOLS,
    Capability.JSON_SCHEMA: r"(?:response_format|json[_ ]schemas?|structured outputs?|guided_json|guided decoding)",
    Capability.IMAGES: r"(?:images?|image[_ ]urls?|vision|multi-?modal)(?: inputs?)?",
    Capability.LOGPROBS: r"(?:(?:top_)?logprobs|log[- ]?probabilities)",
    Capability.N: r"n",
    Capability.FIM: r"(?:suffix|infill|fill-in-the-middle)",
}
_NOT = r"(?:is|are)(?: currently| yet)? ?n[o']t(?: currently| yet)?"
_QUOTE = r"['\"`]?"
_FIELD = r"(?:parameter|argument|field|key)s?"
_THE_ITEM = rf"{_QUOTE}NAME\b(?![\[.])"  # not a part of it, such as tools[0]: that one is wrong by itself
# How servers say that they lack what NAME stands for: each line is followed by what it was made for.
_SAID = (
    # OpenAI, vLLM, llama-server: logprobs are not supported, image input is not supported
    rf"(?<![\w.\]])NAME{_QUOTE}(?: (?:param|parameter|input)s?)? {_NOT} (?:supported|available|enabled|implemented)\b",
    # Ollama and others: the model does not support tools, or the 'logprobs' parameter
    rf"n[o']t support (?:the |any )?(?:use of |using |provided )?(?:parameters? )?{_THE_ITEM}",
    # OpenAI: Unrecognized request argument supplied; Mistral, Go, Rust: unknown field
    rf"(?:unsupported|unrecognized|unknown|unexpected)[a-z ]{{0,24}} {_FIELD}(?: supplied)?:? {_THE_ITEM}",
    # vLLM: "auto" tool choice requires --enable-auto-tool-choice; llama-server: tools param requires --jinja flag
    r"NAME(?: param)? requires? --",
    # OpenRouter, with a 404
    rf"no endpoints found that support (?:the provided )?{_THE_ITEM}",
    # pydantic
    r"extra_forbidden\W+loc\W+body\W+NAME\b(?!\W+\d)",
)
# A limit that is known and too high: this model does not support max_tokens above 8192.
_TOO_HIGH = re.compile(
    r"max_(?:completion_)?tokens['\"`]? (?:above|over|beyond|greater|more|larger|higher|exceeding|of\b|>)",
    re.IGNORECASE,
)
_NO_PICTURES = re.compile(r"is not a multimodal model|at most 0 images?\b", re.IGNORECASE)  # vLLM
_LENGTH = re.compile(
    r"(?:maximum context length|context (?:length|size|window)|configured limit of)\D{0,24}?(\d[\d,_]*)"
    r"|> (\d+) maximum",
    re.IGNORECASE,
)
_IS_TOO_LONG = re.compile(
    r"maximum context length|exceeds? .{0,32}context|prompt is too long|input tokens exceed", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Understood:
    """What a refusal says: it lacks the capability, or has a context of so many tokens (0: it is too short).

    Or it does not know the `limit` of an answer by this name.
    """

    capability: Capability | None = None
    context_length: int | None = None
    limit: str | None = None


@cache
def _lacks(names: str) -> re.Pattern[str]:
    """Return what finds that a server lacks what has these names; made for the first refusal, not at each start."""
    return re.compile("|".join(one.replace("NAME", names) for one in _SAID), re.IGNORECASE)


def understand(status: int, document: object, asked: Collection[Capability]) -> Understood | None:
    """Return what the error document of a refusal says of the server; None if nothing that is sure.

    `asked` are the capabilities that the refused request asked for.
    """
    if status not in STATUSES:
        return None
    told, text = _told(document)
    codes = (told.get("code"), told.get("type"))
    if any(code in _TOO_LONG for code in codes) or _IS_TOO_LONG.search(text):
        return Understood(context_length=_length(told, text))
    for capability in asked:
        if capability not in _NAMES:
            continue
        is_picture = capability is Capability.IMAGES and _NO_PICTURES.search(text) is not None
        if is_picture or _is_lacking(_NAMES[capability], told, text):
            return Understood(capability)
    return None


def refused_limit(status: int, document: object, body: Collection[str]) -> str | None:
    """Return the name of the limit in `body`, a refused request's, where the refusal says that no such is known.

    OpenAI's newer models know the newer name only, strict servers of others the older one.
    """
    told, text = _told(document) if status in (400, 422) else ({}, "")
    if _TOO_HIGH.search(text):
        return None
    return next((name for name in LIMITS if name in body and _is_lacking(name, told, text)), None)


def _told(document: object) -> tuple[Mapping[str, Any], str]:
    """Return an error document's fields, and the texts in it."""
    error = document.get("error", document) if isinstance(document, Mapping) else document
    return (error if isinstance(error, Mapping) else {}), " ".join(_texts(error))[:MAX_SAID]


def _is_lacking(names: str, told: Mapping[str, Any], text: str) -> bool:
    """Whether a refusal says, by its fields or in words, that the server lacks what has these names."""
    param = told.get("param")
    is_named = isinstance(param, str) and re.fullmatch(names, param, re.IGNORECASE) is not None
    return (is_named and told.get("code") in _CODES) or _lacks(names).search(text) is not None


def _length(told: Mapping[str, Any], text: str) -> int:
    """Return the tokens of the context that a refusal names, 0 if it names none that can be true."""
    stated = told.get("n_ctx")
    if isinstance(stated, int) and stated in _LENGTHS:
        return stated
    found = _LENGTH.search(text)
    number = re.sub(r"\D", "", found[1] or found[2])[:12] if found else ""
    return int(number) if number and int(number) in _LENGTHS else 0


def _texts(error: object) -> Iterator[str]:
    """Yield the texts of an error document: its message, or the details of each field."""
    match error:
        case str():
            yield error
        case {"message": str(message)}:
            yield message
        case {"message": {"detail": _} as inner}:  # Mistral
            yield from _texts(inner)
        case {"detail": detail}:
            yield detail if isinstance(detail, str) else repr(detail)[:MAX_SAID]

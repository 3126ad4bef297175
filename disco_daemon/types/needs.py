"""What a question needs beyond an answer in plain text, as its parameters say it, and the refusal of what is not there.

The parameters are OpenAI's and those of servers. This daemon hands them on unread, but for what is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

Json = Mapping[str, Any]

# Parameters whose meaning must not be lost: an endpoint either honours them or refuses, and an answer under them is
# never continued by the other side. Everything else unknown is a hint that may be ignored.
_NEEDS = frozenset(
    {
        "tools", "tool_choice", "functions", "function_call", "logprobs", "top_logprobs", "logit_bias", "modalities",
        "audio", "web_search_options",
    }
)  # fmt: skip
_NO_NEED: tuple[Any, ...] = (None, False, 0, "none", [], {}, ["text"])
# Constraints on the answer's form, by the names that servers have for them (OpenAI, vLLM, llama-server, SGLang, TGI).
# An empty schema is one, too: any JSON.
_FORMS = frozenset(
    {"response_format", "structured_outputs", "json_schema", "structural_tag", "grammar", "regex", "ebnf"}
)
_GUIDED = "guided_"  # vLLM's older names begin so: guided_json, guided_regex, guided_choice, guided_grammar
_GUIDED_HINTS = ("guided_decoding_backend", "guided_whitespace_pattern")  # how, not what
_NO_FORM: tuple[Any, ...] = (None, False, "")


def _is_need(key: str, value: Any) -> bool:
    """Whether a parameter constrains the answer."""
    if key in _NEEDS:
        return value not in _NO_NEED
    if key == "response_format":
        return value is not None and value != {"type": "text"}
    if key in _FORMS or (key.startswith(_GUIDED) and key not in _GUIDED_HINTS):
        return value not in _NO_FORM
    return False


def needs(parameters: Json) -> list[str]:
    """Parameters that constrain the answer (tools, schemas, log-probabilities …), sorted."""
    return sorted(key for key, value in parameters.items() if _is_need(key, value))


def response_format(parameters: Json) -> dict[str, Any] | None:
    """OpenAI's `response_format`, unless it is plain text; None also for what has no such shape."""
    wanted = parameters.get("response_format")
    return dict(wanted) if isinstance(wanted, Mapping) and wanted.get("type") != "text" else None


def template_args(parameters: Json) -> dict[str, Any]:
    """Arguments for the chat template, of `chat_template_kwargs` and `reasoning_effort`.

    As vLLM does (its pull request 43401): an effort of `none` means not to think, any other one to think, unless the
    client says it itself.
    """
    given, effort = parameters.get("chat_template_kwargs"), parameters.get("reasoning_effort")
    args = dict(given) if isinstance(given, Mapping) else {}
    if isinstance(effort, str):
        args = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | args
    return args


class Refusal(str):
    """Why an endpoint does not take a request; `param` is the parameter that is to blame."""

    __slots__ = ("param",)
    param: str

    def __new__(cls, message: str, param: str) -> Self:
        """A text that knows its parameter."""
        refusal = super().__new__(cls, message)
        refusal.param = param
        return refusal

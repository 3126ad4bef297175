"""What a question needs beyond an answer in plain text, as its parameters say it, and the refusal of what is not there.

The parameters are OpenAI's and those of servers; `fields` says what each is to an endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import msgspec

from .fields import Json, Treatment, asked

# The names that a JSON schema for the whole answer has: llama-server's, and vLLM's older and newer one.
_SCHEMAS = ("json_schema", "guided_json")
_UNTHINKING = ("none", False, "disabled")
# All names that a wish for thoughts, or an argument of the chat template, may have.
_BUDGETS = ("thinking_budget_tokens", "reasoning_budget_tokens", "thinking_token_budget", "thinking_budget")
_TEMPLATE_ARGS = frozenset(
    ("reasoning_effort", "reasoning", "enable_thinking", "think", "thinking", "chat_template_kwargs", *_BUDGETS)
)
LOW, MEDIUM = 4096, 16384  # tokens of a budget to think, up to which the effort is that
# The tokens of a thought by its effort (None: any number), and its share of the answer's limit, which is OpenRouter's.
_EFFORTS: dict[object, tuple[int | None, float]] = {
    "minimal": (1024, 0.1), "low": (LOW, 0.2), "medium": (MEDIUM, 0.5), "high": (None, 0.8), "xhigh": (None, 0.95),
    "max": (None, 0.95),
}  # fmt: skip


def needs(parameters: Json) -> list[str]:
    """Parameters that constrain the answer (tools, schemas, log-probabilities …), sorted.

    An endpoint either honours them or refuses, and an answer under them is never continued by the other side.
    """
    return sorted(row.name for row in asked(parameters) if row.binds)


def named(parameters: Json, *treatments: Treatment) -> list[str]:
    """Parameters that ask for something, and of which the device makes one of these, sorted."""
    return sorted(row.name for row in asked(parameters) if row.device in treatments)


def is_for_a_server(parameters: Json) -> bool:
    """Whether a server is to answer, if one can: it may know what is unknown here, and token ids may be its own."""
    return any(row.device is Treatment.AWAY or row.ids for row in asked(parameters))


def ignored(parameters: Json, *, on_device: bool, is_raw: bool) -> list[str]:
    """Parameters that ask for something that an answer does not heed, by the device too or not, sorted.

    Of a raw prompt the device renders nothing, and what this daemon reads of a chat only is of no use.
    """
    if not on_device:
        return named(parameters, Treatment.IGNORED)
    found = set(named(parameters, Treatment.IGNORED, Treatment.AWAY))
    return sorted(found.union(row.name for row in asked(parameters) if is_raw and (row.renders or row.own)))


def form_parameter(parameters: Json) -> str | None:
    """The parameter that says which form the answer is to have."""
    return next((name for name, _ in forms(parameters)), None)


def forms(parameters: Json) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the forms that the answer is to have, by the parameter that says so: as OpenAI's `response_format`.

    Beside OpenAI's there is `{"type": "choice", "choice": [...]}`: one of these texts. What has no such shape is left
    out.
    """
    wanted = parameters.get("response_format")
    if isinstance(wanted, Mapping) and wanted.get("type") != "text":
        yield "response_format", dict(wanted)
    for name in _SCHEMAS:
        if (schema := schema_of(parameters.get(name))) is not None:
            yield name, _form_of(schema)
    if choice := parameters.get("guided_choice"):
        yield "guided_choice", {"type": "choice", "choice": choice}
    if isinstance(more := parameters.get("structured_outputs"), Mapping):
        if (schema := schema_of(more.get("json"))) is not None:
            yield "structured_outputs.json", _form_of(schema)
        if more.get("json_object"):
            yield "structured_outputs.json_object", {"type": "json_object"}
        if choice := more.get("choice"):
            yield "structured_outputs.choice", {"type": "choice", "choice": choice}


def schema_of(value: object) -> Json | None:
    """Return a JSON schema, which may be given as its text; None for what is none."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError):
            return None
    return value if isinstance(value, Mapping) else None


def _form_of(schema: Json) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def response_format(parameters: Json, *, whole: bool = False) -> dict[str, Any] | None:
    """Return the form of the answer; None for plain text, and for what has no such shape.

    `whole`: it may be all that its schema allows, as `disco.whole_schema` asks.
    """
    found = next((form for _, form in forms(parameters)), None)
    return {**found, "whole": True} if found and whole else found


def template_args(parameters: Json) -> dict[str, Any]:
    """Arguments for the chat template, of all the names that clients have for the effort to think.

    As vLLM does (its pull request 43401): an effort of `none` means not to think, any other one to think, unless the
    client says it itself.
    """
    if _TEMPLATE_ARGS.isdisjoint(parameters):  # as in nearly every request
        return {}
    args: dict[str, Any] = {}
    for wish in _thinking(parameters):
        if isinstance(wish, str) and wish not in ("enabled", "disabled", "adaptive"):
            args = {"reasoning_effort": wish} | args
        args = {"enable_thinking": wish not in _UNTHINKING} | args
    if (budget := _budget(parameters)) is not None and budget >= 0:
        args["thinking_budget"] = budget
        if not budget:
            args["enable_thinking"] = False  # so that the prompt says so, where the template knows how
    return args | _given_args(parameters)


def thought_budget(parameters: Json, max_tokens: int | None) -> int | None:
    """Return how many tokens a thought may have, None for any number: as told, or by the effort that was asked for.

    With a limit of the whole answer an effort leaves some of it for what follows the thought.
    """
    if (budget := _budget(parameters)) is not None:
        return budget if budget >= 0 else None
    args = template_args(parameters)
    if args.get("enable_thinking") is False:
        return 0
    most, share = _EFFORTS.get(args.get("reasoning_effort"), (None, 1.0))
    of_limit = None if max_tokens is None or share == 1.0 else int(share * max_tokens)
    return min((n for n in (most, of_limit) if n is not None), default=None)


def _budget(parameters: Json) -> int | None:
    """Return the tokens that the client gives a thought by any name; negative for any number of them."""
    reasoning, thinking = parameters.get("reasoning"), parameters.get("thinking")
    every = (
        *(parameters.get(name) for name in _BUDGETS),
        reasoning.get("max_tokens") if isinstance(reasoning, Mapping) else None,
        thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None,
        _given_args(parameters).get("thinking_budget"),
    )
    return next((one for one in every if type(one) is int), None)


def _given_args(parameters: Json) -> dict[str, Any]:
    """Return what the client says to the chat template by that name."""
    given = parameters.get("chat_template_kwargs")
    return dict(given) if isinstance(given, Mapping) else {}


def _thinking(parameters: Json) -> Iterable[str | bool]:
    """Yield what the client says of thinking: whether to, or with which effort; what goes before comes first."""
    reasoning, thinking = parameters.get("reasoning"), parameters.get("thinking")
    nested = reasoning if isinstance(reasoning, Mapping) else {}
    every = (
        parameters.get("reasoning_effort"),
        nested.get("effort"),
        nested.get("enabled"),
        parameters.get("enable_thinking"),
        parameters.get("think"),
        thinking.get("type") if isinstance(thinking, Mapping) else None,
    )
    return [wish for wish in every if isinstance(wish, str | bool)]


class WishError(ValueError):
    """A field has a value that cannot be meant; `param` is its name."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class Refusal(str):
    """Why an endpoint does not take a request; `param` is the parameter that is to blame."""

    __slots__ = ("param",)
    param: str

    def __new__(cls, message: str, param: str) -> Self:
        """A text that knows its parameter."""
        refusal = super().__new__(cls, message)
        refusal.param = param
        return refusal

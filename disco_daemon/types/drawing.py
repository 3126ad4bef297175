"""How tokens are drawn beyond OpenAI's own parameters, by the names of llama-server and vLLM, and the types of fields.

`Wishes` has the fields of a request that the device reads, as clients write them; `Drawing` is what they mean, and
travels to where tokens are drawn. Bounds are those that servers have, as far as there are any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .fields import Json
from .likelihood import MAX_TOP
from .needs import WishError as WishError
from .needs import forms, schema_of
from .tools import check_tools

MAX_COUNT = 2**31 - 1  # llama.cpp's integers have 32 bits
MAX_IDS = 1024  # token ids in one list: each is looked up for every token; OpenAI allows 300 biases
MAX_BIAS = 100.0  # OpenAI's; beyond it a token is banned or forced in any case
MAX_INDENT = 1024  # spaces and tabs; code that is indented further is none
MAX_BREAKERS = 16  # sequence breakers of DRY; llama.cpp has 4, and looks each up in the vocabulary, in 3 ms
MAX_BREAKER = 40  # characters, as llama.cpp
MAX_CHOICES = 8  # answers to one request
ALL = -1  # tokens: all there are
REPEAT_WINDOW = 64  # tokens that `repeat_penalty` looks back on, as in llama.cpp
BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Window = Annotated[int, Meta(ge=ALL, le=MAX_COUNT)]
Factor = Annotated[float, Meta(ge=0.01, le=100)]  # logits are divided by it: by next to nothing, all are infinite
Indent = Annotated[int, Meta(ge=0, le=MAX_INDENT)]
Strength = Annotated[float, Meta(ge=0, le=100)]
Base = Annotated[float, Meta(ge=1, le=100)]
Top = Annotated[int, Meta(ge=0, le=MAX_TOP)]
Ids = Annotated[tuple[Count, ...], Meta(max_length=MAX_IDS)]
Bias = tuple[Count, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]]
Breaker = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER)]
Breakers = Annotated[tuple[Breaker, ...], Meta(max_length=MAX_BREAKERS)]
Choice = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


class Drawing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn, besides temperature, `top_p`, seed, and OpenAI's penalties; None: as usual here.

    The repeat penalty is for the last `repeat_last_n` tokens, prompt and answer, and so is DRY's. `min_tokens` count as
    `max_tokens` do. A token of `stop_token_ids` ends the answer, and is not shown. `logit_bias` is added to logits. An
    answer ends at a line that is indented by fewer than `n_indent` spaces and tabs, and with the line that goes on for
    longer than `t_max_predict_ms`, ms from its first token on (not positive: never).
    """

    top_k: Window | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repeat_penalty: Factor | None = None
    repeat_last_n: Window | None = None
    xtc_probability: Share = 0.0
    xtc_threshold: Share = 0.1
    dry_multiplier: Strength = 0.0
    dry_base: Base = 1.75
    dry_allowed_length: Count = 2
    dry_penalty_last_n: Window = ALL
    dry_sequence_breakers: Breakers = BREAKERS
    mirostat: Literal[0, 1, 2] = 0
    mirostat_tau: Strength = 5.0
    mirostat_eta: Share = 0.1
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: Ids = ()
    logit_bias: Annotated[tuple[Bias, ...], Meta(max_length=MAX_IDS)] = ()
    n_indent: Indent = 0
    t_max_predict_ms: Window = 0

    @property
    def repeats(self) -> bool:
        """Whether repetitions of the prompt's tokens count, so that these have to be known."""
        return self.penalizes or bool(self.dry_multiplier)

    @property
    def penalizes(self) -> bool:
        """Whether there is a repeat penalty."""
        return self.repeat_penalty not in (None, 1.0) and self.repeat_last_n != 0

    @property
    def goes_on(self) -> bool:
        """Whether the model may not end the answer where it would, which no form can keep to."""
        return self.ignore_eos or self.min_tokens > 0

    def after(self, n_tokens: int) -> Drawing:
        """Return it for the rest of an answer that has `n_tokens` already."""
        if not self.min_tokens:
            return self
        return msgspec.structs.replace(self, min_tokens=max(0, self.min_tokens - n_tokens))


AS_USUAL = Drawing()


class FormWish(msgspec.Struct):
    """OpenAI's `response_format`; servers have more types than OpenAI."""

    type: str


class ThinkingWish(msgspec.Struct):
    """Anthropic's and DeepSeek's way to ask for thoughts."""

    type: Literal["enabled", "disabled", "adaptive"] | None = None
    budget_tokens: Count | None = None


class ReasoningWish(msgspec.Struct):
    """OpenRouter's way to ask for thoughts."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: Count | None = None


class OutputWish(msgspec.Struct):
    """The forms of newer vLLMs."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    choice: Choice | None = None


class Wishes(msgspec.Struct):
    """The fields of a request that the device reads besides OpenAI's common ones: their types and bounds."""

    top_k: Window | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    typ_p: Share | None = None
    repeat_penalty: Factor | None = None
    repetition_penalty: Factor | None = None
    repeat_last_n: Window | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    dry_multiplier: Strength | None = None
    dry_base: Base | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: Window | None = None
    dry_sequence_breakers: Breakers | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Strength | None = None
    mirostat_eta: Share | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    logit_bias: dict[str, float | bool] | None = None
    n_indent: Indent | None = None
    t_max_predict_ms: Window | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    response_format: FormWish | None = None
    json_schema: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_choice: Choice | None = None
    structured_outputs: OutputWish | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    logprobs: bool | Top | None = None
    top_logprobs: Top | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    think: bool | str | None = None
    reasoning: ReasoningWish | None = None
    thinking: ThinkingWish | None = None
    thinking_budget_tokens: Window | None = None
    reasoning_budget_tokens: Window | None = None
    thinking_token_budget: Window | None = None
    thinking_budget: Window | None = None


_SAME_NAME = (
    "top_k", "min_p", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers", "mirostat", "mirostat_tau", "mirostat_eta", "min_tokens",
    "ignore_eos", "stop_token_ids", "n_indent", "t_max_predict_ms",
)  # fmt: skip


def drawing_of(parameters: Json) -> Drawing:
    """Return what the parameters of a request say of drawing tokens.

    Raises WishError, or msgspec's ValidationError, for values that cannot be meant, of any field that the device reads.
    """
    if not parameters:  # most requests
        return AS_USUAL
    wishes = msgspec.convert(dict(parameters), Wishes)
    _check_forms(parameters, wishes)
    if wishes.top_logprobs and wishes.logprobs in (None, False):
        raise WishError("'top_logprobs' needs 'logprobs': set it to true.", "top_logprobs")
    check_tools(parameters)
    found: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(wishes, name)) is not None}
    found["typical_p"] = _one(wishes, "typical_p", "typ_p")
    found["repeat_penalty"] = _one(wishes, "repeat_penalty", "repetition_penalty")
    window = REPEAT_WINDOW if wishes.repeat_penalty is not None else ALL
    if wishes.repeat_last_n is not None:
        found["repeat_last_n"] = wishes.repeat_last_n
    elif found["repeat_penalty"] is not None:
        found["repeat_last_n"] = window
    found["logit_bias"] = tuple(_biases(wishes.logit_bias or {}))
    return Drawing(**found)


def _one(wishes: Wishes, name: str, other: str) -> float | None:
    """Return the value of a field with two names. Raises WishError if they say different things."""
    first, second = getattr(wishes, name), getattr(wishes, other)
    if first is not None and second is not None and first != second:
        msg = f"'{name}' and '{other}' are the same thing here, and say {first:g} and {second:g}: give one of them."
        raise WishError(msg, other)
    found: float | None = first if first is not None else second
    return found


def _check_forms(parameters: Json, wishes: Wishes) -> None:
    """Raise WishError for two forms of one answer, and for a schema as text that is none."""
    more = wishes.structured_outputs.json if wishes.structured_outputs is not None else None
    for name, schema in (("guided_json", wishes.guided_json), ("structured_outputs.json", more)):
        if isinstance(schema, str) and schema_of(schema) is None:
            msg = f"Invalid value for '{name}': it is no JSON schema. Give an object, or the text of one."
            raise WishError(msg, name)
    every = [name for name, _ in forms(parameters)]
    if len(every) > 1:
        msg = f"An answer has one form, and '{every[0]}' and '{every[1]}' ask for two: give one of them."
        raise WishError(msg, every[1])


def _biases(given: dict[str, float | bool]) -> Iterator[tuple[int, float]]:
    """Yield token ids with what is added to their logits; `false` bans a token, as in llama-server."""
    if len(given) > MAX_IDS:
        raise WishError(f"'logit_bias' has {len(given)} tokens; at most {MAX_IDS} are possible.", "logit_bias")
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and int(key) <= MAX_COUNT) or value is True:
            msg = f"Invalid value for 'logit_bias': {key[:20]!r}: {value}; expected token ids with numbers."
            raise WishError(msg, "logit_bias")
        yield int(key), -MAX_BIAS if value is False else min(MAX_BIAS, max(-MAX_BIAS, float(value)))

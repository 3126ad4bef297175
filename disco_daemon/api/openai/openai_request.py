"""OpenAI's wire format: requests become checked structures and endpoint-neutral requests. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...errors import RequestError
from ...types import (
    BOTH,
    Delivery,
    Drawing,
    EarlierAnswer,
    GenerationRequest,
    Infill,
    NextAct,
    RawPrompt,
    Sampling,
    Side,
    SplitMode,
    SplitWish,
    n_choices,
)
from ...types.drawing import WishError, Wishes, drawing_of
from ..http.bodies import convert, invalid
from .chat_messages import begun_text, check_message, flattened, has_text_only

MAX_INT = 2**63 - 1  # of a signed number with 64 bits, as the engine's wire format has them
MAX_TOKEN_ID = 2**31 - 1  # llama.cpp's; the engine knows how many there really are
MAX_STOP = 4  # stop sequences, as OpenAI
MAX_COST_USD = 1e6  # of one answer; more is a mistake
MAX_ID = 64  # characters of a request's name; ours have 20
MAX_PACE_TPS = 1000.0  # token/s; faster than any reader and any model here
COMPLETION_TOKENS = 16  # OpenAI's default for text completions
NO_LIMIT = -1  # of max_tokens, as llama-server has it

Limit = Annotated[int, Meta(ge=NO_LIMIT, le=MAX_INT)]


class DiscoOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The `disco` object of a request (docs/explain/design.md#interfaces); `pace_tps` in token/s.

    With `sides`, each chunk of a stream names the endpoint that made it. On a device over two machines
    `split_mode` says who decides a token, and `theta` how sure this one must be to do so. `redo_of`, `regenerates` and
    `edits` name the request of an earlier answer that would not do.
    """

    route: Literal["device", "server", "prefer-device", "prefer-server"] | None = None
    private: bool = False
    delivery: Literal["reserve", "paced", "off"] | None = None
    pace_tps: Annotated[float, Meta(gt=0, le=MAX_PACE_TPS)] | None = None
    sides: bool = False
    max_cost_usd: Annotated[float, Meta(ge=0, le=MAX_COST_USD)] | None = None
    split_mode: SplitMode | None = None
    theta: Annotated[float, Meta(gt=0, le=1)] | None = None
    whole_schema: bool = False
    stop_repetition: bool | None = None
    thinking_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    redo_of: Annotated[str, Meta(min_length=1, max_length=MAX_ID)] | None = None
    regenerates: Annotated[str, Meta(min_length=1, max_length=MAX_ID)] | None = None
    edits: Annotated[str, Meta(min_length=1, max_length=MAX_ID)] | None = None


class AnswerRequest(msgspec.Struct, kw_only=True):
    """The fields that chats and text completions share."""

    model: str
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    max_tokens: Limit | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None
    stop: str | list[str] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    return_token_ids: bool | None = False
    disco: DiscoOptions | UnsetType = UNSET

    @property
    def options(self) -> DiscoOptions:
        """The `disco` object, or its defaults."""
        return DiscoOptions() if self.disco is UNSET else self.disco

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage block."""
        return bool((self.stream_options or {}).get("include_usage"))


class ChatRequest(AnswerRequest, kw_only=True):
    """The fields of a chat completion that this daemon reads; the rest travels in `extra`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Limit | None = None
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = True


class CompletionRequest(AnswerRequest, kw_only=True):
    """The same of a text completion; `echo` and `best_of` are accepted only with values that ask for nothing.

    With a `suffix` the answer is what stands between `prompt` and that. Without `max_tokens` an answer has
    COMPLETION_TOKENS at most, with null it has no limit.
    """

    prompt: Any
    max_tokens: Limit | None = COMPLETION_TOKENS
    suffix: str | None = None
    echo: Any = None
    best_of: Any = None


_A = TypeVar("_A", bound=AnswerRequest)
_PREFER = "prefer-"
# Parameters of text completions that no endpoint here honours, with the values that ask for nothing.
_TRIVIAL: dict[str, tuple[Any, ...]] = {
    "echo": (None, False),
    "best_of": (None, 1),
}


# --- in -----------------------------------------------------------------------------------------------------------


def parse_chat(raw: dict[str, Any]) -> tuple[ChatRequest, dict[str, Any]]:
    """Check a chat; return it with the parameters that a server gets as they are. Raises RequestError."""
    request, extra = read(raw, ChatRequest)
    for index, message in enumerate(request.messages):
        check_message(index, message)
    if request.continue_final_message and request.messages[-1]["role"] != "assistant":
        msg = "'continue_final_message' needs a last message of the assistant, which is to be continued."
        raise RequestError(msg, param="continue_final_message", code="invalid_value")
    if request.add_generation_prompt is False and not request.continue_final_message:
        extra["add_generation_prompt"] = False
    return request, extra


def parse_completion(raw: dict[str, Any]) -> tuple[CompletionRequest, dict[str, Any]]:
    """Check a text completion, as `parse_chat`. Raises RequestError."""
    request, extra = read(raw, CompletionRequest)
    for name, trivial in _TRIVIAL.items():
        value = getattr(request, name)
        if not any(type(value) is type(nothing) and value == nothing for nothing in trivial):
            raise RequestError(f"'{name}' is not supported for text completions.", param=name, code="unsupported_value")
    return request, extra


def read(raw: dict[str, Any], kind: type[_A]) -> tuple[_A, dict[str, Any]]:
    """Check a request; return it with the fields that it does not have. Raises RequestError."""
    request = convert(raw, kind)
    if len(_stop(request)) > MAX_STOP:
        raise RequestError(f"At most {MAX_STOP} stop sequences are supported, got {len(_stop(request))}.", param="stop")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(request, name, None) == 0:
            msg = f"'{name}' must be at least 1, or {NO_LIMIT} for no limit."
            raise RequestError(msg, param=name, code="invalid_value")
    own = kind.__struct_fields__
    return request, {k: v for k, v in raw.items() if k not in own}


def _drawing(extra: dict[str, Any], max_tokens: int | None) -> Drawing:
    """Return how tokens are drawn, and check all fields beside OpenAI's common ones. Raises RequestError."""
    try:
        drawing = drawing_of(extra)
    except WishError as e:
        raise RequestError(str(e), param=e.param, code="invalid_value") from e
    except msgspec.ValidationError as e:
        raise invalid(e, Wishes) from e
    if max_tokens is not None and drawing.min_tokens > max_tokens:
        msg = f"'min_tokens' is {drawing.min_tokens}, more than the limit of {max_tokens} tokens."
        raise RequestError(msg, param="min_tokens", code="invalid_value")
    return drawing


def to_generation(
    request: ChatRequest, extra: dict[str, Any], request_id: str, allowed: frozenset[Side]
) -> GenerationRequest:
    """Return the endpoint-neutral form of a chat."""
    limit = _limit(request.max_completion_tokens, request.max_tokens)
    messages = [flattened(m) for m in request.messages]
    last = messages[-1]
    answer_so_far = ""
    if last["role"] == "assistant" and (request.continue_final_message or last.get("prefix") is True):
        answer_so_far = begun_text(messages.pop())
        if not messages:
            raise RequestError("There is no message before the one to continue.", param="messages")
        if n_choices(extra) > 1:
            raise RequestError("An answer that is begun is gone on with once: 'n' must be 1.", param="n")
    return _generation(
        request,
        extra,
        request_id,
        limit,
        allowed,
        messages=tuple(messages),
        text_only=all(has_text_only(m) for m in messages),
        max_tokens_key="max_completion_tokens" if request.max_completion_tokens else "max_tokens",
        answer_so_far=answer_so_far,
    )


def to_raw_generation(
    request: CompletionRequest, extra: dict[str, Any], request_id: str, allowed: frozenset[Side]
) -> GenerationRequest:
    """Return the endpoint-neutral form of a text completion."""
    return raw_generation(request, _raw_prompt(request), extra, request_id, allowed)


def raw_generation(
    request: AnswerRequest, prompt: RawPrompt, extra: dict[str, Any], request_id: str, allowed: frozenset[Side]
) -> GenerationRequest:
    """Return the endpoint-neutral form of a request with a raw prompt, for the device, whose token ids it may use.

    A gap may be filled by a server that is known to do so.
    """
    sides = BOTH if isinstance(prompt, Infill) else frozenset({Side.DEVICE})
    if not sides & allowed:
        msg = "Text completions are served by the device only: use the model 'disco' or 'disco/device'."
        raise RequestError(msg, param="model", code="unsupported_value")
    limit = _limit(request.max_tokens)
    return _generation(request, extra, request_id, limit, sides & allowed, messages=(), prompt=prompt)


def _generation(
    request: AnswerRequest,
    extra: dict[str, Any],
    request_id: str,
    limit: int | None,
    allowed: frozenset[Side],
    **own: Any,
) -> GenerationRequest:
    """Return a request with what chats and raw prompts have alike, and its `own` fields. Raises RequestError."""
    options = request.options
    return GenerationRequest(
        request_id=request_id,
        sampling=_sampling(request, limit),
        extra=extra,
        drawing=_drawing(extra, limit),
        allowed=_allowed(options, allowed),
        delivery=_delivery(request),
        pace_tps=options.pace_tps,
        private=options.private,
        split=SplitWish(options.split_mode, options.theta),
        prefers=_preferred(options),
        max_cost_usd=options.max_cost_usd,
        whole_schema=options.whole_schema,
        stop_repetition=options.stop_repetition,
        thinking_tokens=options.thinking_tokens,
        earlier=_earlier(options),
        **own,
    )


def _preferred(options: DiscoOptions) -> Side | None:
    """Return the side that is to begin alone, the other one being there if it fails."""
    route = options.route or ("" if options.redo_of is None else f"{_PREFER}{Side.SERVER}")
    return Side(route.removeprefix(_PREFER)) if route.startswith(_PREFER) else None


def _earlier(options: DiscoOptions) -> EarlierAnswer | None:
    """Return the answer in whose place this one comes, and why. Raises RequestError for more than one."""
    told = {NextAct.REDONE: options.redo_of, NextAct.REGENERATED: options.regenerates, NextAct.EDITED: options.edits}
    found = [EarlierAnswer(request_id, act) for act, request_id in told.items() if request_id is not None]
    if len(found) > 1:
        raise RequestError("Give one of 'redo_of', 'regenerates' and 'edits', not several.", param="disco")
    return found[0] if found else None


def _limit(*told: int | None) -> int | None:
    """Return the first limit that is told; None for no limit."""
    found = next((n for n in told if n is not None), None)
    return None if found == NO_LIMIT else found


def _allowed(options: DiscoOptions, allowed: frozenset[Side]) -> frozenset[Side]:
    if options.route is not None and _preferred(options) is None:
        allowed &= {Side(options.route)}
    if options.private or options.split_mode in ("confident", "alone"):
        allowed &= {Side.DEVICE}
    if not allowed:
        raise RequestError(
            "'model', 'disco.route', 'disco.private' and 'disco.split_mode' contradict each other.", param="disco"
        )
    return allowed


def _delivery(request: AnswerRequest) -> Delivery | None:
    """Return how the tokens are released; an answer in one body needs no pace."""
    if not request.stream:
        return Delivery.OFF
    wish = request.options.delivery
    return None if wish is None else Delivery(wish)


def _stop(request: AnswerRequest) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def _sampling(request: AnswerRequest, max_tokens: int | None) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop=_stop(request),
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
    )


def _raw_prompt(request: CompletionRequest) -> RawPrompt:
    """Return the one prompt: text, token ids, or a gap before a suffix. Raises RequestError."""
    if not request.suffix:
        return _prompt(request.prompt)
    if not isinstance(request.prompt, str):
        msg = "Invalid value for 'prompt': with a 'suffix' it has to be a text."
        raise RequestError(msg, param="prompt", code="invalid_type")
    return Infill(prefix=request.prompt, suffix=request.suffix)


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    """Return the one prompt: text, or token ids. Raises RequestError."""
    if isinstance(prompt, list) and prompt and all(isinstance(p, str | list) for p in prompt):
        if len(prompt) > 1:
            msg = f"Only one prompt a request is supported, got {len(prompt)}."
            raise RequestError(msg, param="prompt", code="unsupported_value")
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i <= MAX_TOKEN_ID for i in prompt):
        return tuple(prompt)
    msg = "Invalid value for 'prompt': expected text or an array of token ids, and not an empty one."
    raise RequestError(msg, param="prompt", code="invalid_type")

"""The frozen values that travel between the rooms. Nothing here does I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

import msgspec

Json = Mapping[str, Any]


class Side(StrEnum):
    """One of the two endpoints."""

    DEVICE = "device"
    SERVER = "server"

    @property
    def other(self) -> Side:
        """The opposite endpoint."""
        return Side.SERVER if self is Side.DEVICE else Side.DEVICE


BOTH = frozenset(Side)


class Delivery(StrEnum):
    """How tokens are released to the reader (docs/design.md#delivery)."""

    RESERVE = "reserve"  # at once, but for a few held back while a handoff is possible
    PACED = "paced"  # at most as fast as they are read
    OFF = "off"  # at once


class Continuation(StrEnum):
    """How well an endpoint continues a partial answer."""

    NONE = "none"
    UNTRIED = "untried"  # nobody knows: tried when all else has failed, checked at the seam, never for money
    GUARDED = "guarded"  # it should, but may start the answer again: its text is checked at the seam
    EXACT = "exact"


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


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `None` means "the endpoint's default"; `max_tokens` in tokens."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One question, endpoint-neutral.

    `messages` are OpenAI chat messages; `text_only` says that every content is plain text. `extra` holds OpenAI
    parameters that this daemon hands to a server unread (tools, response_format, …). `answer_so_far` is what the
    reader already has: an endpoint must continue right after it, never repeat it.
    `answer_ids` are its token ids by the device's tokenizer, if known: then nothing is tokenized again.
    `max_tokens_key` is the name the client used for the limit, since some servers know only one of the two.
    `prompt`, of a raw completion, stands in place of `messages`: text, or token ids of the device's model.
    `delivery` and `pace_tps` are what the client asks for; `None` is the configured default. The reader expects the
    first token after `expected_ttft_s`, s. An endpoint is told all three.
    `adapter` is the name of a LoRA adapter of the device; no other endpoint is allowed then. What is `private` stays on
    this machine, and of its keys and values nothing goes to disk.
    """

    request_id: str
    messages: tuple[Json, ...]
    sampling: Sampling = Sampling()
    extra: Json = field(default_factory=dict)
    allowed: frozenset[Side] = BOTH
    text_only: bool = True
    max_tokens_key: str = "max_tokens"
    answer_so_far: str = ""
    answer_ids: tuple[int, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    delivery: Delivery | None = None
    pace_tps: float | None = None
    expected_ttft_s: float | None = None
    adapter: str = ""
    private: bool = False

    @property
    def response_format(self) -> dict[str, Any] | None:
        """OpenAI's `response_format`, unless it is plain text; None also for what has no such shape."""
        wanted = self.extra.get("response_format")
        return dict(wanted) if isinstance(wanted, Mapping) and wanted.get("type") != "text" else None

    @property
    def template_args(self) -> dict[str, Any]:
        """What the client tells the chat template, of `chat_template_kwargs` and `reasoning_effort`.

        As vLLM does (its pull request 43401): an effort of `none` means not to think, any other one to think, unless
        the client says it itself.
        """
        given, effort = self.extra.get("chat_template_kwargs"), self.extra.get("reasoning_effort")
        args = dict(given) if isinstance(given, Mapping) else {}
        if isinstance(effort, str):
            args = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | args
        return args

    @property
    def needs(self) -> list[str]:
        """Parameters that constrain the answer (tools, schemas, log-probabilities …), sorted."""
        return sorted(key for key, value in self.extra.items() if _is_need(key, value))

    @property
    def n_chars(self) -> int:
        """Characters of text in the prompt and the answer so far, for an estimate while no tokenizer is loaded."""
        raw = (len(self.prompt) if isinstance(self.prompt, str) else 0) + len(self.answer_so_far)
        return raw + sum(len(m["content"]) for m in self.messages if isinstance(m.get("content"), str))


class Refusal(str):
    """Why an endpoint does not take a request; `param` is the parameter that is to blame."""

    __slots__ = ("param",)
    param: str

    def __new__(cls, message: str, param: str) -> Self:
        """A text that knows its parameter."""
        refusal = super().__new__(cls, message)
        refusal.param = param
        return refusal


@dataclass(frozen=True, slots=True)
class Plan:
    """Start delay of each endpoint, s; `inf` = not started unless the other one fails."""

    device_s: float
    server_s: float

    def __post_init__(self) -> None:
        if not (self.device_s >= 0 and self.server_s >= 0):
            msg = f"start delays must be >= 0: {self}"
            raise ValueError(msg)

    def delay(self, side: Side) -> float:
        """Start delay of one side, s."""
        return self.device_s if side is Side.DEVICE else self.server_s

    def restricted(self, available: frozenset[Side]) -> Plan:
        """The same plan when only `available` can serve: one alone starts at once, for it has nobody to wait for."""
        delays = {side: self.delay(side) if side in available else math.inf for side in Side}
        if len(available) == 1 or (available and all(math.isinf(d) for d in delays.values())):
            delays[next(side for side in Side if side in available)] = 0.0
        return Plan(delays[Side.DEVICE], delays[Side.SERVER])


@dataclass(frozen=True, slots=True)
class Readiness:
    """What an endpoint would meet a request with right now.

    `load_s` until it can begin (a model that is still loading), `n_busy` answers it is working on already, `down_s`
    for which it asks not to be asked at all (a rate limit's Retry-After). `prefill_tps` is what it measured, token/s.
    `cached` tokens of the prompt in question are in its KV cache. Prompt and answer together may have `n_ctx` tokens;
    None where that is not known.
    """

    load_s: float = 0.0
    n_busy: int = 0
    down_s: float = 0.0
    prefill_tps: float | None = None
    cached: int = 0
    n_ctx: int | None = None


@dataclass(frozen=True, slots=True)
class PromptLength:
    """Length of a rendered prompt, tokens; `cached` of them are in the device's KV cache already.

    Not `counted`: estimated, since nobody who could count is there.
    """

    tokens: int
    cached: int = 0
    counted: bool = True


class Token(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer. `text` holds whole code points; `delta` holds other OpenAI delta fields (tool calls …).

    `ids` are the token ids in the vocabulary of the endpoint that made it, where they are known and where the text up
    to here is exactly theirs; a piece in the middle of something has none, and the next one carries all since.

    Tokens stay as long as their answer, hundreds of thousands with many readers, and can be in no cycle: the garbage
    collector does not walk them.
    """

    text: str
    n_tokens: int = 1
    delta: Json | None = None
    logprobs: Json | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Embedding:
    """What a text of `n_tokens` means: little-endian float32 numbers, of length 1; it took `busy_s` to compute, s."""

    vector: bytes
    n_tokens: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A held answer has prefilled all it was given, and waits for more or for the word to go."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The regular end of an answer. `reason` as in OpenAI's `finish_reason`.

    `full`: nobody wanted an end there, the endpoint's context has no room for more.
    """

    reason: str
    full: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Order: go back to the end of what was given, keep its prefill, and wait; tokens made so far are thrown away."""


@dataclass(frozen=True, slots=True)
class Append:
    """Order: add answer text that came from elsewhere, and its token ids where known; with `go` generate from there."""

    text: str
    ids: tuple[int, ...] = ()
    go: bool = False


@dataclass(frozen=True, slots=True)
class Pace:
    """Order: the reader takes `pace_tps` token/s from now on; None: as fast as they come."""

    pace_tps: float | None


Order = Hold | Append | Pace  # from the conductor to an answer that an endpoint works on


@dataclass(frozen=True, slots=True)
class Paused:
    """The endpoint's own scheduler lets the answer wait (`paused`), or go on again: meanwhile it says nothing."""

    paused: bool


@dataclass(slots=True)
class Usage:
    """What one endpoint really processed for one answer; filled in by the endpoint while it runs.

    `prompt_tokens` and `completion_tokens` are counts, `busy_s` is compute time of the device in s. `cached_tokens` of
    the prompt were in the endpoint's cache and not processed; they are none of `prompt_tokens`. Of the completion,
    `reasoning_tokens` were thoughts, told or hidden. `told`: the completion is counted by the endpoint itself, all of
    it; else it is what its text tells. `load_s` is how long it had to wait for its model.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    busy_s: float = 0.0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    told: bool = False
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one start of one endpoint went. Times in s; `ttft_s` counts from that start.

    `censored` means that no first token was seen: the true TTFT is only known to exceed `ttft_s`. It waited `load_s`
    for its model, and met `n_busy` other answers. `continued`: it went on with an answer begun elsewhere. `disturbed`:
    this machine slept or this process stood still meanwhile, so the times say nothing about it. `unseen_tokens` a
    server may have made, and billed, after it was closed: an estimate. `bill_usd` is what the server bills, $,
    `energy_j` what this machine spent, J.
    """

    side: Side
    model: str
    started_s: float
    ttft_s: float
    censored: bool
    usage: Usage
    error: str | None = None
    load_s: float = 0.0
    n_busy: int = 0
    continued: bool = False
    disturbed: bool = False
    unseen_tokens: int = 0
    bill_usd: float = 0.0
    energy_j: float = 0.0


@dataclass(frozen=True, slots=True)
class HandoffRecord:
    """One move of a running answer, done or dropped.

    `at` tokens and `at_char` characters of the answer are from before the target took over (or, dropped, from before
    it was begun); `reason` is `cost`, `failure`, `stall`, or `context` where the source's was full. `took_s` is from
    the decision to the target's first joined token; `overlap` tokens of the source were thrown away. `dropped` says
    why it did not happen: the source went on.
    """

    at: int
    source: Side
    target: Side
    reason: str
    took_s: float
    overlap: int = 0
    dropped: str | None = None
    at_char: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """How a delivered answer was to read: Andes' QoE in [0, 1], the largest gap and TBT quantiles in s.

    `stalled` counts the tokens that came after the reader had digested all before them, the first one aside. `ttlt_s`
    is the end of digestion, from the request on.
    """

    qoe: float
    ttlt_s: float
    largest_gap_s: float
    stalled: int
    tbt_p50_s: float
    tbt_p99_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished answer, the input of history, ledger, estimators and metrics.

    `arrivals_s` is when each token was shown, by the clock of the daemon, s; the history does not keep it.
    """

    request_id: str
    created: float
    model: str
    policy: str
    plan: Plan
    prompt_tokens: int
    winner: Side | None
    finish_reason: str | None
    error: str | None
    ttft_s: float | None
    duration_s: float
    handoffs: int
    tokens: Mapping[Side, int]
    attempts: tuple[Attempt, ...]
    cost_usd: float
    energy_j: float
    prompt: str | None = None
    answer: str | None = None
    moves: tuple[HandoffRecord, ...] = ()
    reading: Reading | None = None
    delivery: Delivery = Delivery.RESERVE
    arrivals_s: Sequence[float] = ()

    @property
    def server_usd(self) -> float:
        """What the server bills for it, $."""
        return math.fsum(a.bill_usd for a in self.attempts)

    @property
    def billed(self) -> tuple[int, int]:
        """Prompt and answer tokens as the endpoints count them: OpenAI's `usage`."""
        used = next((a.usage for a in self.attempts if a.side is self.winner), Usage())
        return used.prompt_tokens + used.cached_tokens or self.prompt_tokens, sum(self.tokens.values())

    @property
    def cached_tokens(self) -> int:
        """Of the billed prompt, the tokens that were in the device's KV cache."""
        return next((a.usage.cached_tokens for a in self.attempts if a.side is self.winner), 0)

    @property
    def reasoning_tokens(self) -> int:
        """Of the billed answer, the tokens that were thoughts."""
        return next((a.usage.reasoning_tokens for a in self.attempts if a.side is self.winner), 0)

    def _named_attempts(self) -> list[tuple[str, Attempt]]:
        """Attempts as `device`, `server`; later ones of the same side as `device#2` and so on."""
        seen: dict[Side, int] = {}
        named = []
        for attempt in self.attempts:
            n = seen[attempt.side] = seen.get(attempt.side, 0) + 1
            named.append((attempt.side.value if n == 1 else f"{attempt.side}#{n}", attempt))
        return named

    def to_json(self) -> dict[str, Any]:
        """The `disco` object of the last chunk (docs/design.md#interfaces)."""
        return {
            "request_id": self.request_id,
            "ttft_s": self.ttft_s,
            "winner": self.winner,
            "plan": {"device_s": finite(self.plan.device_s), "server_s": finite(self.plan.server_s)},
            "prompt_tokens": self.prompt_tokens,
            "endpoints": {
                name: {
                    "model": a.model,
                    "started_s": round(a.started_s, 6),
                    "ttft_s": round(a.ttft_s, 6),
                    "censored": a.censored,
                    "prompt_tokens": a.usage.prompt_tokens,
                    "cached_tokens": a.usage.cached_tokens,
                    "completion_tokens": a.usage.completion_tokens,
                    "unseen_tokens": a.unseen_tokens,
                    "bill_usd": a.bill_usd,
                    "energy_j": a.energy_j,
                    "error": a.error,
                }
                for name, a in self._named_attempts()
            },
            "tokens": {side.value: self.tokens.get(side, 0) for side in Side},
            "handoffs": self.handoffs,
            "moves": [asdict(move) for move in self.moves],
            "cost_usd": self.cost_usd,
            "server_usd": self.server_usd,
            "energy_j": self.energy_j,
            "delivery": self.delivery.value,
            "qoe": None if self.reading is None else self.reading.qoe,
            "reading": None if self.reading is None else asdict(self.reading),
        }


def finite(x: float) -> float | None:
    """`x`, or None where it is infinite: JSON has no infinity."""
    return x if math.isfinite(x) else None

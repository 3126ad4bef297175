"""The question: what is to be answered, by which sides, and how the tokens are drawn and delivered."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .caller import OWNER, Caller
from .content import text_of
from .drawing import AS_USUAL, Drawing
from .fields import Json, Treatment
from .infill import Infill, RawPrompt, n_chars_of
from .needs import form_parameter, named, needs, template_args, thought_budget
from .split import AS_SET, SplitWish


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
    """How tokens are released to the reader (docs/explain/design.md#delivery)."""

    RESERVE = "reserve"  # at once, but for a few held back while a handoff is possible
    PACED = "paced"  # at most as fast as they are read
    OFF = "off"  # at once


class Continuation(StrEnum):
    """How well an endpoint continues a partial answer."""

    NONE = "none"
    UNTRIED = "untried"  # nobody knows: tried when all else has failed, checked at the seam, never for money
    GUARDED = "guarded"  # it should, but may start the answer again: its text is checked at the seam
    EXACT = "exact"


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


class NextAct(StrEnum):
    """What the reader of an answer did next, where that says that the answer would not do."""

    REDONE = "redone"  # asked the server for the same
    REGENERATED = "regenerated"  # asked for the same once more
    EDITED = "edited"  # changed the question
    OUTDONE = "outdone"  # preferred another model's answer


@dataclass(frozen=True, slots=True)
class EarlierAnswer:
    """An answer, by the id of its request, and what its reader did in its place."""

    request_id: str
    act: NextAct


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One question, endpoint-neutral.

    `messages` are OpenAI chat messages; `text_only` says that every content is plain text. A server gets `extra` as it
    is (tools, response_format, …); `drawing` is what that says of drawing tokens, for the device (`types.fields`). An
    endpoint must continue right after `answer_so_far`, which the reader has; `answer_ids` are its ids by the device's
    tokenizer, if known. `max_tokens_key` is the client's name for the limit: some servers know only one. `prompt` is a
    raw one in place of `messages`. Of `delivery` and `pace_tps` `None` is the configured default; the first token is
    expected after `expected_ttft_s`, s, the rest by `expected_rest` (`types.rest`). `adapter` is a LoRA adapter of the
    device, then alone. What is `private` stays here, off the disk. `split` is for two machines. The side that it
    `prefers` begins, the other helps if that fails; servers may bill `max_cost_usd`. No chat has what was `left_out`.
    `stop_repetition` ends it where it repeats itself; `None` is the configured default. `thinking_tokens` are the most
    that the device may think, if they are not `None`, whatever `extra` says. `local` is the one of several models of
    this machine that answers alone; "" for the device of the race. `caller` is whose caps and books it counts in.
    `rule` is the name of the user's rule that decided, `ruled` whether it has narrowed anything. In a `race` both sides
    begin at once, however good their models are. `kind` is what a rule's learned chance tells it by; None where nobody
    looked. `earlier` is the answer in whose place this one is to come. Of several servers it may be only those of
    `servers`, each `NAME/MODEL`; () for those that answer `disco`; and those whose model has `min_parameters`, in
    billions, and `min_grade`.
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
    prompt: RawPrompt | None = None
    delivery: Delivery | None = None
    pace_tps: float | None = None
    expected_ttft_s: float | None = None
    expected_rest: tuple[float, ...] = ()
    adapter: str = ""
    private: bool = False
    split: SplitWish = AS_SET
    prefers: Side | None = None
    drawing: Drawing = AS_USUAL
    max_cost_usd: float | None = None
    left_out: tuple[str, ...] = ()
    whole_schema: bool = False  # whether the device may say all that a JSON schema allows
    stop_repetition: bool | None = None
    thinking_tokens: int | None = None
    local: str = ""
    caller: Caller = OWNER
    rule: str = ""
    ruled: bool = False
    race: bool = False
    kind: str | None = None
    earlier: EarlierAnswer | None = None
    servers: tuple[str, ...] = ()
    min_parameters: float | None = None
    min_grade: float | None = None

    @property
    def template_args(self) -> dict[str, Any]:
        """What the client tells the chat template."""
        own = {} if self.thinking_tokens is None else {"thinking_budget_tokens": self.thinking_tokens}
        return template_args({**self.extra, **own})

    @property
    def thought_budget(self) -> int | None:
        """How many tokens a thought may have; None for any number."""
        told = self.thinking_tokens
        return thought_budget(self.extra, self.sampling.max_tokens) if told is None else told

    @property
    def needs(self) -> list[str]:
        """Parameters that constrain the answer (tools, schemas, a suffix …), sorted."""
        return sorted(needs(self.extra) + ["suffix"] * isinstance(self.prompt, Infill))

    @property
    def has_form(self) -> bool:
        """Whether the answer is to be data: by a schema or grammar, or one of a few texts."""
        return form_parameter(self.extra) is not None or bool(named(self.extra, Treatment.FORM))

    @property
    def n_chars(self) -> int:
        """Characters of text in the prompt and the answer so far, for an estimate while no tokenizer is loaded."""
        texts = (self.answer_so_far, *(text_of(m.get("content")) for m in self.messages))
        return n_chars_of(self.prompt) + sum(map(len, texts))

"""The context that all answers share, the delivery of one, and the sink that it goes into."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..clock import Clock
from ..dispatch.mover import Mover
from ..dispatch.planner import Planner
from ..endpoints.base import Endpoint
from ..money.spending import Spending
from ..types import EQUAL, Delivery, GenerationRequest, Grade, Outcome, Reason, Relation, Side, Token
from .traces import Traces


class Sink(Protocol):
    """Where an answer goes: the HTTP response."""

    def prompt(self, n_tokens: int) -> None:
        """Take the length of the prompt as the plan has it, counted or estimated; once, before all else."""
        ...

    def route(self, side: Side, model: str, reason: Reason) -> None:
        """Take the side and the model that begin the answer, and why it is they; before the first token."""
        ...

    def token(self, token: Token, side: Side) -> None:
        """Take one token of the answer, made by `side`."""
        ...

    def note(self, text: str) -> None:
        """Take a remark that no reader sees, between the tokens."""
        ...

    def mix(self) -> None:
        """Take that another server goes on from here: token ids of two vocabularies are no one list."""
        ...

    async def flush(self) -> None:
        """Show the tokens taken so far; may wait for a slow reader. Raises ReaderGone."""
        ...


@dataclass(frozen=True, slots=True)
class DeliveryDefaults:
    """The delivery of answers whose client asks for nothing else.

    `pace_tps` is the reader's pace in token/s, `expected_ttft_s` the TTFT that readers expect. `stall_s` of a source's
    silence in mid-answer begin a handoff. The source of a move may `pause` while the reader has enough to read.
    `stop_repetition` ends an answer that repeats itself.
    """

    delivery: Delivery = Delivery.RESERVE
    pace_tps: float = 4.8
    expected_ttft_s: float = 1.0
    stall_s: float = 2.0
    pause: bool = True
    stop_repetition: bool = True


@dataclass(slots=True, eq=False)
class CurrentDelivery:
    """The delivery of one answer now; it may change while the answer runs."""

    mode: Delivery
    pace_tps: float


class EnergyObserver(Protocol):
    """Observes when the device computes, and how many tokens it makes, for its energy; times in s of the clock."""

    def begin(self, key: Hashable, now: float) -> None:
        """Take the start of a piece of work."""
        ...

    def observe_prefill(self, key: Hashable, now: float, tokens: float) -> None:
        """Take the number of prompt tokens read, without those from the cache."""
        ...

    def end(self, key: Hashable, now: float, tokens: float = 0.0) -> None:
        """Take the end of that work, and the number of tokens generated."""
        ...


@dataclass(slots=True, eq=False)
class Privacy:
    """The one switch of `policy.private`: while it is `on` nothing may leave this machine, whatever a request says.

    Every context has the same one, also those that were in use before it was turned. Written by the daemon only.
    """

    on: bool = False


@dataclass(slots=True, eq=False)
class AnswerContext:
    """Everything that all answers share.

    `disturbed(begin, end)`: whether this process stood still between two times. `shadow`: a server that lost the race
    may still show its first token, where that is learned from. `energy` observes what the device works on; `traces` has
    the answers that ended last. `relation()` says which side is a stand-in now; an answer keeps the one that it began
    with. With several `servers` an answer has a context of its own, whose server side is one of them at a time.
    """

    endpoints: Mapping[Side, Endpoint]
    planner: Planner
    mover: Mover
    clock: Clock
    spending: Spending
    disturbed: Callable[[float, float], bool]
    energy: EnergyObserver
    shadow: bool = True
    privacy: Privacy = field(default_factory=Privacy)
    keep_text: bool = False
    defaults: DeliveryDefaults = field(default_factory=DeliveryDefaults)
    traces: Traces = field(default_factory=Traces)
    relation: Callable[[], Relation] = lambda: EQUAL
    servers: Servers | None = None

    @property
    def private(self) -> bool:
        """Whether nothing may leave this machine now."""
        return self.privacy.on


class Servers(Protocol):
    """Several servers, of which one at a time is an answer's server side."""

    def find(self, name: str) -> tuple[str, ...]:
        """Return the models that a name stands for, each as `SERVER/MODEL`; none where it is no server's."""
        ...

    def cards(self) -> list[dict[str, Any]]:
        """Return the documents of all models that the servers offer, for lists."""
        ...

    def card(self, name: str) -> Mapping[str, Any]:
        """Return what is known of the model behind a name that `find` knows."""
        ...

    def grades(self, keys: Sequence[str]) -> dict[str, Grade]:
        """Return how good these models are, by `SERVER/MODEL`; those that answer `disco` where no keys are given."""
        ...

    def context(self, base: AnswerContext, request: GenerationRequest) -> AnswerContext:
        """Return the context of one answer: with a server chosen for it, or the base where it may not leave."""
        ...

    def explain(self, base: AnswerContext, request: GenerationRequest, n_prompt: int) -> list[dict[str, Any]]:
        """Return which of them would be asked for such a request, why, and what the others would have been."""
        ...

    def allow_hedges(self, share: float) -> None:
        """Ask another server as well for this share of the requests at most, from now on."""
        ...

    def record(self, context: AnswerContext, outcome: Outcome) -> bool:
        """Learn from one answer; return whether it was one of models that were asked for by name, and is recorded."""
        ...

    def restore(self) -> None:
        """Go on with what was learned before; blocks on disk."""
        ...

    async def run(self) -> None:
        """Keep the lists of models up to date, until cancelled."""
        ...

    async def stop(self) -> None:
        """End a question for one: when this returns, nothing more is sent."""
        ...

    def value_waiting(self, usd_per_hour: float) -> None:
        """Weigh prices and waits of servers by what an hour of waiting is worth, $, from now on."""
        ...

    def documents(self) -> list[dict[str, Any]]:
        """Return the `servers` of `disco status --json`."""
        ...


class LocalModels(Protocol):
    """Models of this machine beside the device of the race; a request that names one is answered by it alone."""

    @property
    def names(self) -> Collection[str]:
        """Return the names of those that may be asked for now."""
        ...

    def context(self, name: str) -> AnswerContext:
        """Return the context of a request for that model now, without holding it. Raises RequestError."""
        ...

    def held(self, name: str) -> AbstractContextManager[AnswerContext]:
        """Give that context; the model is loaded, and stays in memory until the end of this. Raises DiscoError."""
        ...

    def about(self, name: str) -> Mapping[str, str]:
        """Return what lists of models say of it beside what it can do: its `state`, and what its user says."""
        ...

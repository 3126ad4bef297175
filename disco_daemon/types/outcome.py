"""The records of finished work: an answer's outcome, and the ledger entry of a cost without an answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

import msgspec

from .generation import Plan
from .grade import EQUAL, Relation
from .request import Delivery, EarlierAnswer, Side

HedgeResult = Literal["won", "lost", "failed"]  # of a second request: the reader got its tokens, or not


class Reason(StrEnum):
    """Why the side that gave the first token was the one."""

    PRIVATE = "private"  # the request must not leave this machine
    ROUTE = "route"  # the client asked for this side, by the model's name or `disco.route`
    RULE = "rule"  # a rule of the user's asked for this side
    ONLY = "only"  # no other side is there that can serve it, that no cap closes and that may be asked now
    FAILURE = "failure"  # the other side began, and failed
    RACE = "race"  # both had begun, and this one was first
    PLAN = "plan"  # it was planned to begin, and the other had not begun yet
    GRADE = "grade"  # its model is the better one, and the other side a stand-in
    STAND_IN = "stand-in"  # the better side was silent for longer than ever, or lets it show the first words


@dataclass(slots=True)
class Usage:
    """What one endpoint really processed for one answer; filled in by the endpoint while it runs.

    `prompt_tokens` and `completion_tokens` are counts, `busy_s` is compute time of the device in s. `cached_tokens` of
    the prompt were in the endpoint's cache and not processed; they are none of `prompt_tokens`. Of the completion,
    `reasoning_tokens` were thoughts, told or hidden. `cache_write_tokens` and `cost` are what a server says of them, in
    its own currency: the ledger does not know them. `told`: the completion is counted by the endpoint itself, all of
    it; else it is what its text tells. `load_s` is how long it had to wait for its model. `split` tells the partner's
    part of a split device's answer, in the names of the API; `partner_j` is what the partner's machine spent on it, J.
    `rearranged`: the model has read the messages in another order, or with turns joined or filled in.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    busy_s: float = 0.0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    told: bool = False
    load_s: float = 0.0
    split: Mapping[str, Any] | None = None
    partner_j: float = 0.0
    cache_write_tokens: int = 0
    cost: float | None = None
    rearranged: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one start of one endpoint went. Times in s; `ttft_s` counts from that start.

    `censored` means that no first token was seen: the true TTFT is only known to exceed `ttft_s`. It waited `load_s`
    for its model, and met `n_busy` other answers. `continued`: it went on with an answer begun elsewhere. `disturbed`:
    this machine slept or this process stood still meanwhile, so the times say nothing about it. `unseen_tokens` a
    server may have made, and billed, after it was closed: an estimate. `bill_usd` is what the server bills, $,
    `energy_j` what the device spent, J: this machine, and the partner's part of it where there is one. `hedge` is what
    came of a second request for the same answer, and None for a first one. `server` is which of several it was, by its
    name in the settings.
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
    hedge: HedgeResult | None = None
    server: str | None = None


@dataclass(frozen=True, slots=True)
class HandoffRecord:
    """One move of a running answer, done or dropped.

    `at` tokens and `at_char` characters of the answer are from before the target took over (or, dropped, from before
    it was begun); `reason` is `cost`, `failure`, `stall`, `context` where the source's was full, or `grade` from a
    stand-in to the better side. `took_s` is from the decision to the target's first joined token; `overlap` tokens of
    the source were thrown away. `dropped` says why it did not happen: the source went on. `paused`: the source was
    stopped meanwhile, since the reader had enough to read; `asked_again`: the target did not come in time, and the
    source was asked again.
    """

    at: int
    source: Side
    target: Side
    reason: str
    took_s: float
    overlap: int = 0
    dropped: str | None = None
    at_char: int = 0
    paused: bool = False
    asked_again: bool = False


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

    `arrivals_s` is when each token was shown, by the clock of the daemon, s; `reason` why the winner began it, and
    `ignored` the request's fields that nobody heeded, `narrowed` what a schema allows and was left out all the same,
    `stop_sequence` the client's that ended it, where that is known, `relation` which side was a stand-in. The history
    keeps none of them. It has `choices`: their tokens are those of all, the reason to finish is that of the last one.
    `stopped` says what went wrong with an answer that was ended for that: `repetition`. `key` is the name of the key
    that asked, "" for none with a name, `rule` the user's rule that decided who may answer, `kind` what of its kind it
    was where a rule asks what is learned of that (None where none does), `earlier` the answer that this one is in place
    of. Of one that was `private` neither is kept.
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
    reason: Reason | None = None
    ignored: Sequence[str] = ()
    narrowed: Sequence[str] = ()
    choices: int = 1
    stop_sequence: str | None = None
    relation: Relation = EQUAL
    stopped: str | None = None
    key: str = ""
    rule: str = ""
    kind: str | None = None
    earlier: EarlierAnswer | None = None
    private: bool = False

    @property
    def teaches_of(self) -> str | None:
        """The model of this machine of which it shows how likely an answer is to do; None where it shows nothing.

        It has to be that model's alone, and its kind known. A question that was changed is seen to later.
        """
        alone = self.winner is Side.DEVICE and self.error is None and not self.tokens.get(Side.SERVER, 0)
        return self.winner_model if alone and self.kind is not None and not self.private else None

    @property
    def winner_model(self) -> str | None:
        """The model that gave the first token; None where none came."""
        return self.winning.model if self.winning is not None else None

    @property
    def server(self) -> str | None:
        """Which of several servers gave the first token, by its name in the settings; None where none of them did."""
        return self.winning.server if self.winning is not None else None

    @property
    def server_usd(self) -> float:
        """What the server bills for it, $."""
        return math.fsum(a.bill_usd for a in self.attempts)

    @property
    def used(self) -> Usage:
        """What the start that won has processed, as its endpoint tells it; nothing where none won."""
        return self.winning.usage if self.winning is not None else Usage()

    @property
    def billed(self) -> tuple[int, int]:
        """Prompt and answer tokens as the endpoints count them: OpenAI's `usage`."""
        used = self.used
        return used.prompt_tokens + used.cached_tokens or self.prompt_tokens, sum(self.tokens.values())

    @property
    def winning(self) -> Attempt | None:
        """The start whose tokens the reader got: of a server that was asked twice, the request that won."""
        own = [a for a in self.attempts if a.side is self.winner]
        begun = [a for a in own if a.error is None or not a.censored] or own  # after others that showed no token
        return next((a for a in own if a.hedge == "won"), begun[0] if begun else None)

    def _named_attempts(self) -> list[tuple[str, Attempt]]:
        """Attempts as `device`, `server`; later ones of the same side as `device#2` and so on."""
        seen: dict[Side, int] = {}
        named = []
        for attempt in self.attempts:
            n = seen[attempt.side] = seen.get(attempt.side, 0) + 1
            named.append((attempt.side.value if n == 1 else f"{attempt.side}#{n}", attempt))
        return named

    @property
    def split(self) -> Mapping[str, Any] | None:
        """What two machines did for the answer; None where there is one."""
        return next((a.usage.split for a in reversed(self.attempts) if a.usage.split is not None), None)

    def to_json(self) -> dict[str, Any]:
        """The `disco` object of the last chunk (docs/explain/design.md#interfaces)."""
        lower = self.relation.lower
        stand_in = None if lower is None else {"side": lower.value, "why": self.relation.why}
        sometimes = {
            "split": self.split,
            "narrowed": list(self.narrowed) or None,
            "stand_in": stand_in,
            "stopped": self.stopped,
            "server": self.server,
            "rule": self.rule or None,
        }
        return {name: value for name, value in sometimes.items() if value is not None} | {
            "request_id": self.request_id,
            "ttft_s": self.ttft_s,
            "winner": self.winner,
            "reason": self.reason,
            "plan": {
                "device_s": finite(self.plan.device_s),
                "server_s": finite(self.plan.server_s),
                "hedge_s": finite(self.plan.hedge_s),
            },
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
                    "hedge": a.hedge,
                }
                | ({} if a.server is None else {"server": a.server})
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
            "reading": msgspec.to_builtins(self.reading),  # `asdict` takes ten times as long
            "ignored": list(self.ignored),
        }


class EntryKind(StrEnum):
    """The works that cost something and answer nobody: texts made vectors, and the daemon's questions to a server."""

    EMBEDDING = "embedding"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One finished work without an answer, for history, ledger and metrics. Nothing is learned from it.

    `model` is the name in the request; a probe has the server's. `attempt` is the work with its price: it shows no
    first token, so it is censored. `cancelled`: the client left before the end. `key` is the name of the key that
    asked, "" for none with a name.
    """

    kind: EntryKind
    request_id: str
    created: float
    model: str
    attempt: Attempt
    cost_usd: float
    duration_s: float
    cancelled: bool = False
    key: str = ""

    @property
    def served(self) -> Side | None:
        """The side that a client was served by; None where it failed, and for a probe, which has no client."""
        failed = self.attempt.error is not None
        return None if failed or self.kind is EntryKind.PROBE else self.attempt.side

    @property
    def finish_reason(self) -> str | None:
        """The kind, or `cancelled`; None where it failed."""
        if self.attempt.error is not None:
            return None
        return "cancelled" if self.cancelled else self.kind.value


def finite(x: float) -> float | None:
    """`x`, or None where it is infinite: JSON has no infinity."""
    return x if math.isfinite(x) else None

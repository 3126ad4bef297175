"""What an answer teaches: times are those of the endpoint alone, not of closing it, of a load, or of a slow reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable
from datetime import UTC
from typing import Any

import pytest

from disco_daemon.answer import Arrived
from disco_daemon.clock import SystemClock
from disco_daemon.conductor import Conductor
from disco_daemon.conductor.context import AnswerContext
from disco_daemon.conductor.endpoint_run import EndpointRun
from disco_daemon.conductor.inbox import QUEUE_SIZE, EventInbox
from disco_daemon.conductor.keeper import Keeper
from disco_daemon.conductor.record import decode_tps
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.migrate import Costs
from disco_daemon.dispatch.mover import CostMover, Stay
from disco_daemon.dispatch.planner import Planner
from disco_daemon.endpoints.base import Controls, Resumption
from disco_daemon.money.caps import CapLimits, Caps
from disco_daemon.money.catalog import Price
from disco_daemon.money.spending import Speeds, Spending
from disco_daemon.types import (
    UNKNOWN,
    Continuation,
    Finish,
    GenerationRequest,
    Outcome,
    PromptLength,
    Readiness,
    Reason,
    Side,
    Token,
    Usage,
)

SLOW_CLOSE_S = 0.5


class Faulty:
    """An endpoint with a first token after `first_s`, or none, which takes `close_s` to let go."""

    continuation, resumption, can_hold = Continuation.NONE, Resumption.UNSURE, False
    model, adapters = "m", dict[str, str]()
    known_since, capabilities = 0.0, UNKNOWN

    def __init__(self, side: Side, first_s: float | None, load_s: float = 0.0, close_s: float = 0.0) -> None:
        self.side, self.first_s, self.load_s, self.close_s = side, first_s, load_s, close_s

    def refuses(self, request: GenerationRequest) -> None:
        del request

    def overlap_of(self, request: GenerationRequest) -> None:
        del request

    def readiness(self) -> Readiness:
        return Readiness(load_s=2.0 if self.load_s else 0.0)  # a guess, as always

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def count(self, request: GenerationRequest) -> PromptLength:
        del request
        return PromptLength(40)

    async def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | Finish, None]:
        del request, controls
        usage.load_s = self.load_s
        try:
            if self.first_s is None:
                await asyncio.Event().wait()
            await asyncio.sleep(self.load_s + (self.first_s or 0.0))  # the endpoint's own time
            usage.prompt_tokens = 40
            yield Token("Yes")
            yield Finish("stop")
        finally:
            if self.close_s:
                await asyncio.sleep(self.close_s)


class Nobody:
    """Takes tokens and observations, and ignores them: a sink and an energy observer."""

    def token(self, token: Token, side: Side) -> None: ...
    def note(self, text: str) -> None: ...
    def prompt(self, n_tokens: int) -> None: ...
    def route(self, side: Side, model: str, reason: Reason) -> None: ...
    def mix(self) -> None: ...

    async def flush(self) -> None: ...
    def begin(self, key: Hashable, now: float) -> None: ...
    def observe_prefill(self, key: Hashable, now: float, tokens: float) -> None: ...
    def end(self, key: Hashable, now: float, tokens: float = 0.0) -> None: ...


def context(*endpoints: Faulty, policy: str = "race", **more: Any) -> AnswerContext:
    clock = SystemClock()
    planner = Planner(make_policy(policy), Side.DEVICE, 0.5)
    spending = Spending(Price(0.15, 0.1, 0.6), Caps(CapLimits(), UTC, 0.0), usd_per_kwh=0.3, watts=15.0,
                  speeds=Speeds(400.0, 30.0), context=4096)  # fmt: skip
    mover = Stay(CostMover(planner, lambda prefill_tps, decode_tps: Costs(0.0, 0.0, 0.0, 0.0)))
    how: dict[str, Any] = {"disturbed": lambda begin, end: False} | more
    present: dict[Side, Any] = {e.side: e for e in endpoints}
    return AnswerContext(present, planner, mover, clock, spending, energy=Nobody(), **how)


async def answered(*endpoints: Faulty, **how: Any) -> Outcome:
    outcomes = list[Outcome]()
    keeper = Keeper(context(*endpoints, **how))
    await keeper.start()
    conductor = Conductor(keeper, lambda _, outcome: outcomes.append(outcome), lambda entry: None)
    request = GenerationRequest("r", ({"role": "user", "content": "Yes?"},))
    await conductor.run(request, "disco", Nobody())
    await keeper.end()
    return outcomes[0]


@pytest.mark.parametrize("shadow", [False, True])
async def test_the_time_that_a_loser_was_silent_ends_when_it_was_cut_not_when_it_was_closed(shadow: bool) -> None:
    device, server = Faulty(Side.DEVICE, 0.05), Faulty(Side.SERVER, None, close_s=SLOW_CLOSE_S)
    outcome = await answered(device, server, shadow=shadow)
    (lost,) = (a for a in outcome.attempts if a.side is Side.SERVER)
    assert lost.censored
    assert lost.ttft_s < SLOW_CLOSE_S
    assert outcome.duration_s > SLOW_CLOSE_S


async def test_the_wait_for_the_model_is_what_it_was_not_what_was_guessed() -> None:
    outcome = await answered(Faulty(Side.DEVICE, 0.05, load_s=0.4))
    (only,) = outcome.attempts
    assert only.load_s == pytest.approx(0.4)
    assert only.ttft_s - only.load_s == pytest.approx(0.05, abs=0.2)


def run_of(*, held_up: bool = False) -> EndpointRun:
    return EndpointRun(Side.DEVICE, "m", 0.0, Readiness(), n_tokens=41, first_at=1.0, last_at=3.0, held_up=held_up)


def test_a_decode_speed_is_learned_from_undisturbed_answers_to_quick_readers_only() -> None:
    quiet, shaken = context(), context(disturbed=lambda begin, end: (begin, end) == (1.0, 3.0))
    assert decode_tps(run_of(), quiet) == pytest.approx(20.0)
    assert decode_tps(run_of(), shaken) is None
    assert decode_tps(run_of(held_up=True), quiet) is None


async def test_who_waits_for_a_slow_reader_is_told_so() -> None:
    inbox, run = EventInbox(), run_of()
    event = Arrived(Side.DEVICE, Token("x"))
    assert not any([await inbox.put(run, event) for _ in range(QUEUE_SIZE)])
    waiting = asyncio.create_task(inbox.put(run, event))
    await asyncio.sleep(0)  # it begins to wait
    for _ in range(QUEUE_SIZE):
        await inbox.get()
    assert await waiting

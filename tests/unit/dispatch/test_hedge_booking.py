"""A second request to the server within one answer: both are reserved, booked and told, and none goes where it may not.

The server is a real one on loopback; its first request is held.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from disco_daemon.api.control.metrics import Metrics
from disco_daemon.conductor import AnswerContext
from disco_daemon.dispatch.hedge import HedgeAllowance
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.planner import Planner
from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.types import Attempt, Finish, GenerationRequest, Outcome, Plan, Sampling, Side, Token
from tests.fixtures.upstream import PATIENCE_S, Upstream
from tests.unit.conductor.test_answer_run import Scripted, context, played

DEVICE, SERVER = Side.DEVICE, Side.SERVER
REQUEST = GenerationRequest("r", ({"role": "user", "content": "one two three"},), Sampling(max_tokens=3))
LENGTH = 10  # tokens of the prompt as the device counts them; the server counts 3
AFTER_S = 0.02
LATER_S = 0.3  # where something has to be done before it, on a busy machine, too
NEVER = asyncio.Event
HEDGED = Plan(math.inf, 0.0, AFTER_S)


class Hedging(Planner):
    """Plans by one plan; the server is the side that is not scarce."""

    def __init__(self, plan: Plan) -> None:
        self.always = plan
        super().__init__(make_policy("optimal"), DEVICE, 1.0)
        self.hedges = HedgeAllowance(1.0)

    def _preview(self, *args: Any, **more: Any) -> tuple[Plan, float]:
        del args, more
        return self.always, math.inf


@dataclass
class Setting:
    """One answer on a real server. Faults of `second` befall the second request alone."""

    upstream: Upstream
    on: AnswerContext
    faults: ExitStack = field(default_factory=ExitStack)

    def second(self, fault: Callable[[], AbstractContextManager[None]]) -> None:
        hedges = self.on.planner.hedges
        take = hedges.take

        def opened(length: int) -> None:  # the last thing before it is sent
            take(length)
            self.faults.enter_context(fault())

        cast(Any, hedges).take = opened

    async def answer(self) -> tuple[str, tuple[Attempt, ...], Outcome]:
        text, outcome = await played(self.on, REQUEST)
        return text, tuple(a for a in outcome.attempts if a.side is SERVER), outcome

    def spent(self) -> dict[str, float]:
        state = self.on.spending.caps.state(self.on.clock.wall())
        return cast("dict[str, float]", state["usd_per_day"])


@asynccontextmanager
async def setting(plan: Plan = HEDGED, *script: Any, usd: float = 1.0) -> AsyncIterator[Setting]:
    async with Upstream() as upstream:
        server = Server(ServerConfig(upstream.url, "m", "k"))
        await server.start()
        device = Scripted(DEVICE, list(script) or [Token("never"), Finish("stop")], n_prompt=LENGTH)
        on = context(device, cast(Any, server), "optimal", usd_per_day=usd)
        on.planner = Hedging(plan)
        on.mover = cast(Any, SimpleNamespace(observe=lambda *_: None, foresees=lambda _: False, target=lambda _: None))
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield (one := Setting(upstream, on))
            one.faults.close()
        finally:
            await server.close()


async def test_both_requests_are_booked_and_told_and_nothing_stays_reserved() -> None:
    async with setting() as one:
        with one.upstream.held_until(NEVER(), None, times=1):
            text, (first, second), outcome = await one.answer()
        assert text == "one two three "
        assert (first.hedge, second.hedge) == (None, "won")
        assert (first.censored, second.censored) == (True, False)
        assert first.started_s < second.started_s
        assert first.started_s + first.ttft_s >= second.started_s
        assert first.usage.prompt_tokens == LENGTH, "what it read nobody says: the prompt is booked"
        assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (3, 3)
        assert outcome.server_usd == pytest.approx(first.bill_usd + second.bill_usd)
        assert first.bill_usd == pytest.approx(LENGTH * 1.0 / 1e6 + first.unseen_tokens * 10.0 / 1e6)
        assert one.spent()["spent"] == pytest.approx(outcome.server_usd)
        assert one.spent()["reserved"] == 0.0
        assert one.on.planner.hedges.n_sent == LENGTH
        assert outcome.billed == (3, 3)
        told = outcome.to_json()
        assert told["plan"]["hedge_s"] == AFTER_S
        assert [told["endpoints"][name]["hedge"] for name in ("server", "server#2")] == [None, "won"]
        metrics = Metrics()
        metrics.observe(outcome)
        assert b'disco_hedges_total{result="won"} 1.0' in metrics.render()[0]
        assert one.on.planner.knowledge.server.n == 1, "of the first one's silence alone is learned"


async def test_a_second_request_that_lost_is_booked_for_its_prompt() -> None:
    async with setting() as one:
        go, asked = asyncio.Event(), asyncio.Event()
        one.second(lambda: one.upstream.held_until(NEVER(), reached=asked))
        with one.upstream.held_until(go, times=1):
            answer = asyncio.create_task(one.answer())
            await asked.wait()
            go.set()
            text, (first, second), _ = await answer
        assert text == "one two three "
        assert (first.censored, second.censored, second.hedge) == (False, True, "lost")
        assert second.usage.prompt_tokens == LENGTH
        assert one.spent()["spent"] == pytest.approx(first.bill_usd + second.bill_usd)
        assert one.spent()["reserved"] == 0.0


async def test_a_device_that_wins_closes_both_and_both_are_booked() -> None:
    async with setting(Plan(0.2, 0.0, AFTER_S), Token("mine"), Finish("stop")) as one:
        with one.upstream.held_until(NEVER(), None):
            text, (first, second), _ = await one.answer()
            for i in (0, 1):
                await one.upstream.wait_closed(i)
        assert text == "mine"
        assert (first.censored, second.censored, second.hedge) == (True, True, "lost")
        assert [a.usage.prompt_tokens for a in (first, second)] == [LENGTH, LENGTH]
        assert one.spent()["reserved"] == 0.0


async def test_a_second_request_that_is_turned_away_costs_nothing_and_is_no_mark_against_the_server() -> None:
    async with setting() as one:
        go = asyncio.Event()
        available = one.on.planner.knowledge.server.availability()
        one.second(lambda: one.upstream.status(429))
        with one.upstream.held_until(go, times=1):
            answer = asyncio.create_task(one.answer())
            while one.on.endpoints[SERVER].readiness().hedgeable:
                await asyncio.sleep(0.001)  # the server's word has no event to wait for
            go.set()
            text, (first, second), _ = await answer
        assert text == "one two three "
        assert (second.hedge, second.error, second.bill_usd) == ("failed", "rate_limited", 0.0)
        assert first.error is None
        assert one.on.planner.knowledge.server.availability() >= available


@pytest.mark.parametrize("why", ["private", "cap", "share", "429"])
async def test_where_it_may_not_go_none_is_sent_and_the_answer_goes_on(why: str) -> None:
    one_request_usd = (LENGTH * 1.0 + 3 * 10.0) / 1e6
    async with setting(Plan(math.inf, 0.0, LATER_S), usd=0.9 * one_request_usd if why == "cap" else 1.0) as one:
        go = asyncio.Event()
        refused = asyncio.Event()
        hedges = one.on.planner.hedges
        with one.upstream.held_until(go, times=1):
            if why == "share":
                hedges.share = 0.0
            answer = asyncio.create_task(one.answer())
            await one.upstream.wait_request(0)
            one.on.privacy.on = why == "private"
            if why == "429":
                cast(Any, one.on.endpoints[SERVER])._errors._unhedged_until = math.inf
            asyncio.get_running_loop().call_later(2 * LATER_S, refused.set)  # long after it would have been sent
            await refused.wait()
            go.set()
            text, attempts, _ = await answer
        assert text == "one two three "
        assert len(attempts) == one.upstream.n_requests == 1
        assert (hedges.n_sent, attempts[0].hedge) == (0, None)

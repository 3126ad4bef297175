"""The conductor's places and contexts: taken before any waiting, given back once, and one context from begin to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from disco_daemon.conductor import AnswerContext, Conductor, Keeper, Privacy, in_flight
from disco_daemon.conductor import conductor as room
from disco_daemon.conductor.embedding import AT_A_TIME, EmbeddingRun
from disco_daemon.conductor.plan import LATE_LOAD, LATE_S, insured
from disco_daemon.endpoints.base import Endpoint
from disco_daemon.errors import DiscoError, RequestError, Unavailable
from disco_daemon.money.spending import CostBound
from disco_daemon.types import UNKNOWN, GenerationRequest, Plan, PromptLength, Readiness, Side, TextTask
from tests.fixtures.clock import StoppedClock

HELLO = ({"role": "user", "content": "hello"},)


class Hanging:
    """The fault: an endpoint that counts for as long as the test likes, and can do nothing else."""

    capabilities = UNKNOWN

    def __init__(self, side: Side) -> None:
        self.side = side
        self.counting, self.may_go_on = asyncio.Event(), asyncio.Event()

    def refuses(self, request: GenerationRequest) -> str | None:
        return None

    async def count(self, request: GenerationRequest) -> PromptLength | None:
        self.counting.set()
        await self.may_go_on.wait()
        return None

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Spending:
    def affordable(self, sides: frozenset[Side], bound: object, now: float) -> frozenset[Side]:
        return sides


class Wall:
    def wall(self) -> float:
        return 0.0

    def now(self) -> float:
        return 0.0


class Playing:
    """What of a context is looked at before an answer is played."""

    def __init__(self, *endpoints: Hanging, privacy: Privacy | None = None) -> None:
        self.endpoints = {endpoint.side: endpoint for endpoint in endpoints}
        self.privacy = privacy or Privacy()
        self.spending, self.clock, self.servers = Spending(), Wall(), None

    @property
    def private(self) -> bool:
        return self.privacy.on


def context(*endpoints: Hanging, privacy: Privacy | None = None) -> AnswerContext:
    return cast("AnswerContext", Playing(*endpoints, privacy=privacy))


def never(but: Endpoint) -> float:
    return 0.0


@asynccontextmanager
async def conductor(first: AnswerContext) -> AsyncIterator[Conductor]:
    keeper = Keeper(first)
    await keeper.start()
    yield Conductor(keeper, lambda context, outcome: None, lambda entry: None)
    await keeper.end()


def run(conductor: Conductor, name: str) -> asyncio.Task[Any]:
    return asyncio.create_task(conductor.run(GenerationRequest(name, HELLO), "disco", cast("Any", None)))


async def embedded(conductor: Conductor) -> list[object]:
    async with aclosing(conductor.embed(["a"], TextTask(), "disco", "e")) as found:
        return [one async for one in found]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AnswerContext, GenerationRequest, frozenset[Side]]]:
    """What came to be played, in place of playing it."""
    seen: list[tuple[AnswerContext, GenerationRequest, frozenset[Side]]] = []

    class Played:
        def __init__(
            self, context: AnswerContext, request: GenerationRequest, sink: Any, available: Any, *_: Any
        ) -> None:
            seen.append((context, request, available))

        async def run(self, record: object) -> None: ...

    monkeypatch.setattr(room, "AnswerRun", Played)
    return seen


@pytest.mark.usefixtures("played")
async def test_a_place_is_taken_before_anything_is_waited_for_and_given_back_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_flight, "MAX_IN_FLIGHT", 2)
    device = Hanging(Side.DEVICE)
    async with conductor(context(device)) as ours:
        tasks = [run(ours, "a"), run(ours, "b")]
        await device.counting.wait()
        assert len(ours.in_flight) == 2, "both are still being counted"
        for late in (run(ours, "c"), embedded(ours)):
            with pytest.raises(Unavailable) as refused:
                await late
            assert refused.value.status == 503
            assert refused.value.retry_after_s is not None
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert len(ours.in_flight) == 1
        device.may_go_on.set()
        await tasks[1]
        assert len(ours.in_flight) == 0
        with pytest.raises(DiscoError):
            await embedded(ours)  # nobody here embeds
        assert len(ours.in_flight) == 0


async def test_a_reload_while_the_prompt_is_counted_changes_nothing_for_it(played: list[Any]) -> None:
    device, server, other = Hanging(Side.DEVICE), Hanging(Side.SERVER), Hanging(Side.DEVICE)
    both, alone = context(device, server), context(other)
    async with conductor(both) as ours:
        task = run(ours, "a")
        await device.counting.wait()
        await ours.keeper.use(alone, never)
        device.may_go_on.set()
        await task
        assert [(on, available) for on, _, available in played] == [(both, frozenset(Side))]
        assert ours.context is alone


async def test_what_is_being_counted_when_the_switch_is_turned_is_private_too(played: list[Any]) -> None:
    privacy = Privacy()
    device, server = Hanging(Side.DEVICE), Hanging(Side.SERVER)
    async with conductor(context(device, server, privacy=privacy)) as ours:
        task = run(ours, "a")
        await device.counting.wait()
        privacy.on = True
        device.may_go_on.set()
        await task
        ((_, request, available),) = played
        assert request.private
        assert available == {Side.DEVICE}
        with pytest.raises(RequestError) as refused:
            await ours.run(GenerationRequest("s", HELLO, allowed=frozenset({Side.SERVER})), "m", cast("Any", None))
        assert (refused.value.status, refused.value.code) == (403, "private")


async def test_a_drain_waits_for_what_is_being_counted_and_lets_nothing_more_begin(played: list[Any]) -> None:
    device = Hanging(Side.DEVICE)
    async with conductor(context(device)) as ours:
        task = run(ours, "a")
        await device.counting.wait()
        draining = asyncio.create_task(ours.in_flight.drain(60.0))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="being stopped"):
            await embedded(ours)
        assert not draining.done()
        device.may_go_on.set()
        assert await draining == 0
        with pytest.raises(Unavailable, match="being stopped"):
            await task
        assert played == []


@pytest.mark.parametrize(
    ("plan", "load_s", "sides", "wanted"),
    [
        (Plan(0.0, float("inf")), 3.0, Side, LATE_S + LATE_LOAD * 3.0),  # later than known: the server helps
        (Plan(0.0, float("inf")), 0.0, Side, float("inf")),  # it is in memory
        (Plan(0.0, 0.4), 3.0, Side, 0.4),  # planned already
        (Plan(0.0, float("inf")), 3.0, [Side.DEVICE], float("inf")),  # nobody else may
    ],
)
def test_a_load_that_takes_longer_than_was_planned_has_the_server_help(
    plan: Plan, load_s: float, sides: Any, wanted: float
) -> None:
    readiness = {side: Readiness(load_s if side is Side.DEVICE else 0.0) for side in sides}
    assert insured(plan, readiness) == Plan(0.0, wanted)


def test_a_query_counts_with_each_text_that_it_is_read_with() -> None:
    """Else a long one beside many short documents would overrun what is computed at a time, and the caps."""
    reserved: list[CostBound] = []
    spending = SimpleNamespace(reserve=lambda side, bound, at: reserved.append(bound))
    context = cast("Any", SimpleNamespace(clock=StoppedClock(), spending=spending))
    for query, n_next, n_tokens in ((None, AT_A_TIME, 2048), ("", AT_A_TIME, 2048), ("q" * 7999, 2, 2048 * 2000)):
        run = EmbeddingRun(context, ["d"] * 2048, TextTask(query=query), "disco", "e")
        run._reserved()
        assert run._n_next() == n_next
        assert reserved.pop().prompt_tokens == n_tokens

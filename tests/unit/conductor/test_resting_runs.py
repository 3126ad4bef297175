"""An answer of scripted endpoints whose source rests: when it is stopped, what it is asked again, and what it costs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from disco_daemon.conductor import AnswerContext
from disco_daemon.conductor.moves import MAX_PARKED_BESIDE
from disco_daemon.dispatch.migrate import Costs
from disco_daemon.dispatch.mover import CostMover, Forced
from disco_daemon.endpoints.base import Controls, Resumption
from disco_daemon.errors import EndpointError
from disco_daemon.money.spending import CapRefusal, CostBound
from disco_daemon.types import (
    Append,
    CaughtUp,
    Delivery,
    Finish,
    GenerationRequest,
    Order,
    Outcome,
    Paused,
    Readiness,
    Side,
    Token,
    Usage,
)
from tests.fixtures.jumping import in_jumps
from tests.unit.conductor.test_answer_run import Scripted, asked, context, played

DEVICE, SERVER = Side.DEVICE, Side.SERVER
N_WORDS = 120
WHOLE = "".join(f"{i} " for i in range(N_WORDS))
PACE_TPS = 50.0  # of a reader
STEP_S = 0.002  # between the words of a source, ten times as fast as they are read
COSTS = Costs(device_prefill=1e-9, device_decode=2e-8, server_prefill=1.5e-7, server_decode=6e-7)
TTFT_S, DEVICE_TPS = 0.4, 400.0  # what is known of the server, and of the device


@dataclass
class Counting(Scripted):
    """An endpoint that counts on from the answer so far, once what its start `waits_for` has happened.

    It tells when it was closed, and when it was started a second time. The device follows: what it is given is there as
    soon as its first token might be.
    """

    waits_for: Sequence[asyncio.Event] = ()
    breaks: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    again: asyncio.Event = field(default_factory=asyncio.Event)
    n_open: int = 0

    def __post_init__(self) -> None:
        self.can_hold = self.side is DEVICE

    async def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Paused | Finish, None]:
        self.asked.append(request)
        self.n_open += 1
        orders, n = asyncio.Queue[Order](), len(request.answer_so_far.split())
        if len(self.asked) == 2:
            self.again.set()
        try:
            usage.prompt_tokens = self.n_prompt + n
            if len(self.asked) <= len(self.waits_for):
                await self.waits_for[len(self.asked) - 1].wait()
            if self.breaks:
                raise EndpointError(self.side, "timeout", "nothing came")
            if controls is not None and controls.held:
                controls.bind(orders.put_nowait)
                go = False
                while not go:
                    yield CaughtUp()
                    match await orders.get():
                        case Append(text=text, go=go):
                            n += len(text.split())
            for i in range(n, N_WORDS):
                usage.completion_tokens += 1
                yield Token(f"{i} ")
                await asyncio.sleep(STEP_S)
            yield Finish("stop")
        finally:
            self.n_open -= 1
            self.closed.set()


def never() -> asyncio.Event:
    return asyncio.Event()


def now() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def pair(source: Side, *, pause: bool = True) -> tuple[AnswerContext, Counting, Counting]:
    """A context in which each answer of `source` moves after three tokens, that endpoint, and the target."""
    begins, target = Counting(source, ()), Counting(source.other, ())
    target.waits_for = [begins.closed]
    device, server = (begins, target) if source is DEVICE else (target, begins)
    on = context(device, server, policy=f"all-{source}")
    on.defaults = replace(on.defaults, delivery=Delivery.PACED, pace_tps=PACE_TPS, pause=pause, stall_s=60.0)
    on.spending.stops_billing = True
    for _ in range(200):
        on.planner.knowledge.server.add(TTFT_S, censored=False)
    on.planner.knowledge.use_measured_speed(DEVICE_TPS)
    on.mover = Forced(CostMover(on.planner, lambda *_: COSTS), 3, 3)
    on.mover.observe(DEVICE, 1000.0)
    return on, begins, target


def bill(outcome: Outcome, side: Side) -> list[tuple[int, int]]:
    """Tokens read and made by each start of a side, as booked."""
    return [(a.usage.prompt_tokens, a.usage.completion_tokens) for a in outcome.attempts if a.side is side]


@pytest.mark.parametrize("source", Side)
@in_jumps
async def test_the_source_is_closed_before_the_target_speaks_and_makes_nothing_for_the_bin(source: Side) -> None:
    on, begins, target = pair(source)
    text, outcome = await played(on)
    (move,) = outcome.moves
    assert text == WHOLE
    assert (move.target, move.paused, move.asked_again, move.overlap) == (source.other, True, False, 0)
    assert (len(begins.asked), len(target.asked)) == (1, 1)
    assert WHOLE[: move.at_char].startswith(target.asked[0].answer_so_far)
    assert outcome.tokens == {source: move.at, source.other: N_WORDS - move.at}
    (made,) = bill(outcome, source)
    assert made[1] <= move.at + 1, "but for one on its way"


@pytest.mark.parametrize("source", Side)
@pytest.mark.parametrize("breaks", [False, True], ids=["stalls", "breaks"])
@in_jumps
async def test_where_the_target_does_not_come_the_source_is_asked_for_the_rest_and_both_are_booked(
    source: Side, breaks: bool
) -> None:
    on, begins, target = pair(source)
    target.breaks = breaks
    if not breaks:
        target.waits_for = [never()]
    text, outcome = await played(on)
    (move,) = outcome.moves
    assert text == WHOLE
    assert (move.paused, move.asked_again) == (True, True)
    assert move.dropped == ("timeout" if breaks else "the source had finished before")
    first, second = begins.asked
    assert first.answer_so_far == ""
    n_before = len(second.answer_so_far.split())
    assert 0 < n_before < N_WORDS
    booked = bill(outcome, source)
    assert booked[0][0] == begins.n_prompt
    assert n_before <= booked[0][1] <= n_before + 1
    assert booked[1] == (begins.n_prompt + n_before, N_WORDS - n_before), "what it read again is paid again"
    assert len(bill(outcome, source.other)) == 1, "and what the target read"
    assert (begins.n_open, target.n_open) == (0, 0)


@pytest.mark.parametrize("source", Side)
@in_jumps
async def test_a_target_that_comes_late_takes_over_from_the_source_that_was_asked_again(source: Side) -> None:
    on, begins, target = pair(source)
    begins.waits_for, target.waits_for = [now(), never()], [begins.again]
    text, outcome = await played(on)
    (move,) = outcome.moves
    assert text == WHOLE
    assert (move.paused, move.asked_again, move.dropped, len(begins.asked)) == (True, True, None, 2)


UNSURE, HELPED = "its way to go on is not known for sure", "it needs the device for that"


@pytest.mark.parametrize("why", ["handoff.pause", "delivery", "closing does not stop its bill", UNSURE, HELPED])
@in_jumps
async def test_a_server_goes_on_where_nothing_says_that_it_may_rest(why: str) -> None:
    on, begins, target = pair(SERVER, pause=why != "handoff.pause")
    target.waits_for = [begins.closed]  # which it is at its end
    begins.resumption = {UNSURE: Resumption.UNSURE, HELPED: Resumption.HELPED}.get(why, Resumption.ALONE)
    on.spending.stops_billing = why != "closing does not stop its bill"
    delivery = Delivery.RESERVE if why == "delivery" else Delivery.PACED
    text, outcome = await played(on, asked(delivery=delivery))
    assert (text, len(begins.asked)) == (WHOLE, 1)
    assert [(move.paused, move.asked_again) for move in outcome.moves] == [(False, False)]


@in_jumps
async def test_a_device_that_rests_needs_neither_a_server_that_stops_billing_nor_one_that_goes_on_without_it() -> None:
    on, _, server = pair(DEVICE)
    on.spending.stops_billing, server.resumption = False, Resumption.HELPED
    assert (await played(on))[1].moves[0].paused


@in_jumps
async def test_a_device_does_not_rest_for_a_server_that_is_not_sure_to_go_on_exactly() -> None:
    on, _, server = pair(DEVICE)
    server.resumption = Resumption.UNSURE
    assert not (await played(on))[1].moves[0].paused


@in_jumps
async def test_a_device_with_many_answers_does_not_rest_since_its_cells_are_wanted() -> None:
    on, begins, _ = pair(DEVICE)
    begins.ready = Readiness(n_busy=MAX_PARKED_BESIDE + 2)
    assert not (await played(on))[1].moves[0].paused


REACHED = CapRefusal(SERVER, "usd_per_day", math.inf, math.inf)


@in_jumps
async def test_a_server_whose_cap_is_reached_does_not_rest_since_it_could_not_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on, begins, _ = pair(SERVER)
    check = on.spending.check

    def reached_meanwhile(side: Side, wanted: CostBound, wall: float) -> CapRefusal | None:
        return REACHED if begins.asked and side is SERVER else check(side, wanted, wall)

    monkeypatch.setattr(on.spending, "check", reached_meanwhile)
    assert not (await played(on))[1].moves[0].paused


@in_jumps
async def test_an_answer_that_is_cancelled_while_its_source_rests_leaves_nothing() -> None:
    on, begins, target = pair(DEVICE)
    target.waits_for = [never()]
    on.defaults = replace(on.defaults, pace_tps=5.0)
    answering = asyncio.create_task(played(on))
    await begins.closed.wait()
    assert (len(begins.asked), target.n_open) == (1, 1)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert (begins.n_open, target.n_open) == (0, 0)

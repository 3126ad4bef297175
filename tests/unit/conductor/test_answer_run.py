"""One answer on a context of scripted endpoints: who is started, when silence counts, and what the budget holds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from types import SimpleNamespace
from typing import Any, cast

import pytest

from disco_daemon.answer import Answer
from disco_daemon.conductor import AnswerContext, Conductor, DeliveryDefaults
from disco_daemon.conductor import plan as planning
from disco_daemon.conductor.answer_run import AnswerRun
from disco_daemon.delivery.buffer import TokenBuffer
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.mover import CostMover, Stay, View
from disco_daemon.dispatch.pacer import Amount, Pacer
from disco_daemon.dispatch.planner import Planner
from disco_daemon.endpoints.base import Controls, Resumption
from disco_daemon.errors import EndpointError
from disco_daemon.money.caps import CapLimits, Caps
from disco_daemon.money.catalog import Price
from disco_daemon.money.spending import Speeds, Spending
from disco_daemon.types import (
    UNKNOWN,
    Capabilities,
    CaughtUp,
    Continuation,
    Delivery,
    Finish,
    GenerationRequest,
    Outcome,
    Paused,
    PromptLength,
    Readiness,
    Reason,
    Sampling,
    Side,
    Token,
    Usage,
)
from tests.fixtures.jumping import LoopClock, in_jumps

DEVICE, SERVER = Side.DEVICE, Side.SERVER
STALL_S = 0.2
LONG = 3 * STALL_S  # s of nothing
Step = Token | Paused | Finish | float | EndpointError


@dataclass
class Scripted:
    """An endpoint that does what its script says; a number is so many seconds of nothing."""

    side: Side
    script: Sequence[Step]
    ready: Readiness = field(default_factory=Readiness)
    continuation: Continuation = Continuation.EXACT
    overlap: str | None = None
    n_prompt: int = 10
    model: str = "scripted"
    can_hold: bool = False
    resumption: Resumption = Resumption.ALONE
    known_since: float = 0.0
    adapters: Mapping[str, str] = field(default_factory=dict)
    asked: list[GenerationRequest] = field(default_factory=list)

    capabilities: Capabilities = UNKNOWN

    def refuses(self, request: GenerationRequest) -> None:
        del request

    def overlap_of(self, request: GenerationRequest) -> str | None:
        return self.overlap if request.answer_so_far else None

    def may_serve(self) -> bool:
        return True

    def readiness(self) -> Readiness:
        return self.ready

    async def count(self, request: GenerationRequest) -> PromptLength:
        del request
        return PromptLength(self.n_prompt)

    async def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Paused | Finish, None]:
        del usage, controls
        self.asked.append(request)
        for step in self.script:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, EndpointError):
                raise EndpointError(step.side, step.reason, str(step))  # a new one has no old traceback
            else:
                yield step

    def status(self) -> dict[str, Any]:
        return {}

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Books(Pacer):
    """A pacer that keeps its books open."""

    def __init__(self, budget: float, mean_length: float) -> None:
        super().__init__(budget, mean_length)
        self.held: list[Any] = []

    def reserve(self, length: Amount, tokens: Amount) -> None:
        self.held.append(tokens)
        super().reserve(length, tokens)


class Page:
    """A reader who takes everything."""

    text = ""
    n_prompt: int | None = None
    routes: Sequence[tuple[Side, str, Reason]] = ()

    def token(self, token: Token, side: Side) -> None:
        del side
        self.text += token.text

    def prompt(self, n_tokens: int) -> None:
        self.n_prompt = n_tokens

    def route(self, side: Side, model: str, reason: Reason) -> None:
        self.routes = [*self.routes, (side, model, reason)]

    def note(self, text: str) -> None: ...

    def mix(self) -> None: ...

    async def flush(self) -> None: ...


def context(
    device: Scripted, server: Scripted, policy: str = "all-device", budget: float = 0.5, **caps: float
) -> AnswerContext:
    clock = LoopClock()
    caps_ = Caps(CapLimits(**caps), UTC, clock.wall())
    price = Price(1.0, 0.5, 10.0)
    spending = Spending(price, caps_, usd_per_kwh=0.3, watts=1.0, speeds=Speeds(100.0, 20.0), context=4096)
    planner = Planner(make_policy(policy), SERVER, budget)
    mover = Stay(CostMover(planner, cast(Any, None)))
    nobody = SimpleNamespace(**dict.fromkeys(("begin", "observe_prefill", "end"), lambda *_: None))
    return AnswerContext(
        {DEVICE: device, SERVER: server},
        planner,
        mover,
        clock,
        spending,
        lambda begin, end: False,
        nobody,
        shadow=False,
        defaults=DeliveryDefaults(Delivery.OFF, stall_s=STALL_S),
    )


async def played(
    on: AnswerContext, request: GenerationRequest | None = None, page: Page | None = None
) -> tuple[str, Outcome]:
    """The text of one answer, and what came of it; an error is the outcome's, too."""
    page, outcomes = page or Page(), list[Outcome]()
    with contextlib.suppress(EndpointError):
        keeper = SimpleNamespace(context=on, held=lambda: contextlib.nullcontext(on))
        conductor = Conductor(cast(Any, keeper), lambda _, outcome: outcomes.append(outcome), lambda entry: None)
        await conductor.run(request or asked(), "disco", page)
    return page.text, outcomes[-1]


def asked(**more: Any) -> GenerationRequest:
    return GenerationRequest("r", ({"role": "user", "content": "x"},), **more)


def words(*texts: str) -> list[Step]:
    return [Token(text) for text in texts]


WAITS: list[Step] = [
    *words("one ", "two "),
    Paused(paused=True),
    LONG,
    Paused(paused=False),
    *words("three"),
    Finish("stop"),
]
SILENT: list[Step] = [*words("one ", "two "), LONG, *words("three"), Finish("stop")]
GOES_ON: list[Step] = [*words("and ", "so on"), Finish("stop")]


@in_jumps
async def test_a_pause_of_the_engines_own_scheduler_is_no_silence() -> None:
    server = Scripted(SERVER, GOES_ON)
    text, outcome = await played(context(Scripted(DEVICE, WAITS), server))
    assert text == "one two three"
    assert (outcome.moves, server.asked) == ((), [])


@in_jumps
async def test_silence_after_a_pause_counts_from_its_end_on() -> None:
    script = [*WAITS[:5], 0.5 * STALL_S, *words("three"), Finish("stop")]
    server = Scripted(SERVER, GOES_ON)
    assert (await played(context(Scripted(DEVICE, script), server)))[0] == "one two three"
    assert server.asked == []
    hangs = [*WAITS[:5], LONG, *words("three"), Finish("stop")]
    assert (await played(context(Scripted(DEVICE, hangs), server)))[0] == "one two and so on"


@in_jumps
async def test_a_silent_source_is_left() -> None:
    text, outcome = await played(context(Scripted(DEVICE, SILENT), Scripted(SERVER, GOES_ON)))
    assert text == "one two and so on"
    assert [move.reason for move in outcome.moves] == ["stall"]


@in_jumps
async def test_a_silent_source_is_not_left_where_a_cap_closes_the_target() -> None:
    server = Scripted(SERVER, GOES_ON)
    text, outcome = await played(context(Scripted(DEVICE, SILENT), server, usd_per_day=0.0))
    assert (text, outcome.moves, server.asked) == ("one two three", (), [])


@in_jumps
async def test_a_silent_source_is_not_left_where_the_budget_is_used_up() -> None:
    server = Scripted(SERVER, GOES_ON)
    on = context(Scripted(DEVICE, SILENT), server, policy="optimal", budget=0.0)
    pacer = on.planner.pacer
    while pacer.allows(10):
        pacer.reserve(0, 1)
    text, outcome = await played(on)
    assert (text, outcome.moves, server.asked) == ("one two three", (), [])


@in_jumps
async def test_what_a_move_may_process_is_held_against_the_budget_until_the_answer_is_settled() -> None:
    on = context(Scripted(DEVICE, SILENT), Scripted(SERVER, GOES_ON), policy="optimal", budget=0.0)
    pacer = on.planner.pacer = Books(0.0, 60.0)
    assert len((await played(on))[1].moves) == 1
    assert 10 in pacer.held
    assert sum(pacer.held) == 0


@in_jumps
async def test_fifty_silences_start_no_more_targets_than_the_bound_says() -> None:
    script: list[Step] = [Token("w ")]
    for _ in range(8):
        script += [1.5 * STALL_S, Token("w ")]
    server = Scripted(SERVER, [0.2 * STALL_S, EndpointError(SERVER, "timeout", "nothing came")], Readiness())
    text, _ = await played(context(Scripted(DEVICE, [*script, Finish("stop")]), server))
    assert text == "w " * 9
    assert len(server.asked) <= 2


# --- room in the context ----------------------------------------------------------------------------------------------


@in_jumps
async def test_the_device_is_told_how_much_to_expect_and_nothing_where_prompts_do_not_say() -> None:
    device = Scripted(DEVICE, [*words("one"), Finish("stop")])
    on = context(device, Scripted(SERVER, [*words("two"), Finish("stop")]))
    await played(on)
    outputs = on.planner.knowledge.outputs
    for i in range(400):
        outputs.add(300 + i % 9 if i % 2 else 20 + i % 9, censored=False, prompt=400 if i % 2 else device.n_prompt)
    expected = outputs.rest(device.n_prompt)
    await played(on)
    assert [request.expected_rest for request in device.asked] == [(), expected]
    assert 20 < expected[0] < 40


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "starts"),
    [
        (100, None, DEVICE),
        (100, 4000, DEVICE),  # clients allow more than they get
        (500, None, SERVER),
        (500, 12, DEVICE),
        (501, 12, SERVER),
        (600, 1, SERVER),
    ],
)
@in_jumps
async def test_a_prompt_that_leaves_too_little_room_does_not_start_on_the_device(
    n_prompt: int, max_tokens: int | None, starts: Side
) -> None:
    device = Scripted(DEVICE, GOES_ON, Readiness(n_ctx=512), n_prompt=n_prompt)
    server = Scripted(SERVER, GOES_ON)
    _, outcome = await played(context(device, server), asked(sampling=Sampling(max_tokens)))
    assert outcome.winner is starts
    assert [len(e.asked) for e in (device, server)] == [starts is DEVICE, starts is SERVER]
    assert outcome.plan.delay(starts.other) == math.inf


@in_jumps
async def test_where_the_server_cannot_take_it_the_device_tries() -> None:
    device = Scripted(DEVICE, GOES_ON, Readiness(n_ctx=512), n_prompt=500)
    down = Scripted(SERVER, GOES_ON, Readiness(down_s=5.0))
    assert (await played(context(device, down)))[1].winner is DEVICE
    dead = Scripted(SERVER, [EndpointError(SERVER, "unreachable", "nobody is there")])
    full: list[Step] = [*words("one "), Finish("length", full=True)]
    text, outcome = await played(context(Scripted(DEVICE, full, device.ready, n_prompt=500), dead))
    assert (text, outcome.error) == ("one ", "context_full")


@in_jumps
async def test_only_the_device_asked_for_a_full_context_is_a_length() -> None:
    device = Scripted(DEVICE, [*words("one "), Finish("length", full=True)], Readiness(n_ctx=512), n_prompt=500)
    server = Scripted(SERVER, GOES_ON)
    _, outcome = await played(context(device, server), asked(allowed=frozenset({DEVICE})))
    assert (outcome.finish_reason, server.asked) == ("length", [])


# --- what the client has begun ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trust", "overlap", "starts"),
    [
        (Continuation.EXACT, None, SERVER),
        (Continuation.GUARDED, None, SERVER),
        (Continuation.UNTRIED, None, DEVICE),
        (Continuation.GUARDED, "lived", DEVICE),
    ],
)
@in_jumps
async def test_a_server_that_nobody_knows_to_continue_is_not_asked_while_the_device_can(
    trust: Continuation, overlap: str | None, starts: Side
) -> None:
    server = Scripted(SERVER, words("lived on") + GOES_ON, continuation=trust, overlap=overlap)
    on = context(Scripted(DEVICE, GOES_ON), server, policy="all-server")
    assert (await played(on, asked(answer_so_far="There once lived")))[1].winner is starts
    assert (await played(on))[1].winner is SERVER, "what it begins itself is its own"


@in_jumps
async def test_an_echo_is_not_doubled_when_the_device_cannot() -> None:
    begun = "There once lived"
    server = Scripted(SERVER, [*words(begun, " a fox"), Finish("stop")], continuation=Continuation.UNTRIED)
    broken = Scripted(DEVICE, [EndpointError(DEVICE, "engine_gone", "it is gone")])
    text, outcome = await played(context(broken, server), asked(answer_so_far=begun))
    assert (text, outcome.winner) == (" a fox", SERVER)


# --- what is left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "server"),
    [
        ([*words("one ", "two"), Finish("stop")], GOES_ON),
        (SILENT, GOES_ON),
        ([*words("one "), EndpointError(DEVICE, "engine_gone", "killed")], GOES_ON),
        ([EndpointError(DEVICE, "busy", "no")], [EndpointError(SERVER, "timeout", "nothing came")]),
    ],
    ids=["whole", "moved", "broken", "failed"],
)
@in_jumps
async def test_an_answer_that_has_ended_is_in_no_cycle(
    device: list[Step], server: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon looks for cycles only while nobody waits."""
    monkeypatch.setattr(logging.getLogger("disco.answer"), "disabled", True)  # else pytest keeps what was logged
    on = context(Scripted(DEVICE, device), Scripted(SERVER, server))
    gc.collect()
    gc.disable()
    gc.freeze()  # what is there already is not looked at: in a run of all tests it is millions of objects
    try:
        await played(on)
        await asyncio.sleep(0)
        assert [o for o in gc.get_objects() if isinstance(o, AnswerRun | Answer | TokenBuffer)] == []
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize(
    ("trust", "overlap", "n"),
    [
        (Continuation.EXACT, None, 8),
        (Continuation.UNTRIED, None, 8),
        (Continuation.GUARDED, None, 10),
        (Continuation.GUARDED, "one two", 10),
        (Continuation.GUARDED, "two", 9),
    ],
)
@in_jumps
async def test_a_side_that_goes_on_is_asked_for_what_is_left_and_for_what_it_says_again(
    trust: Continuation, overlap: str | None, n: int
) -> None:
    breaks = Scripted(DEVICE, [*words("one", " two"), EndpointError(DEVICE, "engine_gone", "it is gone")])
    server = Scripted(SERVER, GOES_ON, continuation=trust, overlap=overlap)
    await played(context(breaks, server), asked(sampling=Sampling(max_tokens=10)))
    assert [request.sampling.max_tokens for request in server.asked] == [n]


# --- what it is told that was not heeded ------------------------------------------------------------------------------


@dataclass
class Strict(Scripted):
    """A device whose model takes the turns in another order; how long the prompt is, it does not say in time."""

    def count(self, request: GenerationRequest) -> Any:
        del request
        return asyncio.sleep(0, None)

    async def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Paused | Finish, None]:
        try:
            async for event in super().generate(request, usage, controls):
                yield event
        finally:
            usage.rearranged = True


@in_jumps
async def test_turns_that_were_changed_are_told_however_slow_the_prompt_is_counted() -> None:
    whole = [*words("one"), Finish("stop")]
    told: list[tuple[list[Step], list[Step], str, list[str]]] = [
        (whole, GOES_ON, "all-device", ["messages.order"]),
        (SILENT, GOES_ON, "all-device", ["messages.order"]),
        (
            [*words("one "), EndpointError(DEVICE, "engine_gone", "it is gone")],
            GOES_ON,
            "all-device",
            ["messages.order"],
        ),
        (whole, GOES_ON, "all-server", []),
    ]
    for device, server, policy, ignored in told:
        _, outcome = await played(context(Strict(DEVICE, device), Scripted(SERVER, server), policy))
        assert list(outcome.ignored) == ignored


# --- which side begins, and why -----------------------------------------------------------------------------------

DOWN = EndpointError(SERVER, "unreachable", "nobody is there")
LATER: list[Step] = [0.1 * STALL_S, *words("late"), Finish("stop")]
AT_ONCE: list[Step] = [*words("here"), Finish("stop")]


@pytest.mark.parametrize(
    ("policy", "server", "more", "caps", "side", "reason"),
    [
        ("race", AT_ONCE, {}, {}, SERVER, Reason.RACE),
        ("all-device", AT_ONCE, {}, {}, DEVICE, Reason.PLAN),
        ("all-server", AT_ONCE, {}, {"usd_per_day": 0.0}, DEVICE, Reason.ONLY),
        ("all-server", [DOWN], {}, {}, DEVICE, Reason.FAILURE),
        ("race", AT_ONCE, {"allowed": frozenset({DEVICE})}, {}, DEVICE, Reason.ROUTE),
        ("race", AT_ONCE, {"allowed": frozenset({DEVICE}), "private": True}, {}, DEVICE, Reason.PRIVATE),
        ("all-device", LATER, {"prefers": SERVER}, {}, SERVER, Reason.ROUTE),
        ("race", AT_ONCE, {"prefers": DEVICE}, {}, DEVICE, Reason.ROUTE),
        ("all-server", [DOWN], {"prefers": SERVER}, {}, DEVICE, Reason.FAILURE),
        ("race", AT_ONCE, {"prefers": SERVER}, {"usd_per_day": 0.0}, DEVICE, Reason.ONLY),
    ],
)
@in_jumps
async def test_the_reader_is_told_once_which_side_begins_and_why(
    policy: str, server: list[Step], more: dict[str, Any], caps: dict[str, float], side: Side, reason: Reason
) -> None:
    page = Page()
    on = context(Scripted(DEVICE, LATER), Scripted(SERVER, server), policy, **caps)
    _, outcome = await played(on, asked(**more), page)
    assert page.routes == [(side, "scripted", reason)]
    assert (outcome.winner, outcome.reason, outcome.winner_model) == (side, reason, "scripted")
    assert outcome.to_json()["reason"] == reason


@in_jumps
async def test_the_side_that_is_preferred_begins_alone_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LATE_S", 0.0)  # after which a loading device gets help
    for prefers, policy in ((DEVICE, "all-server"), (DEVICE, "race"), (SERVER, "all-device"), (SERVER, "race")):
        slow, other = Scripted(prefers, [LONG, *words("late"), Finish("stop")]), Scripted(prefers.other, AT_ONCE)
        slow.ready = Readiness(load_s=0.01)
        device, server = (slow, other) if prefers is DEVICE else (other, slow)
        text, _ = await played(context(device, server, policy), asked(prefers=prefers))
        assert (text, other.asked) == ("late", [])


@in_jumps
async def test_a_preferred_server_that_wants_no_requests_now_is_not_asked() -> None:
    server = Scripted(SERVER, AT_ONCE, Readiness(down_s=5.0))
    text, outcome = await played(context(Scripted(DEVICE, LATER), server, "all-server"), asked(prefers=SERVER))
    assert (text, server.asked, outcome.winner) == ("late", [], DEVICE)


@in_jumps
async def test_a_preferred_device_without_room_leaves_it_to_the_server() -> None:
    device = Scripted(DEVICE, AT_ONCE, Readiness(n_ctx=8))
    text, _ = await played(context(device, Scripted(SERVER, LATER)), asked(prefers=DEVICE))
    assert (text, device.asked) == ("late", [])


class Eager(CostMover):
    """The fault: it finds that every move pays, and at once."""

    def advise(self, view: View) -> int | None:
        del view
        return 0

    def next_check(self, generated: int) -> int:
        return generated + 1


@in_jumps
async def test_an_answer_that_began_where_it_was_wanted_does_not_move_for_money_but_away_from_silence() -> None:
    for prefers, reasons in ((None, ["cost"]), (DEVICE, [])):
        steps = [*words("one ", "two "), 0.01, *words("three "), 0.1 * STALL_S, *words("four"), Finish("stop")]
        on = context(Scripted(DEVICE, steps), Scripted(SERVER, GOES_ON))
        on.defaults = DeliveryDefaults(Delivery.RESERVE, stall_s=STALL_S)
        on.mover = Eager(on.planner, cast(Any, None))
        _, outcome = await played(on, asked(prefers=prefers))
        assert [move.reason for move in outcome.moves] == reasons
    _, outcome = await played(context(Scripted(DEVICE, SILENT), Scripted(SERVER, GOES_ON)), asked(prefers=DEVICE))
    assert [move.reason for move in outcome.moves] == ["stall"]

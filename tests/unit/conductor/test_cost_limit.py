"""What servers bill for one answer stays below what its client allows, by sums and by the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from datetime import UTC
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from disco_daemon.api.openai import openai_request
from disco_daemon.clock import SystemClock
from disco_daemon.conductor import AnswerContext, Conductor, DeliveryDefaults
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.mover import CostMover, View
from disco_daemon.dispatch.planner import Planned, Planner
from disco_daemon.endpoints.base import Controls
from disco_daemon.endpoints.hedge import ServerEvents, hedged
from disco_daemon.errors import EndpointError, RequestError
from disco_daemon.money.caps import PROMPT_MARGIN, CapLimits, Caps
from disco_daemon.money.catalog import Price
from disco_daemon.money.cost_limit import MOST_SENT, billed, fit
from disco_daemon.money.spending import CostBound, Speeds, Spending
from disco_daemon.types import (
    BOTH,
    UNKNOWN,
    CaughtUp,
    Continuation,
    Delivery,
    Finish,
    GenerationRequest,
    Outcome,
    Paused,
    PromptLength,
    Readiness,
    Sampling,
    Side,
    Token,
    Usage,
)
from tests.fixtures import chat_bodies

PRICE = Price(0.15, 0.075, 0.6)
N_PROMPT = 40
QUESTION = " ".join(f"w{i}" for i in range(N_PROMPT))
amounts = st.floats(0.0, 1.0)


# --- sums ---------------------------------------------------------------------------------------------------------


@example(Price(0.0, 0.0, 5e-324), 1, None, 8, 0.0)  # a token costs nothing that a float could hold, all of them do
@given(
    st.builds(Price, st.floats(0, 100), st.floats(0, 100), st.floats(0, 500)), st.integers(1, 200_000),
    st.one_of(st.none(), st.integers(1, 200_000)), st.integers(1, 8), amounts,
)  # fmt: skip
def test_what_fits_costs_no_more_than_is_left_and_changes_no_limit_of_the_client(
    price: Price, n_prompt: int, max_tokens: int | None, choices: int, left_usd: float
) -> None:
    found = fit(price, CostBound(n_prompt, max_tokens, choices), left_usd)
    if found is not None:
        assert billed(price, found) <= left_usd
        assert (found.prompt_tokens, found.choices) == (n_prompt, choices)
        if max_tokens is not None:
            assert found.max_tokens == max_tokens
        elif found.max_tokens is not None:
            assert 1 <= found.max_tokens <= MOST_SENT
    else:
        assert billed(price, CostBound(n_prompt, max_tokens or 1, choices)) > left_usd * (1 - 1e-9)


def test_without_a_limit_the_rest_buys_one() -> None:
    prompt_usd = 1000 * PROMPT_MARGIN * 0.15 / 1e6
    found = fit(PRICE, CostBound(1000), prompt_usd + 100.5 * 0.6 / 1e6)
    assert found is not None
    assert found.max_tokens == 100
    assert fit(PRICE, CostBound(1000), prompt_usd) is None, "an answer of nothing is none"
    whole = fit(PRICE, CostBound(1000), 1.0)
    assert whole is not None
    assert whole.max_tokens is None, "a whole context fits"


def test_an_unknown_price_does_not_fit_and_a_free_server_always_does() -> None:
    assert fit(replace(PRICE, known=False), CostBound(1, 1), 1e6) is None
    free = Price(0.0, 0.0, 0.0)
    assert fit(free, CostBound(10**9), 0.0) == CostBound(10**9)


# --- answers ------------------------------------------------------------------------------------------------------


class Billing:
    """An endpoint that makes, bills and fails by chance, and keeps to what it is asked for."""

    can_hold, model, known_since, adapters = False, "m", 0.0, dict[str, str]()
    continuation, capabilities = Continuation.EXACT, UNKNOWN

    def __init__(self, side: Side, chance: random.Random) -> None:
        self.side, self.chance = side, chance
        self.asked: list[GenerationRequest] = []

    def refuses(self, request: GenerationRequest) -> None:
        del request

    def overlap_of(self, request: GenerationRequest) -> None:
        del request

    def readiness(self) -> Readiness:
        return Readiness(hedgeable=self.side is Side.SERVER)

    def may_serve(self) -> bool:
        return True

    async def count(self, request: GenerationRequest) -> PromptLength:
        del request
        return PromptLength(N_PROMPT)

    def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Paused | Finish, None]:
        if controls is None or controls.hedge is None:
            return self._ask(request, usage)
        asks = hedged(lambda own: cast(ServerEvents, self._ask(request, own)), usage, controls.hedge, SystemClock())
        return cast(AsyncGenerator[Token | CaughtUp | Paused | Finish, None], asks)

    async def _ask(
        self, request: GenerationRequest, usage: Usage
    ) -> AsyncGenerator[Token | CaughtUp | Paused | Finish, None]:
        self.asked.append(request)
        chance, n_before = self.chance, len(request.answer_so_far.split())
        await asyncio.sleep(chance.choice((0.0, 0.0, 0.001, 0.003)))
        if chance.random() < 0.2:
            raise EndpointError(self.side, chance.choice(("unreachable", "timeout", "cut")), "by chance")
        usage.prompt_tokens = math.floor((N_PROMPT + n_before) * chance.uniform(0.5, PROMPT_MARGIN))
        n_wanted = chance.randrange(1, 60)
        for i in range(min(n_wanted, request.sampling.max_tokens or n_wanted)):
            usage.completion_tokens += 1
            yield Token(f"w{i} ")
            if chance.random() < 0.02:
                raise EndpointError(self.side, "cut", "by chance")
            if chance.random() < 0.1:
                await asyncio.sleep(0)
        yield Finish("stop" if n_wanted <= (request.sampling.max_tokens or n_wanted) else "length")

    def status(self) -> dict[str, Any]:
        return {}

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Impatient(Planner):
    """The fault: it finds that every server is late."""

    def plan(self, length: int, readiness: Mapping[Side, Readiness]) -> Planned:
        planned = super().plan(length, readiness)
        return replace(planned, plan=replace(planned.plan, hedge_s=0.0005))


class Eager(CostMover):
    """The fault: it finds that every move pays, and at once."""

    def advise(self, view: View) -> int | None:
        del view
        return 0

    def next_check(self, generated: int) -> int:
        return generated + 1


class Anybody:
    """Takes everything: a sink and an energy observer."""

    def prompt(self, *_: object) -> None: ...
    def route(self, *_: object) -> None: ...
    def token(self, *_: object) -> None: ...
    def note(self, *_: object) -> None: ...
    def mix(self) -> None: ...

    async def flush(self) -> None: ...
    def begin(self, *_: object) -> None: ...
    def observe_prefill(self, *_: object) -> None: ...
    def end(self, *_: object) -> None: ...


def context(chance: random.Random, policy: str = "race", price: Price = PRICE, **more: Any) -> AnswerContext:
    clock = SystemClock()
    spending = Spending(price, Caps(CapLimits(), UTC, clock.wall()), usd_per_kwh=0.3, watts=1.0,
                        speeds=Speeds(100.0, 20.0), context=4096)  # fmt: skip
    planner = Impatient(make_policy(policy), Side.SERVER, 0.5, hedge_share=1.0)
    endpoints = {side: Billing(side, chance) for side in Side}
    return AnswerContext(
        cast(Any, endpoints), planner, Eager(planner, cast(Any, None)), clock, spending, lambda begin, end: False,
        Anybody(), shadow=False, defaults=DeliveryDefaults(Delivery.RESERVE, stall_s=0.5), **more,
    )  # fmt: skip


async def outcome_of(on: AnswerContext, request: GenerationRequest) -> Outcome | EndpointError:
    outcomes: list[Outcome] = []
    keeper = SimpleNamespace(context=on, held=lambda: contextlib.nullcontext(on))
    conductor = Conductor(cast(Any, keeper), lambda _, outcome: outcomes.append(outcome), lambda entry: None)
    try:
        return await conductor.run(request, "disco", Anybody())
    except EndpointError as e:
        return outcomes[-1] if outcomes else e


def asked(**more: Any) -> GenerationRequest:
    return GenerationRequest("r", ({"role": "user", "content": QUESTION},), **more)


async def test_the_ledger_of_a_thousand_answers_has_none_above_its_limit() -> None:
    chance = random.Random(25)
    n_asked = n_refused = n_moved = n_hedged = 0
    for _ in range(1000):
        on = context(chance, chance.choice(("race", "all-server", "all-device", "delay")))
        max_usd = chance.choice((0.0, 1e-6, 1e-5, 2e-5, 4e-5, 1e-4))
        max_tokens = chance.choice((None, None, 1, 20, 50))
        allowed = chance.choice((BOTH, BOTH, BOTH, frozenset({Side.SERVER})))
        request = asked(sampling=Sampling(max_tokens), max_cost_usd=max_usd, allowed=allowed)
        outcome = await outcome_of(on, request)
        if isinstance(outcome, EndpointError):
            assert (outcome.status, outcome.code) == (429, "max_cost_reached")
            n_refused += 1
            continue
        assert outcome.server_usd <= max_usd, (outcome.attempts, request.sampling)
        n_asked += any(a.side is Side.SERVER for a in outcome.attempts)
        n_moved += outcome.handoffs
        n_hedged += any(a.hedge is not None for a in outcome.attempts)
    assert n_asked > 200
    assert n_refused > 20
    assert n_moved > 50, "the servers that answers moved to are among them"
    assert n_hedged > 20, "and those that were asked twice"


async def test_where_nobody_is_left_the_error_says_what_to_do() -> None:
    on = context(random.Random(1), "race", replace(PRICE, known=False))
    found = await outcome_of(on, asked(max_cost_usd=1.0, allowed=frozenset({Side.SERVER})))
    assert isinstance(found, EndpointError)
    assert (found.status, found.code, found.param) == (429, "max_cost_reached", "disco.max_cost_usd")
    assert "server.input_usd_per_mtok" in str(found)
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"price": PRICE, "max_cost_usd": 1e-9}, "ask for less", "input_usd_per_mtok"),
        ({"price": PRICE, "extra": {"web_search_options": {}}}, "no bound that is known", "ask for less"),
    ]
    for more, said, unsaid in cases:
        on = context(random.Random(1), "race", more.pop("price"))
        found = await outcome_of(on, asked(**{"max_cost_usd": 1.0, "allowed": frozenset({Side.SERVER})} | more))
        assert said in str(found)
        assert unsaid not in str(found)


async def test_a_server_that_would_cost_too_much_is_not_asked_and_the_device_answers() -> None:
    searches: dict[str, Any] = {"web_search_options": {}}
    for extra, max_usd in (({}, 1e-7), (searches, 1.0)):
        on = context(random.Random(3), "all-server")
        outcome = await outcome_of(on, asked(max_cost_usd=max_usd, extra=extra))
        assert isinstance(outcome, Outcome)
        assert [a.side for a in outcome.attempts] == [Side.DEVICE] * len(outcome.attempts)


async def test_the_limit_that_the_rest_buys_is_sent_and_one_of_the_client_is_left_alone() -> None:
    prompt_usd = N_PROMPT * PROMPT_MARGIN * 0.15 / 1e6
    for max_tokens, sent in ((None, 10), (5, 5)):
        on = context(random.Random(2), "all-server")
        await outcome_of(on, asked(max_cost_usd=prompt_usd + 10.5 * 0.6 / 1e6, sampling=Sampling(max_tokens)))
        server = cast(Billing, on.endpoints[Side.SERVER])
        assert server.asked[0].sampling.max_tokens == sent


async def test_calls_of_earlier_turns_count_though_the_device_that_counts_does_not_show_them() -> None:
    arguments = "word " * 9000
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"arguments": arguments}}]}
    request = asked(allowed=frozenset({Side.SERVER}), max_cost_usd=9000 * 0.15 / 1e6, sampling=Sampling(1))
    for messages, is_asked in ((request.messages, True), ((*request.messages, called), False)):
        on = context(random.Random(2), "all-server")
        await outcome_of(on, replace(request, messages=messages))
        assert bool(cast(Billing, on.endpoints[Side.SERVER]).asked) is is_asked


# --- the API ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, "1", 1e9, True])
def test_an_amount_that_is_none_is_refused_with_its_name(wrong: object) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "disco": {"max_cost_usd": wrong}}
    with pytest.raises(RequestError) as raised:
        chat_bodies.parse(json.dumps(body).encode())
    assert raised.value.param == "disco.max_cost_usd"


def test_an_amount_reaches_the_conductor() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "disco": {"max_cost_usd": 0.01}}'
    assert openai_request.to_generation(*chat_bodies.parse(body), "r", BOTH).max_cost_usd == 0.01

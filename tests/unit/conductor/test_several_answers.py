"""One answer of several servers by the real conductor: who is asked next, and what is in the way of that."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from disco_daemon.errors import EndpointError
from disco_daemon.money.caps import CapLimits
from disco_daemon.money.catalog import Price
from disco_daemon.types import BOTH, GenerationRequest, Readiness, Sampling, Side
from tests.fixtures.jumping import in_jumps
from tests.fixtures.several import STALL_S, UNREAD, WHOLE, Call, Source, Stage, asked, server

CHEAP, DEAR, FREE = Price(1.0, 0.5, 2.0), Price(300.0, 150.0, 600.0), Price(0.0, 0.0, 0.0)
EIGHT = Sampling(max_tokens=8)
ONCE_USD = 0.06  # a request to the dear one is bounded by 0.046
LONG = 3.0


@in_jumps
async def test_an_answer_that_waits_for_one_of_several_servers_ends_when_all_becomes_private() -> None:
    for n_servers in (1, 2, 3):
        stage = Stage([(server(Call(LONG)), CHEAP) for _ in range(n_servers)])
        await stage.answer(acts=[(0.1, "private")])
        assert isinstance(stage.error, EndpointError)
        assert stage.error.code == "private"
        assert [len(one.metered) for one in stage.sources.values()] == [1] + [0] * (n_servers - 1)


@in_jumps
async def test_an_answer_that_became_private_asks_nobody_though_all_is_public_again() -> None:
    stage = Stage([(server(Call(LONG)), CHEAP), (server(), CHEAP)])
    await stage.answer(acts=[(0.1, "private"), (0.1, "public")])
    assert isinstance(stage.error, EndpointError)
    assert stage.sources["b"].metered == []


@in_jumps
async def test_an_answer_that_may_cost_no_more_ends_where_another_server_is_left() -> None:
    """Each alone fits the limit, both do not: nobody would be asked again and again."""
    for n_cut in (0, 3):
        stage = Stage([(server(Call(0.1, n_cut, "cut")), DEAR), (server(), DEAR)])
        outcome = await stage.answer(asked(max_cost_usd=ONCE_USD, sampling=EIGHT))
        assert outcome is not None
        assert isinstance(stage.error, EndpointError)
        assert stage.sources["b"].metered == []
        assert stage.told == ["a"], "who was not asked has not failed"
        assert WHOLE.startswith(stage.page.text)
        assert outcome.server_usd <= ONCE_USD


@in_jumps
async def test_an_answer_ends_where_a_cap_was_filled_meanwhile() -> None:
    for n_cut in (0, 3):
        stage = Stage([(server(Call(0.1, n_cut, "cut")), DEAR), (server(), DEAR)], limits=CapLimits(usd_per_day=0.01))
        outcome = await stage.answer(asked(sampling=EIGHT))
        assert outcome is not None
        assert isinstance(stage.error, EndpointError)
        assert (stage.sources["b"].metered, stage.told) == ([], ["a"])


@pytest.mark.parametrize("n_cut", [0, 3])
@in_jumps
async def test_another_server_goes_on_where_all_of_it_fits(n_cut: int) -> None:
    stage = Stage([(server(Call(0.1, n_cut, "cut")), DEAR), (server(), CHEAP)])
    outcome = await stage.answer(asked(sampling=EIGHT, max_cost_usd=ONCE_USD))
    assert outcome is not None
    assert stage.page.text == WHOLE
    assert stage.told == ["a"]


@pytest.mark.parametrize("n_cut", [0, 3])
@pytest.mark.parametrize("limits", [{"max_cost_usd": ONCE_USD}, {}])
@in_jumps
async def test_a_server_that_is_too_dear_by_now_does_not_keep_a_cheaper_one_from_the_answer(
    n_cut: int, limits: dict[str, float]
) -> None:
    """The second one no longer fits the limit, or the cap is full but for what costs nothing; the third one fits."""
    third = CHEAP if limits else FREE
    caps = CapLimits() if limits else CapLimits(usd_per_day=0.01)
    stage = Stage([(server(Call(0.1, n_cut, "cut")), DEAR), (server(), DEAR), (server(), third)], limits=caps)
    outcome = await stage.answer(asked(sampling=EIGHT, **cast(Any, limits)))
    assert outcome is not None
    assert (stage.page.text, outcome.error) == (WHOLE, None)
    assert (stage.sources["b"].metered, stage.told) == ([], ["a"])
    assert outcome.server_usd <= ONCE_USD


@in_jumps
async def test_one_that_filled_the_cap_since_the_plan_leaves_the_answer_to_one_that_costs_nothing() -> None:
    stage = Stage([(server(), DEAR), (server(), FREE)], limits=CapLimits(usd_per_day=0.01))
    reserve = stage.members[0].spending.reserve

    def filled(*asked: Any) -> Any:
        stage.caps.book(Side.SERVER, 0.02, stage.clock.wall())
        return reserve(*asked)

    cast(Any, stage.members[0].spending).reserve = filled
    outcome = await stage.answer(asked(sampling=EIGHT))
    assert outcome is not None
    assert (stage.page.text, outcome.error, stage.told) == (WHOLE, None, [])
    assert stage.sources["a"].metered == []


@pytest.mark.parametrize("error", UNREAD)
@in_jumps
async def test_what_was_held_for_a_server_that_turned_the_request_away_is_free_for_the_next_one(error: str) -> None:
    """One answer may be bounded by more than a whole cap: nothing was spent of it."""
    stage = Stage([(server(Call(0.1, 0, error)), DEAR), (server(), DEAR)], limits=CapLimits(usd_per_day=0.01))
    outcome = await stage.answer(asked(sampling=EIGHT))
    assert outcome is not None
    assert (stage.page.text, outcome.error) == (WHOLE, None)
    assert all(not cap["reserved"] for cap in stage.caps.state(0.0).values())
    assert stage.caps.spent(0.0).usd_today == pytest.approx(outcome.server_usd)


@in_jumps
async def test_a_silent_server_is_not_left_for_one_that_nothing_is_left_for() -> None:
    stage = Stage([(server(Call(0.1, between_s=2 * STALL_S)), DEAR), (server(), DEAR)])
    outcome = await stage.answer(asked(sampling=EIGHT, max_cost_usd=ONCE_USD))
    assert outcome is not None
    assert (stage.page.text, outcome.error, stage.told) == (WHOLE, None, [])


class Unable(Source):
    """A device that this request is not for."""

    def refuses(self, request: GenerationRequest) -> str:  # type: ignore[override]
        del request
        return "the device cannot do this"


@pytest.mark.parametrize(
    ("device", "allowed"),
    [
        (None, BOTH),
        (Source(Side.DEVICE, "small", [Call()]), frozenset({Side.SERVER})),
        (Unable(Side.DEVICE, "small", [Call()]), BOTH),
    ],
    ids=["no device", "the server alone is wished for", "the device cannot"],
)
@in_jumps
async def test_a_server_that_is_silent_in_mid_answer_is_left_where_no_device_can_take_over(
    device: Source | None, allowed: frozenset[Side]
) -> None:
    began = asyncio.get_running_loop().time()
    stage = Stage([(server(Call(0.1, between_s=500.0)), CHEAP), (server(), CHEAP)], device=device)
    outcome = await stage.answer(asked(allowed=allowed))
    assert outcome is not None
    assert (stage.page.text, stage.told, outcome.handoffs) == (WHOLE, ["a"], 1)
    assert asyncio.get_running_loop().time() - began < 3 * STALL_S


# --- a second request to another server -------------------------------------------------------------------------------


@in_jumps
async def test_an_answer_that_the_second_server_won_is_that_servers_from_its_first_token_on() -> None:
    """What rests, moves or breaks afterwards goes by its ways and its prices, not by those of the silent one."""
    stage = Stage([(server(Call(LONG)), CHEAP), (server(Call(0.1, between_s=0.1)), DEAR)], hedge_after_s=0.2)
    seen: list[tuple[str, float]] = []
    token = stage.page.token

    def shown(*what: Any) -> None:
        assert stage.choice is not None
        answer_run = stage.conductor.in_flight.answering["r"]
        seen.append((stage.choice.now.server, answer_run.context.spending.price.output))
        token(*what)

    cast(Any, stage.page).token = shown
    outcome = await stage.answer()
    assert outcome is not None
    assert seen == [("b", DEAR.output)] * len(seen)
    assert (stage.page.text, outcome.server, stage.told) == (WHOLE, "b", [])
    assert outcome.cost_usd == sum(one.bill_usd for one in outcome.attempts)


@in_jumps
async def test_the_cost_of_an_answer_is_the_sum_of_what_each_server_bills() -> None:
    stage = Stage([(server(Call(0.0, 3, "cut")), CHEAP), (server(), DEAR)])
    outcome = await stage.answer()
    assert outcome is not None
    assert [(one.server, one.bill_usd > 0) for one in outcome.attempts] == [("a", True), ("b", True)]
    assert outcome.cost_usd == sum(one.bill_usd for one in outcome.attempts)


@pytest.mark.parametrize(
    ("first", "second", "acts", "told"),
    [
        (Call(0.5, 0, "cut"), Call(1.0), (), ["a"]),  # the second one wins
        (Call(1.0), Call(0.1, 0, "cut"), (), ["b"]),  # the first one wins
        (Call(0.5, 0, "cut"), Call(0.6, 0, "cut"), (), ["a", "b"]),
        (Call(0.5, 0, "cut"), Call(9.0), [(1.0, "cancel")], ["a"]),
        (Call(0.5, 0, "refused"), Call(1.0), (), []),  # that is the request's own fault
        (Call(0.5), Call(0.3, 0, "cut"), (), ["b"]),  # both at once, the first of which has a token
        (Call(0.5, 0, "cut"), Call(0.3), (), ["a"]),
    ],
)
@in_jumps
async def test_whoever_fails_of_two_servers_is_told_of_whoever_wins(
    first: Call, second: Call, acts: list[tuple[float, str]], told: list[str]
) -> None:
    stage = Stage([(server(first), CHEAP), (server(second), CHEAP)], hedge_after_s=0.2)
    await stage.answer(acts=acts)
    assert stage.told == told


@in_jumps
async def test_a_second_request_that_a_cap_a_limit_or_its_share_refuses_holds_and_uses_nothing() -> None:
    for more, limit in (({"limits": CapLimits(usd_per_day=0.01)}, None), ({"hedge_share": 0.0}, None), ({}, ONCE_USD)):
        stage = Stage([(server(Call(LONG)), DEAR), (server(), DEAR)], hedge_after_s=0.2, **cast(Any, more))
        outcome = await stage.answer(asked(sampling=EIGHT, max_cost_usd=limit))
        assert outcome is not None
        assert (stage.page.text, len(stage.sources["b"].metered), stage.pool.hedges.n_taken) == (WHOLE, 0, 0)
        assert [one.hedge for one in outcome.attempts] == [None]
        assert all(not cap["reserved"] for cap in stage.caps.state(0.0).values())


@pytest.mark.parametrize("acts", [("private",), ("private", "cancel"), ("cancel", "private"), ("cancel", "cancel")])
@pytest.mark.parametrize("first_s", [0.0, 0.01])
@in_jumps
async def test_two_requests_are_closed_also_where_what_ends_them_comes_twice(
    acts: tuple[str, ...], first_s: float
) -> None:
    """The second cancellation meets the closing of the streams, which goes on."""
    for after_s in (0.0, 0.3):
        device = Source(Side.DEVICE, "small", [Call()])
        stage = Stage([(server(Call(first_s)), CHEAP), (server(Call(0.01)), CHEAP)], device, hedge_after_s=after_s)
        await stage.answer(acts=[(first_s, act) for act in acts])
        metered = [meter for source in (device, *stage.sources.values()) for meter in source.metered]
        assert not any(meter.is_open for meter in metered)


@in_jumps
async def test_a_server_without_room_for_second_requests_gets_none() -> None:
    full = server(ready=Readiness(hedgeable=False))
    stage = Stage([(server(Call(LONG)), CHEAP), (full, CHEAP)], hedge_after_s=0.2)
    await stage.answer()
    assert (stage.page.text, full.metered) == (WHOLE, [])


@in_jumps
async def test_who_lost_the_race_goes_on_with_the_answer_and_is_asked_again_where_that_connection_broke() -> None:
    """Three requests to one server, each for a reason of its own; none is sent for the same reason twice."""
    loser = server(Call(2.0), Call(0.1, 0, "dropped"), Call(0.1))
    stage = Stage([(server(Call(0.5, 3, "cut")), CHEAP), (loser, CHEAP)], hedge_after_s=0.1)
    outcome = await stage.answer()
    assert outcome is not None
    assert (stage.page.text, outcome.error, stage.told) == (WHOLE, None, ["a"])
    asked_b = [(one.hedge, one.continued, one.error) for one in outcome.attempts if one.server == "b"]
    assert asked_b == [("lost", False, None), (None, True, "dropped"), (None, True, None)]
    assert len(loser.metered) == 3

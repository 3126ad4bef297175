"""One answer of several servers by the real conductor: who is asked next, and what is in the way of that."""

from __future__ import annotations

import pytest

from disco_daemon.errors import EndpointError
from disco_daemon.money.caps import CapLimits
from disco_daemon.money.catalog import Price
from disco_daemon.types import Sampling
from tests.fixtures.jumping import in_jumps
from tests.fixtures.several import WHOLE, Call, Stage, asked, server

CHEAP, DEAR = Price(1.0, 0.5, 2.0), Price(300.0, 150.0, 600.0)
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

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.migrate import LATE, MAX_RESERVE, MIN_TOKENS, Costs
from disco_daemon.dispatch.mover import DECODE_TPS, SEEN, UNTOLD_S, CostMover, Forced, Stay, View
from disco_daemon.dispatch.planner import Planner
from disco_daemon.engine.supervisor import IDS_TIMEOUT_S
from disco_daemon.estimation.knowledge import Knowledge
from disco_daemon.money.prices import Prices
from disco_daemon.types import Readiness, Side

DEVICE, SERVER = Side.DEVICE, Side.SERVER
PACE_TPS = 4.8
# A laptop on household electricity beside a dear model; the same on a battery that must last, beside a cheap one.
HOME = Prices(2.5, 10.0, device_watts=15.0, usd_per_kwh=0.3)
AWAY = Prices(0.15, 0.6, device_watts=15.0, usd_per_kwh=50.0)
TO_DEVICE = View("a", DEVICE, 100, 20, 0, None, 20.0, PACE_TPS, Readiness(), 0, follows=True)
TO_SERVER = replace(TO_DEVICE, target=SERVER, follows=False)


def learned(*, answers: int = 300, ttft_s: float = 0.5) -> Knowledge:
    """Answers have `answers` tokens, about, and the server's TTFT is `ttft_s`, about."""
    know = Knowledge()
    for i in range(200):
        know.outputs.add(answers - 50 + i % 100, censored=False)
        know.server.add(ttft_s * (0.9 + 0.2 * (i % 10) / 9), censored=False)
    return know


def mover(prices: Prices = HOME, knowledge: Knowledge | None = None, *, budget: float = 1.0, **more: Any) -> CostMover:
    know = knowledge or learned()
    scarcer = more.pop("constrained", prices.scarcer(1 / know.device.k, DECODE_TPS[DEVICE]))
    planner = Planner(make_policy("optimal"), scarcer, budget, know)
    return CostMover(planner, lambda prefill_tps, decode_tps: Costs(**prices.per_token(prefill_tps, decode_tps)))


def test_an_answer_moves_to_the_cheaper_side_only() -> None:
    assert mover(HOME).advise(TO_DEVICE) is not None
    assert mover(HOME).advise(TO_SERVER) is None
    assert mover(AWAY).advise(TO_DEVICE) is None
    assert mover(AWAY).advise(TO_SERVER) is not None
    assert mover(Prices()).advise(TO_DEVICE) is None, "where nothing costs anything, nothing is to be saved"


def test_the_gain_is_of_what_answers_to_such_prompts_come_to() -> None:
    """Short prompts get 22 tokens here and long ones 500: behind 20 tokens the former are not worth a move."""
    know = learned()
    for i in range(600):
        know.outputs.add(21 + i % 3 if i % 2 else 480 + i % 41, censored=False, prompt=20 if i % 2 else 200)
    short, long = (replace(TO_DEVICE, prompt=n, generated=20) for n in (20, 200))
    assert mover(HOME, know).prospect(short).remaining < 20 < 300 < mover(HOME, know).prospect(long).remaining
    assert mover(HOME, know).advise(short) is None
    assert mover(HOME, know).advise(long) is not None


def test_the_reserve_lasts_for_the_servers_ttft() -> None:
    """B = ceil(r_c t_m): the 95th percentile of its TTFT, at the reader's pace."""
    slow = mover(AWAY, learned(ttft_s=2.0))
    t_m95_s = float(slow._planner.knowledge.server.curve().quantile(0.95))
    assert 2.0 < t_m95_s < 2.5
    assert slow.advise(TO_SERVER) == slow.reserve(TO_SERVER) == math.ceil(PACE_TPS * t_m95_s)
    assert slow.reserve(replace(TO_SERVER, pace_tps=2 * PACE_TPS)) == math.ceil(2 * PACE_TPS * t_m95_s)


def test_the_reserve_for_a_follower_lasts_for_its_last_step_only() -> None:
    long = replace(TO_DEVICE, prompt=4000)
    assert mover(HOME).reserve(long) == mover(HOME).reserve(TO_DEVICE) <= 2
    assert mover(HOME).reserve(replace(long, follows=False)) > 100


def test_a_device_that_the_source_outruns_never_catches_up_but_may_follow_to_its_last_step() -> None:
    outrun = replace(TO_DEVICE, source_tps=1000.0)
    assert mover(HOME).prospect(outrun).prefill_s == math.inf
    assert mover(HOME).advise(outrun) is None, "all that remains would be there before it"
    assert mover(HOME).reserve(replace(outrun, follows=False)) == MAX_RESERVE


def test_a_side_that_asks_not_to_be_asked_is_left_alone() -> None:
    assert mover(AWAY).advise(replace(TO_SERVER, readiness=Readiness(down_s=3.0))) is None


def test_nothing_moves_to_a_scarce_side_whose_budget_is_spent() -> None:
    for constrained in Side:
        spending = mover(HOME, constrained=constrained, budget=0.2)
        assert spending.advise(TO_DEVICE) is not None
        spending._planner.pacer.settle(10_000, 10_000)
        assert (spending.advise(TO_DEVICE) is None) == (constrained is DEVICE)


def test_a_target_slower_than_the_reader_is_no_target() -> None:
    slow = mover(HOME)
    for _ in range(40):
        slow.observe(DEVICE, 2.0)
    assert slow.decode_tps[DEVICE] < PACE_TPS
    assert slow.advise(TO_DEVICE) is None
    assert slow.advise(replace(TO_DEVICE, pace_tps=1.0)) is not None


def test_what_is_seen_of_a_decode_speed_counts_a_share() -> None:
    seen = mover()
    seen.observe(DEVICE, 80.0)
    assert seen.decode_tps == {DEVICE: pytest.approx((1 - SEEN) * 30.0 + SEEN * 80.0), SERVER: 60.0}


@pytest.mark.parametrize(("max_tokens", "remaining"), [(None, 250), (100, 80), (20, 0), (10, 0)])
def test_what_remains_is_what_the_answers_so_far_and_max_tokens_leave(max_tokens: int | None, remaining: int) -> None:
    prospect = mover().prospect(replace(TO_DEVICE, max_tokens=max_tokens))
    assert prospect.remaining == pytest.approx(remaining, rel=0.2)
    assert max_tokens is None or prospect.remaining <= max(0, max_tokens - TO_DEVICE.generated)


def test_an_answer_that_may_hardly_go_on_stays() -> None:
    cached = replace(TO_DEVICE, cached=120)
    assert mover(HOME).advise(replace(cached, max_tokens=cached.generated + MIN_TOKENS - 1)) is None
    assert mover(HOME).advise(replace(cached, max_tokens=cached.generated + 10 * MIN_TOKENS)) is not None


def test_short_answers_stay_where_they_are_and_long_ones_move() -> None:
    """A move to the server pays for the prompt again: some 100 tokens of its prompt price."""
    priced = Prices(3.0, 4.0, device_watts=15.0, usd_per_kwh=50.0)
    assert mover(priced, learned(answers=60)).advise(replace(TO_SERVER, prompt=1000)) is None
    assert mover(priced, learned(answers=3000)).advise(replace(TO_SERVER, prompt=1000)) is not None


def test_a_finished_prefill_makes_a_move_worth_it() -> None:
    dear = Prices(0.1, 0.4, device_watts=100.0, usd_per_kwh=0.3)
    view = replace(TO_DEVICE, prompt=2000)
    assert dear.per_token(100.0, 30.0)["device_decode"] < 0.4e-6
    assert mover(dear).advise(view) is None
    assert mover(dear).advise(replace(view, cached=2000)) is not None


def test_a_move_is_foreseen_where_it_would_pay() -> None:
    assert mover(HOME).foresees(TO_DEVICE)
    assert not mover(AWAY).foresees(TO_DEVICE)
    assert Forced(mover(AWAY), 5, 30).foresees(replace(TO_DEVICE, generated=0))
    assert not Forced(mover(AWAY), 5, 30).foresees(replace(TO_DEVICE, handoffs=1))
    assert not Stay(mover(HOME)).foresees(TO_DEVICE)


def test_a_server_that_fails_often_is_worth_less() -> None:
    failing = learned()
    for _ in range(200):
        failing.server.add_failure(None)
    assert mover(AWAY).prospect(TO_SERVER).p_fail < 0.1
    assert mover(AWAY, failing).prospect(TO_SERVER).p_fail > 0.5
    assert mover(AWAY, failing).advise(replace(TO_SERVER, prompt=4000)) is None
    assert mover(AWAY).advise(replace(TO_SERVER, prompt=4000)) is not None


def test_a_busy_device_takes_longer() -> None:
    busy = replace(TO_DEVICE, readiness=Readiness(n_busy=3), source_tps=5.0)
    idle = replace(busy, readiness=Readiness())
    assert mover().prospect(busy).prefill_s > mover().prospect(idle).prefill_s
    loading = replace(idle, readiness=Readiness(load_s=4.0))
    assert mover().prospect(loading).prefill_s > mover().prospect(idle).prefill_s + 4.0


def test_a_source_whose_speed_is_unknown_is_as_fast_as_those_before_it() -> None:
    assert mover().prospect(replace(TO_DEVICE, source_tps=None)).source_tps == DECODE_TPS[SERVER]


# --- a source that rests --------------------------------------------------------------------------------------------


def test_an_answer_moves_to_a_device_that_never_catches_up_once_the_source_may_rest_for_as_long_as_that_takes() -> None:
    outrun = replace(TO_DEVICE, source_tps=1000.0)
    resting = replace(outrun, rests=True)
    home = mover(HOME)
    assert home.advise(outrun) is None
    stock = home.stock_to_rest(resting)
    assert home.advise(resting) == stock
    device, server = home._planner.knowledge.device, home._planner.knowledge.server
    alone_s = device.c + (resting.prompt + resting.generated) / device.prefill_tps
    assert stock / PACE_TPS > alone_s + float(server.curve().quantile(0.95)), "its prefill, and the server's TTFT"


def test_where_a_follower_pays_as_it_is_it_does_not_wait_for_a_stock() -> None:
    assert mover(HOME).advise(replace(TO_DEVICE, rests=True)) == mover(HOME).advise(TO_DEVICE)


def test_a_move_to_a_server_waits_until_the_source_may_rest_at_once() -> None:
    resting = replace(TO_SERVER, rests=True)
    assert mover(AWAY).advise(resting) == mover(AWAY).stock_to_rest(resting) > mover(AWAY).reserve(TO_SERVER)
    endless = mover(AWAY, learned(ttft_s=1000.0))
    assert endless.reserve(resting) == endless.reserve(TO_SERVER) == MAX_RESERVE


def test_the_stock_shrinks_as_a_follower_catches_up() -> None:
    stocks = [mover().stock_to_rest(replace(TO_DEVICE, prompt=2000, cached=n)) for n in range(0, 1501, 500)]
    assert all(more > less for more, less in pairwise(stocks))


def test_a_server_does_not_rest_for_an_instant_since_it_might_have_to_read_the_prompt_again() -> None:
    nearly = replace(TO_DEVICE, prompt=4000, cached=4019)
    assert mover(HOME).stock_to_rest(nearly) == math.inf
    assert mover(HOME).stock_to_rest(replace(nearly, cached=0)) < math.inf
    instant = mover(AWAY, learned(ttft_s=0.01))
    assert instant.stock_to_rest(replace(TO_SERVER, prompt=4000)) < math.inf, "a device has its cells yet"


def test_a_source_that_rests_makes_nothing_meanwhile_and_a_server_perhaps_reads_again() -> None:
    slow = replace(TO_SERVER, source_tps=10.0)
    prospect, resting = mover(AWAY).prospect(slow), mover(AWAY).resting(slow)
    assert prospect.overlap > 0
    assert (resting.overlap, resting.p_again) == (0.0, 0.0), "a device has its cells yet"
    assert mover(HOME).resting(TO_DEVICE).p_again == LATE
    assert mover(HOME).resting(TO_DEVICE).to_prefill == TO_DEVICE.prompt + TO_DEVICE.generated


def test_a_resting_device_is_back_sooner_than_a_server_and_later_beside_others() -> None:
    assert mover().stock_to_ask_again(TO_SERVER) < mover().stock_to_ask_again(TO_DEVICE)
    slow = mover(knowledge=learned(ttft_s=3.0))
    assert slow.stock_to_ask_again(TO_DEVICE) > PACE_TPS * (3.0 + UNTOLD_S)
    assert UNTOLD_S >= IDS_TIMEOUT_S, "the device that does not come may not tell the server's token ids, either"
    assert mover().stock_to_ask_again(replace(TO_SERVER, source_busy=200)) > mover().stock_to_ask_again(TO_SERVER)


def test_no_stock_is_as_large_as_that_for_a_very_long_prefill() -> None:
    endless = replace(TO_DEVICE, prompt=100_000, source_tps=1000.0, rests=True)
    assert mover(HOME, learned(answers=100_000)).stock_to_rest(endless) > MAX_RESERVE
    assert mover(HOME, learned(answers=100_000)).advise(endless) is None


def test_experiments_let_sources_rest_as_others_do() -> None:
    inner = mover(HOME)
    for around in (Stay(inner), Forced(inner, 5, 5)):
        assert around.stock_to_rest(TO_DEVICE) == inner.stock_to_rest(TO_DEVICE)
        assert around.stock_to_ask_again(TO_DEVICE) == inner.stock_to_ask_again(TO_DEVICE)


# --- the experiments --------------------------------------------------------------------------------------------------


def test_a_forced_answer_moves_once_after_as_many_tokens_as_its_name_says() -> None:
    forced = Forced(mover(HOME), 5, 30)
    begun = set()
    for key in map(str, range(200)):
        views = [replace(TO_SERVER, key=key, generated=n) for n in range(1, 41)]
        at = next(view.generated for view in views if forced.advise(view) is not None)
        assert all((forced.advise(view) is not None) == (view.generated >= at) for view in views)
        assert all(forced.advise(replace(view, handoffs=1)) is None for view in views), "only once"
        begun.add(at)
    assert begun == set(range(5, 31))


def test_a_forced_move_keeps_the_reserve_of_an_ordinary_one() -> None:
    view = replace(TO_SERVER, generated=10)
    assert Forced(mover(HOME), 5, 5).advise(view) == mover(HOME).reserve(view)
    assert Forced(mover(HOME), 5, 5).next_check(7) == 8


def test_what_is_seen_in_an_experiment_is_learned() -> None:
    inner = mover(HOME)
    Forced(inner, 5, 5).observe(SERVER, 160.0)
    assert inner.decode_tps[SERVER] == pytest.approx(80.0)


def test_who_stays_is_hardly_ever_asked() -> None:
    inner = mover(HOME)
    stay = Stay(inner)
    stay.observe(SERVER, 160.0)
    assert inner.decode_tps[SERVER] > DECODE_TPS[SERVER], "prices need the speeds all the same"
    stay.advise(TO_DEVICE)
    assert stay.next_check(10) > 1 << 20

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.dispatch.migrate import (
    HYSTERESIS,
    LOOK_EVERY,
    MAX_RESERVE,
    MIN_GAIN_USD,
    MIN_TOKENS,
    Costs,
    Prospect,
    catch_up_s,
    cost,
    gain,
    is_worthwhile,
    margin,
    next_check,
    reserve,
    saving,
)
from disco_daemon.types import Side

DEVICE, SERVER = Side.DEVICE, Side.SERVER
PACE = 4.8
# A phone on household electricity beside gpt-4o-mini, and the same phone when its battery is dear.
HOME = Costs(device_prefill=5e-9, device_decode=2e-8, server_prefill=1.5e-7, server_decode=6e-7)
DEAR = Costs(device_prefill=2e-6, device_decode=6e-6, server_prefill=1.5e-7, server_decode=6e-7)
TO_DEVICE = Prospect(SERVER, DEVICE, 100, 20, 0, 200.0, 30.0, 20.0, 2.0, 3.0, 0.0, True)
TO_SERVER = Prospect(DEVICE, SERVER, 100, 20, 0, 200.0, 20.0, 60.0, 2.0, 3.0, 0.0, False)


def none_or_up_to(most: float) -> st.SearchStrategy[float]:
    """Nothing, or as much that what it costs has all the digits of a float: below 1e-308 there are fewer."""
    return st.just(0.0) | st.floats(1e-9, most)


amounts = st.floats(1e-9, 1e-4)
costs = st.builds(Costs, amounts, amounts, amounts, amounts)
lengths = st.integers(0, 4000)
speeds = none_or_up_to(500.0)
waits = none_or_up_to(60.0)


@st.composite
def prospects(draw: st.DrawFn) -> Prospect:
    source = draw(st.sampled_from(Side))
    return Prospect(
        source, source.other, draw(lengths), draw(lengths), draw(lengths), draw(none_or_up_to(4000.0)),
        draw(speeds), draw(speeds), draw(waits), draw(waits), draw(st.floats(0, 1)), draw(st.booleans()),
        draw(st.just(0.0) | st.floats(1e-9, 1)),
    )  # fmt: skip


def close(a: float, b: float) -> bool:
    return a == pytest.approx(b, rel=1e-9, abs=1e-15)


# --- the trade --------------------------------------------------------------------------------------------------------


def test_to_the_device_reckoned_by_hand() -> None:
    """60 tokens come while it prefills the 120 and them; 140 are left to save on."""
    assert TO_DEVICE.overlap == 60
    assert TO_DEVICE.to_prefill == 180
    assert close(cost(TO_DEVICE, HOME), 180 * 5e-9)
    assert close(saving(TO_DEVICE, HOME), 140 * (6e-7 - 2e-8))
    assert close(gain(TO_DEVICE, HOME), 140 * 5.8e-7 - 180 * 5e-9)
    assert is_worthwhile(TO_DEVICE, HOME, PACE, margin=margin(0))


def test_to_the_server_reckoned_by_hand() -> None:
    """40 tokens of insurance are paid for and thrown away; all 200 are made by the server."""
    assert TO_SERVER.overlap == 40
    assert close(cost(TO_SERVER, DEAR), 120 * 1.5e-7 + 40 * 6e-6)
    assert close(gain(TO_SERVER, DEAR), 200 * (6e-6 - 6e-7) - 120 * 1.5e-7 - 40 * 6e-6)
    assert is_worthwhile(TO_SERVER, DEAR, PACE, margin=margin(0))


def test_a_source_that_rests_saves_what_it_does_not_make_and_risks_to_read_again() -> None:
    resting = replace(TO_SERVER, source_tps=0.0)
    assert close(gain(resting, DEAR), gain(TO_SERVER, DEAR) + 40 * 6e-6)
    server = replace(TO_DEVICE, source_tps=0.0, p_again=0.05)
    assert close(cost(server, HOME), 120 * 5e-9 + 0.05 * 120 * 1.5e-7)
    assert close(gain(server, HOME), 200 * 5.8e-7 - cost(server, HOME))


@given(prospects(), costs)
def test_the_gain_is_what_the_two_ways_to_go_on_differ_by(prospect: Prospect, costs: Costs) -> None:
    """Token by token: the source alone, against both, with the prefill, until one of them is gone."""
    source, target = costs.decode(prospect.source), costs.decode(prospect.target)
    alone = prospect.remaining * source
    if prospect.exact_follow:
        moved = prospect.overlap * source + (prospect.remaining - prospect.overlap) * target
    else:
        moved = prospect.overlap * source + prospect.remaining * target
    moved += prospect.to_prefill * costs.prefill(prospect.target)
    moved += prospect.p_again * (prospect.prompt + prospect.generated) * costs.prefill(prospect.source)
    assert close(gain(replace(prospect, p_fail=0.0), costs), alone - moved)


@given(prospects(), costs)
def test_a_target_that_always_fails_costs_its_price(prospect: Prospect, costs: Costs) -> None:
    certain = replace(prospect, p_fail=1.0)
    assert gain(certain, costs) == -cost(certain, costs)
    assert not is_worthwhile(certain, costs, PACE, margin=0.0)


@given(prospects(), costs, st.floats(0, 4000), st.floats(0, 4000))
def test_where_the_target_is_cheaper_a_longer_rest_gains_more(
    prospect: Prospect, costs: Costs, rest: float, longer: float
) -> None:
    """From where the overlap is whole: before, more rest is only more overlap."""
    cheap, dear = sorted((costs.device_decode, costs.server_decode))
    device, server = (cheap, dear) if prospect.target is DEVICE else (dear, cheap)
    costs = replace(costs, device_decode=device, server_decode=server)
    whole = prospect.source_tps * prospect.prefill_s
    less, more = (replace(prospect, remaining=whole + x) for x in (rest, rest + longer))
    assert gain(more, costs) >= gain(less, costs) - 1e-12 * max(1.0, whole)


@given(prospects(), amounts, amounts)
def test_equal_costs_or_a_dearer_target_are_never_worth_it(prospect: Prospect, decode: float, prefill: float) -> None:
    dearer = 1.5 * decode if prospect.target is DEVICE else decode
    same, dear = Costs(prefill, decode, prefill, decode), Costs(prefill, dearer, prefill, decode)
    for costs in (same, dear):
        assert gain(prospect, costs) <= 0
        assert not is_worthwhile(prospect, costs, PACE, margin=0.0)


@given(prospects(), costs, st.sampled_from([0.25, 0.5, 2.0, 1024.0]))
def test_the_trade_knows_no_currency(prospect: Prospect, costs: Costs, rate: float) -> None:
    """Powers of two, so that the scaled figures carry the same rounding."""
    scaled = Costs(*(rate * c for c in (costs.device_prefill, costs.device_decode)),
                   *(rate * c for c in (costs.server_prefill, costs.server_decode)))  # fmt: skip
    assert gain(prospect, scaled) == rate * gain(prospect, costs)
    if min(gain(prospect, costs), gain(prospect, scaled)) >= MIN_GAIN_USD:
        decided = [is_worthwhile(prospect, c, PACE, margin=margin(0)) for c in (costs, scaled)]
        assert decided[0] == decided[1]


@given(prospects(), costs, st.integers(0, 500))
def test_what_is_cached_helps_and_never_beyond_the_whole(prospect: Prospect, costs: Costs, more: int) -> None:
    helped = replace(prospect, cached=prospect.cached + more)
    assert gain(helped, costs) >= gain(prospect, costs)
    assert helped.to_prefill >= 0


@pytest.mark.parametrize(
    ("field", "worse"),
    [
        ("prompt", 200),
        ("generated", 200),
        ("source_tps", 100.0),
        ("prefill_s", 5.0),
        ("p_fail", 0.2),
        ("remaining", 100.0),
        ("cached", 0),
    ],
)
@pytest.mark.parametrize(("prospect", "costs"), [(TO_DEVICE, HOME), (TO_SERVER, DEAR)])
def test_everything_against_a_handoff_lowers_its_gain(prospect: Prospect, costs: Costs, field: str, worse: Any) -> None:
    before = replace(prospect, cached=50)
    assert gain(replace(before, **{field: worse}), costs) < gain(before, costs)


def test_the_cheaper_side_is_where_an_answer_goes() -> None:
    assert HOME.cheaper is DEVICE
    assert DEAR.cheaper is SERVER
    assert replace(HOME, device_decode=HOME.server_decode).cheaper is None


# --- the threshold ----------------------------------------------------------------------------------------------------


@given(prospects(), costs, st.floats(0, 4))
def test_only_what_gains_beyond_its_margin_is_worth_it(prospect: Prospect, costs: Costs, margin: float) -> None:
    if is_worthwhile(prospect, costs, PACE, margin=margin):
        assert gain(prospect, costs) > margin * cost(prospect, costs)
        assert gain(prospect, costs) >= MIN_GAIN_USD
        assert prospect.remaining >= MIN_TOKENS
        assert prospect.target_tps >= PACE
        assert is_worthwhile(prospect, costs, PACE, margin=margin / 2)


@given(prospects(), costs, st.floats(100, 4000))
def test_an_answer_that_moved_by_cost_does_not_come_back(prospect: Prospect, costs: Costs, remaining: float) -> None:
    """Not even were the way back free and certain."""
    certain = replace(prospect, p_fail=0.0, p_again=0.0)
    free = replace(certain, cached=10_000, remaining=remaining, prefill_s=0.0, target_tps=PACE)
    back = replace(free, source=free.target, target=free.source)
    decided = [is_worthwhile(p, costs, PACE, margin=0.0) for p in (free, back)]
    assert decided.count(True) == (abs(costs.device_decode - costs.server_decode) * remaining >= MIN_GAIN_USD)


def test_a_move_after_a_handoff_has_to_gain_more() -> None:
    assert [margin(n) for n in range(4)] == [HYSTERESIS[0], *3 * [HYSTERESIS[-1]]]
    assert margin(1) > margin(0) > 0
    once = next(
        p for p in (replace(TO_SERVER, remaining=float(n)) for n in range(20, 200))
        if is_worthwhile(p, DEAR, PACE, margin=margin(0))
    )  # fmt: skip
    assert not is_worthwhile(once, DEAR, PACE, margin=margin(1))


def test_a_target_slower_than_the_reader_is_refused() -> None:
    assert is_worthwhile(replace(TO_DEVICE, target_tps=PACE), HOME, PACE, margin=0.25)
    assert not is_worthwhile(replace(TO_DEVICE, target_tps=PACE - 0.1), HOME, PACE, margin=0.25)


def test_the_end_of_an_answer_stays_where_it_is() -> None:
    free = Costs(0.0, 0.0, 0.0, 1.0)
    near = replace(TO_DEVICE, prefill_s=0.0, remaining=float(MIN_TOKENS))
    assert is_worthwhile(near, free, PACE, margin=0.25)
    assert not is_worthwhile(replace(near, remaining=MIN_TOKENS - 0.5), free, PACE, margin=0.25)


def test_nothing_moves_for_less_than_the_least_gain() -> None:
    token = MIN_GAIN_USD / 64
    prospect = replace(TO_DEVICE, prefill_s=0.0, remaining=64.0)
    assert is_worthwhile(prospect, Costs(0.0, 0.0, 0.0, token), PACE, margin=0.25)
    assert not is_worthwhile(prospect, Costs(0.0, 0.0, 0.0, 0.99 * token), PACE, margin=0.25)


@pytest.mark.parametrize("source_tps", [0.0, 30.0])
def test_a_target_that_would_never_come_is_not_worth_it(source_tps: float) -> None:
    never = replace(TO_DEVICE, prefill_s=math.inf, prefill95_s=math.inf, source_tps=source_tps)
    assert never.overlap == never.remaining
    assert not is_worthwhile(never, HOME, PACE, margin=0.0)


@pytest.mark.parametrize(
    "wrong",
    [{"target": SERVER}, {"p_fail": 1.1}, {"p_fail": -0.1}, {"prompt": -1}, {"remaining": -1.0},
     {"prefill_s": math.nan}, {"source_tps": math.nan}],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no handoff can be like this"):
        replace(TO_DEVICE, **wrong)


# --- the wait ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pace", "t_m", "held"),
    [(4.8, 0.0, 0), (4.8, 0.625, 3), (4.8, 0.63, 4), (4.8, 1.0, 5), (4.8, math.inf, MAX_RESERVE),
     (1000.0, 60.0, MAX_RESERVE)],
)  # fmt: skip
def test_the_reserve_lasts_the_handoff_rounded_up(pace: float, t_m: float, held: int) -> None:
    assert reserve(pace, t_m) == held


@given(st.floats(0.1, 1000), st.floats(0, 1))
def test_the_reserve_covers_the_wait_and_is_not_a_token_too_many(pace: float, t_m: float) -> None:
    held = reserve(pace, t_m)
    assert held >= pace * t_m - 1e-6
    assert held < pace * t_m + 1


@given(st.integers(1, 5000), st.floats(1, 500), st.floats(0, 0.95), st.floats(0, 5))
def test_catching_up_is_prefilling_all_that_has_come_by_then(
    missing: int, prefill_tps: float, share: float, wait_s: float
) -> None:
    source_tps = share * prefill_tps
    t = catch_up_s(missing, prefill_tps, source_tps, wait_s)
    assert prefill_tps * (t - wait_s) == pytest.approx(missing + source_tps * t, rel=1e-6)
    assert t >= wait_s + missing / prefill_tps - 1e-9


def test_a_source_as_fast_as_the_prefill_is_never_caught_up_with() -> None:
    assert catch_up_s(10, 30.0, 30.0) == math.inf
    assert catch_up_s(0, 30.0, 60.0) == 0.0  # nothing is missing
    assert catch_up_s(0, 30.0, 60.0, 0.1) == math.inf
    assert catch_up_s(-5, 30.0, 10.0) == catch_up_s(0, 30.0, 10.0, -0.2) == 0.0


def test_looks_grow_rarer_but_never_rarer_than_an_eighth() -> None:
    looks = [0]
    while looks[-1] < 4000:
        looks.append(next_check(looks[-1]))
    steps = [b - a for a, b in itertools.pairwise(looks)]
    assert steps == sorted(steps)
    assert steps[:8] == [LOOK_EVERY] * 8
    assert all(step <= max(LOOK_EVERY, at / 8) for step, at in zip(steps, looks, strict=False))
    assert len(looks) < 60

"""Which of several servers is asked, and which one as well."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.dispatch.pool import Candidate, Pool
from disco_daemon.estimation.lengths import OutputLengths

FAST, SLOW, DEAR = "fast/m", "slow/m", "dear/m"


def pool_of(**medians_s: float) -> Pool:
    pool, rng = Pool(), np.random.default_rng(45)
    for _ in range(100):
        for name, median_s in medians_s.items():
            pool.observe(f"{name}/m", float(median_s * np.exp(0.1 * rng.normal())), 0.0)
    return pool


def test_the_quickest_is_asked() -> None:
    assert pool_of(fast=0.3, slow=0.5).choose([Candidate(SLOW), Candidate(FAST)], 0.0).name == FAST


def test_a_price_counts_where_waits_are_close_and_an_unknown_one_as_the_dearest() -> None:
    pool = pool_of(fast=0.30, dear=0.28, slow=3.0)
    assert pool.choose([Candidate(FAST, 0.0002), Candidate(DEAR, 0.004)], 0.0).name == FAST
    assert pool.choose([Candidate(SLOW, 0.0002), Candidate(DEAR, 0.004)], 0.0).name == DEAR
    costs = {one.name: one.cost_s for one in pool.weigh([Candidate(FAST, None), Candidate(DEAR, 0.004)])}
    assert costs[FAST] == pytest.approx(pool.weigh([Candidate(FAST, 0.004), Candidate(DEAR, 0.004)])[0].cost_s)


def test_who_stalls_now_and_then_is_hedged_and_who_never_does_is_hedged_only_beyond_anything_seen() -> None:
    pool = pool_of(fast=0.3, slow=0.5)
    steady = pool.choose([Candidate(FAST), Candidate(SLOW)], 0.0)
    assert steady.hedge is not None
    assert steady.hedge[1] >= 0.5, "no sooner than the least silence that is a cause for alarm"
    for i in range(100):
        pool.observe(FAST, 8.0 if i % 25 == 0 else 0.3, 0.0)
    stalling = pool.choose([Candidate(FAST), Candidate(SLOW)], 0.0)
    assert stalling.name == FAST
    assert stalling.hedge is not None
    assert stalling.hedge[0] == SLOW
    assert stalling.hedge[1] < 1.0


def test_the_other_one_is_asked_at_the_latest_once_a_silence_is_rare_and_it_mostly_takes_no_longer_itself() -> None:
    for other_s in (0.65, 0.9):
        pool = pool_of(fast=0.6, slow=other_s)
        choice = pool.choose([Candidate(FAST), Candidate(SLOW)], 0.0)
        fast, slow = pool.weigh([Candidate(FAST), Candidate(SLOW)])
        assert fast.p99_s is not None
        assert slow.p50_s is not None
        assert choice.hedge == (SLOW, max(fast.p99_s, slow.p50_s)), "no gain is seen, as no request ever stalled"


def test_what_is_heard_of_a_server_after_long_says_more_than_one_answer_of_many_in_a_row() -> None:
    costs = list[float]()
    for asked in (FAST, SLOW):
        pool = pool_of(fast=0.3, slow=0.4)
        for i in range(100):
            pool.choose([Candidate(asked)], float(i))
            pool.observe(asked, 0.3 if asked == FAST else 0.4, float(i))
        for i in range(2):
            pool.choose([Candidate(SLOW)], 100.0 + i)
            pool.observe(SLOW, 0.25, 100.0 + i)
        costs += [one.cost_s for one in pool.weigh([Candidate(SLOW)]) if one.cost_s is not None]
    rested_s, busy_s = costs
    assert rested_s < 0.96 * busy_s


def test_a_wait_that_was_given_up_beyond_all_that_is_known_costs_no_infinite_time() -> None:
    pool = pool_of(fast=0.3)
    pool.observe(FAST, 100.0, 0.0, censored=True)
    (one,) = pool.weigh([Candidate(FAST)])
    assert one.mean_s is not None
    assert one.cost_s is not None
    assert 0.3 < one.mean_s < one.cost_s < math.inf


def test_a_server_that_becomes_slower_is_left_within_twenty_requests() -> None:
    pool, rng = pool_of(fast=0.3, slow=0.45), np.random.default_rng(1)
    asked = []
    for i in range(40):
        choice = pool.choose([Candidate(FAST), Candidate(SLOW)], float(i))
        median_s = 0.7 if choice.name == FAST else 0.45
        pool.observe(choice.name, float(median_s * np.exp(0.1 * rng.normal())), float(i))
        asked.append(choice.name)
    assert asked[20:].count(SLOW) >= 18


def test_a_server_that_was_not_asked_for_long_is_looked_at_again_with_or_without_hedges() -> None:
    for sends_hedges in (True, False):
        pool = pool_of(fast=0.30, slow=0.33)
        seen = []
        for i in range(400):
            choice = pool.choose([Candidate(FAST), Candidate(SLOW)], float(i))
            pool.observe(choice.name, 0.30 if choice.name == FAST else 0.33, float(i))
            if choice.is_look and choice.hedge is not None and choice.hedge[1] == 0 and sends_hedges:
                assert pool.take_hedge(SLOW)
                seen.append(i)
            elif choice.name == SLOW:
                seen.append(i)
        assert 2 <= len(seen) <= 20


def test_what_no_pool_can_have_written_is_an_error_and_changes_nothing() -> None:
    pool = pool_of(fast=0.3)
    before = pool.to_json()
    known = before["members"][FAST]
    foreign: list[dict[str, Any]] = [{}, {"members": {"a": {}}}, {"members": {"a": {**known, "known": -1}}}]
    levels = ([math.nan, 1.0, 0], [1e300, 1.0, 0], [0.0, 1.5, 0], [0.0, 1.0, -1], [0.0, 1.0], "none", 1)
    foreign += [{"members": {"a": {**known, "level": level}}} for level in levels]
    for wrong in foreign:
        with pytest.raises(ValueError, match=r"server|whole|values"):
            pool.learned(wrong)
    assert pool.to_json() == before


@given(st.lists(st.sampled_from(["observe", "fail", "choose", "hedge", "give up"]), min_size=1, max_size=30))
def test_what_is_known_of_a_member_never_changes_without_its_extent(events: list[str]) -> None:
    pool = Pool(hedge_share=1.0)
    acts: dict[str, Callable[[], object]] = {
        "observe": lambda: pool.observe(FAST, 0.3, 0.0),
        "give up": lambda: pool.observe(FAST, 0.3, 0.0, censored=True),
        "fail": lambda: pool.fail(FAST, 0.0),
        "choose": lambda: pool.choose([Candidate(FAST)], 0.0),
        "hedge": lambda: pool.take_hedge(FAST),
    }
    for event in events:
        before = pool.extent_of(FAST), pool.state_of(FAST)
        acts[event]()
        if pool.state_of(FAST) != before[1]:
            assert pool.extent_of(FAST) != before[0], event


@given(st.integers(0, 2**32), st.lists(st.floats(0.1, 40.0), min_size=2, max_size=6))
def test_lengths_of_a_few_answers_ago_choose_as_those_of_now(seed: int, output_usd: list[float]) -> None:
    """Another one may be chosen only where by the exact length it costs next to nothing more."""
    rng, answers, pool = np.random.default_rng(seed), OutputLengths(), Pool()
    names = [f"s{i}/m" for i in range(len(output_usd))]
    for name in names:
        median_s = rng.uniform(0.2, 0.6)
        for _ in range(40):
            pool.observe(name, float(median_s * np.exp(0.1 * rng.normal())), 0.0)
    for _ in range(150):
        answers.add(int(np.exp(rng.normal(5.0, 1.0))) + 1, bool(rng.random() < 0.2), int(rng.integers(5, 500)))
    for _ in range(12):
        answers.add(int(np.exp(rng.normal(5.0, 1.0))) + 1, False, int(rng.integers(5, 500)))
        about = answers.about(60)
        exact = OutputLengths.from_json(answers.to_json()).expected_remaining(0, 60)
        costs = [
            {
                one.name: one.cost_s
                for one in pool.weigh([Candidate(*each) for each in zip(names, prices, strict=True)])
                if one.cost_s is not None
            }
            for prices in ([round(n) * usd / 1e6 for usd in output_usd] for n in (about, exact))
        ]
        chosen = min(names, key=lambda name: costs[0][name])
        assert costs[1][chosen] <= min(costs[1].values()) * 1.05

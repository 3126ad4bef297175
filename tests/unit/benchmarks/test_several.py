"""The simulation of what stays in memory: its memory holds, its days are as described, and expected use pays."""

from __future__ import annotations

import math

import pytest

from benchmarks.several.days import DAY_S, DAYS, LIMIT, requests
from benchmarks.several.keeping import Count, Expected, Foresight, LeastRecent, play

LEARNED = 2  # days


@pytest.mark.parametrize("day", sorted(DAYS))
def test_no_rule_has_more_in_memory_than_there_is_and_all_answer_each_request(day: str) -> None:
    models = DAYS[day]
    asked = requests(models, 1, seed=1, per_day=300)
    for rule in (LeastRecent(), Count(math.inf), Expected(models), Foresight(asked)):
        played = play(rule, models, asked, LIMIT, 0.0)
        assert played.requests == len(asked)
        assert max(m.n_bytes for m in models) < played.most_bytes <= LIMIT
        assert 0 < played.cold < len(asked)


def test_where_two_models_are_in_steady_use_expected_use_makes_fewer_wait_than_age_or_count() -> None:
    models = DAYS["office"]
    asked = requests(models, LEARNED + 1, seed=4)
    ours, oldest, count = (
        play(rule, models, asked, LIMIT, LEARNED * DAY_S).cold
        for rule in (Expected(models), LeastRecent(), Count(math.inf))
    )
    assert ours < 0.85 * oldest
    assert ours < 0.85 * count


def test_days_are_drawn_with_as_many_requests_as_asked_for() -> None:
    asked = requests(DAYS["office"], 5, seed=2)
    assert len(asked) / 5 == pytest.approx(2000, rel=0.1)
    assert [one.at for one in asked] == sorted(one.at for one in asked)

"""The simulation of what stays in memory: its memory holds, its days are as described, and expected use pays."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.several.__main__ import pieces
from benchmarks.several.bound import least_loads
from benchmarks.several.days import DAY_S, DAYS, HOUR_S, LIMIT, requests
from benchmarks.several.fast_daemon import FastClock
from benchmarks.several.keeping import Count, Expected, Foresight, LeastRecent, play
from benchmarks.several.recorded import OPEN_H, RECORD_S, SOURCES, recorded
from disco_daemon.errors import ConfigError
from tests.fixtures.clock import StoppedClock

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
    assert ours < 0.75 * oldest
    assert ours < 0.75 * count


def test_rules_begin_with_the_models_that_memory_has_and_each_piece_of_the_day_is_told() -> None:
    models = DAYS["office"]
    asked = requests(models, 1, seed=5, per_day=300)
    first = asked[0].model
    warm = play(LeastRecent(), models, asked, LIMIT, 0.0, here=[first])
    assert warm.was_cold[0] is False
    assert play(LeastRecent(), models, asked, LIMIT, 0.0).was_cold[0] is True
    assert (len(warm.was_cold), sum(warm.was_cold)) == (len(asked), warm.cold)
    rules = [play(rule, models, asked, LIMIT, 0.0) for rule in (LeastRecent(), Count(math.inf), Expected(models))]
    assert pieces(rules, len(asked) // 3).startswith("3 pieces of ")
    with pytest.raises(ConfigError, match="no piece"):
        pieces(rules, len(asked) + 1)


def test_a_fast_clock_is_right_at_first_and_runs_as_many_times_as_fast() -> None:
    slow = StoppedClock()
    clock = FastClock(slow, 10.0)
    assert (clock.now(), clock.wall()) == (slow.now(), slow.wall())
    slow.at += 3.0
    assert clock.now() == pytest.approx(slow.now() + 27)
    assert clock.wall() == pytest.approx(slow.wall() + 27)


def test_a_rule_that_knows_all_has_no_more_cold_starts_than_one_that_must_not_close_what_answers() -> None:
    models = DAYS["person"]
    asked = requests(models, 1, seed=3, per_day=200)
    bound = least_loads(models, asked, LIMIT, 0.0)
    assert 0 < bound <= play(Foresight(asked), models, asked, LIMIT, 0.0).cold
    assert bound <= play(LeastRecent(), models, asked, LIMIT, 0.0).cold


def test_a_recorded_day_has_the_order_and_the_gaps_of_its_piece_of_the_record(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    rows = "t_s,in_tok,out_tok\n" + "".join(f"{10 * i},{100 if i % 2 else 5000},{25}\n" for i in range(343))
    for name in {source[0] for source in SOURCES.values()}:
        (tmp_path / "common" / name).write_text(rows)
    found = recorded(tmp_path, 2, seed=0)
    coder = [one.at for one in found if one.model == "coder"]
    assert len(coder) == 343
    assert coder[1] - coder[0] == pytest.approx(10 * 2 * OPEN_H * HOUR_S / RECORD_S)
    assert {int(one.at // DAY_S) for one in found} == {0, 1}
    assert all(one.takes_s == 1.5 for one in found)
    with pytest.raises(ConfigError, match="--traces names the folder"):
        recorded(tmp_path / "nowhere", 2, seed=0)


def test_days_are_drawn_with_as_many_requests_as_asked_for() -> None:
    asked = requests(DAYS["office"], 5, seed=2)
    assert len(asked) / 5 == pytest.approx(2000, rel=0.1)
    assert [one.at for one in asked] == sorted(one.at for one in asked)

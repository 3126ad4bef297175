"""`benchmarks.handoff --pause` compares what it is there for, by the ledger of each run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.handoff.pause import figures_of_runs, long_prompts, pause_table
from benchmarks.handoff.seams import Heard

MOVE = {"at": 9, "dropped": None, "overlap": 0, "paused": False, "asked_again": False}


def heard(
    cost_usd: float, text: str = "one two", times: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6), **move: Any
) -> Heard:
    moves = [MOVE | move] if move else []
    return Heard(text, list(times), {"cost_usd": cost_usd, "moves": moves}, "length")


def test_the_ratio_is_of_the_shares_saved() -> None:
    stays = [heard(1.0), heard(1.0)]
    moves = [heard(0.8, overlap=7), heard(0.8, text="one too", overlap=5)]
    rests = [heard(0.5, paused=True), heard(0.7, times=(0.0, 0.2, 0.9, 1.1), paused=True, asked_again=True)]
    found = figures_of_runs({"staying": stays, "moving": moves, "resting": rests})
    assert found["saved"] == {"moving": 0.2, "resting": 0.4}
    assert found["ratio"] == pytest.approx(2.0)
    assert found["moved"] == {"staying": 0, "moving": 2, "resting": 2}
    assert found["identical"] == {"moving": 1, "resting": 2}
    assert (found["paused"], found["asked_again"]) == (2, 1)
    assert found["thrown_away"] == {"moving": 12, "resting": 0}
    assert found["largest_gap_s"]["resting"] == pytest.approx(0.7)
    host = {"python": "3", "cpus": 2, "platform": "x"}
    told = pause_table({"to_device": found, "most_gap_s": 0.2283, "server_tps": 60.0, "host": host})
    assert "2.0 times the saving; rested 2, asked again 1" in told


def test_where_nothing_was_saved_before_there_is_no_ratio() -> None:
    same = [heard(1.0)]
    found = figures_of_runs({"staying": same, "moving": same, "resting": [heard(0.5, paused=True)]})
    assert (found["saved"]["resting"], found["ratio"]) == (0.5, None)


def test_no_two_prompts_share_a_beginning_that_a_cache_would_have() -> None:
    prompts = long_prompts(0, 12) + long_prompts(1000, 5) + long_prompts(2000, 5)
    assert len({prompt[:3] for prompt in prompts}) >= 12
    assert len(set(prompts)) == len(prompts)
    assert all(len(prompt.split()) > 300 for prompt in prompts)

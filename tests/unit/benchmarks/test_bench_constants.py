"""Constants are chosen without the rows that they are judged by."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.eval.constants import best, choose, fitted_half, folds, scores, tables
from benchmarks.eval.traces import LatencyTrace, Requests
from disco_daemon.dispatch.optimal import KAPPA, TAIL_SHARE

OURS = (KAPPA, TAIL_SHARE)


def trace(name: str, n: int = 400, *, is_sorted: bool = False) -> LatencyTrace:
    rng = np.random.default_rng(n)
    return LatencyTrace("bfcl", name, rng.lognormal(-0.5, 0.6, n), is_sorted)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_the_tested_rows_of_the_evaluation_are_not_read(is_sorted: bool) -> None:
    whole = trace("one", is_sorted=is_sorted)
    _, tested = whole.halves()
    inner = fitted_half(whole)
    past, future = inner.halves()
    assert not set(tested.tolist()) & {*past.tolist(), *future.tolist()}
    assert len(past) + len(future) == len(whole.ttft_s) - len(tested)


def test_constants_are_scored_against_those_in_force_and_short_traces_are_left_out() -> None:
    requests = Requests(np.arange(1, 101), np.arange(1, 101))
    found = scores([trace("long"), trace("short", 100)], requests, [OURS, (0.0, 0.01)], n_seeds=1)
    assert found[OURS] == {"bfcl/long": 0.0}
    assert found[0.0, 0.01]["bfcl/long"] != 0.0


def test_a_model_at_two_dates_is_in_one_fold() -> None:
    names = [f"bfcl/{model}@{date}" for model in "abcdefg" for date in (1, 2)]
    dealt = folds(names)
    assert sorted(name for fold in dealt for name in fold) == sorted(names)
    for fold in dealt:
        assert {name.replace("@1", "@2") for name in fold} == {name for name in fold if "@2" in name}


def test_a_fold_is_judged_by_what_the_others_choose() -> None:
    """Of five models one alone gains by other constants: by the others it is left as it is."""
    names = [f"bfcl/{model}@1" for model in "abcde"]
    found = {OURS: dict.fromkeys(names, 0.0), (0.2, TAIL_SHARE): dict.fromkeys(names, 1.0) | {names[0]: -9.0}}
    assert best(found, names) == (0.2, TAIL_SHARE)
    chosen = choose(found)
    assert (chosen["kappa"], chosen["tail_share"]) == (0.2, TAIL_SHARE)
    assert [fold["kappa"] for fold in chosen["folds"]] == [KAPPA, 0.2, 0.2, 0.2, 0.2]
    assert chosen["held_out"] == pytest.approx(4 / 5)
    assert "best: 0.2, share 0.02: -1.000" in tables(chosen)

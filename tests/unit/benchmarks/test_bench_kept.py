"""Long measurements are kept by trace, and go on where they were cut off; the budget's figures are of what was kept."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks.eval.constants import scores
from benchmarks.eval.hedge_share import SHARES
from benchmarks.eval.hedge_share import figures_of as hedge_figures
from benchmarks.eval.hedge_share import table as hedge_table
from benchmarks.eval.kept import KeptResults, of_part, part_of
from benchmarks.eval.online_budget import SHIFTED, figures_of, over, table, worst_window
from benchmarks.eval.traces import LatencyTrace, Requests
from disco_daemon.bench.child import BenchError
from disco_daemon.dispatch.optimal import KAPPA, TAIL_SHARE


def test_what_was_kept_is_read_again_and_not_measured_again(tmp_path: Path) -> None:
    setting = {"seeds": 1, "grid": ((0.0, 0.01),)}
    KeptResults(tmp_path / "kept", setting).add("a", [1.0])
    again = KeptResults(tmp_path / "kept", setting)
    assert "a" in again
    assert again["a"] == [1.0]
    again.add("b", [2.0])
    assert KeptResults(tmp_path / "kept", setting)["b"] == [2.0]


@pytest.mark.parametrize("line", ["no json", "{}", '{"trace": "a", "setting": {"seeds": 2}, "found": 1}'])
def test_results_of_another_setting_or_none_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "kept").write_text(f"{line}\n")
    with pytest.raises(BenchError, match=r"other settings|cannot be read"):
        KeptResults(tmp_path / "kept", {"seeds": 1})


def test_parts_are_all_of_it_and_nothing_twice() -> None:
    given = list(range(7))
    assert sorted(i for k in (1, 2, 3) for i in of_part(given, (k, 3))) == given
    assert of_part(given, None) == given
    assert part_of("2/3") == (2, 3)
    for text in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError):
            part_of(text)


def test_constants_of_a_trace_are_taken_from_what_was_kept(tmp_path: Path) -> None:
    trace = LatencyTrace("bfcl", "one", np.random.default_rng(0).lognormal(-0.5, 0.6, 400))
    grid, in_force = [(0.0, 0.01)], (KAPPA, TAIL_SHARE)
    kept = KeptResults(tmp_path / "kept", {})
    requests = Requests(np.arange(1, 101), np.arange(1, 101))
    found = scores([trace], requests, [*grid, in_force], n_seeds=1, kept=kept)
    kept = KeptResults(tmp_path / "kept", {})
    other = LatencyTrace("bfcl", "one", trace.ttft_s * 2)
    assert scores([other], requests, [*grid, in_force], n_seeds=1, kept=kept) == found


def test_the_worst_200_requests_are_found_with_what_insured_among_them() -> None:
    offered = np.full(600, 10.0)
    spent = np.where(np.arange(600) % 10 == 0, 10.0, 0.0)
    spent[300:310] = 10.0
    insured = np.zeros(600)
    insured[300:305] = 10.0
    tokens = np.stack([offered, spent, insured], axis=1)
    assert over(tokens, 0.1) == pytest.approx(1.5)
    assert worst_window(tokens, 0.1) == pytest.approx((4.5, 2.5))


def test_runs_above_the_promise_are_counted_by_what_is_constrained() -> None:
    def run(side: str, window: float, insured: float = 0.0) -> dict[str, object]:
        return {"side": side, "budget": 0.1, "seed": 0, "over": window / 10, "window": window, "insured": insured}

    by_trace = {"a": [run("device", 1.0), run("server", 0.5)], "b": [run("device", 2.5, 1.0), run("server", 1.5)]}
    figures = figures_of(by_trace, [run("device", 1.0), run("server", 1.0)])
    device, _, server, _ = figures["rows"]
    assert (device["above_promise"], server["above_promise"]) == (1, 0)
    assert (device["window_max"], device["window_max_insured"]) == (2.5, 1.0)
    assert device["window_max_without"] == 1.5
    assert device["over_mean"] == pytest.approx(0.175)
    assert SHIFTED in table(figures)


def test_what_a_second_request_gains_is_told_for_each_share() -> None:
    once = {"mean_ttft_s": [1.0] * 3, "p99_ttft_s": [2.0] * 3, "cvar_ttft_s": [4.0] * 3, "asked_twice": [0.0] * 3}
    sooner = {k: [0.9 * x for x in v] for k, v in once.items()} | {"asked_twice": [0.05, 0.1, 0.15]}
    found = {"0": once} | {f"{share:g}": sooner for share in SHARES}
    figures = hedge_figures({"a": found, "b": found})
    least, every = figures["rows"][:2]
    assert least["change"]["p99_ttft_s"] == pytest.approx(-10.0)
    assert (least["asked_twice"], every["asked_twice"]) == (pytest.approx(5.0), pytest.approx(10.0))
    assert "2 traces" in hedge_table(figures)

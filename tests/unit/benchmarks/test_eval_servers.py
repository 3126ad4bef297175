"""The choice among servers, played on traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.eval.__main__ import main
from benchmarks.eval.servers import LiteLlmLatency, RoundRobin, draw_servers, play
from benchmarks.eval.servers_report import figures_of
from benchmarks.eval.traces import LatencyTrace
from disco_daemon.errors import ConfigError
from disco_daemon.simulate.server_player import Played, PoolRule, serve


def traces(n: int = 4) -> list[LatencyTrace]:
    rng = np.random.default_rng(3)
    return [LatencyTrace("made", f"t{i}", (1 + 0.1 * i) * np.exp(0.2 * rng.normal(size=240))) for i in range(n)]


def test_only_servers_with_medians_within_a_factor_of_two_are_drawn_and_halves_are_kept_apart() -> None:
    far = LatencyTrace("made", "far", np.full(240, 9.0))
    for draw in draw_servers([*traces(), far], 5):
        assert "far" not in draw.names
        assert {len(x) for x in (*draw.known_s, *draw.played_s)} == {120}
    with pytest.raises(ConfigError, match="too few"):
        draw_servers([*traces(2), far], 1)


def test_the_first_token_wins_and_of_the_other_only_a_bound_is_learned() -> None:
    learned: list[tuple[int, float, bool]] = []

    class Hedging(RoundRobin):
        def choose(self, i: int) -> tuple[int, tuple[int, float]]:  # type: ignore[override]
            return 0, (1, 1.0)

        def take_hedge(self, server: int) -> bool:
            return True

        def observe(self, server: int, ttft_s: float, i: int, *, censored: bool) -> None:
            learned.append((server, ttft_s, censored))

    played = Played()
    serve(Hedging(2), (5.0, 0.5), 0, played)
    serve(Hedging(2), (1.2, 0.5), 1, played)
    assert played.waits_s == [1.5, 1.2]
    assert [(n, round(t, 3), c) for n, t, c in learned] == [
        (0, 1.5, True), (1, 0.5, False), (0, 1.2, False), (1, 0.2, True),
    ]  # fmt: skip


def test_litellms_rule_keeps_its_nine_oldest_times() -> None:
    rule = LiteLlmLatency(2)
    for i in range(30):
        rule.observe(0, 1.0 if i < 9 else 50.0, i, censored=False)
        rule.observe(1, 7.0, i, censored=False)
    assert rule.choose(30) == (0, None)


def test_hedges_of_the_pool_stay_within_their_share_and_ratios_are_of_the_best_single_server() -> None:
    draws = draw_servers(traces(), 2)
    played = [play(PoolRule(3), draw) for draw in draws]
    figures = figures_of(draws, {"pool": played})
    assert figures["hedged_share_most"] <= 0.05
    assert figures["mean_ratio"] == pytest.approx(
        np.exp(np.mean([np.log(np.mean(p.waits_s) / d.best_s.mean()) for p, d in zip(played, draws, strict=True)]))
    )


def test_the_command_prints_what_others_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{trace.name},{ttft_s}" for trace in traces() for ttft_s in trace.ttft_s]
    (tmp_path / "ttft_made.csv").write_text("\n".join(["trace,ttft_s", *rows]), "utf-8")
    argv = ["--traces", str(tmp_path), "--servers", "--draws", "1", "--json"]
    assert main(argv) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {"mean_ratio", "p99_ratio", "p99_ratio_long_tail", "hedged_share"} <= set(figures)
    with pytest.raises(ConfigError, match="--seeds"):
        main([*argv, "--seeds", "3"])

"""`disco bench engine`, alone and beside the real llama-server, as small as it goes: its figures are there."""

from __future__ import annotations

import pytest

from benchmarks.engine.__main__ import PEER, bench_engine
from disco_daemon.bench import engine
from disco_daemon.bench.engine import OURS, EngineSetup, table


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> EngineSetup:
    for name, value in {
        "CHAT_TOKENS": 80,
        "TURN_TOKENS": 8,
        "LONG_PROMPT": 128,
        "RUN_TOKENS": 64,
        "LONG_CONTEXT": 100,
    }.items():
        monkeypatch.setattr(engine, name, value)
    return EngineSetup(repeats=1, concurrent=(1, 2), lengths=(32,), n_ctx=2048, max_tokens=12)


@pytest.mark.slow
async def test_the_device_is_measured_alone(setup: EngineSetup) -> None:
    figures = await engine.bench_engine(setup, lambda _: None)
    assert list(figures["throughput"]["2"]["tps"]) == [OURS]
    assert figures["ttft"]["32"]["prompts"][OURS]["prompt_tokens"] == pytest.approx(32, abs=4)
    assert figures["second_turn"]["prompts"][OURS]["cached_tokens"] > 60
    assert figures["worst_tbt"]["s"][OURS] > 0
    assert "ratio" not in str(figures)
    assert "first token, second turn" in table(figures)


@pytest.mark.slow
async def test_both_servers_answer_the_same_prompts(setup: EngineSetup) -> None:
    pytest.importorskip("xllamacpp")
    said: list[str] = []
    figures = await bench_engine(setup, said.append)
    assert set(figures["throughput_ratio"]) == set(figures["throughput_ratio_long"]) == {"1", "2"}
    short = figures["ttft"]["32"]["prompts"]
    assert short[PEER]["prompt_tokens"] == 32
    assert 29 <= short[OURS]["prompt_tokens"] <= 32  # of which the first three open every chat, and may be cached
    turn = figures["second_turn"]["prompts"]
    assert turn[PEER]["cached_tokens"] > 70
    assert figures["second_turn_ttft_ratio"] > 0
    gap = figures["worst_tbt"]
    assert min(*gap["s"].values(), gap["ratio"], gap["prompt_ttft_ratio"]) > 0
    assert figures["peer"]["name"].startswith("llama-server")
    assert "first token, second turn" in table(figures)
    assert said

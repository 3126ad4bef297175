"""`disco bench engine` with the real engine and the real llama-server, as small as it goes: its figures are there."""

from __future__ import annotations

import pytest

from disco_daemon.bench import engine
from disco_daemon.bench.engine import OURS, PEER, Setup, bench_engine, table


@pytest.mark.slow
async def test_both_servers_answer_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    for name, value in {"CHAT_TOKENS": 80, "TURN_TOKENS": 8, "LONG_PROMPT": 256, "RUN_TOKENS": 64}.items():
        monkeypatch.setattr(engine, name, value)
    said: list[str] = []
    setup = Setup(repeats=1, concurrent=(1, 2), lengths=(32,), n_ctx=2048, max_tokens=12)
    figures = await bench_engine(setup, said.append)
    assert set(figures["throughput_ratio"]) == {"1", "2"}
    short = figures["ttft"]["32"]["prompts"]
    assert short[PEER]["prompt_tokens"] == 32
    assert 29 <= short[OURS]["prompt_tokens"] <= 32  # of which the first three open every chat, and may be cached
    turn = figures["second_turn"]["prompts"]
    assert turn[PEER]["cached_tokens"] > 70
    assert figures["second_turn_ttft_ratio"] > 0
    assert min(figures["worst_tbt"]["s"].values()) > 0
    assert figures["peer"]["name"].startswith("llama-server")
    assert "first token, second turn" in table(figures)
    assert said

"""`disco bench engine`, alone and beside the real llama-server, as small as it goes: its figures are there.

The peer is the wheel's: nothing is compiled for a test.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import llama_server
from benchmarks.engine.__main__ import PEER, bench_engine, main, table_all, table_rounding
from disco_daemon.bench import engine
from disco_daemon.bench.engine import OURS, EngineSetup, table
from disco_daemon.models.default import default_model_path
from tests.fixtures.servers import wheel_argv


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


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(llama_server, "require", lambda *_: None)
    monkeypatch.setattr(llama_server, "argv", wheel_argv)


@pytest.mark.slow
def test_a_shape_is_made_measured_and_described(
    wheel: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["--shape", "tiny", "--quant", "q5_k_m", "--brief", "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == {"shape": "tiny", "quant": "q5_k_m", "file": "random-tiny-q5_k_m.gguf"}
    assert found["native"] is True
    assert min(found["cpu_ratio"][what] for what in ("prompt", "one", "many")) > 0
    for what, measured in (("one", found["throughput"]["1"]), ("many", found["throughput"]["8"])):
        assert found["cpu_ratio"][what] == measured["cpu_ratio"]
        assert min(measured["cpu_s"].values()) > 0
    assert found["ttft"]["512"]["prompts"][PEER]["prompt_tokens"] == 512
    assert set(found["limit_share"]) == {"prompt", "one"}
    assert found["work"]["n_bytes"] > 49_152 * 256 / 2, "the head is read for a token"
    if shutil.which("cc"):
        assert min(*found["limit_share"].values(), *found["limits"].values()) > 0
    assert not list(tmp_path.glob("**/*.gguf")), "it was made for this measurement"


@pytest.mark.slow
def test_exact_rounding_is_measured_beside_fast_rounding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(llama_server, "require", lambda *_: pytest.fail("no other server is asked"))
    assert main(["--shape", "tiny", "--rounding", "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == {"shape": "tiny", "quant": "q4_k_m", "file": "random-tiny-q4_k_m.gguf"}
    assert "peer" not in found
    for what, measured in (("one", found["throughput"]["1"]), ("many", found["throughput"]["8"])):
        assert found["exact_over_fast"][what] * measured["cpu_ratio"] == pytest.approx(1, rel=1e-3)
    assert found["exact_over_fast"]["prompt"] > 0
    assert "a token alone: " in table_rounding(found)


@pytest.mark.slow
async def test_both_servers_answer_the_same_prompts(setup: EngineSetup, wheel: None) -> None:
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
    assert "first token, second turn" in table_all(figures)
    assert figures["model"] == {"shape": None, "quant": "q4_1", "file": default_model_path().name}
    assert said

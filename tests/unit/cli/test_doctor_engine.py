"""What the doctor says of llama.cpp and memory: by what a child process tells, which may die, and a model's header."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disco_daemon.cli.doctor import engine
from disco_daemon.cli.doctor.finding import Level
from disco_daemon.config.schema import DeviceSettings
from disco_daemon.engine.llama.memory import GIB, LEAST_CTX, N_BATCH, SPARE, work_bytes
from disco_daemon.engine.measure import checkup
from disco_daemon.engine.measure.checkup_messages import Bindings, CheckupRequest, Confined, Examined, Fit
from disco_daemon.engine.measure.predicted_memory import fit
from disco_daemon.machines import model_memory
from disco_daemon.system import process
from tests.fixtures.gguf import gguf
from tests.fixtures.tiny_models import tiny_model

OK, WARN, WRONG = Level
NONE = Examined()

BUILT = Bindings("0.3.36", ["AVX2", "FMA"], 0)


@pytest.mark.parametrize(
    ("bindings", "settings", "level", "word"),
    [
        (BUILT, DeviceSettings(), OK, "CPU only"),
        (None, DeviceSettings(), WRONG, "died of signal 4"),
        (Bindings("0.3.35", ["AVX2"], 0), DeviceSettings(), WRONG, "0.3.36 is needed"),
        (Bindings("0.3.36", ["SSE3"], 0), DeviceSettings(), WARN, "without AVX2"),
        (Bindings("0.3.36", ["AVX2"], 0, [], "it is wrong"), DeviceSettings(), WRONG, "it is wrong"),
        (BUILT, DeviceSettings(n_gpu_layers=12), WARN, "device.n_gpu_layers = 12"),
        (BUILT, DeviceSettings(n_gpu_layers=0), OK, ""),
        (Bindings("0.3.36", ["AVX2"], 8 * GIB), DeviceSettings(n_gpu_layers=-1), OK, "8.0 GiB free on the GPU"),
    ],
)
def test_the_bindings(
    bindings: Bindings | None, settings: DeviceSettings, level: Level, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = engine.llama_cpp(settings, Examined(bindings, problem="died of signal 4"), "0.3.36")
    assert found.level is level
    assert word in found.found
    assert (level is OK) == (found.mend == "")


@pytest.mark.parametrize(
    ("there", "free", "level"), [(True, 0, WARN), (False, 0, OK), (True, 8 * GIB, OK)], ids=["shut", "none", "open"]
)
def test_a_gpu_that_a_cuda_build_cannot_open_is_told(
    there: bool, free: int, level: Level, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = tmp_path / "nvidiactl"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(engine, "NVIDIA", device)
    if there:
        device.touch()
    said = "0.3.36 CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : AVX2 = 1 | "
    monkeypatch.setattr("disco_daemon.engine.llama.model.build", lambda: said)
    monkeypatch.setattr("disco_daemon.engine.llama.gpu.free_bytes", lambda: free)
    bindings = checkup.bindings()
    assert bindings.backends == ["CUDA", "CPU"]
    assert bindings.features == ["USE_GRAPHS", "AVX2", "MTP"]
    found = engine.llama_cpp(DeviceSettings(), Examined(bindings), "0.3.36")
    assert found.level is level
    assert ("cannot open" in found.found) is (level is WARN)


def test_an_arm_processor_has_no_avx2_to_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    seen = Examined(Bindings("0.3.36", ["NEON"], 0))
    assert engine.llama_cpp(DeviceSettings(), seen, "0.3.36").level is OK
    assert engine.llama_cpp(DeviceSettings(), seen, "").level is OK  # a checkout that is not installed


SHAPE: dict[str, int | str] = {
    "general__architecture": "llama", "llama__block_count": 30, "llama__embedding_length": 576,
    "llama__feed_forward_length": 1536, "llama__attention__head_count": 9, "llama__attention__head_count_kv": 3,
    "llama__vocab_size": 49152, "llama__context_length": 2048,
}  # fmt: skip


def test_what_is_asked_of_a_model_stands_in_its_header(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", **SHAPE)
    settings = DeviceSettings(model=str(path), n_ctx=0, flash_attn="off")
    assert engine.checkup_question(settings, 0) == CheckupRequest(
        path.stat().st_size, 30, 576, 49152, 9, 30 * 3 * 2 * 64, 2048, 0, is_open=True
    )
    asked = engine.checkup_question(DeviceSettings(model=str(path), n_ctx=1024), 0)
    assert isinstance(asked, CheckupRequest)
    assert (asked.n_ctx, asked.is_open) == (1024, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__block_count": 0},
        {"llama__block_count": 2**40, "llama__embedding_length": 2**50},
        {"general__name": "x"},
    ],
)
def test_a_header_that_tells_nothing_or_lies_is_no_crash(changes: dict[str, Any], tmp_path: Path) -> None:
    shape: dict[str, Any] = SHAPE if "general__name" not in changes else {}
    path = gguf(tmp_path / "m.gguf", **shape | changes)
    said = engine.checkup_question(DeviceSettings(model=str(path), n_ctx=0), 0)
    assert isinstance(said, str)
    assert engine.memory(said, NONE, None).level is WARN
    assert isinstance(engine.checkup_question(DeviceSettings(model=str(tmp_path / "none")), 0), str)


SMALL = CheckupRequest(98 * 2**20, 30, 576, 49152, 0, 11520, 4096, 0)
WORK = work_bytes(N_BATCH, 49152, 576)


def test_memory_is_reckoned_as_the_engine_does() -> None:
    roomy = fit(SMALL, 16 * GIB, 0)
    assert (roomy.n_ctx, roomy.n_cells, roomy.problem) == (4096, 8192, "")
    assert roomy.n_bytes == SMALL.n_bytes + WORK + 8192 * 2 * 11520
    tight = fit(SMALL, 250 * 2**20, 0)
    assert LEAST_CTX <= tight.n_ctx < 4096
    assert "GiB" in fit(SMALL, 90 * 2**20, 0).problem
    assert "context" in fit(SMALL, 120 * 2**20, 0).problem


def test_a_context_that_nobody_has_set_is_told_with_what_the_model_was_trained_for() -> None:
    trained = 131_072
    asked = msgspec.structs.replace(SMALL, n_ctx=trained, is_open=True)
    roomy, tight = fit(asked, 64 * GIB, 0), fit(asked, GIB, 0)
    assert (roomy.n_ctx, roomy.n_cells, roomy.problem) == (trained, trained, "")
    default = fit(msgspec.structs.replace(asked, n_ctx=8192), 64 * GIB, 0)
    assert (default.n_ctx, default.n_cells) == (8192, 8192), "no more memory than two of 4,096 took"
    assert LEAST_CTX < tight.n_ctx < trained
    assert tight.n_bytes < GIB, "others get some of what is free"
    told = engine.memory(asked, Examined(fits=(tight,)), None)
    assert told.level is OK
    assert f"{tight.n_ctx} tokens of the {trained}" in told.found


def test_a_number_takes_a_byte_where_a_context_that_is_set_fits_only_so() -> None:
    asked = msgspec.structs.replace(SMALL, kv_type="auto")
    need = SMALL.n_bytes + WORK + 4096 * 2 * 11520
    room = int((WORK + 4096 * 2 * 11520) / SPARE)
    at = [fit(asked, max(SMALL.n_bytes, free), 0) for free in (2 * need, room + 1, room - 4096, room // 2)]
    assert [(one.kv_type, one.n_ctx == 4096) for one in at] == [
        ("f16", True), ("f16", True), ("q8_0", True), ("f16", False),
    ]  # fmt: skip
    for kv_type in ("f16", "q8_0"):
        one = fit(msgspec.structs.replace(SMALL, kv_type=kv_type), room - 4096, 0)
        assert (one.kv_type, one.n_ctx == 4096) == (kv_type, kv_type == "q8_0")
    open_ = msgspec.structs.replace(asked, is_open=True, n_ctx=131_072)
    assert fit(open_, GIB, 0).kv_type == "f16", "as much as fits, of 16 bits"
    said = engine.memory(asked, Examined(fits=(at[2],)), None).found
    assert f"{at[2].n_cells} tokens kept as q8_0" in said


def test_what_a_setting_leaves_open_needs_flash_attention_and_whole_blocks(tmp_path: Path) -> None:
    def kv_type(**settings: Any) -> str:
        path = gguf(tmp_path / "m.gguf", **SHAPE | {"llama__attention__key_length": settings.pop("head", 64)})
        asked = engine.checkup_question(DeviceSettings(model=str(path), n_ctx=512, **settings), 0)
        assert isinstance(asked, CheckupRequest)
        return asked.kv_type

    assert (kv_type(), kv_type(kv_type="f16"), kv_type(kv_type="q8_0")) == ("auto", "f16", "q8_0")
    assert (kv_type(flash_attn="off"), kv_type(head=80)) == ("f16", "f16")


def test_layers_go_to_a_gpu_before_a_context_that_nobody_has_set_grows() -> None:
    asked = msgspec.structs.replace(SMALL, n_ctx=131_072, is_open=True, n_gpu_layers=None)
    found = fit(asked, 64 * GIB, GIB)
    assert found.gpu_layers == 30
    assert 4096 < found.n_ctx < 131_072
    assert found.n_cells * 2 * 11520 + SMALL.n_bytes + WORK < GIB


def test_experts_that_stay_with_the_processor_are_in_main_memory(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "moe.gguf", "moe")
    found = engine.checkup_question(DeviceSettings(model=str(path), n_ctx=64, n_cpu_moe=2), None)
    assert isinstance(found, CheckupRequest)
    experts = 3 * 4 * 256 * 128 * 20 // 32
    assert (found.experts, found.n_cpu_moe) == ((experts,) * 3, 2)
    work = work_bytes(N_BATCH, found.n_vocab, found.n_embd)
    by_hand = fit(found, 16 * GIB, GIB)
    assert (by_hand.gpu_layers, by_hand.n_cpu_moe, by_hand.n_bytes) == (3, 2, 2 * experts + work)
    auto = msgspec.structs.replace(found, n_cpu_moe=None)
    assert fit(auto, 16 * GIB, GIB).n_cpu_moe == fit(found, 16 * GIB, 0).n_cpu_moe == 0
    whole = fit(auto, 16 * GIB, GIB).in_all
    short = fit(auto, 16 * GIB, int(whole / 0.9) - 1)
    assert (short.gpu_layers, short.n_cpu_moe, short.in_all) == (3, 2, whole), "room for those that are copied, too"
    said = engine.memory(found, Examined(fits=(by_hand,)), None).found
    assert "3 layers on the GPU, without the experts of 2 with" in said


def test_layers_on_a_gpu_are_not_in_main_memory() -> None:
    wanted = CheckupRequest(98 * 2**20, 30, 576, 49152, 0, 11520, 4096, 0, n_gpu_layers=None)
    assert fit(wanted, 16 * GIB, 0).gpu_layers == 0
    whole = fit(wanted, 16 * GIB, 8 * GIB)
    assert (whole.gpu_layers, whole.n_bytes) == (30, WORK)
    assert fit(SMALL, 16 * GIB, 8 * GIB).gpu_layers == 0  # n_gpu_layers = 0
    half = CheckupRequest(98 * 2**20, 30, 576, 49152, 0, 11520, 4096, 0, n_gpu_layers=15)
    assert WORK < fit(half, 16 * GIB, 8 * GIB).n_bytes < fit(SMALL, 16 * GIB, 0).n_bytes


@pytest.mark.parametrize(
    ("fit", "level", "word"),
    [
        (Fit(16 * GIB, GIB, 4096, 8192), OK, "1.00 GiB with 8192 tokens"),
        (Fit(16 * GIB, GIB, 4096, 8192, 30), OK, "30 layers on the GPU"),
        (Fit(2 * GIB, GIB, 2048, 2048), WARN, "an answer gets 2048, not 4096"),
        (Fit(2 * GIB, 3 * GIB, 4096, 8192), WARN, "swap"),
        (Fit(GIB, problem="the model needs 5 GiB"), WRONG, "needs 5 GiB"),
        (None, WARN, "cannot be predicted"),
    ],
)
def test_what_memory_means(fit: Fit | None, level: Level, word: str) -> None:
    found = engine.memory(SMALL, Examined(BUILT, () if fit is None else (fit,)), None)
    assert found.level is level
    assert word in found.found


def test_a_running_daemons_model_is_in_memory_already() -> None:
    state = {"endpoints": {"device": {"state": "ready", "n_cells": 8192}}}
    large = Examined(BUILT, (Fit(0, problem="too large"),))
    assert engine.memory(SMALL, large, state).level is OK
    loading = {"endpoints": {"device": {"state": "loading"}}}
    assert engine.memory(SMALL, large, loading).level is WRONG


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "was killed by signal 4"),
        ("import none_such", "ModuleNotFoundError: No module named 'none_such'"),
        ("print('hello')", "exited with status 0 without a result"),
    ],
)
async def test_a_child_that_dies_says_why(program: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "command", lambda *_: [sys.executable, "-c", program])
    seen = await model_memory.run_checkup()
    assert problem in seen.problem
    assert seen.bindings is None
    assert seen.fit is None


async def test_a_child_that_hangs_is_given_up_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(model_memory, "CHILD_TIMEOUT_S", 0.2)
    assert "no result in 0.2 s" in (await model_memory.run_checkup()).problem


def test_what_is_not_in_force_is_told_with_its_reason() -> None:
    found = Confined(["no core dumps"], {"landlock": "Function not implemented"}, {"connect": True, "write": False})
    told = engine.confinement(Examined(confined=found))
    assert told is not None
    assert told.level is WARN
    assert "not in force: landlock (Function not implemented)" in told.found
    assert "it can write" in told.found
    assert engine.confinement(Examined()) is None
    everything = Confined(["seccomp"], {}, {"connect": True})
    assert engine.confinement(Examined(confined=everything)).level is OK  # type: ignore[union-attr]

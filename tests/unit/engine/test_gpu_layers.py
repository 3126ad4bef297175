"""How many layers go to a GPU: the arithmetic, and what happens when it was too hopeful."""

from __future__ import annotations

import llama_cpp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.llama import gpu
from disco_daemon.engine.llama import model as llama
from disco_daemon.engine.llama.memory import GIB, GPU_SPARE, Footprint, gpu_layers, work_bytes
from disco_daemon.engine.llama.model import AbortFlag, load_model
from disco_daemon.engine.llama.refusals import ModelError
from disco_daemon.engine.wire import Load

MIB = 2**20
SMALL = Footprint(n_bytes=100 * MIB, n_layers=30, kv_bytes=180 * MIB)  # SmolLM2-135M, 8,192 cells
LARGE = Footprint(n_bytes=4_800 * MIB, n_layers=32, kv_bytes=1_024 * MIB)  # Llama 3.1 8B Q4_K_M, 8,192 cells


@pytest.mark.parametrize(
    ("model", "work", "free", "n"),
    [
        (SMALL, 150 * MIB, 0, 0),  # no memory
        (SMALL, 150 * MIB, 160 * MIB, 0),  # not even the work buffers
        (SMALL, 150 * MIB, 8 * GIB, 31),  # all of it, and what makes logits
        (SMALL, 150 * MIB, 480 * MIB, 31),  # 282 MiB for 280: just so
        (SMALL, 150 * MIB, 476 * MIB, 29),  # 278 MiB: just not
        (SMALL, 150 * MIB, 340 * MIB, 16),  # 156 MiB for layers of 9.33 MiB
        (LARGE, 300 * MIB, 24 * GIB, 33),
        (LARGE, 300 * MIB, 8 * GIB, 33),  # 7,073 MiB for 5,824
        (LARGE, 300 * MIB, 6 * GIB, 28),  # 5,229 MiB for layers of 182 MiB
        (LARGE, 300 * MIB, 2 * GIB, 8),
        (LARGE, 300 * MIB, 400 * MIB, 0),
    ],
)
def test_as_many_layers_as_fit(model: Footprint, work: int, free: int, n: int) -> None:
    assert gpu_layers(model, work, free) == n


@given(
    st.integers(1, 200),
    st.integers(1, 10**11),
    st.integers(0, 10**11),
    st.integers(0, 10**9),
    st.integers(0, 2 * 10**11),
)
def test_what_is_put_there_fits_and_one_more_would_not(n: int, size: int, kv: int, work: int, free: int) -> None:
    found = gpu_layers(Footprint(size, n, kv), work, free)
    layer = (size + kv) / n
    assert 0 <= found <= n + 1
    if found:
        assert min(found, n) * layer <= (GPU_SPARE * free - work) * (1 + 1e-9)
    if found < n:
        assert (found + 1) * layer > (GPU_SPARE * free - work) * (1 - 1e-9)


def test_work_buffers_grow_with_rows_and_vocabulary() -> None:
    assert work_bytes(512, 49_152, 576) == 4 * 512 * (49_152 + 40 * 576)


class Crowded:
    """Stands for llama.cpp on a GPU that holds fewer layers than was reckoned."""

    def __init__(self, load: Load, abort: AbortFlag, *, warm: bool) -> None:
        del abort
        self.tried.append(load.n_gpu_layers)
        if (load.n_gpu_layers or 0) > self.holds:
            raise ModelError("no context")
        self.n_gpu_layers = load.n_gpu_layers

    tried: list[int | None] = []  # noqa: RUF012
    holds = 4


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> type[Crowded]:
    monkeypatch.setattr(Crowded, "tried", [])
    monkeypatch.setattr(llama, "Llama", Crowded)
    monkeypatch.setattr(gpu, "layers", lambda load: 31 if load.n_gpu_layers is None else load.n_gpu_layers)
    return Crowded


def test_fewer_layers_are_tried_when_a_context_cannot_be_made(crowded: type[Crowded]) -> None:
    assert load_model(Load(model_path="m", n_ctx=512, n_threads=1, n_gpu_layers=None), AbortFlag()).n_gpu_layers == 3
    assert crowded.tried == [31, 15, 7, 3]


def test_at_last_none_and_then_the_error(crowded: type[Crowded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crowded, "holds", -1)
    with pytest.raises(ModelError, match="no context"):
        load_model(Load(model_path="m", n_ctx=512, n_threads=1, n_gpu_layers=None), AbortFlag())
    assert crowded.tried == [31, 15, 7, 3, 1, 0]


def test_a_number_in_the_settings_is_meant(crowded: type[Crowded]) -> None:
    with pytest.raises(ModelError, match="no context"):
        load_model(Load(model_path="m", n_ctx=512, n_threads=1, n_gpu_layers=20), AbortFlag())
    assert crowded.tried == [20]


@pytest.mark.parametrize(
    ("supported", "free", "asked", "n"),
    [
        (False, 8 * GIB, None, 0),
        (False, 8 * GIB, -1, 0),  # such a build would go on without, and round as a GPU does
        (True, 8 * GIB, 0, 0),
        (True, 8 * GIB, 7, 7),
        (True, 8 * GIB, -1, -1),
        (True, 0, None, 0),  # built for one, and there is none
        (True, 8 * GIB, None, 12),
    ],
)
def test_who_decides(monkeypatch: pytest.MonkeyPatch, supported: bool, free: int, asked: int | None, n: int) -> None:
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: supported)
    monkeypatch.setattr(gpu, "free_bytes", lambda: free)
    monkeypatch.setattr(gpu, "_fitting", lambda load, free: 12)
    assert gpu.layers(Load(model_path="m", n_ctx=512, n_threads=1, n_gpu_layers=asked)) == n


def test_this_build_says_what_devices_there_are() -> None:
    """The functions that the bindings lack are called as the header has them: the CPU is always there."""
    cpus = gpu._devices(0)
    assert cpus
    assert gpu._free(cpus[0]) > 0


def test_discrete_ones_go_before_those_in_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {1: [5, 6], 2: [7]}
    monkeypatch.setattr(gpu, "_devices", lambda wanted: memory.get(wanted, []))
    monkeypatch.setattr(gpu, "_free", lambda device: device)
    assert gpu.free_bytes() == 11
    del memory[1]
    assert gpu.free_bytes() == 7
    memory.clear()
    assert gpu.free_bytes() == 0

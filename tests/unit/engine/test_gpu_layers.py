"""How many layers go to a GPU: the arithmetic, and what happens when it was too hopeful."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import llama_cpp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.llama import gpu
from disco_daemon.engine.llama import model as llama
from disco_daemon.engine.llama.library import show_errors
from disco_daemon.engine.llama.memory import (
    GIB,
    GPU_SLACK,
    GPU_SPARE,
    Footprint,
    GpuPlacement,
    gpu_layers,
    one_gpu,
    placement,
    weights_there,
    work_bytes,
)
from disco_daemon.engine.llama.model import AbortFlag, load_model
from disco_daemon.engine.llama.refusals import ModelError
from disco_daemon.engine.wire import Load
from tests.fixtures.tiny_models import tiny_model

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


# The free memory of each GPU, bytes, as machines have it: a desktop with two of 16 GB, one with 24 GB beside an older
# card of 8, a server with four of 48, a laptop with one of 6.
TWO, UNLIKE, FOUR, ONE = [15 * GIB, 15 * GIB], [8 * GIB - 400 * MIB, 23 * GIB], [47 * GIB] * 4, [6 * GIB]
HUGE = Footprint(n_bytes=40 * GIB, n_layers=80, kv_bytes=2 * GIB)  # 70B, Q4_K_M


@pytest.mark.parametrize(
    ("models", "free", "expected"),
    [
        ((LARGE, LARGE), TWO, [0, 0]),  # two of 6 GB are on one
        ((LARGE, LARGE, LARGE), TWO, [0, 0, 1]),
        ((LARGE, LARGE), UNLIKE, [0, 1]),  # the smaller one is taken first, and the larger kept for others
        ((HUGE, SMALL), TWO, [-1, -1]),  # one that no GPU holds is spread over all, and leaves nothing
        ((HUGE, LARGE), FOUR, [0, 1]),
        ((SMALL, LARGE), ONE, [-1, -1]),  # there is nothing to choose
    ],
)
def test_models_are_placed_on_a_gpu_that_holds_them_one_after_the_other(
    models: tuple[Footprint, ...], free: list[int], expected: list[int]
) -> None:
    left, found, work = list(free), [], 300 * MIB
    for model in models:
        placed = placement(model, work, sum(left))
        on = one_gpu(model, work, left, placed)
        found.append(on)
        if on >= 0:
            left[on] -= model.n_bytes + model.kv_bytes + work
            assert left[on] >= 0
        else:  # spread over all of them, as far as it goes
            left = [0] * len(left) if placed.n_gpu_layers <= model.n_layers else left
    assert found == expected


def test_a_model_that_finds_the_gpus_full_is_computed_by_the_processor() -> None:
    placed = placement(LARGE, 300 * MIB, 2 * 300 * MIB)
    assert placed.n_gpu_layers <= 2
    assert one_gpu(LARGE, 300 * MIB, [300 * MIB, 300 * MIB], placed) == -1


sizes = st.integers(0, 64 * GIB)


@given(st.lists(sizes, max_size=6), st.integers(1, 64 * GIB), st.integers(0, GIB))
def test_a_gpu_that_is_chosen_holds_all_of_the_model_and_no_smaller_one_does_easily(
    free: list[int], size: int, work: int
) -> None:
    model = Footprint(size, 20, 0)
    on = one_gpu(model, work, free, placement(model, work, sum(free)))
    holds = [has for has in free if size <= GPU_SPARE * has - work]
    easily = [has for has in free if size <= GPU_SPARE * (has - GPU_SLACK) - work]
    if on >= 0:
        assert len(free) > 1
        assert free[on] == (min(easily) if easily else max(holds))
    else:
        assert len(free) < 2 or not holds


@pytest.mark.parametrize("free", [[23 * GIB, 11 * GIB], [11 * GIB, 23 * GIB], [8 * GIB, 8 * GIB]])
def test_a_lone_model_is_on_all_gpus_as_ever_and_one_of_several_on_one(
    monkeypatch: pytest.MonkeyPatch, free: list[int]
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(gpu, "free_each", lambda: free)
    monkeypatch.setattr(gpu, "_shape", lambda load, free: (LARGE, 300 * MIB))
    lone = Load(model_path="m", n_ctx=512, n_threads=1, n_gpu_layers=None)
    assert gpu.placed(lone) == GpuPlacement(33, main_gpu=-1)
    one_of_several = msgspec.structs.replace(lone, one_gpu=True)
    assert gpu.placed(one_of_several) == GpuPlacement(33, main_gpu=free.index(min(free)))


def test_a_gpu_that_would_be_filled_to_the_brim_is_left_to_its_screen() -> None:
    just = int((LARGE.n_bytes + LARGE.kv_bytes + 300 * MIB) / GPU_SPARE) + 1
    placed = placement(LARGE, 300 * MIB, just + 24 * GIB)
    assert one_gpu(LARGE, 300 * MIB, [just, 24 * GIB], placed) == 1
    assert one_gpu(LARGE, 300 * MIB, [just + GPU_SLACK, 24 * GIB], placed) == 0
    assert one_gpu(LARGE, 300 * MIB, [just, just + 1, 2 * GIB], placed) == 1, "the one with most of those that do"


def test_what_did_not_fit_on_one_gpu_is_tried_on_all_before_less_of_it_is() -> None:
    placed = GpuPlacement(33, main_gpu=1)
    assert placed.smaller(None, None) == GpuPlacement(33)
    assert GpuPlacement(-1, main_gpu=0).smaller(-1, 0) == GpuPlacement(-1)


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
    monkeypatch.setattr(
        gpu, "placed", lambda load: GpuPlacement(31 if load.n_gpu_layers is None else load.n_gpu_layers)
    )
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


def test_experts_leave_the_gpu_before_any_layer_does() -> None:
    found = list[tuple[int, int]]()
    placed: GpuPlacement | None = GpuPlacement(49, 0, 48)
    while placed is not None:
        found.append((placed.n_gpu_layers, placed.n_cpu_moe))
        placed = placed.smaller(None, None)
    assert found == [(49, 0), (49, 48), (24, 48), (12, 48), (6, 48), (3, 48), (1, 48), (0, 0)]
    assert GpuPlacement(49, 7, 48).smaller(49, 7) is None
    assert GpuPlacement(-1, 7, 48).smaller(-1, None) == GpuPlacement(-1, 48, 48)
    assert GpuPlacement(-1, 48, 48).smaller(-1, None) is None
    assert GpuPlacement(49, 7, 48).smaller(None, 7) == GpuPlacement(24, 7, 48)
    assert GpuPlacement(49, -1, 48).smaller(None, -1) == GpuPlacement(24, -1, 48)


# Qwen3-30B-A3B Q4_K_M: 48 layers, of whose 17.7 GiB experts are 16.6; a KV cache of 8,192 cells.
EXPERTS = 354 * MIB
MOE = Footprint(18_125 * MIB, 48, 768 * MIB, (EXPERTS,) * 48)


@pytest.mark.parametrize(
    ("free", "asked", "placed"),
    [
        (32 * GIB, (None, None), (49, 0)),
        (24 * GIB, (None, None), (49, 0)),  # 21,818 MiB for 18,893
        (16 * GIB, (None, None), (49, 14)),  # 14,092 MiB beside a copy of a layer's, for 1,901 and 34 x 354
        (8 * GIB, (None, None), (49, 35)),  # 6,719 MiB, for 1,901 and 13 x 354
        (3 * GIB, (None, None), (49, 48)),  # 2,111 MiB for 1,901
        (2 * GIB, (None, None), (30, 48)),  # 1,189 MiB for layers of 39.6 MiB
        (400 * MIB, (None, None), (0, 0)),
        (8 * GIB, (None, 0), (17, 0)),  # 7,073 MiB for layers of 394 MiB
        (8 * GIB, (None, -1), (49, 48)),
        (8 * GIB, (None, 99), (49, 48)),
        (8 * GIB, (None, 40), (49, 40)),
        (8 * GIB, (None, 20), (17, 20)),  # 6,719 MiB for layers of 394
        (8 * GIB, (-1, None), (-1, 35)),
        (8 * GIB, (10, None), (10, 0)),  # ten layers fit with all that they have
        (8 * GIB, (30, None), (30, 33)),  # 6,719 MiB for 30 layers of 39.6 and 15 x 354
        (2 * GIB, (-1, None), (-1, 48)),  # it does not fit, and is asked for
        (2 * GIB, (20, 3), (20, 3)),
        (2 * GIB, (0, None), (0, 0)),
    ],
)
def test_experts_stay_with_the_processor_where_they_do_not_fit(
    free: int, asked: tuple[int | None, int | None], placed: tuple[int, int]
) -> None:
    found = placement(MOE, 300 * MIB, free, *asked)
    assert (found.n_gpu_layers, found.n_cpu_moe) == placed
    assert found.n_moe == 48


def test_a_model_without_experts_is_placed_by_layers_alone() -> None:
    assert placement(LARGE, 300 * MIB, 6 * GIB) == placement(LARGE, 300 * MIB, 6 * GIB, None, -1) == GpuPlacement(28)


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=99),
    st.integers(1, 10**10),
    st.integers(0, 10**10),
    st.integers(0, 10**9),
    st.integers(0, 10**11),
)
def test_what_of_experts_is_put_there_fits(sizes: list[int], others: int, kv: int, work: int, free: int) -> None:
    model = Footprint(others + sum(sizes), len(sizes), kv, tuple(sizes))
    found, n = placement(model, work, free), len(sizes)
    on_gpu = min(n, found.n_gpu_layers)
    copied = max(sizes[: found.n_cpu_moe], default=0)
    if on_gpu:
        room = (GPU_SPARE * free - work - copied) * (1 + 1e-9) + 1
        assert weights_there(model, found) + kv * on_gpu // n <= room
    if found.n_cpu_moe and found.n_gpu_layers > n:
        fewer = GpuPlacement(found.n_gpu_layers, found.n_cpu_moe - 1)
        copied = max(sizes[: fewer.n_cpu_moe], default=0)
        assert weights_there(model, fewer) + kv > (GPU_SPARE * free - work - copied) * (1 - 1e-9) - 1
    assert found.n_cpu_moe in range(n + 1)
    assert found.n_gpu_layers > n or found.n_cpu_moe in (0, n), "no layer stays for an expert's sake"


def test_weights_on_the_gpu_are_those_of_its_layers() -> None:
    model = Footprint(1_000, 4, 0, (100, 200, 100, 200))
    assert [weights_there(model, GpuPlacement(n)) for n in (0, 1, 2, 4, 5, -1)] == [0, 300, 500, 1000, 1000, 1000]
    assert [weights_there(model, GpuPlacement(5, n)) for n in (0, 1, 3, 4)] == [1000, 900, 600, 400]
    assert weights_there(model, GpuPlacement(2, 3)) == 200 + 200


@pytest.mark.parametrize("n_cpu_moe", [1, 2, -1])
def test_llama_cpp_keeps_the_experts_of_these_layers_in_main_memory(n_cpu_moe: int, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "moe.gguf", "moe")
    lines = list[str]()

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def keep(_level: int, text: bytes, _data: object) -> None:
        lines.append(text.decode())

    def said(n: int) -> list[int]:
        load = Load(model_path=str(path), n_ctx=512, n_threads=1, n_cells=512, exact=True, n_cpu_moe=n)
        llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
        try:
            loaded = llama.Llama(load, AbortFlag(), warm=False)
        finally:
            llama_cpp.llama_log_set(show_errors, ctypes.c_void_p(0))
        assert loaded.n_cpu_moe == n
        tokens = [5, 6, 7]
        for _ in range(8):
            loaded.clear()
            assert loaded.decode([(token, i, 0, i == len(tokens) - 1) for i, token in enumerate(tokens)]) == 0
            tokens.append(int(loaded.logits(len(tokens) - 1).argmax()))
        loaded.close()
        return tokens

    expected, plain = said(0), len(lines)
    assert not any("overridden" in line for line in lines)
    assert said(n_cpu_moe) == expected
    moved = {match[1] for line in lines[plain:] if (match := re.match(r"tensor (\S+) .* overridden to CPU", line))}
    layers = range(3 if n_cpu_moe < 0 else n_cpu_moe)
    assert moved == {f"blk.{i}.ffn_{part}_exps.weight" for i in layers for part in ("gate", "up", "down")}


def test_there_is_nothing_to_override_without_experts_to_keep() -> None:
    assert gpu.overrides(0) is None
    found = gpu.overrides(12)
    assert found is not None
    assert [len(found), found[1].pattern, found[1].buft] == [2, None, None], "a list that llama.cpp finds the end of"
    matches = [i for i in range(130) if re.search(found[0].pattern.decode(), f"blk.{i}.ffn_up_exps.weight")]
    assert matches == list(range(12))


def test_experts_are_weighed_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model(tmp_path / "moe.gguf", "moe")
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    found = gpu._shape(Load(model_path=str(path), n_ctx=64, n_threads=1), 0)
    assert found is not None
    footprint, work = found
    # Three matrices of 256 x 128 in four experts, as Q4_1: 20 bytes for 32 numbers.
    assert footprint.experts == (3 * 4 * 256 * 128 * 20 // 32,) * 3
    others = footprint.n_bytes - sum(footprint.experts) + footprint.kv_bytes
    free = int((others + work + 2.5 * footprint.experts[0]) / GPU_SPARE)  # one layer's, beside those that are copied
    monkeypatch.setattr(gpu, "free_each", lambda: [free])
    load = Load(model_path=str(path), n_ctx=64, n_threads=1, n_gpu_layers=None)
    assert gpu.placed(load) == GpuPlacement(4, 2, 3)
    by_hand = Load(model_path=str(path), n_ctx=64, n_threads=1, n_gpu_layers=-1, n_cpu_moe=1)
    assert gpu.placed(by_hand) == GpuPlacement(-1, 1, 3)


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
    monkeypatch.setattr(gpu, "free_each", lambda: [free])
    monkeypatch.setattr(
        gpu, "_shape", lambda load, free: (Footprint(30 * 590 * MIB, 30, 0), 0)
    )  # 7,373 MiB for layers of 590
    load = Load(model_path="m", n_ctx=512, n_threads=1, n_gpu_layers=asked)
    assert gpu.placed(load) == GpuPlacement(n)
    monkeypatch.setattr(gpu, "_shape", lambda load, free: None)
    assert gpu.placed(load) == GpuPlacement(0 if asked is None else n), "a file that cannot be read"


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

"""Layers with a sliding window that have cells for that alone: a tiny Gemma 3 with random weights, in both ways.

That chats are answered as if each prompt came first is shown in test_tiny_models.py, for this kind, too.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import llama_cpp
import msgspec
import numpy as np
import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.llama import memory, model
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.sequence import Sequence
from disco_daemon.machines.split.drafter import own_certainty
from tests.e2e.engine.test_engine_exact import Core
from tests.e2e.engine.test_tiny_models import phrase
from tests.fixtures.tiny_models import WINDOW, tiny_model

N_CTX, N_CELLS = 1024, 4096
N_SWA_LAYERS, N_LAYERS, CELL_BYTES = 5, 6, 512  # of a layer: key and value of two heads of 64 numbers, two bytes each


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> wire.Load:
    path = tiny_model(tmp_path_factory.mktemp("window") / "m.gguf", "sliding-window")
    return wire.Load(model_path=str(path), n_ctx=N_CTX, n_threads=1, n_gpu_layers=0, n_cells=N_CELLS, exact=True)


@pytest.fixture(scope="module")
def llama(load: wire.Load) -> Iterator[Llama]:
    loaded = Llama(load, AbortFlag(), warm=False)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def full(load: wire.Load) -> Iterator[Llama]:
    """The same model, whose layers have all cells."""
    patch = pytest.MonkeyPatch()
    patch.setattr(memory, "MOST_WINDOW_SHARE", 0.0)
    loaded = Llama(load, AbortFlag(), warm=False)
    patch.undo()
    yield loaded
    loaded.close()


def test_they_have_few_cells_where_the_context_is_long_and_all_where_it_is_short(load: wire.Load, llama: Llama) -> None:
    assert llama.windowed
    assert not llama.divisible
    assert llama.n_cells == N_CELLS
    assert llama._n_window_cells <= N_CELLS // 4
    short = Llama(wire.Load(model_path=load.model_path, n_ctx=512, n_threads=1, n_cells=1024), AbortFlag(), warm=False)
    assert not short.windowed
    assert short.divisible
    short.close()


def test_a_model_that_drafts_for_another_machine_has_all_cells_since_its_text_is_cut_anywhere(load: wire.Load) -> None:
    drafter = Llama(msgspec.structs.replace(load, exit=own_certainty()), AbortFlag(), warm=False)
    assert (drafter.windowed, drafter.divisible) == (False, True)
    drafter.close()


def test_their_memory_is_reckoned_and_a_quarter_of_what_it_was(
    load: wire.Load, full: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs, known = list[memory.Need](), memory.fitting

    def fitting(n_ctx: int, n_cells: int, need: memory.Need, available: int) -> tuple[int, int]:
        needs.append(need)
        return known(n_ctx, n_cells, need, available)

    monkeypatch.setattr(model, "fitting", fitting)
    llama = Llama(load, AbortFlag(), warm=False)
    llama.close()
    work = memory.work_bytes(memory.N_BATCH, llama.vocabulary.n_tokens, llama.n_embd)
    reckoned = needs[-1].work - work + N_CELLS * needs[-1].per_token
    n_window = llama._n_window_cells
    taken = CELL_BYTES * ((N_LAYERS - N_SWA_LAYERS) * N_CELLS + N_SWA_LAYERS * n_window)
    assert reckoned == pytest.approx(taken, rel=0.03)
    assert taken < 0.4 * full.bytes_per_token * N_CELLS


def test_no_bit_of_an_answer_depends_on_it(llama: Llama, full: Llama) -> None:
    tokens = llama.vocabulary.tokenize(phrase(random.Random(1), 900, 900))[:900]
    found = []
    for one in (llama, full):
        one.clear()
        for start in range(0, len(tokens), 100):
            end = min(start + 100, len(tokens))
            assert one.decode([(tokens[i], i, 0, i == end - 1) for i in range(start, end)]) == 0
            found.append(one.logits(end - start - 1).copy())
    assert np.array_equal(found[: len(found) // 2], found[len(found) // 2 :])


def test_windows_are_moved_when_their_cells_are_used_and_nothing_else_is(llama: Llama) -> None:
    llama.clear()
    tokens = llama.vocabulary.tokenize(phrase(random.Random(2), 700, 700))[:700]
    moved = 0
    for start in range(0, len(tokens), 70):
        for seq in range(2):
            before = llama._window_head
            assert llama.decode([(tokens[i], i, seq, False) for i in range(start, start + 70)]) == 0
            moved += llama._window_head < before
            assert llama._window_head < llama._n_window_cells
            assert llama.can_cut(seq, start + 70)
    assert moved
    memory_, whole = llama._memory, llama.save(0)
    llama.drop_state(0)
    assert llama_cpp.llama_memory_seq_pos_max(memory_, 0) == -1
    assert len(llama.save(0)) == pytest.approx(len(tokens) * CELL_BYTES, rel=0.05), "it has its cells still"
    assert len(whole) - len(llama.save(0)) == pytest.approx(WINDOW * CELL_BYTES * N_SWA_LAYERS, rel=0.05)


def begun(core: Core, prompt: str) -> Sequence:
    s = core.ask("it", prompt, max_tokens=12)
    while s.draw.n_drawn < 4:
        assert core.batcher.step()
    return s


@pytest.mark.parametrize("back", [1, 3, WINDOW // 2, 2 * WINDOW, 10_000])
def test_an_answer_that_is_cut_goes_on_as_if_it_had_not_been(llama: Llama, back: int) -> None:
    prompt = phrase(random.Random(3), 150, 150)
    core = Core(llama)
    core.ask("it", prompt, max_tokens=12)
    core.finish()
    expected = core.said["it"]
    core = Core(llama)
    s = begun(core, prompt)
    n = s.n_past
    core.admission.cut(s, max(0, n - back))
    assert s.n_past <= max(0, n - back)
    core.check()
    core.finish()
    assert core.said["it"] == expected


def test_what_was_cancelled_and_what_is_shared_is_gone_on_with_from_a_copy(llama: Llama) -> None:
    prompt = phrase(random.Random(4), 150, 150)
    core = Core(llama)
    begun(core, prompt)
    core.batcher.cancel("it")
    again = core.ask("again", prompt, max_tokens=4)
    core.finish()
    assert again.prefill.n_cached > again.prefill.n_prompt - 2 * WINDOW


def test_a_text_on_disk_goes_on_in_a_new_process(llama: Llama) -> None:
    prompt = phrase(random.Random(5), 150, 150)
    core = Core(llama)
    s = core.ask("it", prompt, max_tokens=12)
    core.finish()
    tokens = s.key(0, s.n_past)
    on_disk = core.cells.copy(array("i", tokens).tobytes())
    assert on_disk is not None
    expected, data = core.said["it"], bytes(on_disk)
    core = Core(llama)
    cells = core.cells._without_states(tokens, data)
    assert cells is not None
    assert core.cells._put_back(tokens, cells, private=False)
    again = core.ask("it", prompt, max_tokens=12)
    core.finish()
    assert again.prefill.n_cached > again.prefill.n_prompt - 2 * WINDOW
    assert core.said["it"] == expected

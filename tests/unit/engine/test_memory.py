from __future__ import annotations

import re
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.llama import memory
from disco_daemon.engine.llama.memory import (
    GIB,
    LEAST_CTX,
    LEAST_SEQS,
    N_BATCH,
    N_SEQS,
    ContextSizes,
    KeptBytes,
    Need,
    TextNeed,
    available_bytes,
    context_sizes,
    fitting,
    kv_type_for,
    model_bytes,
    open_cells,
    open_context,
    require,
    too_large,
    window_sizes,
)
from disco_daemon.engine.measure.checkup_messages import CheckupRequest
from disco_daemon.engine.measure.predicted_memory import fit

NEED = Need(per_token=23_000, work=100 * 2**20)


def test_a_text_that_is_read_whole_has_scores_of_each_token_with_each_unless_flash_attention_spares_them() -> None:
    """As bge-m3: 16 heads, 8,192 tokens."""
    flash, plain = (TextNeed(1024, 250_002, 0, True, n_heads) for n_heads in (0, 16))
    assert plain.n_bytes(8192) - flash.n_bytes(8192) == 4 * GIB
    assert (flash.n_ctx(8192, 3 * GIB), plain.n_ctx(8192, 3 * GIB)) == (8192, 4096)
    asked = CheckupRequest(GIB, 24, 1024, 250_002, 16, 0, 8192, 0, pooling="cls", reads_whole=True)
    assert fit(asked, 4 * GIB, 0).n_ctx == 4096
    assert fit(msgspec.structs.replace(asked, n_heads=0), 4 * GIB, 0).n_ctx == 8192


def test_with_memory_to_spare_two_full_answers_fit() -> None:
    assert fitting(4096, 0, NEED, 8 * GIB) == (4096, 8192)


def test_the_cache_of_prefixes_is_given_up_before_the_context_shrinks() -> None:
    assert fitting(4096, 0, NEED, 300 * 2**20) == (4096, 4096)
    n_ctx, n_cells = fitting(4096, 0, NEED, 180 * 2**20)
    assert LEAST_CTX < n_ctx == n_cells < 4096


def test_as_many_cells_as_are_asked_for_but_one_answer_at_least() -> None:
    assert fitting(4096, 20_000, NEED, 8 * GIB) == (4096, 20_000)
    assert fitting(4096, 1000, NEED, 8 * GIB) == (4096, 4096)


def test_a_context_too_small_to_be_of_use_is_refused_with_what_to_do() -> None:
    with pytest.raises(MemoryError, match=r"a context of 512 tokens needs 0\.11 GiB .*device\.model"):
        fitting(4096, 0, NEED, 110 * 2**20)
    assert fitting(64, 0, NEED, 115 * 2**20)[0] == 64, "who asks for less gets it"


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 10**11))
def test_what_is_promised_fits(n_ctx: int, n_cells: int, per_token: int, available: int) -> None:
    need = Need(per_token, 10**6)
    try:
        got, cells = fitting(n_ctx, n_cells, need, available)
    except MemoryError:
        assert need.work + min(n_ctx, LEAST_CTX) * per_token > memory.SPARE * available - per_token
        return
    assert 0 < got <= min(n_ctx, cells)
    assert need.work + cells * per_token <= memory.SPARE * available


def test_a_model_larger_than_memory_is_refused_with_both_figures() -> None:
    assert too_large(GIB, GIB) is None
    assert re.search(r"needs 2\.0 GiB .* 1\.0 GiB are free", too_large(2 * GIB, GIB) or "")


def test_what_is_free_is_within_the_machine() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_what_does_not_fit_is_told_by_name() -> None:
    require("embeddings of 512 tokens", 9 * GIB, 10 * GIB)
    with pytest.raises(
        MemoryError, match=r"embeddings of 512 tokens need 9\.10 GiB of memory, and 10\.00 GiB are free"
    ):
        require("embeddings of 512 tokens", int(9.1 * GIB), 10 * GIB)


def test_a_model_in_parts_is_as_large_as_all_of_them(tmp_path: Path) -> None:
    for n, size in enumerate((10, 200, 3000), start=1):
        (tmp_path / f"m-0000{n}-of-00003.gguf").write_bytes(bytes(size))
    (tmp_path / "m.gguf").write_bytes(bytes(7))
    assert model_bytes(str(tmp_path / "m-00001-of-00003.gguf")) == 3210
    assert model_bytes(str(tmp_path / "m.gguf")) == 7
    with pytest.raises(FileNotFoundError):
        model_bytes(str(tmp_path / "m-00001-of-00004.gguf"))


def test_a_context_that_nobody_has_set_is_as_long_as_half_of_what_weights_leave_has_room_for() -> None:
    need = Need(per_token=1000, work=10**6)
    assert open_context(8192, 0, need, 10**9) == 8192, "as the model was trained for"
    assert open_context(10**6, 0, need, 10**7 + 10**6) == 5000 // 256 * 256
    assert open_context(10**6, 0, need, 0) == LEAST_CTX, "fitting says whether that fits"
    assert open_context(300, 0, need, 0) == 300
    assert open_context(8192, 4096, need, 10**9) == 4096, "no more than there are cells"


@pytest.mark.parametrize(
    ("holding", "kv_type"), [({"f16", "q8_0"}, "f16"), ({"q8_0"}, "q8_0"), ({"f16"}, "f16"), (set(), "f16")]
)
def test_bytes_are_kept_where_only_so_all_fits_that_is_asked_for(holding: set[str], kv_type: str) -> None:
    assert kv_type_for(holding.__contains__) == kv_type


def test_a_context_that_nobody_has_set_is_there_once_or_4096_tokens_twice() -> None:
    assert [open_cells(n) for n in (512, 4096, 6000, 8192, 131_072)] == [1024, 8192, 8192, 8192, 131_072]


@given(st.integers(1, 10**7), st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 10**12))
def test_what_nobody_has_set_leaves_half_to_others(trained: int, n_cells: int, per_token: int, free: int) -> None:
    found = open_context(trained, n_cells, Need(per_token, 10**6), free)
    assert 0 < found <= min(trained, n_cells or trained)
    assert found <= LEAST_CTX or found * per_token <= memory.OPEN_SHARE * (free - 10**6)


def kept_at(n_cells: int, kept: KeptBytes) -> ContextSizes:
    return context_sizes(kept, lambda *_: (n_cells, n_cells), 32 * GIB)


def test_windows_have_cells_of_their_own_where_that_is_much_less() -> None:
    gemma = KeptBytes(20 * 1024, 1024, 116 * 1024)  # Gemma 3 4B: 5 layers that see all, and 29 that see a window
    short, long, longest = (kept_at(n, gemma) for n in (8192, 32_768, 131_072))
    assert (short.windowed, short.n_seqs, short.n_bytes) == (False, N_SEQS, 8192 * 136 * 1024)
    assert (long.windowed, long.n_seqs) == (True, LEAST_SEQS)
    assert long.n_bytes < 32_768 * 136 * 1024 / 3
    assert longest.n_bytes < 131_072 * 136 * 1024 / 4
    little = context_sizes(gemma, lambda *_: (32_768, 32_768), 2 * GIB)
    assert not little.windowed, "there would be no room for copies of a window, and each turn would be computed anew"
    gpt_oss = kept_at(32_768, KeptBytes(24 * 1024, 128, 24 * 1024))
    assert gpt_oss.n_seqs > 8 * LEAST_SEQS, "a small window is of little weight"
    assert gpt_oss.n_bytes < 32_768 * 48 * 1024 * 0.65


@given(
    st.integers(1, 4096), st.integers(1, 10**5), st.integers(1, 10**5), st.integers(LEAST_CTX, 10**6),
    st.integers(1, N_BATCH),
)  # fmt: skip
def test_a_window_s_cells_hold_those_of_all_sequences_and_a_batch(
    window: int, cell: int, window_cell: int, n_cells: int, n_ubatch: int
) -> None:
    kept = KeptBytes(cell, window, window_cell)
    sizes = context_sizes(kept, lambda *_: (n_cells, n_cells), GIB, n_ubatch)
    assert sizes.n_bytes <= n_cells * (cell + window_cell)
    if sizes.windowed:
        n_max, n = window_sizes(window, sizes.n_seqs, n_ubatch)
        assert n_max <= 256, "as many as llama.cpp has"
        assert sizes.n_seqs * window + max(N_BATCH, window) < n <= n_cells

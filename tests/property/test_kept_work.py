"""What a chat costs of what is kept from others: as much at 1,000 kept texts as at 10. Counted, not timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.hosts.kept_rows import KeptRows
from disco_daemon.engine.kv.host_cache import HostCache
from disco_daemon.engine.kv.row_texts import RowTexts
from disco_daemon.engine.kv.sorted_texts import SortedTexts, text_key, tokens_in_common
from disco_daemon.engine.kv.spill import Spill
from disco_daemon.link.rows.edge_rows import EdgeAnswer

FEW, MANY = 10, 1000
N_TOKENS, N_SYSTEM = 24, 8  # of a text, and of those the ones that all texts begin with

texts = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def n_steps(work: Callable[[], object]) -> int:
    """Count the instructions of Python that it takes; what C does on the way is no pass in Python."""
    n = 0

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal n
        frame.f_trace_opcodes = True
        n += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return n


def text(number: int, n: int = N_TOKENS) -> list[int]:
    """A text that begins as all do and goes on as no other."""
    return [*range(N_SYSTEM), *(1000 + number * 31 % 7919 + i for i in range(n - N_SYSTEM))]


def host_cache(n: int, _: Path) -> Callable[[], object]:
    kept = HostCache(n)
    for i in range(n):
        kept.put(text(i), b"x")

    def chat() -> None:
        kept.match(text(n))
        kept.take(text(n // 2)[:-1])
        kept.put(text(n), b"x")
        kept.put(text(n, 2 * N_TOKENS), b"x")

    return chat


def spill(n: int, folder: Path) -> Callable[[], object]:
    kept = Spill(folder / str(n), 1 << 40, bytes(32), 1.0, 1e9)
    for i in range(n):
        kept._write(text_key(text(i)), b"x", i)
    kept._max_bytes = kept.n_bytes

    def chat() -> None:
        found = kept.find(text(n // 2), 0)
        assert found is None or kept.read(found)
        kept.note_unused(text_key(text(n)))
        kept._write(text_key(text(n)), b"x", time.time_ns())
        kept._write(text_key(text(n, 2 * N_TOKENS)), b"x", time.time_ns())
        assert kept.n_bytes <= kept._max_bytes

    return chat


def answer(tokens: Sequence[int]) -> EdgeAnswer:
    found = EdgeAnswer("a", tokens, n_ctx=64, n_vocab=1 << 20)
    found.add(0, tokens, np.zeros((len(tokens), 1), np.float32))
    return found


def row_texts(n: int, _: Path) -> Callable[[], object]:
    kept = RowTexts(N_TOKENS * n)
    for i in range(n):
        kept.put(answer(text(i)))
    new, longer = answer(text(n)), answer(text(n, 2 * N_TOKENS))

    def chat() -> None:
        kept.fill(EdgeAnswer("b", text(n // 2), n_ctx=64, n_vocab=1 << 20), text(n // 2))
        kept.put(new)
        kept.put(longer)

    return chat


def kept_rows(n: int, _: Path) -> Callable[[], object]:
    kept = KeptRows()
    for seq in range(n):
        kept.add(seq, [(i, seq) for i in range(N_TOKENS)], np.zeros((N_TOKENS, 1), np.float32))

    def chat() -> None:
        kept.share(0, n, N_SYSTEM)
        kept.add(n, [(i, n) for i in range(N_SYSTEM, N_TOKENS)], np.zeros((N_TOKENS - N_SYSTEM, 1), np.float32))
        assert (kept.length(n), kept.n_bytes > 0, kept.is_rows) == (N_TOKENS, True, True)
        assert kept.rows_of(n, 0, N_TOKENS) is not None
        kept.forget(n, N_TOKENS - 1)
        kept.forget(n, 0)

    return chat


@pytest.mark.parametrize("kind", [host_cache, kept_rows, row_texts, spill])
def test_a_chat_costs_as_much_of_1_000_kept_texts_as_of_10(
    kind: Callable[[int, Path], Callable[[], object]], tmp_path: Path
) -> None:
    few, many = (n_steps(kind(n, tmp_path)) for n in (FEW, MANY))
    assert many <= 1.25 * few


@given(st.lists(texts, max_size=12), texts)
def test_sorted_texts_find_what_looking_at_all_of_them_finds(kept: list[list[int]], wanted: list[int]) -> None:
    index, keys, key = SortedTexts(), {text_key(one) for one in kept}, text_key(wanted)
    for one in kept:
        index.add(text_key(one))
    assert sorted(index.beginnings(key)) == sorted(one for one in keys if key.startswith(one))
    assert index.begins_one(key) == any(one.startswith(key) for one in keys)
    most = max((tokens_in_common(one, key) for one in keys), default=0)
    assert max((tokens_in_common(one, key) for one in index.near(key)), default=0) == most
    for there in keys:
        index.remove(there)
    assert not index.near(key)
    with pytest.raises(KeyError):
        index.remove(key)

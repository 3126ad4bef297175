"""Rows that texts have in common: those of the longest beginning, and never more than there is room for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.kv.row_texts import RowTexts
from disco_daemon.link.rows.codec import RowArray
from disco_daemon.link.rows.edge_rows import EdgeAnswer, n_alike

texts = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def rows_of(tokens: list[int]) -> RowArray:
    """Rows as a model gives them: each depends on all tokens up to its own."""
    return np.array([[hash(tuple(tokens[: i + 1])) % 2**20] for i in range(len(tokens))], np.float32).reshape(-1, 1)


def answer(tokens: list[int], n_rows: int) -> EdgeAnswer:
    found = EdgeAnswer("a", tokens, n_ctx=64, n_vocab=3)
    found.add(0, tokens[:n_rows], rows_of(tokens[:n_rows]))
    return found


@given(st.lists(st.tuples(texts, st.integers(0, 8)), max_size=8), texts, st.integers(1, 30), st.booleans())
def test_a_text_gets_the_rows_that_others_have_of_its_beginning(
    ended: list[tuple[list[int], int]], tokens: list[int], most: int, one_runs: bool
) -> None:
    kept, others = RowTexts(most), [answer(text, min(n, len(text))) for text, n in ended]
    running = [others.pop()] if one_runs and others else []
    for other in others:
        kept.put(other)
        assert kept.n_rows <= most
    new = EdgeAnswer("b", tokens, n_ctx=64, n_vocab=3)
    n = kept.fill(new, tokens, running)
    assert n == new.n_rows
    assert all((new.text_rows[i] == row).all() for i, row in enumerate(rows_of(tokens)[:n]))
    alike = [n_alike(other.tokens[: other.n_rows], tokens) for other in (*others, *running)]
    assert n <= max(alike, default=0)
    if sum(other.n_rows for other in others) <= most:
        assert n == max(alike, default=0)


def test_a_text_whose_beginning_was_cached_everywhere_is_kept_with_the_rows_of_the_one_that_had_it_first() -> None:
    kept, text = RowTexts(10), [0, 1, 2, 0]
    kept.put(answer([0, 1], 2))
    second = EdgeAnswer("b", text, n_ctx=64, n_vocab=3)
    second.add(2, text[2:], rows_of(text)[2:])
    kept.put(second)
    third = EdgeAnswer("c", text, n_ctx=64, n_vocab=3)
    assert kept.fill(third, text) == 4
    assert all((third.text_rows[i] == row).all() for i, row in enumerate(rows_of(text)))


def test_a_gap_ends_what_is_kept_and_a_longer_text_takes_the_place_of_its_beginning() -> None:
    kept, gap = RowTexts(10), EdgeAnswer("a", [0, 1, 2, 0], n_ctx=64, n_vocab=3)
    gap.add(3, [0], rows_of([0]))
    kept.put(gap)
    assert kept.n_rows == 0
    for text in ([0, 1], [0, 1, 2], [0, 1]):
        kept.put(answer(text, len(text)))
    assert kept.n_rows == 3
    kept.put(answer([2] * 9, 9))
    assert kept.fill(EdgeAnswer("b", [0, 1], n_ctx=64, n_vocab=3), [0, 1]) == 0  # the oldest gave way

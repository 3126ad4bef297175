from __future__ import annotations

import math

import numpy as np
import pytest

from disco_daemon.scheduler.timeline import Readers, Timeline


def test_by_hand() -> None:
    """1 token/s, expected from the arrival on; tokens at 1 and 2 s."""
    reader = Timeline(100.0, 0.0, 1.0)
    assert reader.qoe(100.0) == 1, "nothing was expected yet"
    assert reader.qoe(101.0) == 0
    reader.token(101.0)
    reader.token(102.0)
    assert reader.qoe(102.0) == pytest.approx(0.5 / 2)
    assert reader.qoe(103.0) == pytest.approx(2.0 / 4.5)
    assert reader.qoe(103.0, n_total=2) == pytest.approx(2.0 / 4)
    assert reader.n_tokens == 2


def test_stock_is_what_is_there_and_not_yet_read() -> None:
    reader = Timeline(0.0, 1.0, 4.0)
    assert reader.stock_s(5.0) == 0
    reader.token(10.0, 8)
    assert reader.stock_s(10.0) == pytest.approx(2.0)
    assert reader.stock_s(11.5) == pytest.approx(0.5)
    assert reader.stock_s(13.0) == 0


def test_tokens_at_once_are_tokens_one_by_one() -> None:
    one, other = Timeline(0.0, 1.0, 3.0), Timeline(0.0, 1.0, 3.0)
    one.token(2.0, 7)
    for _ in range(7):
        other.token(2.0)
    assert list(one.row) == pytest.approx(list(other.row))


def test_a_reader_with_stock_loses_nothing_by_waiting() -> None:
    reader = Timeline(0.0, 1.0, 5.0)
    reader.token(0.5, 100)
    assert reader.predicted(1.0, 11.0, math.inf, 0.1) == 1
    assert reader.predicted(1.0, 31.0, math.inf, 0.1) < reader.predicted(1.0, 31.0, 5.0, 0.1) == 1


def test_a_table_shows_all_of_them_at_each_speed() -> None:
    readers = [Timeline(0.0, 1.0, 5.0), Timeline(3.0, 0.5, 2.0)]
    readers[0].token(4.0, 3)
    table = Readers(readers).predicted(5.0, 15.0, np.array([0.0, 2.0]), [0.05, 0.4, 1e9])
    assert table.shape == (3, 2)
    assert table[1, 1] == pytest.approx(readers[1].predicted(5.0, 15.0, 7.4, 0.4))
    assert table[2, 0] == pytest.approx(readers[0].qoe(15.0))
    only = Readers(readers).only(np.array([1]))
    assert only.qoe(9.0) == pytest.approx([readers[1].qoe(9.0)])


@pytest.mark.parametrize("what", [(math.nan, 1.0, 5.0), (0.0, -1.0, 5.0), (0.0, 1.0, 0.0), (0.0, 1.0, math.inf)])
def test_what_is_no_reader_is_refused(what: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="no reader"):
        Timeline(*what)

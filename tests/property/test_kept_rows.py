"""A host that takes another one's place has, from the rows that were kept, exactly the cells of the lost one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.hosts.kept_rows import KeptRows, PutAgain, RowsAgain, ShareAgain

Cells = dict[int, dict[int, float]]  # of each sequence: what is at each position
ORDERS = st.lists(
    st.tuples(
        st.sampled_from(["add", "forget", "share", "compact"]), st.integers(0, 3), st.integers(0, 3), st.integers(1, 40)
    ),
    max_size=60,
)


@given(ORDERS)
def test_a_new_host_has_the_same_cells(orders: list[tuple[str, int, int, int]]) -> None:
    kept, cells, number = KeptRows(), Cells(), 0.0
    for flight, (verb, seq, other, n) in enumerate(orders):
        own = cells.setdefault(seq, {})
        match verb:
            case "add":
                start = len(own)
                rows = np.arange(number, number + n, dtype=np.float32).reshape(n, 1)
                number += n
                kept.add(flight, [(start + i, seq) for i in range(n)], rows)
                own.update({start + i: float(row[0]) for i, row in enumerate(rows)})
            case "forget":
                kept.forget(seq, n)
                cells[seq] = {position: row for position, row in own.items() if position < n}
            case "share" if not cells.get(other) and other != seq:
                kept.share(seq, other, n)
                cells[other] = {position: row for position, row in own.items() if position < n}
            case "compact":
                cells.pop(other, None)
                kept.compact(set(cells))
                assert kept.n_bytes == 4 * len({row for own in cells.values() for row in own.values()})
    assert replayed(kept) == {seq: own for seq, own in cells.items() if own}
    for seq, own in cells.items():
        assert kept.length(seq) == len(own)
        start = len(own) // 3
        found = kept.rows_of(seq, start, len(own))
        assert [own[position] for position in range(start, len(own))] == ([] if found is None else found[:, 0].tolist())
        assert kept.rows_of(seq, start, len(own) + 1) is None


def replayed(kept: KeptRows) -> Cells:
    found = Cells()
    for step in kept.replay():
        match step:
            case RowsAgain(places, rows):
                for (position, seq), row in zip(places, rows, strict=True):
                    assert len(found.setdefault(seq, {})) == position  # attention needs all before it
                    found[seq][position] = float(row[0])
            case ShareAgain(source, seq, n):
                shared = {position: row for position, row in found[source].items() if position < n}
                assert found.get(seq, {}).items() <= shared.items()
                found[seq] = shared
            case PutAgain():
                raise AssertionError
    return found


def test_rows_of_a_text_are_one_piece_and_those_of_nobody_are_gone_when_cells_are_compact() -> None:
    kept, rows = KeptRows(), np.arange(20, dtype=np.float32).reshape(10, 2)
    kept.add(0, [(i, 0) for i in range(4)], rows[:4])
    kept.share(0, 1, 3)
    for i in range(3):  # two answers, a token of each at a time
        kept.add(1 + i, [(4 + i, 0), (3 + i, 1)], rows[4 + 2 * i : 6 + 2 * i])
    kept.forget(1, 5)
    kept.put((2,), 0, 9, b"cells")
    kept.compact({0, 1})
    assert kept.is_rows
    assert kept.n_bytes == 9 * rows[0].nbytes
    assert [(one.start, one.owners) for one in kept._kept.values()] == [(0, {0: 4, 1: 3}), (4, {0: 7}), (3, {1: 5})]
    kept.compact({1})
    assert [(one.start, one.owners) for one in kept._kept.values()] == [(0, {1: 5})]
    assert kept.n_bytes == 5 * rows[0].nbytes


def test_flights_under_way_are_not_replayed() -> None:
    kept = KeptRows()
    kept.add(0, [(0, 0), (1, 0), (0, 1)], np.zeros((3, 2), np.float32))
    kept.add(1, [(2, 0)], np.ones((1, 2), np.float32))
    [step] = kept.replay(without=[1])
    assert isinstance(step, RowsAgain)
    assert step.places == ((0, 0), (1, 0), (0, 1))
    assert kept.n_bytes == 4 * 2 * 4


def test_cells_that_were_saved_are_no_rows_and_shared_ones_are_those_of_both() -> None:
    kept = KeptRows()
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    kept.keep((0, 1), 0, 4, rows)
    kept.put((0,), 4, 6, b"cells")
    assert kept.rows_of(1, 0, 4) is not None
    assert kept.rows_of(0, 0, 6) is None
    kept.add(3, [(4, 1), (5, 1)], rows[:2])
    kept.share(1, 0, 6, start=4)
    assert [step for step in kept.replay() if isinstance(step, ShareAgain)] == [
        ShareAgain(0, 1, 4),
        ShareAgain(0, 1, 6),
    ]

"""While boundaries move, the new legs get each sequence's cells in their order, whatever becomes of it meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.hosts.joining_legs import COPIED_ROWS, missing
from disco_daemon.scheduler.prefix import PrefixIndex

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6)


@given(TEXTS, st.data())
def test_what_is_missing_is_each_cell_once_in_the_order_of_its_text(
    texts: list[list[int]], data: st.DataObject
) -> None:
    index = PrefixIndex()
    for seq, text in enumerate(texts):
        n, source = index.match(text)
        if n:
            index.share(source, seq, n, float(seq))
        index.grow(seq, text[n:], float(seq))
    have = {seq: data.draw(st.integers(0, len(text))) for seq, text in enumerate(texts)}
    there = dict(have)
    copied = list(missing(index.spans(), have))
    for start, end, owners in copied:
        assert 0 < end - start <= COPIED_ROWS
        for seq in owners:
            assert there[seq] == start  # behind what it has, without a gap
            there[seq] = end
    assert there == {seq: len(text) for seq, text in enumerate(texts)}


def test_long_texts_are_copied_in_parts() -> None:
    spans = [(0, 600, frozenset({1, 2})), (600, 610, frozenset({1}))]
    assert list(missing(spans, {2: 100})) == [
        (0, 100, frozenset({1})),
        (100, 356, frozenset({1, 2})),
        (356, 600, frozenset({1, 2})),
        (600, 610, frozenset({1})),
    ]

"""What a sequence has, range by range: taken back by the same ranges only."""

from __future__ import annotations

import pytest

from disco_daemon.engine.hosts.range_states import by_range, parse_ranges
from disco_daemon.engine.llama.refusals import ModelError
from disco_daemon.types import LayerRange

RANGES = [LayerRange(0, 3, 9), LayerRange(3, 7, 9), LayerRange(7, 9, 9)]


def test_parts_and_rows_come_back() -> None:
    found = parse_ranges(by_range(2, RANGES, [b"a", memoryview(b"b"), b"c"], [b"rows"]), RANGES)
    assert (found.n, found.parts, found.rows) == (2, (b"a", b"b", b"c"), (b"rows",))


def test_other_ranges_and_other_bytes_are_refused() -> None:
    data = by_range(2, RANGES, [b"a", b"b", b"c"], [b"rows"])
    with pytest.raises(ModelError, match="moved since"):
        parse_ranges(data, [LayerRange(0, 3, 9), LayerRange(3, 6, 9), LayerRange(6, 9, 9)])
    with pytest.raises(ModelError, match="no state"):
        parse_ranges(b"llama.cpp's own", RANGES)

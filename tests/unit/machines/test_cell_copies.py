"""How many cells are under way in a move of layers: many where memory is common, fewer where a line is between."""

from __future__ import annotations

from typing import Any

import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.hosts import copying
from disco_daemon.engine.hosts.copying import ASKED_ROWS, FAR_ASKED_ROWS, FAR_ROWS, CellCopies
from disco_daemon.engine.hosts.joining_legs import COPIED_ROWS, JoiningLeg
from disco_daemon.engine.hosts.legs import Leg
from disco_daemon.engine.hosts.remote import RemoteHost, RemoteSegment
from disco_daemon.types import LayerRange

LAYERS = LayerRange(5, 15, 30)
LOAD = wire.Load(model_path="m.gguf", n_ctx=64, n_threads=1, n_gpu_layers=0)
SPANS = [(0, 700, frozenset((seq,))) for seq in range(8)]


class Link:
    """A host's process that has been asked for cells and sends none."""

    def __init__(self, *, shares_memory: bool) -> None:
        self.shares_memory, self.saved, self.asked = shares_memory, dict[int, bytes](), list[int]()
        self.is_lent = False

    def save(self, _: int, __: int, span: tuple[int, int], *___: object) -> int:
        self.asked.append(span[1] - span[0])
        return len(self.asked)


def leg(number: int, link: Any) -> Leg:
    def no_process() -> Any:
        raise OSError

    host = RemoteHost(number, no_process, (), 4, link=link)
    return Leg(LAYERS, [RemoteSegment(host, number, LAYERS, LOAD)])


@pytest.mark.parametrize(
    ("here", "there", "most", "at_a_time"),
    [
        (True, True, ASKED_ROWS, COPIED_ROWS),
        (True, False, FAR_ASKED_ROWS, FAR_ROWS),
        (False, True, FAR_ASKED_ROWS, COPIED_ROWS),
    ],
)
def test_cells_under_way_are_bound_by_what_is_between_the_hosts(
    monkeypatch: pytest.MonkeyPatch, here: bool, there: bool, most: int, at_a_time: int
) -> None:
    monkeypatch.setattr(copying, "new_memory", lambda: None)
    source = Link(shares_memory=here)
    copies = CellCopies([leg(1, source)], [JoiningLeg(leg(2, Link(shares_memory=there)))])
    for _ in range(3):
        assert not copies.progress(SPANS)
    assert most <= sum(source.asked) < most + COPIED_ROWS
    assert max(source.asked) == at_a_time

"""What a batcher asks about layers that are elsewhere: orders find every sequence here, and nobody inherits from it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.llama.rows import NO_KV_SLOT
from disco_daemon.engine.serve import edge, home, partner
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.engine.serve.remote_layers import RemoteLayers
from tests.unit.engine.test_batch import Bench


@dataclass(slots=True)
class Noting(RemoteLayers):
    """A whole model that notes when it is to bring all in."""

    settled: list[list[str]] = field(default_factory=list)

    def settle(self) -> None:
        self.settled.append(list(self.batcher.admission.sequences))


def bench_with(remote: RemoteLayers) -> Bench:
    bench = Bench()
    llama, send = cast(Any, bench.llama), cast(Any, bench.sent.append)
    bench.batcher = Batcher(llama, send, bench.admission, bench.batcher.clock, remote=remote)
    return bench


def test_an_order_finds_its_sequence_here_and_one_for_nobody_waits_for_nothing() -> None:
    noting = Noting()
    bench = bench_with(noting)
    name = bench.add("hello")
    bench.batcher.hold("nobody")
    bench.batcher.cancel("nobody")
    bench.batcher.append(wire.AppendText(id="nobody", text="x", go=True))
    assert noting.settled == []
    bench.batcher.hold(name)
    bench.batcher.append(wire.AppendText(id=name, text="x", go=True))
    bench.batcher.cancel(name)
    assert noting.settled == [[name]] * 3


def test_rows_for_which_nobody_waits_cost_no_answer_its_cells_when_there_is_no_room_for_them() -> None:
    bench = Bench()
    name = bench.add("hello")
    bench.batcher.step()
    s = bench.find(name)
    assert s is not None
    bench.batcher.recover(NO_KV_SLOT, [(s, 1, 0)], is_extra=True)
    assert bench.find(name) is s
    bench.batcher.recover(NO_KV_SLOT, [(s, 1, 0)])
    assert bench.find(name) is None, "it was alone, and there is no room"


def test_a_whole_model_is_no_fleet_s_home() -> None:
    with pytest.raises(TypeError, match="LimitAnswers is for a fleet's home"):
        Bench().batcher.remote.obey(wire.LimitAnswers(id="1", n_answers=1))


@pytest.mark.parametrize("side", [home.FleetHome, edge.SplitEdge, partner.SplitPartner])
def test_a_side_answers_what_is_asked_and_reaches_into_no_batcher(side: type[RemoteLayers]) -> None:
    assert not Batcher.__subclasses__()
    source = Path(inspect.getfile(side)).read_text()
    assert "batcher._" not in source
    asked = {name for name in vars(RemoteLayers) if not name.startswith("_")}
    assert asked & vars(side).keys(), "else it is a whole model"
    text = Path(inspect.getfile(Batcher)).read_text()
    private = {name for name in vars(Batcher) if name.startswith("_") and not name.startswith("__")}
    assert not private & vars(side).keys(), "a name of the batcher's own would hide who is meant"
    assert side.__name__ not in text, "a batcher reads the same whatever is elsewhere"

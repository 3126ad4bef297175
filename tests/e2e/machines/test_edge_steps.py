"""What an edge does before it has to: it sends rows while a prompt is being computed, and drafts on beside a verdict.

The edge is in this process and no partner answers, so that nothing depends on how quick one is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.admission import SCHEDULERS, Admission
from disco_daemon.engine.serve.edge import SplitEdge
from disco_daemon.engine.serve.engine_role import make_batcher
from disco_daemon.link.protocol import AnswerOpened, JudgeDrafts, OpenAnswer, PeerFrame, PeerJoined, SendRows
from disco_daemon.models.default import default_model_path
from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.types import LayerRange
from tests.e2e.machines.test_split_engines import exit_segment

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")

LAYERS = LayerRange(0, 29, 30)
SURE = wire.ExitCalibration(coefficients=(0.0, 0.0, 0.0, 0.0), scores=(0.0, 1.0), shares=(0.95, 0.95))
PEER = 1


class Edge:
    """An edge whose partner has joined, and what it sends there."""

    def __init__(self, path: Path) -> None:
        load = wire.Load(
            model_path=str(path), n_ctx=1024, n_cells=1024, n_threads=1, n_gpu_layers=0, exit=SURE,
            layers=(LAYERS.first, LAYERS.last, LAYERS.of),
        )  # fmt: skip
        self.llama = Llama(load, AbortFlag())
        latency = IterationLatency(self.llama.latency_prior)
        admission = Admission(Cells(self.llama, 8, 1024), SCHEDULERS["andes"](latency), latency)
        batcher = make_batcher(load, self.llama, lambda _: None, admission, self._note)
        assert isinstance(batcher.remote, SplitEdge)
        self.batcher, self.remote, self.sent = batcher, batcher.remote, list[PeerFrame]()
        batcher.clock = (0.005 * tick for tick in itertools.count()).__next__  # so quick, wherever it runs
        self.remote.receive(PEER, PeerJoined(name="desktop", credits=4096, n_ctx=1024), b"")

    def _note(self, peer: int, message: PeerFrame, payload: bytes = b"") -> None:
        assert peer == PEER
        assert bool(payload) == isinstance(message, SendRows)
        self.sent.append(message)

    def begin(self, prompt: str) -> int:
        """Ask for an answer, which the partner has opened; return the tokens of its prompt."""
        request = wire.Generate(id="g1", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=64)
        self.batcher.add(request)
        [opened] = [message for message in self.sent if isinstance(message, OpenAnswer)]
        self.remote.receive(PEER, AnswerOpened(id=opened.id, n_past=0), b"")
        return len(self.batcher.admission.sequences["g1"].tokens)

    def of(self, kind: type[PeerFrame]) -> list[PeerFrame]:
        return [message for message in self.sent if isinstance(message, kind)]

    @property
    def n_sent(self) -> int:
        return sum(len(message.tokens) for message in self.sent if isinstance(message, SendRows))


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    found = Edge(exit_segment(tmp_path_factory.mktemp("exit"), LAYERS))
    yield found
    found.llama.close()


@pytest.fixture(autouse=True)
def nothing_runs(edge: Edge) -> Iterator[None]:
    edge.sent.clear()
    yield
    edge.batcher.cancel("g1")


def test_rows_of_a_prompt_go_up_while_the_rest_of_it_is_computed(edge: Edge) -> None:
    n_prompt = edge.begin("Tell me about the sea. " * 60)
    n_before = []
    while not edge.of(JudgeDrafts):
        assert edge.batcher.step()
        n_before.append(edge.n_sent)
    assert len(n_before) > 2, "a prompt of some chunks"
    assert 0 < n_before[0] < n_before[1] < n_prompt, "each chunk's rows, as soon as they are there"


def test_drafts_are_made_while_the_verdict_on_those_before_them_is_awaited(edge: Edge) -> None:
    edge.begin("Count from one to twenty.")
    while not edge.of(JudgeDrafts):
        assert edge.batcher.step()
    answer = edge.batcher.admission.sequences["g1"]
    assert answer.is_away
    n_computed = answer.n_past
    assert edge.batcher.step(), "nothing else is to be done: it drafts on"
    assert answer.n_past > n_computed
    assert len(edge.of(JudgeDrafts)) == 1

"""Inner layers in a process of their own: the answers are one process's, and a host that is killed costs no token."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from disco_daemon.daemon.local_hosts import LocalHosts
from disco_daemon.engine import wire
from disco_daemon.engine.hosts.home import Ends, HomeLlama
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.admission import SCHEDULERS, Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.engine.serve.home import HomeBatcher
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.types import LayerRange

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")

N, N_CTX, N_CELLS = 30, 512, 1024
RANGES = (LayerRange(0, 5, N), LayerRange(5, 22, N), LayerRange(22, N, N))
PROMPTS = [
    f"Tell me something about {word}, and why people like it."
    for word in ("rivers", "lamps", "stones", "gardens", "winter", "silver", "music", "doors")
]
LOAD = wire.Load(model_path=str(default_model_path()), n_ctx=N_CTX, n_cells=N_CELLS, n_threads=1, n_gpu_layers=0)


@dataclass
class Core:
    """A batcher around a model, what each answer came to, and what is done before each step."""

    llama: Llama
    kind: type[Batcher]
    said: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.llama.clear()
        latency = IterationLatency(self.llama.latency_prior)
        self.cells = Cells(self.llama, 32, N_CELLS)
        self.admission = Admission(self.cells, SCHEDULERS["andes"](latency), latency)
        self.batcher = self.kind(self.llama, self._heard, self.admission)

    def _heard(self, message: wire.Message) -> None:
        match message:
            case wire.TextPiece(id=id_, text=text):
                self.said[id_] = self.said.get(id_, "") + text
            case wire.Done(id=id_, reason=reason):
                self.ended[id_] = reason
            case wire.Failed(id=id_, message=text):
                pytest.fail(f"{id_}: {text}")

    def ask(self, id_: str, prompt: str, n: int = 40, **more: Any) -> None:
        messages = [{"role": "user", "content": prompt}]
        self.batcher.add(wire.Generate(id=id_, messages=messages, temperature=0, max_tokens=n, **more))

    def run(self, before: Callable[[int], object] = lambda _: None) -> dict[str, str]:
        number = 0
        while self.admission.sequences:
            before(number)
            self.batcher.step()
            number += 1
        return self.said


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, str]]:
    """What one process says to all prompts."""
    llama = Llama(LOAD, AbortFlag())
    core = Core(llama, Batcher)
    for number, prompt in enumerate(PROMPTS):
        core.ask(str(number), prompt)
    yield core.run()
    llama.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[LocalHosts]:
    found = LocalHosts()
    yield found
    for process in found.started:
        if process.poll() is None:
            process.kill()
    found.close()


@pytest.fixture(scope="module")
def home(hosts: LocalHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HomeLlama]:
    files = SegmentFiles(tmp_path_factory.mktemp("segments"), 1 << 30).write(default_model_path(), RANGES)
    first, middle, last = map(str, files)
    llama = HomeLlama(LOAD, Ends((first, middle, last), RANGES), AbortFlag(), hosts.open)
    yield llama
    llama.close()
    assert hosts.started[-1].wait(10) == 0  # a host ends with its home


def ask_all(core: Core, **more: Any) -> None:
    for number, prompt in enumerate(PROMPTS):
        core.ask(str(number), prompt, **more)


def test_eight_answers_in_two_flights_are_one_process_s(home: HomeLlama, expected: dict[str, str]) -> None:
    core = Core(home, HomeBatcher)
    ask_all(core)
    under_way = []
    assert core.run(lambda _: under_way.append(len(home._flights))) == expected
    assert max(under_way) == 1  # between two steps: in each another one departs before it arrives
    assert home._host is not None
    assert home._host.n_rows > 8 * 40


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_lost_costs_no_token(home: HomeLlama, expected: dict[str, str], how: signal.Signals) -> None:
    core = Core(home, HomeBatcher)
    ask_all(core)
    lost = home.n_lost

    def kill(step: int) -> None:
        if step in (3, 20, 41)[: 3 if how == signal.SIGKILL else 1]:
            os.kill(home.host_pid, how)

    assert core.run(kill) == expected
    assert home.n_lost - lost == (3 if how == signal.SIGKILL else 1)
    assert home.kept_bytes > 0


def test_answers_that_come_go_and_share_do_not_change_others(home: HomeLlama, expected: dict[str, str]) -> None:
    """Cancelled and held answers, a second turn with the cells of the first, and cells that are moved."""
    core = Core(home, HomeBatcher)

    def disturb(step: int) -> None:
        if step % 6 == 0 and step < 60:
            core.ask(f"x{step}", PROMPTS[step % 8] + " Be brief." * (step % 5), n=200)
        if step % 6 == 4 and step < 66:
            core.batcher.cancel(f"x{step - 4}")
        if step in (17, 33):
            core.cells.move()
        if step == 35:
            os.kill(home.host_pid, signal.SIGKILL)

    for _ in range(2):  # the second time prompts are cached
        ask_all(core)
        core.run(disturb)
        assert {key: text for key, text in core.said.items() if not key.startswith("x")} == expected
        core.said.clear()

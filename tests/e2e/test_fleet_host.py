"""Inner layers in a process of their own: the answers are one process's, and a host that is killed costs no token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from disco_daemon.daemon.local_hosts import LocalHosts
from disco_daemon.engine.hosts.home import HomeLlama
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.engine.serve.home import HomeBatcher
from disco_daemon.models.default import default_model_path
from tests.fixtures.fleet import LOAD, PROMPTS, Core, ends_of, local_hosts

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")


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
    with local_hosts() as found:
        yield found


@pytest.fixture(scope="module")
def home(hosts: LocalHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HomeLlama]:
    llama = HomeLlama(LOAD, ends_of(tmp_path_factory.mktemp("segments"), [5, 22]), AbortFlag(), hosts.open)
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
    assert home.hosts[0].computed()[0] > 8 * 40


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_lost_costs_no_token(home: HomeLlama, expected: dict[str, str], how: signal.Signals) -> None:
    core = Core(home, HomeBatcher)
    ask_all(core)
    lost = home.n_lost

    def kill(step: int) -> None:
        if step in (3, 20, 41)[: 3 if how == signal.SIGKILL else 1]:
            os.kill(home.host_pids[0], how)

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
            os.kill(home.host_pids[0], signal.SIGKILL)

    for _ in range(2):  # the second time prompts are cached
        ask_all(core)
        core.run(disturb)
        assert {key: text for key, text in core.said.items() if not key.startswith("x")} == expected
        core.said.clear()

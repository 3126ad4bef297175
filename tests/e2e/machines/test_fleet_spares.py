"""Home keeps copies of all layers: where hosts are lost and no others can be had, answers go on to the same text."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from benchmarks.fleet.local_hosts import LocalHosts
from disco_daemon.engine.hosts.home import HERE, HomeLlama
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.home import FleetHome
from disco_daemon.models.default import default_model_path
from tests.fixtures.fleet import LOAD, PROMPTS, Core, ends_of, local_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
]

KEPT = msgspec.structs.replace(LOAD, keep_home=True)


@dataclass
class Door:
    """Starts hosts until it is shut."""

    hosts: LocalHosts
    is_shut: bool = False

    def open(self) -> socket.socket:
        if self.is_shut:
            raise OSError(0, "no host can be started")
        return self.hosts.open()


def ask_all(core: Core) -> None:
    for number, prompt in enumerate(PROMPTS[:4]):
        core.ask(str(number), prompt, n=24)


def test_every_host_may_be_lost_and_layers_go_to_others_again(tmp_path: Path) -> None:
    whole = Llama(LOAD, AbortFlag())
    core = Core(whole)
    ask_all(core)
    expected = core.run()
    whole.close()
    two, one = ends_of(tmp_path, [5, 12, 22], ((0,), (1,))), ends_of(tmp_path, [5, 22], ((0,),))
    with local_hosts() as hosts:
        door = Door(hosts)
        home = HomeLlama(KEPT, two, AbortFlag(), door.open)
        core = Core(home, FleetHome)
        remote = core.batcher.remote
        assert isinstance(remote, FleetHome)
        ask_all(core)
        beats = list[int]()
        home.vocabulary.beat = lambda: beats.append(len(beats))

        def lose(step: int) -> None:
            door.is_shut = True
            if step in (6, 15) and (pid := home.host_pids[step // 10]):
                os.kill(pid, signal.SIGKILL)

        assert core.run(lose) == expected
        assert [at for _, at in home.cut] == [(HERE,), (HERE,)]
        assert beats, "who waits for home hears that it does not hang while it takes a long text over"

        core.said.clear()
        ask_all(core)
        door.is_shut = False

        def move(step: int) -> None:
            if step == 3:
                remote.begin_move(one)

        assert core.run(move) == expected
        while home.is_moving:
            remote.look()
        assert home.moves[-1].error == ""
        assert home.cut == [(one.ranges[1], (0,))]
        home.close()


def test_a_home_without_any_host_begins_alone(tmp_path: Path) -> None:
    with local_hosts() as hosts:
        home = HomeLlama(KEPT, ends_of(tmp_path, [5, 22]), AbortFlag(), Door(hosts, is_shut=True).open)
        assert [at for _, at in home.cut] == [(HERE,)]
        assert hosts.started == []
        home.close()

"""Moved layers compute their cells again where a state cannot be cut by layers, and the answers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest

from benchmarks.fleet.local_hosts import LocalHosts
from disco_daemon.engine.hosts import link
from disco_daemon.engine.hosts.home import HERE, HomeLlama
from disco_daemon.engine.hosts.messages import FromHost, SegmentLoaded, decode_from_host
from disco_daemon.engine.llama.model import AbortFlag
from disco_daemon.engine.serve.home import FleetHome
from disco_daemon.models.default import default_model_path
from tests.fixtures.fleet import (
    LOAD,
    Core,
    answers_of_one_process,
    ask_all,
    disturbance,
    ends_of,
    local_hosts,
    without_others,
)

pytestmark = [
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
    pytest.mark.slow,
]

BOUNDS, HOSTS = [5, 18, 22], ((0,), (1,))
MOVES = [
    ([5, 8, 11, 22], ((1,), (HERE,), (0,))),  # boundaries within an old leg: three legs in a chain, one at home
    ([5, 11, 15, 22], ((0,), (1,), (1,))),
    ([5, 11, 15, 22], ((0, 1), (1,), (0,))),  # a replica beside what is computed again
    ([5, 11, 15, 22], ((1,), (1,), (0,))),  # the first of both is evicted
    (BOUNDS, HOSTS),
]


def says_no(body: bytes) -> FromHost:
    """A message of a host whose self-test has failed."""
    message = decode_from_host(body)
    return msgspec.structs.replace(message, moves_states=False) if isinstance(message, SegmentLoaded) else message


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return answers_of_one_process()


@pytest.fixture(scope="module")
def hosts() -> Iterator[LocalHosts]:
    with local_hosts() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("segments")


@pytest.fixture(scope="module")
def home(hosts: LocalHosts, folder: Path) -> Iterator[HomeLlama]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "decode_from_host", says_no)
        llama = HomeLlama(LOAD, ends_of(folder, BOUNDS, HOSTS), AbortFlag(), hosts.open)
        assert not llama.moves_states
        yield llama
        llama.close()


def test_moved_layers_compute_their_cells_again(home: HomeLlama, folder: Path, expected: dict[str, str]) -> None:
    core = Core(home, FleetHome)
    remote = core.batcher.remote
    assert isinstance(remote, FleetHome)
    wanted = [ends_of(folder, bounds, hosts) for bounds, hosts in MOVES]
    n_before = len(home.moves)
    while len(home.moves) - n_before < len(wanted) or home.is_moving:
        core.said.clear()
        ask_all(core)

        def move(_: int) -> None:
            done = len(home.moves) - n_before
            if not home.is_moving and done < len(wanted):
                remote.begin_move(wanted[done])

        assert core.run(move) == expected
    moved = list(home.moves)[n_before:]
    assert [(move.error, move.n_bytes) for move in moved] == [("", 0)] * len(wanted)
    assert sum(move.n_rows_again > 0 for move in moved) >= 3


def test_random_operations_change_no_answer(home: HomeLlama, folder: Path, expected: dict[str, str]) -> None:
    random = Random(5)
    plans = [ends_of(folder, bounds, hosts) for bounds, hosts in MOVES]
    core, n_lost = Core(home, FleetHome), home.n_lost
    shares = {"move": 30, "break off": 5, "kill": 2, "ask": 10, "cancel": 10, "move cells": 4, "evict": 4, "preempt": 5}
    kinds = ["kill", *random.choices(list(shares), list(shares.values()), k=60)]
    disturb = disturbance(core, plans, random, kinds)
    while kinds:
        core.said.clear()
        ask_all(core)
        assert without_others(core.run(disturb)) == expected
    assert home.n_lost > n_lost
    assert any(move.n_rows_again and not move.error for move in home.moves)
    home.break_off("the test is over")
    home.clear()
    assert home.kept_bytes == 0
    for host in home.hosts.values():
        assert host.link is None or not host.link.rows

"""Several hosts, and boundaries that move while answers are written: the answers are one process's, to the token."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.fleet.local_hosts import LocalHosts
from disco_daemon.engine.hosts.cell_memory import SharedCells
from disco_daemon.engine.hosts.copying import CellCopies
from disco_daemon.engine.hosts.home import HERE, HomeLlama
from disco_daemon.engine.hosts.joining_legs import JoiningLeg, Span
from disco_daemon.engine.hosts.legs import Leg
from disco_daemon.engine.hosts.link import HostLink
from disco_daemon.engine.hosts.loading import BrokenOffError, HostStart, InBackground
from disco_daemon.engine.hosts.process import NICE
from disco_daemon.engine.hosts.remote import RemoteSegment, wait_for
from disco_daemon.engine.llama.hidden import FloatRows
from disco_daemon.engine.llama.layer_states import LayerState, StateFormatError
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.llama.refusals import ModelError
from disco_daemon.engine.llama.rows import Row
from disco_daemon.engine.llama.state import State
from disco_daemon.engine.serve.home import FleetHome
from disco_daemon.models.default import default_model_path
from disco_daemon.types import LayerRange
from tests.fixtures.fleet import (
    LOAD,
    Core,
    N,
    answers_of_one_process,
    ask_all,
    disturbance,
    ends_of,
    local_hosts,
    n_cell_memories,
    without_others,
)

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")

BOUNDS, HOSTS = [5, 12, 18, 22], ((0,), (1,), (0,))


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
    llama = HomeLlama(LOAD, ends_of(folder, BOUNDS, HOSTS), AbortFlag(), hosts.open)
    yield llama
    llama.close()
    assert {process.wait(10) for process in hosts.started} <= {0, -signal.SIGKILL}  # each ends with its home


@pytest.fixture(autouse=True)
def first_cut(home: HomeLlama, folder: Path) -> None:
    """Each test begins with the layers where home had them at first, wherever the one before it has left them."""
    first = ends_of(folder, BOUNDS, HOSTS)
    if home.cut != list(zip(first.ranges[1:-1], HOSTS, strict=True)):
        remote = Core(home, FleetHome).batcher.remote
        assert isinstance(remote, FleetHome)
        remote.begin_move(first)
        while home.is_moving:
            remote.look()
        assert home.moves[-1].error == ""


def test_three_segments_at_two_hosts_of_which_each_is_lost(home: HomeLlama, expected: dict[str, str]) -> None:
    core = Core(home, FleetHome)
    ask_all(core)
    lost = {number: host.n_lost for number, host in home.hosts.items()}

    def kill(step: int) -> None:
        if step in (4, 13, 22):
            os.kill(home.host_pids[step % 2], signal.SIGKILL)

    assert core.run(kill) == expected
    assert {number: host.n_lost - lost[number] for number, host in home.hosts.items()} == {0: 2, 1: 1}
    assert all(host.computed()[0] > 4 * 24 for host in home.hosts.values())


MOVES = [
    ([5, 8, 18, 22], ((0,), (1,), (0,))),  # a boundary between two hosts
    ([5, 8, 15, 22], ((0,), (HERE,), (1,))),  # layers to home, and from one host to another
    ([5, 22], ((2,),)),  # all at one host, which is new
    ([5, 22], ((2, 0),)),  # a replica
    ([5, 22], ((0, HERE),)),  # one at home
    ([5, 22], ((0,),)),  # the first of both is evicted
    (BOUNDS, HOSTS),
]


def test_boundaries_move_while_answers_are_written(home: HomeLlama, folder: Path, expected: dict[str, str]) -> None:
    core = Core(home, FleetHome)
    remote = core.batcher.remote
    assert isinstance(remote, FleetHome)
    wanted = [ends_of(folder, bounds, hosts) for bounds, hosts in MOVES]
    n_before = len(home.moves)
    while True:  # until all are done, each while answers are written
        ask_all(core)

        def move(_: int) -> None:
            done = len(home.moves) - n_before
            if not home.is_moving and done < len(wanted):
                remote.begin_move(wanted[done])

        assert core.run(move) == expected
        if len(home.moves) - n_before == len(wanted) and not home.is_moving:
            break
        core.said.clear()
    assert [move.error for move in list(home.moves)[n_before:]] == [""] * len(wanted)
    assert home.cut == list(zip(wanted[-1].ranges[1:-1], HOSTS, strict=True))
    assert all(len(host.segments) == n for host, n in zip(home.hosts.values(), (2, 1, 0), strict=True))


def test_replicas_have_their_shares_of_the_answers_and_flights_become_alike(
    home: HomeLlama, folder: Path, expected: dict[str, str]
) -> None:
    core = Core(home, FleetHome)
    remote, flights = core.batcher.remote, list[set[int]]()
    assert isinstance(remote, FleetHome)
    ask_all(core)
    remote.begin_move(replace(ends_of(folder, BOUNDS, ((0, 1), (1,), (0,))), shares=((0.5, 0.5), (), ())))
    while home.is_moving:
        remote.look()
    leg = home._legs[0]

    def look(_: int) -> None:
        if len(leg.pins) == len(core.admission.sequences) == 4:
            assert sorted(map(leg.replica_of, leg.pins)) == [0, 0, 1, 1]
            flights.extend({leg.replica_of(seq) for _, seq in flight.places} for flight in home._flights)

    assert core.run(look) == expected
    assert len(flights) > 20
    assert {len(replicas) for replicas in flights[8:]} == {1}, "the two of a replica go together"


def test_where_home_has_all_layers_there_is_one_flight_and_none_of_its_rows_wait(
    home: HomeLlama, folder: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Core(home, FleetHome)
    remote, depart = core.batcher.remote, home.depart
    assert isinstance(remote, FleetHome)
    departed = list[tuple[bool, int]]()

    def note(rows: Sequence[Row]) -> int:
        departed.append((home.is_all_here, len(rows)))
        return depart(rows)

    monkeypatch.setattr(home, "depart", note)
    ask_all(core)

    def come_home_and_leave(step: int) -> None:
        if step in (8, 40) and not home.is_moving:
            remote.begin_move(ends_of(folder, [5, 22], ((HERE,),)) if step == 8 else ends_of(folder, BOUNDS, HOSTS))

    assert core.run(come_home_and_leave) == expected
    assert [move.error for move in list(home.moves)[-2:]] == ["", ""]
    n = len(expected)
    here, away = ([rows for is_here, rows in departed if is_here is where] for where in (True, False))
    assert max(here) == n, "all of them"
    assert len(here) > 4
    assert here.count(n) >= len(here) - 2, "but for those that landed last when the layers had come"
    assert len([rows for rows in away if rows <= n // 2]) > 4


def test_a_host_is_lost_after_its_cells_were_moved_and_its_layers_became_others(
    home: HomeLlama, folder: Path, expected: dict[str, str]
) -> None:
    """Cells that were put back as saved are of the layers that a segment had then, and no other one's."""
    core = Core(home, FleetHome)
    remote = core.batcher.remote
    assert isinstance(remote, FleetHome)
    ask_all(core)
    wanted = ends_of(folder, *MOVES[0])

    def change(step: int) -> None:
        if step == 6:
            core.cells.move()
            remote.begin_move(wanted)
        elif not home.is_moving and home.cut[0][0].last == 8:
            for pid in home.host_pids.values():
                if pid and not home.n_lost > lost + 1:
                    os.kill(pid, signal.SIGKILL)

    lost = home.n_lost
    assert core.run(change) == expected
    assert home.n_lost > lost + 1


def test_random_operations_change_no_answer(home: HomeLlama, folder: Path, expected: dict[str, str]) -> None:
    """Moves, moves broken off, lost hosts, other answers, moved, evicted and swapped cells: in random order."""
    random = Random(23)
    plans = [ends_of(folder, bounds, hosts) for bounds, hosts in MOVES]
    core, said, n_lost, came_of_moves = Core(home, FleetHome), list[dict[str, str]](), home.n_lost, set[str]()
    shares = {"move": 30, "break off": 8, "kill": 2, "ask": 10, "cancel": 8, "move cells": 4, "evict": 4, "preempt": 6}
    kinds = random.choices(list(shares), list(shares.values()), k=140)
    disturb = disturbance(core, plans, random, kinds)

    def look_and_disturb(step: int) -> None:
        came_of_moves.update(move.error for move in home.moves)  # of which home keeps the latest ones
        disturb(step)

    while kinds:
        core.said.clear()
        ask_all(core)
        said.append(without_others(core.run(look_and_disturb)))
    assert said == [expected] * len(said)
    assert home.n_lost > n_lost
    assert came_of_moves >= {"", "tried out"}
    home.break_off("the test is over")
    home.clear()
    assert home.kept_bytes == 0
    assert n_cell_memories() == 0
    used = {id(segment) for leg in home._legs for segment in leg.replicas}
    assert all(id(segment) in used for host in home.hosts.values() for segment in host.segments.values())
    assert not list(folder.glob("*.new"))


@pytest.mark.parametrize("shares", [True, False])
def test_cells_go_through_common_memory_or_by_socket_and_are_kept_for_another_process(
    home: HomeLlama, folder: Path, expected: dict[str, str], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that begin elsewhere are kept as cells; the host that got them is lost, and has them again."""
    for host in home.hosts.values():
        if host.link is not None:
            assert host.link.shares_memory == (sys.platform == "linux")
            monkeypatch.setattr(host.link, "shares_memory", shares)
    core = Core(home, FleetHome)
    remote, wanted, n_lost = (
        core.batcher.remote,
        [ends_of(folder, *MOVES[0]), ends_of(folder, BOUNDS, HOSTS)],
        home.n_lost,
    )
    assert isinstance(remote, FleetHome)
    ask_all(core)

    def change(step: int) -> None:
        is_there = not home.is_moving and home.cut[0][0].last == 8
        if step == 5:
            remote.begin_move(wanted[0])
        elif is_there and home.n_lost == n_lost and home.host_pids[1]:
            segment = home._legs[1].replicas[0]
            assert isinstance(segment, RemoteSegment)
            kept = [one.saved for one in segment.kept._kept.values() if one.rows is None]
            assert {isinstance(saved, SharedCells) for saved in kept} == {shares and sys.platform == "linux"}
            os.kill(home.host_pids[1], signal.SIGKILL)
        elif is_there and home.n_lost > n_lost:
            remote.begin_move(wanted[1])

    assert core.run(change) == expected
    assert home.n_lost == n_lost + 1
    while home.is_moving:
        remote.look()
    assert home.moves[-1].error == ""
    home.clear()
    assert n_cell_memories() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has common memory")
def test_cells_that_one_host_was_asked_for_are_dropped_when_the_next_one_is_lost(home: HomeLlama) -> None:
    core = Core(home, FleetHome)
    ask_all(core)
    while not (spans := list(core.cells.spans())):
        core.batcher.step()
    both = LayerRange(home._legs[0].layers.first, home._legs[1].layers.last, N)
    copies = CellCopies(home._legs, [JoiningLeg(Leg(both, []))])
    os.kill(home.host_pids[1], signal.SIGKILL)
    os.waitid(os.P_PID, home.host_pids[1], os.WEXITED | os.WNOWAIT)
    with pytest.raises(BrokenOffError, match="broken"):
        copies.ask_all(spans)
    assert n_cell_memories() == 1
    copies.end()
    assert n_cell_memories() == 0
    core.run()
    assert n_cell_memories() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has common memory")
def test_cells_that_do_not_fit_together_are_dropped_with_all_their_parts(
    home: HomeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Core(home, FleetHome)
    ask_all(core)
    while not (spans := list(core.cells.spans())):
        core.batcher.step()
    both = LayerRange(home._legs[0].layers.first, home._legs[1].layers.last, N)
    copies = CellCopies(home._legs, [JoiningLeg(Leg(both, []))])
    copies.ask_all(spans)
    while not copies._copies[0].is_there:
        wait_for(copies.hosts)

    def damaged(state: State, layers: LayerRange) -> LayerState:
        msg = f"{len(state)} bytes are no state of the layers {layers}"
        raise StateFormatError(msg)

    monkeypatch.setattr("disco_daemon.engine.hosts.copying.unpacked", damaged)
    with pytest.raises(BrokenOffError, match="no state"):
        copies.take()
    assert n_cell_memories() == 1
    copies.end()
    assert n_cell_memories() == 0
    core.run()


def test_a_start_of_a_host_that_was_replaced_meanwhile_is_ended(home: HomeLlama) -> None:
    """A move began while a host was lost, and what was lost was replaced before the move's own process was there."""
    host, segment = home.hosts[0], home._legs[0].replicas[0]
    assert isinstance(segment, RemoteSegment)
    host.end()
    made = list[HostLink]()

    def connect() -> HostLink:
        made.append(host.connect())
        return made[-1]

    start = HostStart(InBackground(connect))
    host.replace()
    assert start.progress(segment) is host.link
    for thread in threading.enumerate():
        if thread.name == "loading":
            thread.join(30)
    assert [link.fileno() for link in made] == [-1]


@pytest.mark.parametrize("shares", [True, False])
def test_the_flight_that_a_switch_holds_departs_before_the_last_range_computes_the_other(
    home: HomeLlama, folder: Path, expected: dict[str, str], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what is left goes over a line, the last range computes meanwhile."""
    for host in home.hosts.values():
        if host.link is not None:
            monkeypatch.setattr(host.link, "shares_memory", shares and host.link.shares_memory)
    core, events = Core(home, FleetHome), list[str]()
    remote, depart, finish, decode = core.batcher.remote, home.depart, home.finish_move, Llama.decode
    assert isinstance(remote, FleetHome)

    def departing(rows: Sequence[Row]) -> int:
        rc = depart(rows)
        events.append("held" if home.holds else "departs")
        return rc

    def finishing(spans: Iterable[Span]) -> None:
        events.append("switch" if home.is_switching else "added")
        finish(spans)
        assert not home.holds

    def decoding(self: Llama, rows: Sequence[Row], hidden: FloatRows | None = None) -> int:
        if self is home:
            events.append("last range")
        return decode(self, rows, hidden)

    monkeypatch.setattr(home, "depart", departing)
    monkeypatch.setattr(home, "finish_move", finishing)
    monkeypatch.setattr(Llama, "decode", decoding)
    ask_all(core)

    def move(step: int) -> None:
        if step == 6:
            remote.begin_move(ends_of(folder, *MOVES[0]))

    assert core.run(move) == expected
    at = events.index("switch")
    if shares and sys.platform == "linux":
        assert events[at - 1 : at + 2] == ["held", "switch", "last range"]
    else:
        assert events[at - 2 : at + 1] == ["held", "last range", "switch"]
    assert home.moves[-1].pause_s > 0
    assert home.moves[-1].load_s + home.moves[-1].copy_s <= home.moves[-1].total_s


@pytest.mark.skipif(sys.platform != "linux", reason="only there is niceness a thread's own")
def test_what_a_host_reads_and_loads_does_not_wait_for_what_computes(home: HomeLlama) -> None:
    pid = home.host_pids[0]
    nice = {
        int(task.name): os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()
    }
    assert nice.pop(pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
    assert os.getpriority(os.PRIO_PROCESS, 0) in nice.values(), "its reader, by which a loader is started"


def test_a_move_that_cannot_be_is_refused(home: HomeLlama, folder: Path) -> None:
    for bounds in ([6, 22], [5, 20]):
        with pytest.raises(ModelError, match="own ranges"):
            home.begin_move(ends_of(folder, bounds))
    assert not home.is_moving

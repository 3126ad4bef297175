"""Inner layers in a process of their own: the answers are one process's, and a host that is killed costs no token."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.fleet.local_hosts import LocalHosts
from disco_daemon.engine.door import LentSocket
from disco_daemon.engine.hosts.home import HomeLlama
from disco_daemon.engine.hosts.messages import (
    FROM_HOST,
    AskSign,
    CellsSaved,
    FromHost,
    HostReady,
    RowsComputed,
    SegmentLoaded,
    SignOfLife,
    decode_from_host,
)
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.home import FleetHome
from disco_daemon.models.default import default_model_path
from disco_daemon.system.frames import HEADER, FrameBuffer
from tests.fixtures.fleet import LOAD, PROMPTS, Core, ends_of, local_hosts

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, str]]:
    """What one process says to all prompts."""
    llama = Llama(LOAD, AbortFlag())
    core = Core(llama)
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
    core = Core(home, FleetHome)
    ask_all(core)
    under_way = []
    assert core.run(lambda _: under_way.append(len(home._flights))) == expected
    assert max(under_way) == 1  # between two steps: in each another one departs before it arrives
    assert home.hosts[0].computed()[0] > 8 * 40


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_lost_costs_no_token(home: HomeLlama, expected: dict[str, str], how: signal.Signals) -> None:
    core = Core(home, FleetHome)
    ask_all(core)
    lost = home.n_lost

    def kill(step: int) -> None:
        if step in (3, 20, 41)[: 3 if how == signal.SIGKILL else 1]:
            os.kill(home.host_pids[0], how)

    beats = list[int]()
    home.vocabulary.beat = lambda: beats.append(len(beats))
    try:
        assert core.run(kill) == expected
    finally:
        home.vocabulary.beat = lambda: None
    assert beats, (
        "who waits for home hears that it does not hang: a new host may take long to get as far as the lost one"
    )
    assert home.n_lost - lost == (3 if how == signal.SIGKILL else 1)
    assert home.kept_bytes > 0


@pytest.mark.skipif(sys.platform == "darwin", reason="no other thread's time is told there")
def test_a_host_says_how_far_it_is(home: HomeLlama) -> None:
    core = Core(home, FleetHome)
    core.ask("0", PROMPTS[0], n=4)
    core.run()
    link, signs = home.hosts[0].link, list[SignOfLife]()
    assert link is not None

    def heard(sign: SignOfLife) -> None:
        signs.append(sign)

    link._hear_sign = heard  # type: ignore[method-assign]
    link.tell(AskSign())
    link.wait(lambda: bool(signs))
    assert signs[0].n_done >= 5, "a prompt and the tokens behind it"
    assert signs[0].cpu_s > 0


def test_answers_that_come_go_and_share_do_not_change_others(home: HomeLlama, expected: dict[str, str]) -> None:
    """Cancelled and held answers, a second turn with the cells of the first, and cells that are moved."""
    core = Core(home, FleetHome)

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


# --- a host that another machine lends, and that means ill ----------------------------------------------------------

Frames = list[tuple[FromHost | bytes, bytes]]
Lie = Callable[[RowsComputed, bytes], Frames]


def _raw(message: RowsComputed, **change: object) -> bytes:
    return msgspec.msgpack.encode({"type": "RowsComputed"} | msgspec.structs.asdict(message) | change)


LIES: dict[str, Lie] = {
    "not a number": lambda m, rows: [(m, np.full(len(rows) // 4, np.nan, np.float32).tobytes())],
    "half the rows": lambda m, rows: [(m, rows[: len(rows) // 2])],
    "another flight's": lambda m, rows: [(replace(m, flight=m.flight + 7), rows)],
    "another segment's": lambda m, rows: [(replace(m, segment=m.segment + 1), rows)],
    "twice": lambda m, rows: [(m, rows), (m, rows)],
    "a batch of 2^62": lambda m, rows: [(_raw(m, n_batch=1 << 62), rows)],
    "more than anybody asked for": lambda m, rows: [(CellsSaved(copy=99), bytes(1 << 20)), (m, rows)],
    "loaded once more": lambda m, rows: [(SegmentLoaded(segment=m.segment, moves_states=True), b""), (m, rows)],
    "ready once more": lambda m, rows: [(HostReady(build="x", pid=1, shares_memory=True), b""), (m, rows)],
    "what is no message": lambda m, rows: [(b"\x81", rows)],
}


class Liars:
    """Opens hosts as another machine lends them: real ones, each of which lies once, with its third rows."""

    def __init__(self, hosts: LocalHosts) -> None:
        self.hosts, self.lies, self.told = hosts, list(LIES), list[str]()

    def open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        lie = self.lies.pop() if self.lies else ""
        threading.Thread(target=self._carry, args=(theirs, self.hosts.open(), lie), daemon=True).start()
        return LentSocket(fileno=ours.detach())

    def _carry(self, home: socket.socket, host: socket.socket, lie: str) -> None:
        buffer, n_rows = FrameBuffer(FROM_HOST), 0
        with home, host, suppress(OSError):
            while True:
                ready = select.select([home, host], [], [])[0]
                if home in ready:
                    if not (data := home.recv(1 << 17)):
                        return
                    host.sendall(data)
                if host not in ready:
                    continue
                if not (data := host.recv(1 << 17)):
                    return
                buffer.feed(data)
                while (found := buffer.take()) is not None:
                    body, behind, epoch = found
                    message = decode_from_host(body)
                    said: Frames = [(message, behind)]
                    if isinstance(message, RowsComputed) and (n_rows := n_rows + 1) == 3 and lie:
                        said = LIES[lie](message, behind)
                        self.told.append(lie)
                    for one, rows in said:
                        head = one if isinstance(one, bytes) else msgspec.msgpack.encode(one)
                        home.sendall(HEADER.pack(len(head), len(rows), epoch) + head + rows)


def test_a_lent_host_that_lies_costs_no_token(
    hosts: LocalHosts, expected: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    liars = Liars(hosts)
    home = HomeLlama(LOAD, ends_of(tmp_path_factory.mktemp("lent"), [5, 22]), AbortFlag(), liars.open)
    try:
        core = Core(home, FleetHome)
        ask_all(core)
        assert core.run() == expected
        assert sorted(liars.told) == sorted(LIES)
        assert home.n_lost == len(LIES)
        assert not home.hosts[0].shares_memory
        link = home.hosts[0].link
        assert link is not None
        assert [len(link.rows), len(link.saved)] == [0, 0]
    finally:
        home.close()

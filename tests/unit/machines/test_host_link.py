"""What comes from a host is checked: frames that are too long or no messages, rows that are no numbers, silence."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.hosts import link
from disco_daemon.engine.hosts.link import HostGoneError, HostLink
from disco_daemon.engine.hosts.messages import (
    FROM_HOST,
    MAX_BEHIND,
    HostReady,
    HostSocket,
    RowsComputed,
    SegmentLoaded,
    SegmentRefused,
    SignOfLife,
    decode_from_host,
)
from disco_daemon.system.frames import HEADER, BadFrameError, FrameBuffer

N_EMBD = 4
PATIENCE_S = 20.0  # for another thread, and less than a start may take


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def linked(
    ends: tuple[socket.socket, socket.socket], epoch: int = 1, beat: Callable[[], None] = lambda: None
) -> tuple[HostLink, HostSocket]:
    """A link to a host whose part the test plays."""
    ours, theirs = ends
    host = HostSocket(theirs, epoch)
    host.send(HostReady(build="b", pid=7))
    return HostLink(ours, ["/"], N_EMBD, epoch, beat), host


def rows(n: int, number: float = 1.0) -> bytes:
    return np.full((n, N_EMBD), number, np.float32).tobytes()


def fly(home: HostLink, segment: int, flight: int, n: int = 1) -> None:
    """Send a flight of n rows."""
    home.send(segment, flight, [(i, 0) for i in range(n)], np.ones((n, N_EMBD), np.float32))


def test_rows_are_there_by_segment_and_flight(ends: tuple[socket.socket, socket.socket]) -> None:
    home, host = linked(ends)
    assert (home.pid, home.build) == (7, "b")
    fly(home, 2, 5, 2)
    host.send(RowsComputed(segment=2, flight=5, n_batch=3, took_s=0.3), rows(2))
    home.wait(lambda: (2, 5) in home.rows)
    assert home.rows[2, 5].shape == (2, N_EMBD)
    assert home.n_rows == 2
    assert home.busy_s == pytest.approx(0.2)


def test_the_way_of_rows_is_what_is_left_of_their_time_without_that_at_the_host(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, host = linked(ends)
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    given = np.ones((2, N_EMBD), np.float32)

    def fly_for(flight: int, seconds: float, held_s: float) -> None:
        home.send(0, flight, [(0, 0), (1, 0)], given)
        now[0] += seconds
        host.send(RowsComputed(segment=0, flight=flight, n_batch=2, took_s=0.1, held_s=held_s), rows(2))
        home.wait(lambda: (0, flight) in home.rows)

    fly_for(1, 1.0, 0.25)
    fly_for(2, 0.5, 0.375)
    fly_for(3, 0.2, 0.9)  # what a host says of itself makes no time go backwards
    assert home.ways.take() == [(2, 0.0)]
    assert home.ways.take() == []
    fly_for(4, 1.0, 0.25)
    fly_for(5, 0.5, 0.375)
    assert home.ways.take() == [(2, 0.125)]
    fly_for(6, 0.5, 0.0)
    [(n, seconds)] = home.ways.take()
    assert (n, round(seconds, 6)) == (2, 0.4), "one that does not say for how long it held them"
    home.send(0, 7, [(0, 0)], given[:1])
    home.drop(0, 7)
    host.send(RowsComputed(segment=0, flight=7, n_batch=1, took_s=0.1), rows(1))
    fly_for(8, 1.0, 0.5)
    assert [n for n, _ in home.ways.take()] == [2], "a flight that was dropped says nothing"


@pytest.mark.parametrize(
    "damage", [{"n_batch": 0}, {"took_s": float("nan")}, {"took_s": -1.0}, {"held_s": float("inf")}]
)
def test_times_that_are_none_end_the_host(ends: tuple[socket.socket, socket.socket], damage: dict[str, float]) -> None:
    home, host = linked(ends)
    message = RowsComputed(segment=0, flight=0, n_batch=1, took_s=0.1)
    host.send(msgspec.structs.replace(message, **damage), rows(1))
    with pytest.raises(HostGoneError, match="no message from a host"):
        home.wait(lambda: bool(home.rows))


@pytest.mark.parametrize("behind", [rows(1, float("nan")), rows(1, float("inf")), b"12345"])
def test_what_is_no_row_ends_the_host(ends: tuple[socket.socket, socket.socket], behind: bytes) -> None:
    home, host = linked(ends)
    fly(home, 0, 0)
    host.send(RowsComputed(segment=0, flight=0, n_batch=1, took_s=0.1), behind)
    with pytest.raises(HostGoneError):
        home.wait(lambda: bool(home.rows))
    assert not home.rows


def test_rows_of_an_earlier_epoch_are_dropped(ends: tuple[socket.socket, socket.socket]) -> None:
    home, host = linked(ends, epoch=2)
    fly(home, 0, 1)
    host.epoch = 1
    host.send(RowsComputed(segment=0, flight=0, n_batch=1, took_s=0.1), rows(1))
    host.epoch = 2
    host.send(RowsComputed(segment=0, flight=1, n_batch=1, took_s=0.1), rows(1))
    home.wait(lambda: bool(home.rows))
    assert list(home.rows) == [(0, 1)]


@pytest.mark.parametrize(
    "data",
    [
        HEADER.pack(1 << 30, 0, 1),
        HEADER.pack(2, MAX_BEHIND + 1, 1),
        HEADER.pack(3, 0, 1) + b"abc",
        HEADER.pack(1, 0, 1) + msgspec.msgpack.encode(3),
    ],
)
def test_what_is_no_message_ends_the_host(ends: tuple[socket.socket, socket.socket], data: bytes) -> None:
    home, host = linked(ends)
    host.sock.sendall(data)
    with pytest.raises(HostGoneError):
        home.wait(lambda: False)


def test_a_host_that_ends_within_a_frame_is_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    home, host = linked(ends)
    host.sock.sendall(HEADER.pack(20, 100, 1) + b"half")
    host.sock.close()
    with pytest.raises(HostGoneError):
        home.wait(lambda: False)


def test_a_line_that_is_full_takes_no_more_until_the_other_end_has_read(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    home, host = linked(ends)
    assert home.takes_more()
    ends[0].setblocking(False)
    with suppress(BlockingIOError):
        while True:
            ends[0].send(bytes(1 << 16))
    assert not home.takes_more()
    while not home.takes_more():
        host.sock.recv(1 << 16)


def test_frames_come_in_any_pieces() -> None:
    body = msgspec.msgpack.encode(SignOfLife())
    data = (HEADER.pack(len(body), 3, 9) + body + b"xyz") * 3
    buffer, found = FrameBuffer(FROM_HOST, lambda _, __: 3), list[tuple[bytes, bytes, int]]()
    for byte in data:
        buffer.feed(bytes([byte]))
        while (frame := buffer.take()) is not None:
            found.append(frame)
    assert found == [(body, b"xyz", 9)] * 3
    assert decode_from_host(body) == SignOfLife()
    with pytest.raises(BadFrameError):
        decode_from_host(b"no")


def test_a_silent_host_is_asked_for_a_sign_before_it_is_given_up(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "ASK_S", 0.05)
    home, host = linked(ends)

    def answer(n: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(n):
                host.sock.recv(1 << 16)
                host.send(SignOfLife())

        return run

    thread = threading.Thread(target=answer(3))
    thread.start()
    with pytest.raises(HostGoneError, match="silent"):
        home.wait(lambda: False, 0.3)
    thread.join()


def test_a_silence_is_looked_at_when_it_has_lasted_too_long(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = linked(ends)
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    home.begin_wait()
    found = dict[float, float]()
    for now in (100.0, 101.0, 103.0, 103.4, 110.0):
        found[now] = round(home.wait_s(), 2)
    assert found == {100.0: 1.0, 101.0: 1.0, 103.0: 0.51, 103.4: 0.11, 110.0: 0.01}


def test_a_host_that_has_spoken_and_falls_silent_is_no_slow_start(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    monkeypatch.setattr(HostLink.wait, "__defaults__", (0.2,))
    HostSocket(theirs).send(SignOfLife())  # as one of another machine that is offered has
    began = time.monotonic()
    with pytest.raises(HostGoneError, match="silent"):
        HostLink(ours, ["/"], N_EMBD, 1)
    assert time.monotonic() - began < link.START_S / 2


def test_a_new_host_has_longer_to_say_something(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    monkeypatch.setattr(HostLink.wait, "__defaults__", (0.05,))
    monkeypatch.setattr(link, "ASK_S", 0.02)
    host = HostSocket(theirs, 1)

    def start_slowly() -> None:
        for _ in range(6):  # home has asked for a sign that often: longer than it waits for one that is there
            theirs.recv(1 << 16)
        host.send(HostReady(build="b", pid=7))

    thread = threading.Thread(target=start_slowly)
    thread.start()
    home = HostLink(ours, ["/"], N_EMBD, 1)
    thread.join()
    assert home.pid == 7


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes when the test says so."""
    found = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: found[0])
    return found


def test_home_shows_that_it_does_not_hang_while_a_host_gets_on(
    ends: tuple[socket.socket, socket.socket], now: list[float]
) -> None:
    beats = list[float]()
    home, host = linked(ends, beat=lambda: beats.append(now[0]))
    fly(home, 0, 1)
    beats.clear()

    def sign(n_done: int, after_s: float, cpu_s: float = 0.0) -> bool:
        now[0] += after_s
        host.send(SignOfLife(n_done=n_done, cpu_s=cpu_s))
        home.read()
        return beats[-1:] == [now[0]]

    assert sign(3, 1.0)
    assert not sign(3, 1.0), "its reader answers, and nothing is computed: that is a hang"
    assert sign(4, link.GETS_ON_S - 3.0)
    assert not sign(5, 2.0), "one that says so and sends nothing is not believed for ever"
    host.send(RowsComputed(segment=0, flight=1, n_batch=1, took_s=0.1), rows(1))
    home.read()
    assert sign(6, 1.0)
    now[0] += 2 * link.GETS_ON_S
    fly(home, 0, 2)
    assert sign(7, 1.0), "it owed nothing meanwhile"
    assert sign(7, 1.0, 0.1), "it had a tenth of a processor, and no order takes no time"
    assert not sign(7, 1.0, 0.1)
    assert not sign(7, 1.0, 1.05), "it had a whole one, and carried out nothing: as an engine it hangs at some time"


def test_home_shows_that_it_does_not_hang_while_a_host_loads(
    ends: tuple[socket.socket, socket.socket], now: list[float]
) -> None:
    beats = list[float]()
    home, host = linked(ends, beat=lambda: beats.append(now[0]))
    beats.clear()
    home.look()
    assert not beats, "it has begun, and has nothing to do"
    for segment in (1, 2):
        home.load(segment, wire.Load(model_path="/a", n_ctx=64, n_threads=1, layers=(3, 5, 9)))
    now[0] += link.LOAD_S - 1.0
    home.begin_wait()
    home.look()
    host.send(SegmentLoaded(segment=1, moves_states=True))
    home.read()
    home.look()
    assert beats == [now[0]] * len(beats)
    assert len(beats) >= 3
    beats.clear()
    host.send(SegmentRefused(segment=2, reason="no"))
    home.read()
    beats.clear()
    home.look()
    assert not beats
    home.load(3, wire.Load(model_path="/a", n_ctx=64, n_threads=1, layers=(3, 5, 9)))
    now[0] += link.LOAD_S + 1.0
    home.begin_wait()
    home.look()
    assert not beats, "no loading takes so long"


def test_a_segment_that_is_loaded_beside_rows_hides_no_host_that_hangs_with_them(
    ends: tuple[socket.socket, socket.socket], now: list[float]
) -> None:
    beats = list[float]()
    home, host = linked(ends, beat=lambda: beats.append(now[0]))
    home.load(2, wire.Load(model_path="/a", n_ctx=64, n_threads=1, layers=(3, 5, 9)))
    fly(home, 1, 1)
    beats.clear()
    home.look()
    host.send(SignOfLife(n_done=0, cpu_s=0.0))
    home.read()
    assert not beats, "it owes rows, and nothing says that it computes them"
    host.send(SignOfLife(n_done=1, cpu_s=0.1))
    home.read()
    assert len(beats) == 1
    host.send(RowsComputed(segment=1, flight=1, n_batch=1, took_s=0.1), rows(1))
    home.read()
    beats.clear()
    home.look()
    assert beats, "nothing is owed but the segment, for which a disk may take long"


def test_home_shows_that_it_does_not_hang_while_a_host_starts(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    monkeypatch.setattr(link, "ASK_S", 0.01)
    host, beaten = HostSocket(theirs, 1), threading.Event()

    def start_slowly() -> None:
        beaten.wait(PATIENCE_S)
        host.send(HostReady(build="b", pid=7))

    thread = threading.Thread(target=start_slowly)
    thread.start()
    HostLink(ours, ["/"], N_EMBD, 1, beaten.set)
    thread.join()
    assert beaten.is_set()


class CountedSocket(socket.socket):
    """A socket that says how much of what it was given it took each time."""

    took: list[tuple[int, int]]

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:  # type: ignore[override]
        n = super().send(data, flags)
        self.took.append((n, len(data)))
        return n


def test_a_host_that_takes_a_part_and_then_no_more_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENT_S", 0.2)
    ours, theirs = socket.socketpair()
    with CountedSocket(fileno=ours.detach()) as counted, theirs:
        counted.took = []
        home, _ = linked((counted, theirs))
        n_rows = (1 << 22) // (4 * N_EMBD)  # more than a socket holds, which takes the first part of it
        with pytest.raises(HostGoneError, match="timed out"):
            home.send(0, 0, [(0, 0)], np.ones((n_rows, N_EMBD), np.float32))
        n, of = counted.took[-1]
    assert 0 < n < of == 1 << 22, "the rest was sent again, and waited for as long again"

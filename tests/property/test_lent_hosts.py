"""A host that another machine lends may say what it likes: home keeps what it asked for, checked, and nothing else."""

from __future__ import annotations

import dataclasses
import gc
import random
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine import wire
from disco_daemon.engine.door import LentSocket
from disco_daemon.engine.hosts.cell_memory import CellMemory, SharedCells, new_memory
from disco_daemon.engine.hosts.link import HostGoneError, HostLink
from disco_daemon.engine.hosts.messages import (
    MAX_BEHIND,
    MAX_FROM_HOST,
    MAX_ROWS,
    CellsSaved,
    FromHost,
    HostReady,
    HostSocket,
    RowsComputed,
    SegmentLoaded,
    SegmentRefused,
    SignOfLife,
)
from disco_daemon.engine.hosts.outstanding import AskedCells, AskedOfHost, SentFlight, UnaskedError, check_cells
from disco_daemon.engine.llama.layer_states import LayerState
from disco_daemon.system.frames import HEADER, BadFrameError, FrameBuffer, FrameFormat
from disco_daemon.types import LayerRange

N_EMBD = 4
LAYERS = LayerRange(5, 8, 30)
LOAD = wire.Load(model_path="m.gguf", n_ctx=64, n_threads=1, n_gpu_layers=0, layers=(5, 8, 30))
ROWS = np.ones((2, N_EMBD), np.float32)


@dataclass
class Lent:
    """A link to a host whose part the test plays, and which shares no memory, whatever it says."""

    home: HostLink
    host: HostSocket

    def heard(self, message: FromHost, behind: bytes = b"") -> None:
        """Let home hear something, to its last byte."""
        self.host.send(message, behind)
        self.home.read()
        while self.home._buffer._data:
            self.home.read()

    def ends_by(self, message: FromHost, behind: bytes = b"") -> str:
        """Why home gives the host up when it hears something."""
        with pytest.raises(HostGoneError) as caught:
            self.heard(message, behind)
        return str(caught.value)


@contextmanager
def lent(*, is_lent: bool = True, shares: bool = True) -> Iterator[Lent]:
    ours, theirs = socket.socketpair()
    kind = LentSocket if is_lent else socket.socket
    with kind(fileno=ours.detach()) as sock, theirs:
        host = HostSocket(theirs, 1)
        host.send(HostReady(build="b", pid=7, shares_memory=shares))
        yield Lent(HostLink(sock, ["/"], N_EMBD, 1), host)


def sent(at: Lent, flight: int = 3, segment: int = 0) -> None:
    at.home.send(segment, flight, [(0, 0), (1, 0)], ROWS)


def cells(n: int = 4, start: int = 0, layers: LayerRange = LAYERS) -> bytes:
    row = struct.pack("<iQ", 0, 8) + bytes(range(8)) * n
    rows = (row,) * layers.n_layers
    return LayerState(layers, 1, tuple(range(start, start + n)), False, rows, rows).packed()


# --- answers that nobody asked for ----------------------------------------------------------------------------------

UNASKED: dict[str, tuple[FromHost, bytes]] = {
    "rows of a flight that was never sent": (RowsComputed(segment=0, flight=9, n_batch=2, took_s=0.1), ROWS.tobytes()),
    "rows of another segment": (RowsComputed(segment=1, flight=3, n_batch=2, took_s=0.1), ROWS.tobytes()),
    "rows of a negative flight": (RowsComputed(segment=0, flight=-1, n_batch=2, took_s=0.1), ROWS.tobytes()),
    "no rows of a flight that was never sent": (RowsComputed(segment=0, flight=9, n_batch=2, took_s=0.1), b""),
    "no rows": (RowsComputed(segment=0, flight=3, n_batch=2, took_s=0.1), b""),
    "a row too few": (RowsComputed(segment=0, flight=3, n_batch=2, took_s=0.1), ROWS[:1].tobytes()),
    "a row too many": (RowsComputed(segment=0, flight=3, n_batch=3, took_s=0.1), np.ones((3, 4), np.float32).tobytes()),
    "rows of half the width": (RowsComputed(segment=0, flight=3, n_batch=2, took_s=0.1), ROWS.tobytes()[:16]),
    "rows of 8 bytes a number": (RowsComputed(segment=0, flight=3, n_batch=2, took_s=0.1), ROWS.astype("f8").tobytes()),
    "not a number": (RowsComputed(segment=0, flight=3, n_batch=2, took_s=0.1), (ROWS * np.nan).tobytes()),
    "infinity": (RowsComputed(segment=0, flight=3, n_batch=2, took_s=0.1), (ROWS * -np.inf).tobytes()),
    "a batch smaller than its rows": (RowsComputed(segment=0, flight=3, n_batch=1, took_s=0.1), ROWS.tobytes()),
    "a segment that was not ordered": (SegmentLoaded(segment=4, moves_states=True), b""),
    "a refusal of one that was not": (SegmentRefused(segment=4, reason="no"), b""),
    "cells that nobody asked for": (CellsSaved(copy=5), cells()),
    "shared cells that nobody asked for": (CellsSaved(copy=5, n_shared=10), b""),
    "cells of copy 0": (CellsSaved(copy=0), b""),
    "a sign of life with bytes": (SignOfLife(), bytes(1)),
    "a word that it is ready, once more": (HostReady(build="other", pid=8, shares_memory=True), b""),
    "a loaded segment with bytes": (SegmentLoaded(segment=0, moves_states=True), bytes(100)),
}


@pytest.mark.parametrize(("message", "behind"), UNASKED.values(), ids=UNASKED)
def test_what_home_did_not_ask_for_ends_the_host_and_is_not_kept(message: FromHost, behind: bytes) -> None:
    with lent() as at:
        at.home.load(0, LOAD)
        sent(at)
        why = at.ends_by(message, behind)
        assert why
        print(why)
        assert [len(at.home.rows), len(at.home.loaded), len(at.home.saved)] == [0, 0, 0]
        assert at.home.pid == 7


def test_each_answer_comes_once() -> None:
    rows = RowsComputed(segment=0, flight=3, n_batch=2, took_s=0.1)
    for again in (rows, SegmentLoaded(segment=0, moves_states=True), CellsSaved(copy=1)):
        with lent() as at:
            at.home.load(0, LOAD)
            sent(at)
            at.home.save(0, 0, (0, 4))
            at.heard(SegmentLoaded(segment=0, moves_states=True))
            at.heard(rows, ROWS.tobytes())
            at.heard(CellsSaved(copy=1), cells())
            assert (set(at.home.rows), at.home.loaded, set(at.home.saved)) == ({(0, 3)}, {0: True}, {1})
            at.ends_by(again, {RowsComputed: ROWS.tobytes(), CellsSaved: cells()}.get(type(again), b""))


def test_an_answer_to_what_was_dropped_is_awaited_and_forgotten() -> None:
    with lent() as at:
        at.home.load(0, LOAD)
        sent(at)
        at.home.save(0, 0, (0, 4))
        at.home.drop(0, 3)
        at.home.drop_saved(1)
        at.heard(RowsComputed(segment=0, flight=3, n_batch=2, took_s=0.1), ROWS.tobytes())
        at.heard(CellsSaved(copy=1), cells())
        assert [len(at.home.rows), len(at.home.saved)] == [0, 0]
        assert at.home.n_rows == 2, "it computed them"
        at.ends_by(CellsSaved(copy=1), cells())


def test_a_host_that_sends_what_nobody_asked_for_fills_no_memory() -> None:
    flood = RowsComputed(segment=0, flight=9, n_batch=MAX_ROWS, took_s=0.1)
    behind = bytes(4 << 20)
    with lent() as at:
        tracemalloc.start()
        try:
            body = msgspec.msgpack.encode(flood)
            data = HEADER.pack(len(body), len(behind), 1) + body
            at.host.sock.sendall(data + behind[: 1 << 12])  # it says what is to come, and begins with it
            with pytest.raises(HostGoneError, match="4194304 bytes behind a message that has 0 at most"):
                at.home.wait(lambda: False)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


# --- numbers without bounds -----------------------------------------------------------------------------------------

UNBOUNDED: dict[str, dict[str, object]] = {
    "a batch of 2^62": {"type": "RowsComputed", "segment": 0, "flight": 3, "n_batch": 1 << 62, "took_s": 0.1},
    "a batch beyond the most": {
        "type": "RowsComputed",
        "segment": 0,
        "flight": 3,
        "n_batch": MAX_ROWS + 1,
        "took_s": 0.1,
    },
    "a batch of -1": {"type": "RowsComputed", "segment": 0, "flight": 3, "n_batch": -1, "took_s": 0.1},
    "a year": {"type": "RowsComputed", "segment": 0, "flight": 3, "n_batch": 2, "took_s": 3e7},
    "no time": {"type": "RowsComputed", "segment": 0, "flight": 3, "n_batch": 2, "took_s": float("nan")},
    "no time there": {
        "type": "RowsComputed",
        "segment": 0,
        "flight": 3,
        "n_batch": 2,
        "took_s": 0.1,
        "held_s": float("inf"),
    },
    "a flight of 2^64": {"type": "RowsComputed", "segment": 0, "flight": 1 << 63, "n_batch": 2, "took_s": 0.1},
    "process 0": {"type": "HostReady", "build": "b", "pid": 0},
    "process -1": {"type": "HostReady", "build": "b", "pid": -1},
    "process 2^40": {"type": "HostReady", "build": "b", "pid": 1 << 40},
    "a build without an end": {"type": "HostReady", "build": "b" * 10_000, "pid": 7},
    "rights without an end": {"type": "HostReady", "build": "b", "pid": 7, "confined": ["x"] * 1000},
    "a right without an end": {"type": "HostReady", "build": "b", "pid": 7, "confined": ["x" * 5000]},
    "a reason without an end": {"type": "SegmentRefused", "segment": 0, "reason": "x" * 5000},
    "shared bytes below 0": {"type": "CellsSaved", "copy": 1, "n_shared": -1},
    "shared bytes of the next slot": {"type": "CellsSaved", "copy": 1, "n_shared": MAX_BEHIND + 1},
    "shared bytes of 2^62": {"type": "CellsSaved", "copy": 1, "n_shared": 1 << 62},
    "shared bytes as text": {"type": "CellsSaved", "copy": 1, "n_shared": "8"},
    "a body beyond the limit": {"type": "SegmentRefused", "segment": 0, "reason": "x" * MAX_FROM_HOST},
    "a segment as a list": {"type": "SegmentLoaded", "segment": [0], "moves_states": True},
}


@pytest.mark.parametrize("fields", UNBOUNDED.values(), ids=UNBOUNDED)
@pytest.mark.parametrize("is_lent", [True, False], ids=["lent", "ours"])
def test_numbers_and_texts_have_bounds(fields: dict[str, object], *, is_lent: bool) -> None:
    with lent(is_lent=is_lent) as at:
        at.home.load(0, LOAD)
        sent(at)
        at.home.save(0, 0, (0, 4))
        body = msgspec.msgpack.encode(fields)
        at.host.sock.sendall(HEADER.pack(len(body), 0, 1) + body)
        with pytest.raises(HostGoneError):
            at.home.wait(lambda: False)


# --- what another machine claims is no fact of this one -------------------------------------------------------------


def test_a_lent_host_shares_no_memory_whatever_it_says() -> None:
    with lent() as at:
        assert not at.home.shares_memory
        memory = new_memory()
        at.home.save(0, 0, (0, 4), None, memory)
        assert "10 in memory" in at.ends_by(CellsSaved(copy=1, n_shared=10))
    with lent(is_lent=False) as at:
        assert at.home.shares_memory


@pytest.mark.skipif(new_memory() is None, reason="only Linux has memory behind a descriptor")
def test_a_host_of_ours_says_no_more_of_a_memory_than_its_cells_can_take() -> None:
    with lent(is_lent=False) as at:
        at.home.load(0, LOAD)
        at.home.save(0, 0, (0, 4), None, CellMemory())
        at.heard(CellsSaved(copy=1, n_shared=10))
        assert isinstance(at.home.saved[1], SharedCells)
        at.home.save(0, 0, (0, 4), None, CellMemory())
        assert "in memory" in at.ends_by(CellsSaved(copy=2, n_shared=MAX_BEHIND))
    with lent(is_lent=False) as at:
        at.home.save(0, 0, (0, 4), None, CellMemory())
        at.home.drop_saved(1)
        gc.collect()
        assert not any(isinstance(one, CellMemory) for one in gc.get_objects()), "it is not held for what comes yet"
        at.heard(CellsSaved(copy=1, n_shared=10))
        assert not at.home.saved
    with lent(is_lent=False) as at:
        at.home.save(0, 0, (0, 4), None, CellMemory())
        assert "at most" in at.ends_by(CellsSaved(copy=1, n_shared=10), b"both ways")


def test_the_time_that_a_lent_host_claims_is_no_longer_than_home_has_seen() -> None:
    with lent() as at:
        sent(at)
        at.heard(RowsComputed(segment=0, flight=3, n_batch=2, took_s=80_000.0), ROWS.tobytes())
        assert at.home.busy_s < 60.0


def test_what_it_says_of_itself_is_plain() -> None:
    ours, theirs = socket.socketpair()
    with LentSocket(fileno=ours.detach()) as sock, theirs:
        host = HostSocket(theirs, 1)
        host.send(HostReady(build="b\x1b[2J\n9", pid=7))
        at = Lent(HostLink(sock, ["/"], N_EMBD, 1), host)
        at.home.load(0, LOAD)
        at.heard(SegmentRefused(segment=0, reason="\x1b]0;x\x07no\nroom"))
        assert "\x1b" not in at.home.build + str(at.home.loaded[0])
        assert "\n" not in at.home.build + str(at.home.loaded[0])


# --- saved cells, before llama.cpp has them -------------------------------------------------------------------------

ASKED = AskedCells(LAYERS, 0, 4)


def damaged(data: bytes, random_: random.Random) -> bytes:
    """Cells with one damage, mostly where a length or a number of something is."""
    found, at = bytearray(data), random_.choice([0, 4, 8, 12, 16, 20, 24, 64, 68, 72, 76, random_.randrange(len(data))])
    match random_.randrange(6):
        case 0:
            at = min(at, len(found) - 4)
            struct.pack_into("<I", found, at, random_.choice([0, 1, 2, 5, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]))
        case 1:
            found[at] ^= 1 << random_.randrange(8)
        case 2:
            del found[random_.randrange(len(found)) :]
        case 3:
            found += random_.randbytes(random_.randrange(1, 50))
        case 4:
            del found[at : at + random_.randrange(1, 20)]
        case _:
            at = min(at, len(found) - 8)
            struct.pack_into("<Q", found, at, random_.choice([0, 1, 1 << 32, 1 << 62, (1 << 64) - 1]))
    return bytes(found)


@settings(max_examples=400, deadline=None)
@given(st.randoms(use_true_random=False))
def test_cells_with_any_damage_to_their_form_are_refused(random_: random.Random) -> None:
    """What is let through has the form of the whole, lengths and positions; marks, types and numbers may differ."""
    whole = cells()
    data = damaged(whole, random_)
    try:
        check_cells(data, ASKED)
    except UnaskedError:
        return
    assert len(data) == len(whole)
    head = struct.Struct("<III")  # streams, cells and the like: all that says how long something is
    assert head.unpack_from(data, 8)[:2] == head.unpack_from(whole, 8)[:2]
    positions = [struct.unpack_from("<i", data, 16 + 12 * i)[0] for i in range(4)]
    assert sorted(positions) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", cells(5), cells(4, start=1), cells(4, layers=LayerRange(5, 9, 30)), cells()[:-1], cells() + b"\0"],
    ids=["none", "a byte", "too many", "others", "of other layers", "cut", "longer"],
)
def test_other_cells_than_those_that_were_asked_for_end_a_lent_host(data: bytes) -> None:
    with lent() as at:
        at.home.load(0, LOAD)
        at.home.save(0, 0, (0, 4))
        at.ends_by(CellsSaved(copy=1), data)
        assert not at.home.saved


def test_cells_of_a_text_that_ends_before_are_taken_and_so_are_some_layers() -> None:
    with lent() as at:
        at.home.load(0, LOAD)
        at.home.save(0, 0, (0, 4000))
        at.heard(CellsSaved(copy=1), cells(7))
        at.home.save(0, 0, (0, 4), (6, 7, 30))
        at.heard(CellsSaved(copy=2), cells(4, layers=LayerRange(6, 7, 30)))
        assert set(at.home.saved) == {1, 2}


def test_a_lent_host_does_not_say_that_its_cells_are_in_a_form_of_their_own_where_home_knows_better() -> None:
    with lent() as at:
        at.home.load(0, LOAD, moves_states=True)  # as a process of ours of the same build has said
        at.heard(SegmentLoaded(segment=0, moves_states=False))
        at.home.save(0, 0, (0, 4))
        at.ends_by(CellsSaved(copy=1), b"of a form of my own")


# --- frames ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(n=st.integers(0, 1 << 32), most=st.integers(0, MAX_BEHIND), n_came=st.integers(0, 40))
def test_a_frame_longer_than_its_answer_can_be_is_refused_as_soon_as_its_message_is_there(
    n: int, most: int, n_came: int
) -> None:
    body = msgspec.msgpack.encode(SignOfLife())
    data = HEADER.pack(len(body), min(n, 0xFFFFFFFF), 1) + body
    buffer = FrameBuffer(FrameFormat(1 << 20, MAX_BEHIND), lambda _, __: most)
    buffer.feed(data[:-1])
    too_long = min(n, 0xFFFFFFFF) > MAX_BEHIND
    if not too_long:
        assert buffer.take() is None
    buffer.feed(data[-1:] + bytes(min(n, n_came)))
    if too_long or n > most:
        with pytest.raises(BadFrameError):
            buffer.take()
    else:
        assert (buffer.take() is None) == (n > n_came)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["send", "drop", "rows"]), st.integers(0, 5), st.integers(1, 4)), max_size=30)
)
def test_whatever_is_asked_and_said_only_what_is_awaited_is_taken_and_each_once(
    steps: list[tuple[str, int, int]],
) -> None:
    asked, awaited = AskedOfHost(N_EMBD), dict[int, int]()
    for what, flight, n in steps:
        if what == "send" and flight not in awaited:
            asked.flights[0, flight] = SentFlight(n, 0.0)
            awaited[flight] = n
        elif what == "drop":
            asked.drop_flight((0, flight))
        elif what == "rows":
            message = RowsComputed(segment=0, flight=flight, n_batch=8, took_s=0.0)
            fits = awaited.get(flight) == n
            assert asked.most_behind(message) == 16 * awaited.get(flight, 0)
            if fits:
                assert asked.rows(message, 16 * n).n_rows == awaited.pop(flight)
            else:
                with pytest.raises(UnaskedError):
                    asked.rows(message, 16 * n)
                awaited.pop(flight, None)  # the host has gone
                asked.flights.pop((0, flight), None)
    assert len(asked.flights) == len(awaited)
    assert {n: one.n_rows for (_, n), one in asked.flights.items()} == awaited
    assert not dataclasses.asdict(asked)["copies"]

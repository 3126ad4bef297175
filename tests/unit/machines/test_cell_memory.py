"""Cells that go through memory which home and a host of one machine have in common."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from disco_daemon.engine.hosts.cell_memory import CellMemory, bytes_of, read_all, write_all
from disco_daemon.engine.hosts.messages import MAX_BEHIND, HostSocket, TakeMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory behind a descriptor")


def n_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_was_written_is_read_by_whoever_has_the_descriptor() -> None:
    memory = CellMemory()
    pieces = [memory.write(data) for data in (b"one", memoryview(b"another"))]
    at = memory.slot()
    write_all(memory.fd, b"from elsewhere", at)
    assert [bytes_of(piece) for piece in pieces] == [b"one", b"another"]
    assert [len(piece) for piece in pieces] == [3, 7]
    assert pieces[1].read(2) == b"an"
    assert at == 2 * MAX_BEHIND
    assert read_all(memory.fd, 14, at) == b"from elsewhere"
    assert read_all(memory.fd, 3, at + 100 * MAX_BEHIND) == b"", "nothing is there"
    assert os.fstat(memory.fd).st_blocks * 512 < 1 << 20, "the room between pieces takes no memory"


def test_a_memory_lives_as_long_as_a_piece_of_it() -> None:
    before = n_open()
    memory = CellMemory()
    piece = memory.write(b"kept")
    del memory
    assert bytes_of(piece) == b"kept"
    assert n_open() == before + 1
    del piece
    assert n_open() == before


def test_a_descriptor_comes_with_its_message() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        memory = CellMemory()
        piece = memory.write(b"cells")
        HostSocket(ours).send_with(TakeMemory(memory=memory.number), memory.fd)
        data, found, _, _ = socket.recv_fds(theirs, 1 << 10, 8)
        assert data
        assert read_all(found[0], 5, piece.at) == b"cells"
        os.close(found[0])


def test_over_a_network_the_message_comes_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs, _ = listener.accept()
        with theirs:
            HostSocket(ours).send_with(TakeMemory(memory=1), CellMemory().fd)
            assert theirs.recv(1 << 10)

"""Whose connection it is, out of what Linux says: recorded replies of sock_diag and rows of /proc/net."""

from __future__ import annotations

import errno
import socket
import struct
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from disco_daemon.api.http import peers
from disco_daemon.api.http.peers import (
    Kernel,
    Peer,
    SocketRow,
    Whose,
    numbered,
    owner_of,
    packed,
    parse_reply,
    parse_table,
    question,
)

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has it")
LITTLE = pytest.mark.skipif(sys.byteorder != "little", reason="recorded on a little-endian machine")
# Linux 6.18, x86-64: a client that user 65534 runs, at both ends of loopback, and the same after the process has ended.
V4 = (packed(("127.0.0.1", 47092)), packed(("127.0.0.1", 55567)))
V6 = (packed(("::1", 49180, 0, 0)), packed(("::1", 48237, 0, 0)))
OPEN_V4 = bytes.fromhex(
    "7c00000014000000070000004039000002010000b7f4d90f7f0000010000000000000000000000007f000001000000000000000000000000"
    "000000000200000000000000000000000000000000000000feff00008faa0000050008000000000008000f00000000000c00150001000000"
    "000000000600160052000000"
)
CLOSED_V4 = bytes.fromhex(
    "6000000014000000080000004039000002050300b7f4d90f7f0000010000000000000000000000007f000001000000000000000000000000"
    "00000000020000000000000058ea00000000000000000000000000000000000008000f0000000000"
)
OPEN_V6 = bytes.fromhex(
    "7c0000001400000007000000403900000a010000c01cbc6d0000000000000000000000000000000100000000000000000000000000000001"
    "000000000210000000000000000000000000000000000000feff000097aa0000050008000000000008000f00000000000c00150001000000"
    "000000000600160012000000"
)
HEAD = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LISTENER = b"   0: 00000000:07E8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 19 1 00\n"
OURS_V4 = (
    b"  73: 0100007F:D90F 0100007F:B7F4 01 00000000:00000000 00:00000000 00000000     0        0 43664 1 00000000a4e4\n"
)
THEIRS_V4 = (
    b"  93: 0100007F:B7F4 0100007F:D90F 01 00000000:00000000 00:00000000 00000000 65534        0 43663 2 0000000010\n"
)
LEFT_V4 = (
    b"  93: 0100007F:B7F4 0100007F:D90F 05 00000000:00000000 03:0000176F 00000000     0        0 0 3 0000000079288d\n"
)
THEIRS_V6 = (
    b"   1: 00000000000000000000000001000000:C01C 00000000000000000000000001000000:BC6D 01 00000000:00000000 "
    b"00:00000000 00000000 65534        0 43671 2 00000000a1920a7c 20 0 0 10 -1\n"
)
MAPPED = (
    b"   4: 0000000000000000FFFF00000100007F:B7F4 0000000000000000FFFF00000100007F:D90F 01 00000000:00000000 "
    b"00:00000000 00000000  1000        0 777 2 00000000a1920a7c 20 0 0 10 -1\n"
)


# --- recorded -----------------------------------------------------------------------------------------------------


def test_who_it_is_depends_on_user_and_inode() -> None:
    assert owner_of(SocketRow(1000, 7), 1000) == Peer(Whose.OURS, 1000)
    assert owner_of(SocketRow(1001, 7), 1000) == Peer(Whose.OTHER, 1001)
    assert owner_of(SocketRow(0, 7), 1000) == Peer(Whose.ROOT, 0)
    assert owner_of(SocketRow(0, 7), 0) == Peer(Whose.OURS, 0)
    assert owner_of(SocketRow(0, 0), 1000) == Peer(Whose.NOBODY), "a closed socket shows as root's"
    assert owner_of(SocketRow(1000, 0), 1000) == Peer(Whose.NOBODY), (
        "newer kernels remember the user of a closed socket"
    )
    assert owner_of(None, 1000) == Peer(Whose.NOBODY)
    assert [whose for whose in Whose if Peer(whose).stranger] == [Whose.OTHER, Whose.NOBODY]


@LITTLE
def test_a_recorded_reply_tells_user_and_inode() -> None:
    assert parse_reply(OPEN_V4, *V4) == SocketRow(65534, 43663)
    assert parse_reply(OPEN_V6, *V6) == SocketRow(65534, 43671)
    assert parse_reply(CLOSED_V4, *V4) == SocketRow(0, 0)
    assert (numbered(OPEN_V4), numbered(CLOSED_V4), numbered(b"")) == (7, 8, -1)


@LITTLE
def test_a_reply_about_another_connection_is_none() -> None:
    theirs, ours = V4
    assert parse_reply(OPEN_V4, ours, theirs) is None
    assert parse_reply(OPEN_V4, (theirs[0], theirs[1] + 1), ours) is None
    assert parse_reply(OPEN_V4, theirs, (packed(("127.0.0.2", 1))[0], ours[1])) is None
    listening = bytearray(OPEN_V4)
    listening[17] = 10  # the kernel goes on to listeners where no connection is left
    assert parse_reply(bytes(listening), theirs, ours) is None
    assert parse_reply(OPEN_V4[:40], theirs, ours) is None


def test_no_such_connection_is_none_and_other_errors_are_errors() -> None:
    def error(number: int) -> bytes:
        return struct.pack("=IHHIIi", 36, 2, 0, 1, 0, -number).ljust(36, b"\0")

    assert parse_reply(error(errno.ENOENT), *V4) is None
    with pytest.raises(OSError, match="permitted"):
        parse_reply(error(errno.EPERM), *V4)


@LITTLE
def test_rows_of_proc_net_tell_the_same() -> None:
    table = HEAD + LISTENER + OURS_V4 + THEIRS_V4
    assert parse_table(table, *V4) == SocketRow(65534, 43663)
    assert parse_table(table, *reversed(V4)) == SocketRow(0, 43664), "the other end of the same connection"
    assert parse_table(HEAD + OURS_V4 + LEFT_V4, *V4) == SocketRow(0, 0)
    assert parse_table(HEAD + OURS_V4, *V4) is None
    assert parse_table(HEAD + THEIRS_V6, *V6) == SocketRow(65534, 43671)
    assert parse_table(HEAD + MAPPED, *V4) == SocketRow(1000, 777), "a client that speaks IPv4 by a socket of IPv6"
    assert parse_table(HEAD + THEIRS_V4[:60], *V4) is None
    assert parse_table(b"", *V4) is None


def test_names_of_sockets_are_packed() -> None:
    assert packed(("127.0.0.1", 80)) == (b"\x7f\0\0\1", 80)
    assert packed(("::ffff:127.0.0.1", 80, 0, 0)) == (b"\x7f\0\0\1", 80)
    assert packed(("fe80::1%lo", 80, 0, 1))[0][:2] == b"\xfe\x80"
    with pytest.raises(OSError):
        packed(("not an address", 80))


def test_a_question_names_both_ends() -> None:
    asked = question(*V4, 5)
    assert len(asked) == struct.unpack_from("=I", asked)[0] == 72
    assert numbered(asked) == 5
    assert asked[24:28] == struct.pack("!HH", 47092, 55567)


# --- this machine -------------------------------------------------------------------------------------------------


@LINUX
@pytest.mark.parametrize(
    ("host", "called"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("127.0.0.1", "::ffff:127.0.0.1")]
)
@pytest.mark.parametrize("way", ["sock_diag", "proc"])
def test_a_connection_of_ours_is_ours_and_a_closed_one_nobodys(host: str, called: str, way: str) -> None:
    family, family_called = (socket.AF_INET6 if ":" in name else socket.AF_INET for name in (host, called))
    with (
        closing(Kernel()) as kernel,
        socket.create_server((host, 0), family=family) as listener,
        socket.socket(family_called) as client,
    ):
        if way == "proc":
            kernel.close()
        client.connect((called, listener.getsockname()[1]))
        end, theirs = listener.accept()
        with end:
            ours = end.getsockname()
            assert kernel.whose(theirs, ours).whose is Whose.OURS
            client.close()
            assert kernel.whose(theirs, ours).whose is Whose.NOBODY
        assert kernel.whose((theirs[0], 1, *theirs[2:]), ours).whose is Whose.NOBODY
        assert kernel.whose(None, ours).whose is Whose.NOBODY
        assert kernel.whose(ours, (*ours[:1], 1, *ours[2:])).whose is Whose.NOBODY, "who listens there is not it"


@LINUX
def test_asking_takes_less_than_a_millisecond_beside_hundreds_of_connections() -> None:
    kernel = Kernel()
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        ends = []
        for _ in range(300):
            client = socket.create_connection(listener.getsockname())
            ends += [client, listener.accept()[0]]
        took_s = []
        for end in ends[1::2]:
            theirs, ours = end.getpeername(), end.getsockname()
            begun = time.perf_counter()
            assert kernel.whose(theirs, ours).whose is Whose.OURS
            took_s.append(time.perf_counter() - begun)
        for end in ends:
            end.close()
    kernel.close()
    assert sorted(took_s)[len(took_s) // 2] < 1e-3


def test_without_any_table_nobody_is_known_on_linux_and_nothing_is_told_elsewhere(tmp_path: Path) -> None:
    kernel = Kernel(proc=tmp_path, platform="linux")
    kernel.close()
    assert kernel.whose(("127.0.0.1", 1), ("127.0.0.1", 2)).whose is Whose.NOBODY
    elsewhere = Kernel(platform="darwin")
    assert not elsewhere.tells
    assert elsewhere.whose(("127.0.0.1", 1), ("127.0.0.1", 2)).whose is Whose.UNTOLD


@LINUX
def test_where_sock_diag_has_never_answered_the_tables_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(Kernel, "_ask_sock_diag", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        assert kernel.whose(client.getsockname(), client.getpeername()).whose is Whose.OURS
    kernel.close()


@LINUX
def test_a_reply_left_over_is_passed_over() -> None:
    kernel = Kernel()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        theirs, ours = client.getsockname(), client.getpeername()
        assert kernel._socket is not None
        kernel._socket.send(question(packed(theirs), (b"\x7f\0\0\1", 1), 99))
        assert kernel.whose(theirs, ours).whose is Whose.OURS
    kernel.close()


@LINUX
def test_this_machine_tells_of_us() -> None:
    assert peers.tells_of_us()

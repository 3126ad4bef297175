"""The user at the other end of a loopback connection, as Linux reports it.

Messages are built and read by pure functions, which stand first; `Kernel` sends them. A reply counts only while the
other end's socket has an inode: one whose process has closed it shows as root's.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

Address = tuple[bytes, int]  # an IP address, packed, and a port

_DIAG = struct.Struct("=BBBBI")  # inet_diag_req_v2: family, protocol, ext, padding, states
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
_ROW = struct.Struct("=BBBB4s16s16sIIIIIIII")  # inet_diag_msg: four bytes, inet_diag_sockid, five numbers
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST, _ERROR = 1, 2  # NLM_F_REQUEST, NLMSG_ERROR
_LISTENS = 10  # TCP_LISTEN
_NETLINK, _DIAGNOSES = 16, 4  # AF_NETLINK, NETLINK_SOCK_DIAG
_INET, _INET6 = 2, 10  # as Linux numbers them, whatever this machine calls them
_MAPPED = b"\0" * 10 + b"\xff\xff"  # an IPv4 address in IPv6
_REPLY_BYTES = 4096  # one row is 124
_TRIES = 4  # replies read for one question; another one's can only be left over from a question that failed


class Whose(StrEnum):
    """The owner of a connection. `UNTOLD`: this system does not report it; `DOOR`: a Unix socket, ours alone."""

    OURS = "ours"
    ROOT = "root"
    OTHER = "other"
    NOBODY = "nobody"
    UNTOLD = "untold"
    DOOR = "door"


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection, and its user where that is known."""

    whose: Whose
    uid: int | None = None

    @property
    def stranger(self) -> bool:
        """Whether the peer may be another user."""
        return self.whose in (Whose.OTHER, Whose.NOBODY)


@dataclass(frozen=True, slots=True)
class SocketRow:
    """The kernel's row of a socket; the inode is 0 when no process has it open any more."""

    uid: int
    inode: int


def owner_of(row: SocketRow | None, own_uid: int) -> Peer:
    """Return the peer of a row. Root is believed only with an inode, as any user is: closed sockets are root's."""
    if row is None or row.inode == 0:
        return Peer(Whose.NOBODY)
    if row.uid == own_uid:
        return Peer(Whose.OURS, row.uid)
    return Peer(Whose.ROOT if row.uid == 0 else Whose.OTHER, row.uid)


def packed(address: tuple[Any, ...]) -> Address:
    """Return a socket's name as a packed address; an IPv4 address in IPv6 is one of IPv4. Raises OSError."""
    host, port = str(address[0]).partition("%")[0], int(address[1])
    raw = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    return _unmap(raw), port


def _unmap(raw: bytes) -> bytes:
    return raw[12:] if len(raw) == 16 and raw.startswith(_MAPPED) else raw


# --- sock_diag ----------------------------------------------------------------------------------------------------


def question(theirs: Address, ours: Address, number: int) -> bytes:
    """Return the netlink message that asks for the one socket at `theirs` which is connected to `ours`."""
    family = _INET if len(theirs[0]) == 4 else _INET6
    names = struct.pack("!HH16s16s", theirs[1], ours[1], theirs[0].ljust(16, b"\0"), ours[0].ljust(16, b"\0"))
    body = _DIAG.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + names + struct.pack("=I8s", 0, b"\xff" * 8)
    return _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, number, 0) + body


def numbered(reply: bytes) -> int:
    """Return the number of the question that a reply answers."""
    return int(_HEADER.unpack_from(reply)[3]) if len(reply) >= _HEADER.size else -1


def parse_reply(reply: bytes, theirs: Address, ours: Address) -> SocketRow | None:
    """Return the row in a reply, None if it has none for these two ends. Raises OSError if the kernel refuses."""
    _, kind, _, _, _ = _HEADER.unpack_from(reply)
    if kind == _ERROR:
        code = -struct.unpack_from("=i", reply, _HEADER.size)[0]
        if code == errno.ENOENT:
            return None
        raise OSError(code, os.strerror(code))
    if kind != _BY_FAMILY or len(reply) < _HEADER.size + _ROW.size:
        return None
    family, state, _, _, ports, here, there, _, _, _, _, _, _, uid, inode = _ROW.unpack_from(reply, _HEADER.size)
    size = 4 if family == _INET else 16
    found = (_unmap(here[:size]), _unmap(there[:size]), *struct.unpack("!HH", ports))
    # Where no such connection is left, the kernel goes on to look for a listener at that address.
    if state == _LISTENS or found != (theirs[0], ours[0], theirs[1], ours[1]):
        return None
    return SocketRow(uid, inode)


# --- /proc/net/tcp ------------------------------------------------------------------------------------------------


def parse_table(table: bytes, theirs: Address, ours: Address) -> SocketRow | None:
    """Return the row of /proc/net/tcp or tcp6 for these two ends, None if there is none."""
    for wide in (False, True):
        if wide or len(theirs[0]) == 4:
            start = table.find(f" {_spell(theirs, wide=wide)} {_spell(ours, wide=wide)} ".encode())
            if start >= 0:
                cells = table[start:].split(b"\n", 1)[0].split()
                return SocketRow(int(cells[6]), int(cells[8])) if len(cells) > 8 else None
    return None


def _spell(address: Address, *, wide: bool) -> str:
    """Return an address as those tables spell it: words of 32 bits in the machine's byte order, all in hex."""
    raw = _MAPPED + address[0] if wide and len(address[0]) == 4 else address[0]
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(raw) // 4}I", raw)) + f":{address[1]:04X}"


# --- asking -------------------------------------------------------------------------------------------------------


class Kernel:
    """Asks the kernel for the owner of a connection: 10 to 30 µs by sock_diag; else a look into /proc/net.

    It keeps one socket, so that it can ask when no file descriptor is left.
    """

    def __init__(self, *, proc: Path = Path("/proc/net"), platform: str = sys.platform) -> None:
        self.tells = platform.startswith("linux")
        self._own_uid = os.getuid()
        self._proc = proc
        self._number = 0
        self._answers = False  # whether a row ever came: else "no such row" may mean that sock_diag does not work
        self._socket: socket.socket | None = None
        if self.tells:
            try:
                self._socket = socket.socket(_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _DIAGNOSES)
                self._socket.setblocking(False)  # the kernel answers before `send` returns
            except OSError:  # no such protocol, or none that we may speak
                self._socket = None

    def close(self) -> None:
        """Close the socket; no question may follow."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def whose(self, theirs: tuple[Any, ...] | None, ours: tuple[Any, ...] | None) -> Peer:
        """Return the owner of the other end of a TCP connection, by our socket's names of its two ends."""
        if not self.tells:
            return Peer(Whose.UNTOLD)
        if not theirs or not ours:  # the client has gone already
            return Peer(Whose.NOBODY)
        try:
            return owner_of(self._row(packed(theirs), packed(ours)), self._own_uid)
        except OSError:
            return Peer(Whose.NOBODY)

    def _row(self, theirs: Address, ours: Address) -> SocketRow | None:
        try:
            row = self._ask_sock_diag(theirs, ours)
        except OSError:
            return self._look_up(theirs, ours)
        self._answers = self._answers or row is not None
        return row if self._answers else self._look_up(theirs, ours)

    def _ask_sock_diag(self, theirs: Address, ours: Address) -> SocketRow | None:
        """Return the row by sock_diag. Raises OSError if that cannot be asked."""
        if self._socket is None:
            raise OSError(errno.EPROTONOSUPPORT, "no sock_diag")
        self._number = self._number % 0xFFFFFFFF + 1
        self._socket.send(question(theirs, ours, self._number))
        for _ in range(_TRIES):
            reply = self._socket.recv(_REPLY_BYTES)
            if numbered(reply) == self._number:
                return parse_reply(reply, theirs, ours)
        return None

    def _look_up(self, theirs: Address, ours: Address) -> SocketRow | None:
        """Return the row by the tables of all connections. A table that cannot be read has none."""
        names = ("tcp", "tcp6") if len(theirs[0]) == 4 else ("tcp6",)
        for name in names:
            try:
                row = parse_table((self._proc / name).read_bytes(), theirs, ours)
            except OSError:
                continue
            if row is not None:
                return row
        return None


def tells_of_us() -> bool:
    """Whether this machine reports a connection of ours as ours; tried with one."""
    kernel = Kernel()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = listener.getsockname()
            with socket.create_connection(ours) as end:
                return kernel.whose(end.getsockname(), ours).whose is Whose.OURS
    except OSError:
        return False
    finally:
        kernel.close()

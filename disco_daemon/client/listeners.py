"""The owner of the program that listens on a port of this machine: a client asks before it sends a key or a prompt.

Linux has a row for each socket in /proc/net/tcp and /proc/net/tcp6; macOS has lsof, which shows a user their own.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTEN = "0A"  # the state of a row
LSOF = "/usr/sbin/lsof"
LSOF_TIMEOUT_S = 5.0  # asking macOS whose program listens
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_LOOPBACK = (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1"))


def strangers(host: str, port: int) -> frozenset[int]:
    """Return users, other than us and root, whose programs listen at an address; -1 for an unknown one.

    Empty where no program listens, and where the system does not report it.
    """
    if sys.platform == "darwin":
        return of_macos(port, listens=_listens(host, port))
    rows = "".join(_read(table) for table in TABLES)
    return frozenset(of_linux(rows, host, port)) - {0, os.geteuid()}


def of_linux(rows: str, host: str, port: int, local: Callable[[_Address], bool] | None = None) -> set[int]:
    """Return the users who listen, by the rows of /proc/net/tcp and tcp6; `local` knows the machine's addresses."""
    wanted = _addresses(host)
    here = any((local or _is_local)(address) for address in wanted)
    users = set()
    for line in rows.splitlines():
        cells = line.split()
        if len(cells) < 8 or cells[3] != LISTEN:
            continue
        try:
            where, _, at = cells[1].partition(":")
            address, user = _unpack(where), int(cells[7])
            if int(at, 16) == port and (address in wanted or (here and address.is_unspecified)):
                users.add(user)
        except ValueError:  # the head of the table
            continue
    return users


def _unpack(text: str) -> _Address:
    """Return an address from the kernel's text: words of four bytes in its own order. Raises ValueError."""
    raw = bytes.fromhex(text)
    if sys.byteorder == "little":
        raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return _plain(ipaddress.ip_address(raw))


def _plain(address: _Address) -> _Address:
    """Return an IPv4 address that is written as an IPv6 one as the former."""
    return getattr(address, "ipv4_mapped", None) or address


def _addresses(host: str) -> frozenset[_Address]:
    """Return the addresses that a host may mean here; a name that is not this machine's is not looked up."""
    with suppress(ValueError):
        return frozenset({_plain(ipaddress.ip_address(host))})
    return frozenset(_LOOPBACK) if host == "localhost" or host.endswith(".localhost") else frozenset()


def _is_local(address: _Address) -> bool:
    """Whether it is an address of this machine: one can listen there."""
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.bind((str(address), 0))
    except OSError:
        return False
    return True


def _read(table: Path) -> str:
    try:
        return table.read_text("ascii", "replace")
    except OSError:
        return ""


# --- macOS ------------------------------------------------------------------------------------------------------------


def of_macos(port: int, *, listens: bool, run: Callable[[list[str]], str | None] | None = None) -> frozenset[int]:
    """Return the users by lsof, which shows our own sockets only: a listener that it hides is another user's."""
    if not listens:
        return frozenset()
    said = (run or _lsof)([LSOF, "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fu"])
    if said is None:
        return frozenset()
    users = {int(line[1:]) for line in said.splitlines() if line[:1] == "u" and line[1:].isdigit()}
    return frozenset(users - {0, os.geteuid()} if users else {-1})


def _lsof(command: list[str]) -> str | None:
    """Return lsof's output; None where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LSOF_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode in (0, 1) else None  # 1: it found none


def _listens(host: str, port: int) -> bool:
    """Whether a program takes a connection at an address."""
    with suppress(OSError), socket.create_connection((host, port), timeout=LSOF_TIMEOUT_S):
        return True
    return False


def names_of(users: Iterable[int]) -> str:
    """Return the users' names, for a sentence."""
    return ", ".join(sorted(map(_name, users)))


def _name(uid: int) -> str:
    if uid < 0:
        return "another user"
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"

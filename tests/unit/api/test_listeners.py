"""Who listens on a port, by what Linux and macOS print."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from disco_daemon.client import listeners
from disco_daemon.client.listeners import of_linux, of_macos

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
# Rows of Linux 6.1 on x86-64: port 4747 = 0x128B. An established connection stands beside the listeners.
ROWS = HEAD + (
    "   0: 0100007F:128B 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 41 1 0 100 0 0 10 0\n"
    "   1: 0100007F:128B 0100007F:9C40 01 00000000:00000000 00:00000000 00000000    33        0 42 1 0 20 4 30 10 -1\n"
    "   2: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000   119        0 43 1 0 100 0 0 10 0\n"
    "   3: 0500A8C0:2328 00000000:0000 0A 00000000:00000000 00:00000000 00000000   120        0 44 1 0 100 0 0 10 0\n"
)
ROWS6 = HEAD + (
    "   0: 00000000000000000000000001000000:128B 00000000000000000000000000000000:0000 0A 00000000:00000000 "
    "00:00000000 00000000   121        0 45 1 0 100 0 0 10 0\n"
    "   1: 00000000000000000000000000000000:270F 00000000000000000000000000000000:0000 0A 00000000:00000000 "
    "00:00000000 00000000   122        0 46 1 0 100 0 0 10 0\n"
    "   2: 0000000000000000FFFF00000100007F:15B3 00000000000000000000000000000000:0000 0A 00000000:00000000 "
    "00:00000000 00000000   123        0 47 1 0 100 0 0 10 0\n"
)


@pytest.mark.skipif(sys.byteorder != "little", reason="the rows are of a little-endian machine")
@pytest.mark.parametrize(
    ("host", "port", "users"),
    [
        ("127.0.0.1", 4747, {1000}),
        ("::1", 4747, {121}),
        ("localhost", 4747, {1000, 121}),  # one does not know which of them a client takes
        ("127.0.0.1", 8080, {119}),  # who listens everywhere listens here
        ("192.168.0.5", 8080, {119}),  # an address of this machine
        ("192.168.0.5", 9000, {120}),
        ("192.168.0.6", 8080, set()),  # of another one
        ("127.0.0.1", 9000, set()),
        ("127.0.0.1", 9999, {122}),  # both families
        ("127.0.0.1", 5555, {123}),  # IPv4 by a socket of IPv6
        ("example.com", 4747, set()),  # a name is asked of nobody
        ("127.0.0.1", 1, set()),
    ],
)
def test_linux_tells_by_its_tables(host: str, port: int, users: set[int]) -> None:
    def local(address: object) -> bool:
        return str(address) in ("127.0.0.1", "::1", "192.168.0.5")

    assert of_linux(ROWS + ROWS6, host, port, local) == users


def test_no_table_at_all_says_nothing() -> None:
    assert of_linux("", "127.0.0.1", 4747) == set()
    assert of_linux("a b c d e f g h\n" + HEAD + "0: zz:128B 0:0 0A 0 0 0 0 0\n", "127.0.0.1", 4747) == set()


def test_macos_tells_by_lsof_who_is_not_shown_is_somebody_else() -> None:
    me = os.geteuid()
    ours = f"p4711\nu{me}\nf7\n"
    assert of_macos(4747, listens=True, run=lambda _: ours) == frozenset()
    assert of_macos(4747, listens=True, run=lambda _: "") == {-1}
    assert of_macos(4747, listens=True, run=lambda _: f"p9\nu{me + 1}\nf3\n") == {me + 1}
    assert of_macos(4747, listens=True, run=lambda _: None) == frozenset(), "it cannot be known"
    assert of_macos(4747, listens=False, run=lambda _: "") == frozenset(), "nobody listens"


def test_our_own_listener_is_no_stranger() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        assert listeners.strangers("127.0.0.1", own.getsockname()[1]) == frozenset()


def test_users_are_named_for_people() -> None:
    assert listeners.names_of([-1]) == "another user"
    assert listeners.names_of([0]) == "the user root"
    assert listeners.names_of([3_999_999]) == "the user 3999999"

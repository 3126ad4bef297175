"""The benchmark's lines deliver what is sent, all of it and in its order, no earlier than such a line would."""

from __future__ import annotations

import socket
import time

import pytest

from benchmarks.fleet_lines import MBIT, Line, LineHosts, line_lines


def test_a_line_is_busy_with_what_was_sent_before() -> None:
    line = Line(0.01, 100.0)
    assert [line.due(0.0, 50), line.due(0.1, 50), line.due(5.0, 100)] == pytest.approx([0.51, 1.01, 6.01])
    assert Line().due(3.0, 10**9) == 3.0


def test_what_goes_over_a_line_arrives_whole_and_not_too_early_and_so_does_its_end() -> None:
    there, far = socket.socketpair()
    hosts = LineHosts(lambda: there, Line(0.02, 100 * MBIT))
    with hosts.open() as home, far:
        began, sent = time.monotonic(), bytes(range(256)) * 1000
        home.sendall(sent)
        got = b""
        while len(got) < len(sent):
            got += far.recv(1 << 16)
        assert got == sent
        assert time.monotonic() - began >= 0.02 + len(sent) / (100 * MBIT)
        far.sendall(b"rows")
        assert home.recv(16) == b"rows"
        home.shutdown(socket.SHUT_RDWR)
        assert far.recv(16) == b""
        far.close()
        hosts.close()
    assert not any(thread.is_alive() for thread in hosts.threads)


def test_the_figures_are_a_table() -> None:
    rates = {"none": {"1": 60.0, "8": 120.0}, "2 ms": {"1": 40.0, "8": 110.0}}
    assert [line.split() for line in line_lines({"tokens_per_s": rates})][1:] == [
        ["none", "60.0", "120.0"],
        ["2", "ms", "40.0", "110.0"],
    ]

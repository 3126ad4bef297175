"""The benchmark of lines: its proxy is as slow as a line and no slower, its bound is what line and compute allow."""

from __future__ import annotations

import asyncio
import os
import selectors
import statistics
import time

import pytest

from benchmarks.fleet.lines import AT_HOME, LINES, EveryWay, LineRun, Waits, line_figures, line_lines, rate_bound
from benchmarks.fleet.relays import RelayedHosts
from benchmarks.split.proxy import SlowLine, SlowProxy, precise_loop
from disco_daemon.engine import wire
from disco_daemon.engine.hosts.link import HostLink
from disco_daemon.engine.hosts.messages import AskSign

ROW_BYTES = 2304


def run(host: int, first: int, batch: int, n: int, mean_s: float) -> wire.RunSample:
    return wire.RunSample(host=host, first=first, last=first + 1, batch=batch, n=n, seconds=n * mean_s)


def usage(home_s: float, host_s: float, batch: int) -> wire.FleetUsage:
    """What was measured of flights of `batch` rows, besides one that was larger."""
    samples = (run(0, 0, batch, 40, home_s / 2), run(0, 21, batch, 40, home_s / 2), run(1, 5, batch, 40, host_s))
    return wire.FleetUsage(hosts=(), samples=(*samples, run(1, 5, 2 * batch, 1, 9.0)))


def test_a_line_takes_its_round_trip_and_the_time_of_the_bytes_both_ways() -> None:
    assert SlowLine(0.02, 50).seconds(4 * ROW_BYTES) == pytest.approx(0.02 + 2 * 8 * 4 * ROW_BYTES / 50e6)
    assert SlowLine().seconds(10**9) == 0.0


def test_a_round_is_as_long_as_the_busiest_machine_or_a_flight_s_way_through_all() -> None:
    near, far = SlowLine(), SlowLine(0.08, 20)
    rate, compute_s = rate_bound(8, usage(0.02, 0.03, 4), near, ROW_BYTES)
    assert compute_s == pytest.approx(0.05)
    assert rate == pytest.approx(8 / 0.06), "two flights at the host, one after the other"
    rate, _ = rate_bound(8, usage(0.02, 0.03, 4), far, ROW_BYTES)
    assert rate == pytest.approx(8 / (0.05 + far.seconds(4 * ROW_BYTES)))
    rate, _ = rate_bound(1, usage(0.02, 0.03, 1), far, ROW_BYTES)
    assert rate == pytest.approx(1 / (0.05 + far.seconds(ROW_BYTES))), "one answer is one flight"
    thin = SlowLine(0.0, 0.1)
    rate, _ = rate_bound(8, usage(0.0, 0.0, 4), thin, ROW_BYTES)
    assert rate == pytest.approx(1e5 / 8 / ROW_BYTES / 1), "all rows in one way of the line, whose other way is free"
    at_home = wire.FleetUsage(hosts=(), samples=(run(0, 0, 8, 40, 0.01), run(0, 2, 8, 40, 0.05)))
    assert [*rate_bound(8, at_home, near, ROW_BYTES)] == pytest.approx([8 / 0.06, 0.06])


def test_waits_and_processor_time_are_counted_from_the_beginning_of_a_measurement() -> None:
    waits = Waits([os.getpid()])
    waits.begin()
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    [used_s] = waits.cpu_s()
    assert 0.07 < used_s < 10.0
    assert 0.0 <= waits.seconds() < 100.0


def test_all_ways_of_flights_are_remembered_for_the_median_and_the_engine_s_own_go_on() -> None:
    ways = EveryWay()
    for seconds in (0.3, 0.1, 0.2):
        ways.add(4, seconds)
    assert statistics.median(ways.all_s) == 0.2
    assert ways.take() == [(4, 0.1)]


def test_the_figures_are_medians_and_a_table_that_says_when_others_had_the_processors() -> None:
    def runs(rates: tuple[float, ...], waited: float = 0.02) -> list[LineRun]:
        return [LineRun(8, rate, 100.0, 0.05, 0.024, waited, 2 * rate) for rate in rates]

    home, far = runs((40.0, 80.0, 60.0)), runs((20.0, 80.0, 90.0))
    figures = line_figures("10 ms, 50 Mbit/s", 8, far, home)
    assert (figures["tokens_per_s"], figures["bound"], figures["of_bound"]) == (80.0, 100.0, 0.8)
    assert figures["of_home_alone"] == 1.0, "the median of 0.5, 1.0 and 1.5, each of two runs beside each other"
    assert figures["way_share"] == pytest.approx(0.024 * 80 / 8)
    quiet = {"lines": [line_figures(AT_HOME, 8, home, home), figures]}
    *_, row, _ = line_lines(quiet)
    assert row.split()[:4] == ["10", "ms,", "50", "Mbit/s"]
    assert row.split()[4:] == [
        "8",
        "80.0",
        "100.0",
        "80%",
        "1.00",
        "100.0",
        "50.0",
        "24.0",
        "24%",
        "2%",
        "160.0",
        "1.33",
    ]
    busy = {"lines": [line_figures(AT_HOME, 8, runs((40.0,), 0.5), runs((40.0,)))]}
    assert line_lines(busy)[-1].startswith("NOT JUDGED")


def round_trips_s(line: SlowLine, n: int) -> list[float]:
    """Times of some bytes there and back through the proxy, on its own loop."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def measure() -> list[float]:
        found, server = [], await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, SlowProxy(port, line.rtt_s, line.mbit_s) as proxy, asyncio.timeout(60.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            for _ in range(n):
                began = time.perf_counter()
                writer.write(bytes(1000))
                await reader.readexactly(1000)
                found.append(time.perf_counter() - began)
            writer.close()
        return found

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(measure())


def late_s() -> float:
    """How long after its time this machine wakes a sleeper at least."""
    found = []
    for _ in range(40):
        began = time.perf_counter()
        time.sleep(0.01)
        found.append(time.perf_counter() - began - 0.01)
    return min(found)


def test_the_proxy_is_no_slower_than_its_line() -> None:
    line, at_once = SlowLine(0.02, 50), SlowLine(0.0, 50)
    quickest = min(round_trips_s(line, 40))  # others use this machine, too
    # What this machine takes without a delay, and to wake up in time twice, is not the proxy's doing.
    machine_s = min(round_trips_s(at_once, 40)) - at_once.seconds(1000) + 2 * late_s()
    # Timers of whole milliseconds, as those of `epoll`, add 1.6 ms, whoever runs.
    assert line.seconds(1000) <= quickest < line.seconds(1000) + machine_s + 0.0005


def test_the_loop_of_lines_has_timers_of_microseconds() -> None:
    loop = precise_loop()
    try:
        assert isinstance(loop._selector, selectors.SelectSelector)  # type: ignore[attr-defined]
    finally:
        loop.close()


def test_a_host_behind_relays_and_a_line_answers_after_the_line_s_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    line = SlowLine(0.05, 50)
    hosts = RelayedHosts(line)
    try:
        with hosts.open() as sock:
            link, heard = HostLink(sock, (), 576, 1), list[bytes]()
            hear = link._heard

            def note(body: bytes, behind: bytes) -> None:
                heard.append(body)
                hear(body, behind)

            monkeypatch.setattr(link, "_heard", note)
            took_s = []
            for _ in range(5):
                began, n = time.perf_counter(), len(heard)
                link.tell(AskSign())
                link.wait(lambda n=n: len(heard) > n)  # type: ignore[misc]
                took_s.append(time.perf_counter() - began)
            assert min(took_s) >= line.rtt_s
            assert min(took_s) < 2 * line.rtt_s, "relays neither wait for more nor sleep"
            assert len(hosts.pids()) == 3, "two relays and the proxy"
            link.close()
    finally:
        hosts.close()


def test_the_table_has_home_alone_this_machine_and_lines_of_growing_delay() -> None:
    lines = [line for line in LINES.values() if line is not None]
    assert [line.rtt_s for line in lines] == sorted(line.rtt_s for line in lines)
    assert next(name for name, line in LINES.items() if line is None) == AT_HOME

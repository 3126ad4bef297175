"""What the link adds between two engines on loopback: a small call's round trip, and the rate of bulk rows.

    python -m benchmarks.split.peer_link [--json] [--rtt-ms 20 --mbit-s 50]

Two relay processes with mutual TLS, and this process in place of both engines. The peer in the same run is the same
call over a Unix socket pair without them: what is left is what the relays, their frames and TLS cost. With a delay
there is a slow line between the relays, and each call has rows before it, as a split's has: the peer is what the line
takes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.link.protocol import (
    FRAMES,
    Build,
    DraftVerdict,
    Hello,
    JudgeDrafts,
    PeerFrame,
    PeerJoined,
    SendRows,
    Welcome,
    decode,
    frame,
)
from disco_daemon.link.relay.orders import Address, Identity, JoinPartner, Listening, ServeMembers
from disco_daemon.link.relay.relay_process import RelayProcess
from disco_daemon.link.trust.certificates import new_request
from disco_daemon.link.trust.pairing import Issuer

from ..command import positive, run_script
from .proxy import SlowLine, proxy_process

LIMITS = {"added_ms": 1.0}  # of the median round trip: the bar
N_WARM = 100  # round trips before those that count
PAUSE_S = 0.002  # between two round trips: a token takes that long at least
ROWS_BYTES, N_ROWS = 4 << 20, 32  # a frame of bulk rows, and how many: 128 MiB
CALL_ROWS_BYTES = 4 * 2304  # before a call over a line: four rows of the default model
MOST_OF_LINE = 300  # round trips over a line
START_S = 20.0  # for both relays and their link
BUILD = Build(disco="0", llama="0", model="m", n_layers=2, n_embd=1024, n_vocab=1000)
CALL, REPLY = JudgeDrafts(id="g1", turn=0, start=5, end=8), DraftVerdict(id="g1", turn=1, start=5, tokens=(1, 2, 3))


class _End:
    """An engine's end of a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def of(cls, sock: socket.socket) -> _End:
        sock.setblocking(False)
        return cls(*await asyncio.open_connection(sock=sock))

    async def send(self, message: PeerFrame, payload: bytes = b"") -> None:
        self._writer.write(frame(message, payload, 1))
        await self._writer.drain()

    async def read(self) -> PeerFrame:
        return decode((await FRAMES.receive(self._reader.readexactly))[0])

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@asynccontextmanager
async def _linked(line: SlowLine | None = None) -> AsyncIterator[tuple[_End, _End]]:
    """Two relays whose link stands, over a line if there is one, with the ends of their engines: edge and partner."""
    with tempfile.TemporaryDirectory() as folder:
        issuer, here = Issuer(Path(folder) / "peers"), [Address(host="127.0.0.1", port=1)]
        code = issuer.new_code(here, "desk")
        key, csr = new_request("laptop")
        certificate = issuer.grant(code.secret, csr, "laptop")
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def hear(event: object) -> None:
            if isinstance(event, Listening) and not port.done():
                port.set_result(event.port)

        relays = RelayProcess(lambda _: None), RelayProcess(hear)
        ends, between = [], AsyncExitStack()
        try:
            for relay in relays:
                ours, theirs = socket.socketpair()
                relay.start()
                relay.give_engine(theirs)
                ends.append(await _End.of(ours))
            welcome = Welcome(build=BUILD, cut=1, n_ctx=1024, max_answers=1, credits=1024)
            listen = Address(host="127.0.0.1", port=0)
            relays[1].serve(
                ServeMembers(identity=issuer.identity(), listen=listen, members=issuer.members(), welcome=welcome)
            )
            async with asyncio.timeout(START_S):
                listens = await port
                if line is not None:
                    _, listens = await between.enter_async_context(proxy_process(listens, line))
                at = Address(host="127.0.0.1", port=listens)
                identity = Identity(certificate=certificate, key=key, ca=issuer.identity().ca)
                hello = Hello(build=BUILD, cut=1)
                relays[0].join(JoinPartner(identity=identity, name="desk", addresses=(at,), hello=hello))
                assert [type(await end.read()) for end in ends] == [PeerJoined, PeerJoined]
            yield ends[0], ends[1]
        finally:
            await asyncio.gather(*(relay.close() for relay in relays))
            await asyncio.gather(*(end.close() for end in ends), return_exceptions=True)
            await between.aclose()


async def _answer(end: _End, n: int) -> None:
    """Answer `n` calls."""
    for _ in range(n):
        await end.read()
        await end.send(REPLY)


async def _call_with_rows(edge: _End, partner: _End, n: int) -> list[float]:
    """Return the times of `n` round trips, ms, of rows and a call, which is answered once both have come."""
    took, payload = [], os.urandom(CALL_ROWS_BYTES)

    async def answer() -> None:
        for _ in range(n):
            await partner.read()
            await partner.read()
            await partner.send(REPLY)

    answering = asyncio.create_task(answer())
    try:
        for i in range(n):
            began = time.perf_counter()
            await edge.send(SendRows(id="g1", turn=0, pos=4 * i, tokens=(1, 2, 3, 4)), payload)
            await edge.send(CALL)
            await edge.read()
            took.append(1000 * (time.perf_counter() - began))
            await asyncio.sleep(PAUSE_S)
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
    return took


async def bench_line(n: int, line: SlowLine) -> dict[str, Any]:
    """Measure the round trip of rows and a call over a line, beside what that takes of them."""
    async with _linked(line) as (edge, partner), asyncio.timeout(START_S + 2 * n * (line.rtt_s + 1.0)):
        took = await _call_with_rows(edge, partner, n)
    line_ms = 1000 * (line.rtt_s + 8e-6 * CALL_ROWS_BYTES / line.mbit_s)
    return {
        "round_trip_ms": round(statistics.median(took), 3),
        "quickest_ms": round(min(took), 3),
        "line_ms": round(line_ms, 3),
        "of_line": round(line_ms / statistics.median(took), 3),
        "n": n,
        "machine": machine(),
    }


def line_table(figures: dict[str, Any]) -> str:
    """Return the figures of a line as text."""
    return (
        f"rows and a call       {figures['round_trip_ms']:.2f} ms, the quickest {figures['quickest_ms']:.2f} ms\n"
        f"of it the line's      {figures['line_ms']:.2f} ms\nn = {figures['n']}, {figures['machine']}"
    )


def machine() -> str:
    """Return on what this was measured."""
    return f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


async def _call(end: _End, n: int) -> list[float]:
    """Return the times of `n` round trips, ms."""
    took = []
    for _ in range(n):
        began = time.perf_counter()
        await end.send(CALL)
        await end.read()
        took.append(1000 * (time.perf_counter() - began))
        await asyncio.sleep(PAUSE_S)
    return took


async def _round_trips(edge: _End, partner: _End, n: int) -> list[float]:
    async with asyncio.TaskGroup() as group:
        group.create_task(_answer(partner, n + N_WARM))
        calling = group.create_task(_call(edge, n + N_WARM))
    return calling.result()[N_WARM:]


async def _bulk(edge: _End, partner: _End) -> float:
    """Return at what rate rows travel, MB/s."""
    began = asyncio.get_running_loop().time()
    payload = os.urandom(ROWS_BYTES)

    async def send() -> None:
        for i in range(N_ROWS):
            await edge.send(SendRows(id="g1", turn=0, pos=i, tokens=(1,)), payload)

    async def take() -> None:
        for _ in range(N_ROWS):
            await partner.read()

    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        group.create_task(take())
    return N_ROWS * ROWS_BYTES / 1e6 / (asyncio.get_running_loop().time() - began)


async def bench_link(n: int) -> dict[str, Any]:
    """Measure the round trip with and without relays, in turn, and the rate of rows."""
    direct = [await _End.of(sock) for sock in socket.socketpair()]
    without: list[float] = []
    through: list[float] = []
    try:
        async with _linked() as (edge, partner):
            for i in range(3):
                without += await _round_trips(direct[0], direct[1], n // 3)
                through += await _round_trips(edge, partner, n // 3)
                progress(f"round {i + 1} of 3: {statistics.median(through):.2f} ms")
            rate = await _bulk(edge, partner)
    finally:
        await asyncio.gather(*(end.close() for end in direct))
    median, peer = statistics.median(through), statistics.median(without)
    return {
        "round_trip_ms": round(median, 3),
        "round_trip_p99_ms": round(statistics.quantiles(through, n=100)[98], 3),
        "peer_round_trip_ms": round(peer, 3),
        "added_ms": round(median - peer, 3),
        "rows_mb_s": round(rate),
        "n": len(through),
        "limits": LIMITS,
        "machine": machine(),
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    return "\n".join(
        (
            f"round trip of a call   {figures['round_trip_ms']:.2f} ms, p99 {figures['round_trip_p99_ms']:.2f} ms",
            f"without relays         {figures['peer_round_trip_ms']:.2f} ms",
            f"added                  {figures['added_ms']:.2f} ms (limit {LIMITS['added_ms']:g} ms)",
            f"rows                   {figures['rows_mb_s']} MB/s",
            f"n = {figures['n']}, {figures['machine']}",
        )
    )


def main(argv: list[str] | None = None) -> int:
    """Time the link between two relay processes of this machine."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.split.peer_link",
        description="Time a small call from one engine's socket over two relays and TLS to another's, and back.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--n", type=at_least(30), default=3000, help="round trips (default: 3000)")
    parser.add_argument("--rtt-ms", type=positive, help="round trip of a line between the relays (default: no line)")
    parser.add_argument("--mbit-s", type=positive, default=100.0, help="its rate, each way (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.rtt_ms is not None:
        found = run_measurement(bench_line(min(args.n, MOST_OF_LINE), SlowLine(args.rtt_ms / 1000, args.mbit_s)))
        return print_figures(found, line_table, as_json=args.json)
    return print_figures(run_measurement(bench_link(args.n)), table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

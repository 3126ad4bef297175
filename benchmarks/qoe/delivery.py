"""The cost of delivery on a real asyncio loop: passing tokens through, pacing many streams, and how late releases are.

    python -m benchmarks.qoe.delivery [--json]

Each stream has a token buffer and one timer, as the conductor has. The peers are what one writes without them: an
asyncio.Queue and a task a stream that relays, and the same with an `asyncio.sleep` before each token.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from disco_daemon.bench.command import print_figures, progress
from disco_daemon.delivery.buffer import TokenBuffer
from disco_daemon.types import Delivery, Token

from ..command import run_script

PACE_TPS = 4.8  # a reader's, token/s
GENERATED_TPS = 20.0  # what the sources of the paced streams make, token/s
RELAY_STREAMS, PACED_STREAMS, JITTER_STREAMS = 200, 500, 100
LIMITS = {"pass_through_us": 30.0, "pacing_cpu_share": 0.15, "jitter_p99_ms": 2.0}
ROUNDS = 3  # of pass-through, ours and the peer's in turn; the median counts
TOKEN = Token(" the", ids=(262,))


class _Stream:
    """A buffer and its one timer; counts what is released, and how much later than due, s."""

    def __init__(self, delivery: Delivery) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = TokenBuffer(delivery, PACE_TPS)
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self.n = 0
        self.late: list[float] = []

    def feed(self, token: Token) -> None:
        self._pass(self._buffer.put(token, self._loop.time()))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        now = self._loop.time()
        assert self._due is not None
        self.late.append(now - self._due)
        self._timer = self._due = None
        self._pass(self._buffer.release(now))

    def _pass(self, tokens: list[Token]) -> None:
        self.n += len(tokens)
        due = self._buffer.due_at
        if due == self._due:
            return
        self.stop()
        self._due = due
        self._timer = None if due is None else self._loop.call_at(due, self._fire)


class _Peer:
    """A queue and a task, which sleeps until the next token is due if there is a pace."""

    def __init__(self, delivery: Delivery) -> None:
        self._queue: asyncio.Queue[Token] = asyncio.Queue()
        self.feed = self._queue.put_nowait
        relay = self._pace() if delivery is Delivery.PACED else self._relay()
        self._task = asyncio.get_running_loop().create_task(relay)
        self.n = 0
        self.late: list[float] = []

    def stop(self) -> None:
        self._task.cancel()

    async def _relay(self) -> None:
        while True:
            await self._queue.get()
            self.n += 1

    async def _pace(self) -> None:
        loop, due = asyncio.get_running_loop(), 0.0
        while True:
            await self._queue.get()
            if loop.time() < due:
                await asyncio.sleep(due - loop.time())
                self.late.append(loop.time() - due)
            due = max(due, loop.time()) if not self.n else due
            self.n += 1
            due += 1 / PACE_TPS


async def bench_delivery(
    *, seconds: float = 5.0, tokens: int = 500, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure for `seconds` each paced run, and with `tokens` a stream pass-through; ours, the peer's and the ratio.

    `pass_through_us`: CPU time a token, us, `jitter_*_ms`: how late a release is, `pacing_cpu_share` of one core.
    """
    if not (seconds > 0 and tokens > 0):
        raise ValueError("a measurement takes some seconds and tokens")
    figures: dict[str, Any] = {}
    progress(f"pass-through, {RELAY_STREAMS} streams")
    rounds = [(await _relay_us(_Stream, tokens), await _relay_us(_Peer, tokens)) for _ in range(ROUNDS)]
    figures |= _beside("pass_through_us", *map(statistics.median, zip(*rounds, strict=True)))
    progress(f"pacing, {PACED_STREAMS} streams")
    shares = [(await _run_paced(make, PACED_STREAMS, seconds))[0] for make in (_Stream, _Peer)]
    figures |= _beside("pacing_cpu_share", *shares)
    progress(f"jitter, {JITTER_STREAMS} streams")
    ours, peer = [(await _run_paced(make, JITTER_STREAMS, seconds))[1] for make in (_Stream, _Peer)]
    for name, q in (("jitter_p50_ms", 50), ("jitter_p99_ms", 99)):
        figures |= _beside(name, _percentile(ours, q) * 1e3, _percentile(peer, q) * 1e3)
    return figures | {
        "streams": {"pass_through": RELAY_STREAMS, "pacing": PACED_STREAMS, "jitter": JITTER_STREAMS},
        "pace_tps": PACE_TPS,
        "generated_tps": GENERATED_TPS,
        "host": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
    }


def table(figures: dict[str, Any]) -> str:
    """The figures beside their limits and the peers."""
    lines = [f"{'':<20}{'limit':>10}{'disco':>10}{'peer':>10}{'ratio':>8}   streams"]
    for name, n in zip(LIMITS, figures["streams"].values(), strict=True):
        one, other, ratio = (figures[key] for key in (name, f"peer_{name}", f"{name}_ratio"))
        lines.append(f"{name:<20}{LIMITS[name]:>10g}{one:>10.4g}{other:>10.4g}{ratio:>8.2f}   {n}")
    host = figures["host"]
    lines.append("peers: asyncio.Queue and a task a stream; paced: that task sleeps before each token")
    return "\n".join([*lines, f"Python {host['python']}, {host['cpus']} CPUs, {host['platform']}"])


def _beside(name: str, ours: float, peer: float) -> dict[str, float]:
    return {name: ours, f"peer_{name}": peer, f"{name}_ratio": ours / peer if peer else float("inf")}


async def _relay_us(make: Callable[[Delivery], Any], tokens: int) -> float:
    """CPU time a token, us, when each stream gets a token in each turn of the loop."""
    streams = [make(Delivery.OFF) for _ in range(RELAY_STREAMS)]
    await asyncio.sleep(0)
    gc.collect()  # the rubbish of the run before is not this one's cost
    begin = time.process_time()
    for _ in range(tokens):
        for stream in streams:
            stream.feed(TOKEN)
        await asyncio.sleep(0)
    await _until(lambda: sum(stream.n for stream in streams) == tokens * RELAY_STREAMS)
    spent = time.process_time() - begin
    await _stop(streams)
    return spent / (tokens * RELAY_STREAMS) * 1e6


async def _run_paced(make: Callable[[Delivery], Any], n: int, seconds: float) -> tuple[float, list[float]]:
    """CPU share of `n` paced streams, and how late their releases were, s; sources at GENERATED_TPS, out of step."""
    loop = asyncio.get_running_loop()
    streams: list[list[Any]] = []
    gc.collect()  # the rubbish of the run before is not this one's cost
    begin, cpu = loop.time(), time.process_time()
    turn, n_turns = 1 / GENERATED_TPS, int(seconds * GENERATED_TPS)
    groups = 10  # of streams, which get their tokens at different times
    for i in range(n_turns * groups):
        group = i % groups
        if i < groups:
            streams.append([make(Delivery.PACED) for _ in range(group, n, groups)])
        for stream in streams[group]:
            stream.feed(TOKEN)
        await asyncio.sleep(max(0.0, begin + (i + 1) * turn / groups - loop.time()))
    share = (time.process_time() - cpu) / (loop.time() - begin)
    everyone = [stream for group in streams for stream in group]
    await _stop(everyone)
    return share, [late for stream in everyone for late in stream.late]


async def _until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110 - turns of the loop are what is measured
        await asyncio.sleep(0)


async def _stop(streams: list[Any]) -> None:
    for stream in streams:
        stream.stop()
    await asyncio.sleep(0)


def _percentile(values: list[float], q: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[q - 1] if len(values) > 1 else 0.0


def main(argv: list[str] | None = None) -> int:
    """Time the token buffer in this process."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.qoe.delivery",
        description="Time the token buffer on a real event loop, beside a plain queue and a task for each stream.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    return print_figures(asyncio.run(bench_delivery(progress=progress)), table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

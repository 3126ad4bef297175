"""A proxy on loopback that is as slow as a network: with a delay each way, and a rate that all connections share.

    python -m benchmarks.split.proxy PORT RTT_S MBIT_S

Alone it is a process between a port of this machine and the one that it prints, until its stdin ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from disco_daemon.bench.child import BenchError
from disco_daemon.system import process, program

from ..soak.proxy import PIECE, Proxy

START_S = 60.0  # for the process of a proxy, on a machine that others use
END_S = 1.0  # for connections to end, s
IN_FLIGHT = 64  # pieces that one connection may have on the way: more than 100 Mbit/s over 60 ms can fill


@dataclass(frozen=True, slots=True)
class SlowLine:
    """A line: its round trip, s, and what it carries each way, Mbit/s."""

    rtt_s: float = 0.0
    mbit_s: float = float("inf")

    def seconds(self, n_bytes: float) -> float:
        """Return how long so many bytes take, all at once, to the other end and as many back."""
        return self.rtt_s + 2 * 8e-6 * n_bytes / self.mbit_s


class SlowProxy(Proxy):
    """Delays every byte by half a round trip, and lets through `mbit_s` each way; `n_up`, `n_down` count bytes.

    Up is from the clients of the proxy to the server behind it. Delay and rate may be changed while it runs.
    """

    def __init__(self, port: int, rtt_s: float = 0.0, mbit_s: float = float("inf")) -> None:
        super().__init__(port)
        self.rtt_s, self.mbit_s = rtt_s, mbit_s
        self.n_up = self.n_down = 0
        self._free_at = [0.0, 0.0]  # of the line up and down: when the last byte is on its way

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cut()
        if self._tasks:  # they end by themselves, but for one that is stalled
            await asyncio.wait(self._tasks, timeout=END_S)
        await super().__aexit__(*error)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None, *, answer: bool
    ) -> None:
        """Bytes one way: read at once, written when they are due. Raises OSError."""
        del limit
        waiting: deque[tuple[float, bytes]] = deque()
        changed = asyncio.Condition()

        async def read() -> None:
            while True:
                data = await reader.read(PIECE)
                due = self._due_at(len(data), answer=answer)
                async with changed:
                    await changed.wait_for(lambda: len(waiting) < IN_FLIGHT)
                    waiting.append((due, data))
                    changed.notify_all()
                if not data:
                    return

        async def write() -> None:
            loop = asyncio.get_running_loop()
            while True:
                async with changed:
                    await changed.wait_for(lambda: waiting)
                    due, data = waiting.popleft()
                    changed.notify_all()
                await asyncio.sleep(due - loop.time())
                await self._flows.wait()
                if not data:
                    break
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

        async with asyncio.TaskGroup() as both:
            both.create_task(read())
            both.create_task(write())

    def _due_at(self, n: int, *, answer: bool) -> float:
        """Return when `n` bytes that have just come are through, on the loop's clock, and count them."""
        now = asyncio.get_running_loop().time()
        if answer:
            self.n_down += n
        else:
            self.n_up += n
        self._free_at[answer] = max(now, self._free_at[answer]) + 8e-6 * n / self.mbit_s
        return self._free_at[answer] + self.rtt_s / 2


def precise_loop() -> asyncio.AbstractEventLoop:
    """Return a loop whose timers are exact to microseconds: that of `epoll` waits up to a millisecond longer.

    A line of 20 ms would take 22.
    """
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


@asynccontextmanager
async def proxy_process(port: int, line: SlowLine) -> AsyncIterator[tuple[int, int]]:
    """Run a proxy before a port, as a process of its own; yield that, and its port. Raises BenchError."""
    words = program.command("benchmarks.split.proxy", str(port), str(line.rtt_s), str(line.mbit_s))
    pipe, env = asyncio.subprocess.PIPE, program.environment() | {"PYTHONPATH": str(Path(__file__).parents[2])}
    child = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, env=env)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(START_S):
            said = await child.stdout.readline()
        if not said:
            raise BenchError("the proxy has not begun")
        if sys.platform == "linux":
            os.sched_setaffinity(child.pid, range(os.cpu_count() or 1))  # a line is neither machine's
        yield child.pid, int(json.loads(said)["port"])
    finally:
        await process.end(child)


async def _serve(port: int, line: SlowLine) -> None:
    async with SlowProxy(port, line.rtt_s, line.mbit_s) as proxy:
        print(json.dumps({"port": proxy.port}), flush=True)
        await asyncio.get_running_loop().create_future()  # until our end


def main() -> int:
    """Be a proxy until stdin ends."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.split.proxy", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("port", type=int)
    parser.add_argument("rtt_s", type=float)
    parser.add_argument("mbit_s", type=float)
    args = parser.parse_args()
    program.end_with_stdin()
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(_serve(args.port, SlowLine(args.rtt_s, args.mbit_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

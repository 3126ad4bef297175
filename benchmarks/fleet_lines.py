"""What a line between home and a host costs: token/s by its delay and rate. Part of the live run's `--lines`.

Home on one core, the host of layers 5 to 20 on the other. What either sends is held back by threads of home's process
until a line of this delay and rate would have delivered it; cells have no memory in common then, as between machines.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from disco_daemon.daemon.local_hosts import LocalHosts
from disco_daemon.engine import wire
from disco_daemon.engine.hosts.home import HomeLlama
from disco_daemon.engine.llama.model import AbortFlag

from .fleet_prediction import HOME, HOST, Measured, Plan, ends_of

PLAN: Plan = ((2, HOME), (5, HOST), (21, HOME))
LOADS = (1, 8)  # answers at a time
PIECE = 1 << 16  # bytes read at once
MBIT = 1e6 / 8  # bytes


@dataclass
class Line:
    """One way of a line: `delay_s` and `bytes_per_s`. All mutable state: until when it is busy, s."""

    delay_s: float = 0.0
    bytes_per_s: float = float("inf")
    _busy_until: float = 0.0

    def due(self, now: float, n_bytes: int) -> float:
        """Return when bytes that are sent now have all arrived."""
        self._busy_until = max(now, self._busy_until) + n_bytes / self.bytes_per_s
        return self._busy_until + self.delay_s


LINES = {
    "none": Line(),
    "0.2 ms, 1 Gbit/s": Line(0.0002, 1000 * MBIT),
    "2 ms, 100 Mbit/s": Line(0.002, 100 * MBIT),
    "10 ms, 50 Mbit/s": Line(0.01, 50 * MBIT),
}


@dataclass
class LineHosts:
    """Hosts behind a line. `open` is that of an engine."""

    behind: Callable[[], socket.socket]
    line: Line
    threads: list[threading.Thread] = field(default_factory=list)
    _sockets: list[socket.socket] = field(default_factory=list)

    def open(self) -> socket.socket:
        """Start a host; return home's end of the line to it. Raises OSError."""
        there = self.behind()
        ours, here = socket.socketpair()
        self._sockets += here, there
        for source, target in ((here, there), (there, here)):
            pieces = SimpleQueue[tuple[float, bytes]]()
            line = Line(self.line.delay_s, self.line.bytes_per_s)
            self._start(_read, source, line, pieces)
            self._start(_write, target, pieces)
        return ours

    def close(self) -> None:
        """Wait for the lines' ends, whose homes are gone."""
        for thread in self.threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name="line", daemon=True)
        thread.start()
        self.threads.append(thread)


def _read(source: socket.socket, line: Line, pieces: SimpleQueue[tuple[float, bytes]]) -> None:
    """Take what is sent, until that ends, which is sent on as well."""
    data = b"-"
    while data:
        try:
            data = source.recv(PIECE)
        except OSError:
            data = b""
        pieces.put((line.due(time.monotonic(), len(data)), data))


def _write(target: socket.socket, pieces: SimpleQueue[tuple[float, bytes]]) -> None:
    """Deliver each piece when it is due."""
    while True:
        due, data = pieces.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if not data:
                target.shutdown(socket.SHUT_RDWR)
                return
            target.sendall(data)
        except OSError:
            return


def line_costs(model: Path, folder: Path, cores: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return the token/s of each load by the line; medians."""
    load = wire.Load(model_path=str(model), n_ctx=512, n_cells=4096, n_threads=1, n_gpu_layers=0, speculate=False)
    found: dict[str, dict[str, float]] = {}
    for name, line in LINES.items():
        hosts = LocalHosts(cpus=cores[1:])
        lines = LineHosts(hosts.open, line)
        opened = hosts.open if name == "none" else lines.open
        llama = HomeLlama(load, ends_of(PLAN, model, folder), AbortFlag(), opened)
        try:
            measured = Measured(llama, model, folder)
            found[name] = {str(n): statistics.median(measured.play(n)[0] for _ in range(repeats)) for n in LOADS}
        finally:
            llama.close()
            hosts.close()
            lines.close()
    return {"tokens_per_s": found}


def line_lines(found: dict[str, Any]) -> list[str]:
    """Return as text what lines cost."""
    rates = found["tokens_per_s"]
    lines = [f"{'token/s by the line to the host':40}" + "".join(f"{n:>12}" for n in next(iter(rates.values())))]
    return lines + [f"{name:40}" + "".join(f"{rate:12.1f}" for rate in by.values()) for name, by in rates.items()]

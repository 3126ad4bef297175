"""What a line between home and another machine costs: token/s by its delay and rate. Part of the live run's `--lines`.

Home on one core, the host of layers 5 to 20 on the other, and between them the product's relays and a line
(`fleet_relays`). Beside each rate is the most that line and compute allow, by the times that the same run measured of
each range of layers; what is missing is spent by relays, by sockets, or waiting for a processor.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from disco_daemon.bench.command import progress
from disco_daemon.engine import wire
from disco_daemon.engine.hosts.home import HomeLlama
from disco_daemon.engine.hosts.transit_times import WayTimes
from disco_daemon.engine.llama.model import AbortFlag
from disco_daemon.engine.wire import FLIGHTS
from disco_daemon.system.process import waited_s

from ..split.proxy import SlowLine
from .local_hosts import LocalHosts
from .prediction import HOME, HOST, Measured, Plan, ends_of
from .relays import RelayedHosts

SHARED: Plan = ((2, HOME), (5, HOST), (21, HOME))
ALONE: Plan = ((2, HOME),)
LOADS = (1, 8)  # answers at a time
QUIET = 0.1  # of the time may be spent waiting for a processor in a run that is judged
# A delay is one way, and a round trip twice that.
LINES: dict[str, SlowLine | None] = {
    "all layers at home": None,
    "a host of this machine": None,
    "relays, no delay": SlowLine(),
    "1 ms, 1 Gbit/s": SlowLine(0.002, 1000),
    "10 ms, 50 Mbit/s": SlowLine(0.02, 50),
    "40 ms, 20 Mbit/s": SlowLine(0.08, 20),
}
AT_HOME = next(iter(LINES))


@dataclass(slots=True)
class EveryWay(WayTimes):
    """Remembers all times on the way, not only the quickest."""

    all_s: list[float] = field(default_factory=list)

    def add(self, n_rows: int, seconds: float) -> None:
        """Take a flight's time on its way, without that at the host."""
        self.all_s.append(seconds)
        WayTimes.add(self, n_rows, seconds)


@dataclass(frozen=True, slots=True)
class LineRun:
    """The token/s of `n` answers, and what a round, in which each gets a token, is made of, s.

    `compute_s` is what all ranges take for one flight, and `way_s` its median time between home and the host. `bound`
    is the token/s that line and compute allow. `waited` is the share of the round for which one of the processes that a
    flight needs was ready and had no processor: of all of them together, so it may be above 1. `quiet` is as `bound`,
    by the processor time of home and the host in place of the clock's: what machines allow that do nothing else.
    """

    n: int
    tokens_per_s: float
    bound: float
    compute_s: float
    way_s: float
    waited: float
    quiet: float

    @property
    def way_share(self) -> float:
        """What part of a round a flight is on its way."""
        return self.way_s * self.tokens_per_s / self.n


def rate_bound(n: int, usage: wire.FleetUsage, line: SlowLine, row_bytes: int) -> tuple[float, float]:
    """Return the token/s that line and compute allow `n` answers, and what all ranges take for a flight, s.

    A round takes as long as one flight's way through everything, or all flights' at the busiest machine or in one way
    of the line: whichever is longest.
    """
    is_remote = any(run.host for run in usage.samples)
    n_flights = min(n, FLIGHTS) if is_remote else 1  # with all layers at home nothing is computed beside a flight
    means = dict[tuple[int, int], tuple[int, float]]()
    for run in usage.samples:  # those of full flights: the sizes that came most often
        if run.n > means.get((run.host, run.first), (0, 0.0))[0]:
            means[run.host, run.first] = run.n, run.seconds / run.n
    by_host = [sum(mean_s for (at, _), (_, mean_s) in means.items() if at == host) for host in {at for at, _ in means}]
    n_bytes = row_bytes * n / n_flights if is_remote else 0.0
    return allowed(n, by_host, n_flights, n_bytes, line), sum(by_host)


def allowed(n: int, by_host: Sequence[float], n_flights: int, n_bytes: float, line: SlowLine) -> float:
    """Return the token/s of `n` answers where a flight of `n_bytes` each way takes so long at each machine, s."""
    pass_s = sum(by_host) + (line.seconds(n_bytes) if n_bytes else 0.0)
    return n / max(pass_s, n_flights * max(by_host), 8e-6 * n_flights * n_bytes / line.mbit_s)


@contextmanager
def fleet_over(name: str, model: Path, folder: Path, cores: Sequence[int]) -> Iterator[tuple[HomeLlama, list[int]]]:
    """Yield a fleet over one of LINES, and the processes that a flight needs."""
    load = wire.Load(model_path=str(model), n_ctx=512, n_cells=4096, n_threads=1, n_gpu_layers=0, speculate=False)
    plan, line = ALONE if name == AT_HOME else SHARED, LINES[name]
    hosts = LocalHosts(cpus=cores[1:]) if line is None else RelayedHosts(line, cores[:1], cores[1:])
    llama = None
    try:
        llama = HomeLlama(load, ends_of(plan, model, folder), AbortFlag(), hosts.open)
        pids = [os.getpid(), *llama.host_pids.values()]
        yield llama, pids if isinstance(hosts, LocalHosts) else pids + hosts.pids()
    finally:
        if llama is not None:
            llama.close()
        hosts.close()


@dataclass
class Waits:
    """For how long processes were ready and had no processor, all their threads together, since `begin`.

    The first one is home, the second one its host.
    """

    pids: Sequence[int]
    _before: float = 0.0
    _cpu_before: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Count from now on."""
        self._before, self._cpu_before = self._all(), self._cpu_s()

    def seconds(self) -> float:
        """Return the time since then, s; 0 where the kernel does not say."""
        return self._all() - self._before

    def cpu_s(self) -> list[float]:
        """Return the processor time of home and of the host, if there is one, since then, s."""
        return [now - before for now, before in zip(self._cpu_s(), self._cpu_before, strict=True)]

    def _cpu_s(self) -> list[float]:
        return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in self.pids[:2]]

    def _all(self) -> float:
        tasks = (task for pid in self.pids for task in Path(f"/proc/{pid}/task").glob("*"))
        return sum(map(waited_s, tasks))


def line_runs(name: str, model: Path, folder: Path, cores: Sequence[int]) -> Iterator[LineRun]:
    """Yield what each of LOADS gives over one of LINES."""
    with fleet_over(name, model, folder, cores) as (llama, pids):
        measured, waits = Measured(llama, model, folder), Waits(pids)
        for n in LOADS:
            ways = EveryWay()

            def begin(ways: EveryWay = ways) -> None:
                ways.all_s.clear()
                waits.begin()

            for host in llama.hosts.values():
                assert host.link is not None
                host.link.ways = ways
            played = measured.play(n, begin)
            waited = waits.seconds() / played.seconds
            line, row_bytes = LINES[name] or SlowLine(), 4 * llama.n_embd
            bound, compute_s = rate_bound(n, played.usage, line, row_bytes)
            n_flights = min(n, FLIGHTS) if llama.hosts else 1
            flights = n_flights * played.seconds * played.tokens_per_s / n
            n_bytes = row_bytes * n / n_flights if llama.hosts else 0.0
            quiet = allowed(n, [cpu_s / flights for cpu_s in waits.cpu_s()], n_flights, n_bytes, line)
            way_s = statistics.median(ways.all_s) if ways.all_s else 0.0
            yield LineRun(n, played.tokens_per_s, bound, compute_s, way_s, waited, quiet)


def line_costs(model: Path, folder: Path, cores: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return what each load gives by the line; medians of runs in turn."""
    found: dict[tuple[str, int], list[LineRun]] = {}
    for number in range(repeats):
        for name in LINES:
            for run in line_runs(name, model, folder, cores):
                found.setdefault((name, run.n), []).append(run)
        progress(f"run {number + 1} of {repeats}")
    return {"lines": [line_figures(name, n, runs, found[AT_HOME, n]) for (name, n), runs in found.items()]}


def line_figures(name: str, n: int, runs: Sequence[LineRun], at_home: Sequence[LineRun]) -> dict[str, Any]:
    """Return the medians of some runs over a line; of the ratio to home alone those of runs beside each other."""

    def median(of: Callable[[LineRun], float]) -> float:
        return statistics.median(map(of, runs))

    pairs = zip(runs, at_home, strict=True)
    return {
        "line": name,
        "answers": n,
        "tokens_per_s": median(lambda run: run.tokens_per_s),
        "bound": median(lambda run: run.bound),
        "of_bound": median(lambda run: run.tokens_per_s / run.bound),
        "of_home_alone": statistics.median(run.tokens_per_s / home.tokens_per_s for run, home in pairs),
        "round_s": median(lambda run: run.n / run.tokens_per_s),
        "compute_s": median(lambda run: run.compute_s),
        "way_s": median(lambda run: run.way_s),
        "way_share": median(lambda run: run.way_share),
        "waited": median(lambda run: run.waited),
        "quiet": median(lambda run: run.quiet),
        "quiet_of_home_alone": median(lambda run: run.quiet) / statistics.median(run.quiet for run in at_home),
    }


def line_lines(found: dict[str, Any]) -> list[str]:
    """Return as text what lines cost."""
    columns = (
        "answers",
        "token/s",
        "bound",
        "of bound",
        "of home",
        "round ms",
        "compute",
        "way",
        "on way",
        "waited",
        "quiet",
        "of home",
    )
    lines = [f"{'line to the host':24}" + "".join(f"{name:>10}" for name in columns)]
    for one in found["lines"]:
        cells = (
            f"{one['answers']}", f"{one['tokens_per_s']:.1f}", f"{one['bound']:.1f}", f"{one['of_bound']:.0%}",
            f"{one['of_home_alone']:.2f}", *(f"{1000 * one[key]:.1f}" for key in ("round_s", "compute_s", "way_s")),
            f"{one['way_share']:.0%}", f"{one['waited']:.0%}", f"{one['quiet']:.1f}",
            f"{one['quiet_of_home_alone']:.2f}",
        )  # fmt: skip
        lines.append(f"{one['line']:24}" + "".join(f"{cell:>10}" for cell in cells))
    lines.append("quiet: the bound by processor time, of machines that do nothing else; relays' time is not in it")
    if any(one["waited"] > QUIET for one in found["lines"]):
        lines.append(
            "NOT JUDGED: the processes waited for a processor (waited), so compute and way are others' as well"
        )
    return lines

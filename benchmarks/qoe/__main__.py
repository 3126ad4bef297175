"""Our token scheduler live: readers' quality of experience (QoE) on a real engine under load. Andes' Figs. 10 and 12.

The same requests come at the same times, open loop (a late server does not slow them), to our engine with the scheduler
andes, to our engine with fcfs, and to llama.cpp's own llama-server; one after the other, since they share the cores.
With `--servers` also by the rule of Andes' paper. Loads are multiples of what our engine serves with fcfs, measured
first. Every reader takes 4.8 token/s and expects the first token after 1 s; a QoE (Eq. 1 of Andes, Liu et al. 2024,
arXiv 2404.16283) is of the tokens' arrivals at the client since the moment the request was due. An answer that is
refused or breaks off has QoE 0.

Our engine knows the reader's pace; no handoff is possible, so the daemon holds nothing back. All have one KV cache of
the same size. A scheduler has something to decide only where that cache does not hold all answers there are, and gains
most where those that it holds come faster than they are read: with `n_cells` / 160 answers at a time well below
capacity x 20 s. The queue of an overloaded server grows as long as the run does, and gains in QoE with it: a point is
short here, minutes in the paper. `python -m benchmarks.qoe --simulate` is at the paper's scale.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import tomlkit

from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.bench.engine_chats import story
from disco_daemon.bench.streamed import Door, StreamedAnswer, ask, at_rest, device_state
from disco_daemon.models.default import fetch_default_model
from disco_daemon.simulate.figures import require_plots
from disco_daemon.system.program import verb

from .. import llama_server
from ..command import positive, run_script
from . import report
from . import simulation as simulated
from .figures import FCFS, PACE_TPS, PAPER, PEER, Curve, Served, measure, rate_between, summary, table
from .requests import ANSWER, PROMPT, SERVERS, Request, Setup, workload

N_CTX = 1024  # of one of our answers with its prompt, tokens
PEER_CELLS = 256  # of ours for each of llama-server's slots: as many answers as fit on average

N_CALIBRATION, IN_FLIGHT = 400, 40  # requests at most, and at a time: more than the KV cache holds
CALIBRATION_S, RAMP_S = 60.0, 12.0  # how long they are sent, and how much of that does not count
REQUEST_S = 1200.0  # one answer, s: none fails for having waited
LEAD_S = 0.2  # before the first request of a point is due, s

Progress = Callable[[str], None]


# --- one point --------------------------------------------------------------------------------------------------------


async def play(door: Door, requests: Sequence[Request]) -> list[Served]:
    """Send each request when it is due, however many are under way, and hear all answers to their ends."""
    begin = time.perf_counter() + LEAD_S
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_one(door, request, begin + request.at_s)) for request in requests]
    return [task.result() for task in tasks]


async def _one(door: Door, request: Request, due: float) -> Served:
    heard = StreamedAnswer()
    await asyncio.sleep(due - time.perf_counter())
    try:
        await ask(door, request.chat, request.max_tokens, heard)
    except (BenchError, aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Served(due, heard, str(error) or type(error).__name__)
    return Served(due, heard, None if heard.times else "an answer without text")


# --- capacity ---------------------------------------------------------------------------------------------------------


async def measure_capacity(door: Door, requests: Sequence[Request]) -> float:
    """Requests/s that a server answers with IN_FLIGHT of them at all times; their own times do not matter.

    An answer counts by the share of its tokens that came after RAMP_S. Raises BenchError where nothing came in time.
    """
    todo, heard = iter(requests), list[StreamedAnswer]()
    begin = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(_keep_asking(door, todo, heard, begin + CALIBRATION_S))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    # Where the requests were used up before their time, what counts ends with the last of them.
    end = begin + CALIBRATION_S if next(todo, None) else min(begin + CALIBRATION_S, max(h.sent for h in heard))
    found = rate_between(heard, begin + min(RAMP_S, (end - begin) / 3), end)
    if not found:
        msg = f"{door.name}: no tokens came within {CALIBRATION_S:g} s"
        raise BenchError(msg)
    return found


async def _keep_asking(door: Door, todo: Iterator[Request], heard: list[StreamedAnswer], until: float) -> None:
    """One request after the other."""
    while time.perf_counter() < until and (request := next(todo, None)) is not None:
        heard.append(await ask(door, request.chat, request.max_tokens))


# --- all of it --------------------------------------------------------------------------------------------------------


async def bench_qoe(setup: Setup, progress: Progress) -> dict[str, Any]:
    """Run it all. Raises BenchError."""
    if PEER in setup.servers:
        llama_server.require()
    model = setup.model
    if model is None:
        model = await asyncio.to_thread(fetch_default_model, progress)
    try:
        async with _doors(setup, model, progress) as doors:
            capacity = await _capacity(doors, setup, progress)
            curves = await measure_curves(doors, setup, capacity, progress)
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        msg = f"the measurement broke off: {error!r}"
        raise BenchError(msg) from error
    host = {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()}
    peer = llama_server.peer() if PEER in setup.servers else None
    settings = {"threads": setup.n_threads, "n_cells": setup.n_cells, "seed": setup.seed, "model": model.name}
    return summary(curves) | {"capacity_rps": capacity, "curves": curves, "peer": peer, "host": host, **settings}


async def _capacity(doors: Mapping[str, Door], setup: Setup, progress: Progress) -> float:
    """Our engine's with fcfs; the first server's if that is not asked for."""
    for door in doors.values():  # what is loaded, compiled and mapped at the first request
        await ask(door, story(N_CALIBRATION - 1), 2)
    if setup.capacity_rps:
        return setup.capacity_rps
    door = doors.get(FCFS) or next(iter(doors.values()))
    progress(f"capacity: {IN_FLIGHT} answers at a time of {door.name}, about {CALIBRATION_S * 1.5:.0f} s")
    found = await measure_capacity(door, workload(setup, "poisson", 1.0, N_CALIBRATION, 0))
    progress(f"capacity: {found:.2f} requests/s")
    return found


async def measure_curves(
    doors: Mapping[str, Door], setup: Setup, capacity_rps: float, progress: Progress
) -> list[Curve]:
    """A point for each server, load and kind of arrivals; which server goes first changes from load to load."""
    n = setup.n_requests or max(10, round(setup.point_s * capacity_rps))
    curves: list[Curve] = []
    begin = time.perf_counter()
    for i, (arrivals, load) in enumerate(itertools.product(setup.arrivals, setup.loads)):
        rate = load * capacity_rps
        requests = workload(setup, arrivals, rate, n, N_CALIBRATION + i * n)
        head = {"arrivals": arrivals, "load": load, "rate_rps": rate}
        turn = i % len(setup.servers)
        for name in (*setup.servers[turn:], *setup.servers[:turn]):
            curves.append({"scheduler": name, **head, **await _point(doors[name], requests)})
            left_s = (time.perf_counter() - begin) / len(curves) * (setup.n_points - len(curves))
            progress(f"{_line_of(curves[-1])}; {len(curves)} of {setup.n_points}, about {left_s / 60:.1f} min left")
    return curves


async def _point(door: Door, requests: Sequence[Request]) -> Curve:
    """Measure a point; of ours also the preemptions of a request, and the lag of the daemon's loop, ms."""
    if door.name == PEER:
        return measure(await play(door, requests))
    before = device_state(await at_rest(door)).get("preemptions") or 0
    point = measure(await play(door, requests))
    state = await at_rest(door)
    n_preempted = (device_state(state).get("preemptions") or 0) - before
    lag_ms = (state.get("loop_lag_ms") or {}).get("p99")
    return point | {"preemptions_per_request": n_preempted / len(requests), "loop_lag_ms_p99": lag_ms}


def _line_of(c: Curve) -> str:
    failed = f", {c['failed']} failed" if c["failed"] else ""
    return (
        f"{c['scheduler']}, {c['arrivals']} at {c['load']:g} x capacity: QoE {c['qoe_mean']:.3f}, "
        f"first token {c['ttft_p50_s']:.2f} s, {c['throughput_tps']:.0f} token/s{failed}"
    )


@asynccontextmanager
async def _doors(setup: Setup, model: Path, progress: Progress) -> AsyncIterator[dict[str, Door]]:
    """Run all servers, and open a door to each; those that are not asked meanwhile do nothing."""
    # It has no swap, so that all its slots have room for the longest answer: about twice our cells, and nothing fails.
    n_slots = max(1, setup.n_cells // PEER_CELLS)
    options = llama_server.Options(
        n_ctx=n_slots * (PROMPT[3] + ANSWER[3]), n_parallel=n_slots, n_threads=setup.n_threads, kv_unified=True
    )
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-qoe-")))
        doors = {}
        for name in setup.servers:
            argv = llama_server.argv(model, options) if name == PEER else _up(folder, name, setup, model)
            url = await stack.enter_async_context(child(argv, folder, name))
            doors[name] = Door(name, url, await stack.enter_async_context(_session(name)))
            progress(f"{name}: {url}, {setup.n_threads} threads")
        yield doors


def _session(name: str) -> aiohttp.ClientSession:
    """A client of a server; it tells ours in each request how fast its reader reads."""
    more: dict[str, Any] = {} if name == PEER else {"disco": {"delivery": "reserve", "pace_tps": PACE_TPS}}
    # A connection for each request: llama-server closes those it finds idle, and whatever is under way on them.
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_S),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        read_bufsize=2**20,
        json_serialize=lambda body: msgspec.json.encode(body | more).decode(),
    )


def _up(folder: Path, scheduler: str, setup: Setup, model: Path) -> list[str]:
    config = folder / f"{scheduler}.toml"
    device = {"n_ctx": min(N_CTX, setup.n_cells), "n_cells": setup.n_cells, "scheduler": scheduler}
    config.write_text(tomlkit.dumps({"device": device}), encoding="utf-8")
    return [
        *verb("up"), "--port", "0", "--json", "--until-eof", "--config", str(config),
        "--history", str(folder / f"{scheduler}.sqlite"), "--model", str(model), "--threads", str(setup.n_threads),
        "--device-only", "--policy", "all-device", "--log-level", "warning",
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Live, or simulated; progress goes to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.qoe",
        description="Poisson and bursty arrivals up to twice the capacity: our scheduler, first come first served, and "
        "llama-server. With --simulate in a simulation at the scale of Andes' paper, with the same scheduler code.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--simulate", action="store_true", help="simulate the paper's setting; nothing is started")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="with --simulate: lengths of the Azure trace there")
    parser.add_argument("--requests", type=at_least(20), help="requests of each point; more of them, a longer queue")
    parser.add_argument(
        "--shares",
        type=partial(_loads, below=1.0),
        metavar="X,Y",
        default=(),
        help="with --simulate: also andes with these shares of the readers who may be made to stand still",
    )
    parser.add_argument("--blind", action="store_true", help="with --simulate: also andes that expects no lengths")
    parser.add_argument("--loads", type=_loads, metavar="X,Y", help="multiples of capacity (default: up to 2)")
    parser.add_argument("--arrivals", choices=("poisson", "gamma"), help="one kind of arrivals (default: both)")
    parser.add_argument(
        "--servers", type=_servers, metavar="X,Y",
        help=f"live: some of {', '.join(SERVERS)} (default: all but {PAPER})",
    )  # fmt: skip
    parser.add_argument("--cells", type=at_least(512), help="live: tokens in each server's KV cache (default: 1024)")
    parser.add_argument(
        "--capacity", type=positive, metavar="RPS", help="live: requests/s at load 1 (default: measured)"
    )
    parser.add_argument("--seed", type=at_least(0), help="of lengths and arrivals (default: 1)")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="with --simulate: draw the figures there")
    args = parser.parse_args(argv)
    if args.simulate:
        return _simulate(args)
    usual = Setup()
    setup = Setup(
        loads=args.loads or usual.loads,
        n_requests=args.requests or usual.n_requests,
        arrivals=(args.arrivals,) if args.arrivals else usual.arrivals,
        servers=args.servers or usual.servers,
        n_cells=args.cells or usual.n_cells,
        capacity_rps=args.capacity or usual.capacity_rps,
        seed=usual.seed if args.seed is None else args.seed,
    )
    return print_figures(run_measurement(bench_qoe(setup, progress)), table, as_json=args.json)


def _simulate(args: argparse.Namespace) -> int:
    if args.plots:
        require_plots()
    loads = sorted(set(args.loads or simulated.LOADS))
    schedulers = (*simulated.SCHEDULERS, *(f"{simulated.OURS}@{share:g}" for share in args.shares))
    schedulers += tuple(name + simulated.BLIND for name in schedulers if args.blind and name.startswith(simulated.OURS))
    settings = [one for one in simulated.SETTINGS if args.arrivals in (None, one[1])]
    n_points, done = simulated.n_points(len(settings), len(loads), len(schedulers)), 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(f"{done} of {n_points} points")

    lengths = simulated.azure_lengths(args.traces) if args.traces else None
    n_requests, seeds = args.requests or simulated.N_REQUESTS, simulated.SEEDS if args.seed is None else (args.seed,)
    figures = simulated.simulate_qoe(
        lengths, settings=settings, loads=loads, schedulers=schedulers, n_requests=n_requests, seeds=seeds, tick=tick
    )
    if args.plots:
        for path in report.draw_serving(figures, args.plots):
            progress(f"drew {path}")
    return print_figures(figures, report.summary, as_json=args.json)


def _servers(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(SERVERS) or len(set(names)) < len(names):
        msg = f"must be some of {', '.join(SERVERS)}, each once"
        raise argparse.ArgumentTypeError(msg)
    return names


def _loads(text: str, below: float = 10.0) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number <= below for number in numbers):
        msg = f"must be like 0.8,0.9: each above 0, and at most {below:g}"
        raise argparse.ArgumentTypeError(msg)
    return numbers


if __name__ == "__main__":
    sys.exit(run_script(main))

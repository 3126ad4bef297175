"""`disco bench`: what this machine, and the daemon on it, can do."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Coroutine
from typing import Any

ROWS = (
    ("first token, direct, p50", "direct_ttft_ms_p50", "ms"),
    ("added by the daemon, p50", "added_ttft_ms_p50", "ms"),
    ("added by the daemon, p99", "added_ttft_ms_p99", "ms"),
    ("concurrent streams", "streams", ""),
    ("throughput, direct", "direct_tokens_per_s", "token/s"),
    ("throughput, through the daemon", "tokens_per_s", "token/s"),
    ("the daemon's time for a token", "daemon_us_per_token", "us"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `disco bench` and its measurements."""
    parser = subparsers.add_parser("bench", help="measure this machine", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    relay = kinds.add_parser(
        "relay",
        help="what the daemon adds to a server's first token, and its throughput",
        description="Ask a scripted local server directly and through a daemon of its own, pair by pair.",
    )
    relay.add_argument("--json", action="store_true", help="print one JSON document")
    relay.add_argument("--n", type=_count(2), default=200, help="pairs of requests (default: %(default)s)")
    relay.add_argument("--streams", type=_count(1), default=50, help="concurrent streams (default: %(default)s)")
    relay.add_argument("--tokens", type=_count(1), default=200, help="tokens of each stream (default: %(default)s)")
    relay.set_defaults(run=run)
    policy = kinds.add_parser(
        "policy",
        help="what fitting a policy, one plan and one update cost",
        description="Time the scheduler's own work; the paper's figures are printed beside ours.",
    )
    policy.add_argument("--json", action="store_true", help="print one JSON document")
    policy.add_argument("--plots", metavar="DIR", help="draw refit time against samples, beside the published figures")
    policy.add_argument("--repeat", type=_count(3), default=51, help="fits of each size (default: %(default)s)")
    policy.set_defaults(run=run_policy)
    _add_handoff(kinds)
    _add_delivery(kinds)
    _add_engine(kinds)
    _add_qoe(kinds)
    _add_money(kinds)
    soak = kinds.add_parser(
        "soak",
        help="many clients and a fault every two seconds: what is promised holds, and nothing is left behind",
        description="Two daemons with one model, a proxy between them that breaks connections, engines that are killed "
        "and stopped, crowds, reloads; every answer is compared with the one that nothing has disturbed.",
    )
    soak.add_argument("--json", action="store_true", help="print one JSON document")
    soak.add_argument("--minutes", type=_minutes, default=30.0, help="(default: %(default)g)")
    soak.add_argument("--clients", type=_count(1), default=5, help="at a time (default: %(default)s)")
    soak.add_argument("--seed", type=int, default=1, help="of what is asked and what breaks (default: %(default)s)")
    soak.set_defaults(run=run_soak)


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= 24 * 60:
        raise argparse.ArgumentTypeError("must be above 0, and at most a day")
    return value


def _add_money(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    money = kinds.add_parser(
        "money",
        help="the ledger against a server's own meter, under a cap, and after kill -9",
        description="A metering server, many clients at once, some of whom leave; a cap; kill -9 at random moments.",
    )
    money.add_argument("--json", action="store_true", help="print one JSON document")
    money.add_argument("--requests", type=_count(20), default=1000, help="(default: %(default)s)")
    money.add_argument("--clients", type=_count(1), default=20, help="at a time (default: %(default)s)")
    money.add_argument("--kills", type=_count(0), default=20, help="(default: %(default)s)")
    money.set_defaults(run=run_money)


def _add_handoff(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from pathlib import Path

    handoff = kinds.add_parser(
        "handoff",
        help="move real answers between a real engine and a real server",
        description="Text, flow and cost of answers that move in mid-stream, both ways; another disco is the server.",
    )
    handoff.add_argument("--json", action="store_true", help="print one JSON document")
    handoff.add_argument("--count", type=_count(1), default=40, help="handoffs each way (default: %(default)s)")
    handoff.add_argument(
        "--method", default="token_ids", choices=("token_ids", "continue_final_message", "assistant", "prefix"),
        help="how the server is asked to continue (default: %(default)s)",
    )  # fmt: skip
    handoff.add_argument(
        "--server", default="disco", metavar="disco|llama-server|URL", help="the other side (default: %(default)s)"
    )
    handoff.add_argument("--server-model", type=Path, metavar="GGUF", help="another model on the server's side")
    handoff.add_argument("--shape-ttft", type=Path, metavar="CSV", help="replay a trace's TTFTs at the server")
    handoff.add_argument("--concurrent", type=_count(1), default=1, help="answers at a time (default: %(default)s)")
    handoff.add_argument("--delivery", default="paced", choices=("paced", "reserve"), help="(default: %(default)s)")
    handoff.add_argument("--way", choices=("to_device", "to_server"), help="one direction only")
    handoff.add_argument(
        "--live", type=_count(0), default=12, help="answers that show the saving (default: %(default)s)"
    )
    handoff.set_defaults(run=run_handoff)


def _add_delivery(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    delivery = kinds.add_parser(
        "delivery",
        help="what the token buffer costs: pass-through, pacing, jitter",
        description="Time the token buffer on a real event loop, beside a plain queue and a task for each stream.",
    )
    delivery.add_argument("--json", action="store_true", help="print one JSON document")
    delivery.set_defaults(run=run_delivery)


def _add_engine(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    engine = kinds.add_parser(
        "engine",
        help="the device against llama.cpp's own llama-server: speed of prompts and answers",
        description="Same model, threads, prompts and client on both sides, in turns. Needs the wheel xllamacpp.",
    )
    engine.add_argument("--json", action="store_true", help="print one JSON document")
    engine.add_argument("--repeats", type=_count(1), default=5, help="turns (default: %(default)s)")
    engine.add_argument("--threads", type=int, default=0, help="of both sides (default: one fewer than the cores)")
    engine.set_defaults(run=run_engine)


def _add_qoe(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from pathlib import Path

    qoe = kinds.add_parser(
        "qoe",
        help="quality of experience when more readers come than the device can serve",
        description="Poisson and bursty arrivals up to twice the capacity: our scheduler, first come first served, and "
        "llama-server. With --simulate in a simulation at the scale of Andes' paper, with the same scheduler code.",
    )
    qoe.add_argument("--json", action="store_true", help="print one JSON document")
    qoe.add_argument("--simulate", action="store_true", help="simulate the paper's setting; nothing is started")
    qoe.add_argument("--traces", type=Path, metavar="DIR", help="with --simulate: lengths of the Azure trace there")
    qoe.add_argument("--requests", type=_count(20), help="requests of each point; more of them, a longer queue")
    qoe.add_argument("--loads", type=_loads, metavar="X,Y", help="multiples of capacity (default: up to 2)")
    qoe.add_argument("--arrivals", choices=("poisson", "gamma"), help="live: one kind of arrivals (default: both)")
    qoe.add_argument("--cells", type=_count(512), help="live: tokens in each server's KV cache (default: 1024)")
    qoe.add_argument("--capacity", type=_rate, metavar="RPS", help="live: requests/s at load 1 (default: measured)")
    qoe.add_argument("--seed", type=_count(0), help="of lengths and arrivals (default: 1)")
    qoe.add_argument("--plots", type=Path, metavar="DIR", help="with --simulate: draw the figures there")
    qoe.set_defaults(run=run_qoe)


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(map(float, text.split(",")))
    except ValueError:
        loads = ()
    if not loads or not all(0 < load <= 10 for load in loads):
        raise argparse.ArgumentTypeError("must be like 0.8,1,2: each above 0, and at most 10")
    return loads


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return rate


def run(args: argparse.Namespace) -> int:
    """Measure and print; progress goes to stderr."""
    from disco_daemon.bench.relay import bench_relay

    figures = _measured(bench_relay(n=args.n, streams=args.streams, tokens=args.tokens, progress=_progress))
    return _told(figures, table, as_json=args.json)


def run_handoff(args: argparse.Namespace) -> int:
    """Move answers; progress goes to stderr."""
    from disco_daemon.bench.handoff import Setup, bench_handoff, table

    setup = Setup(
        args.count, args.method, args.server, args.server_model, args.shape_ttft, args.concurrent, args.delivery,
        args.live, (args.way,) if args.way else ("to_device", "to_server"),
    )  # fmt: skip
    figures = _measured(bench_handoff(setup, _progress))
    return _told(figures, table, as_json=args.json)


def run_delivery(args: argparse.Namespace) -> int:
    """Time the token buffer in this process."""
    import asyncio

    from disco_daemon.bench.delivery import bench_delivery, table

    figures = asyncio.run(bench_delivery(progress=_progress))
    print(json.dumps(figures) if args.json else table(figures))
    return 0


def run_engine(args: argparse.Namespace) -> int:
    """Both servers in turns; progress goes to stderr."""
    from disco_daemon.bench.engine import Setup, bench_engine, table

    figures = _measured(bench_engine(Setup(repeats=args.repeats, threads=args.threads), _progress))
    return _told(figures, table, as_json=args.json)


def run_money(args: argparse.Namespace) -> int:
    """Ask, cap and kill; progress goes to stderr."""
    from disco_daemon.bench.money import Setup, bench_money, table

    setup = Setup(args.requests, args.clients, args.kills)
    return _told(_measured(bench_money(setup, _progress)), table, as_json=args.json)


def run_soak(args: argparse.Namespace) -> int:
    """Break things; progress goes to stderr. 1 where a promise was broken."""
    from disco_daemon.bench.soak import Setup, bench_soak, table

    figures = _measured(bench_soak(Setup(args.minutes, args.clients, seed=args.seed), _progress))
    code = _told(figures, table, as_json=args.json)
    return code or int(bool(figures and figures["broken"]))


def run_qoe(args: argparse.Namespace) -> int:
    """Live, or simulated; progress goes to stderr."""
    if args.simulate:
        return _simulate_qoe(args)
    from disco_daemon.bench.qoe import Setup, bench_qoe, table

    usual = Setup()
    setup = Setup(
        loads=args.loads or usual.loads,
        n_requests=args.requests or usual.n_requests,
        arrivals=(args.arrivals,) if args.arrivals else usual.arrivals,
        n_cells=args.cells or usual.n_cells,
        capacity_rps=args.capacity or usual.capacity_rps,
        seed=usual.seed if args.seed is None else args.seed,
    )
    figures = _measured(bench_qoe(setup, _progress))
    return _told(figures, table, as_json=args.json)


def _simulate_qoe(args: argparse.Namespace) -> int:
    from disco_daemon.simulate.figures import require_plots
    from disco_daemon.simulate.scheduler import qoe
    from disco_daemon.simulate.scheduler.report import draw_serving, summary

    if args.plots:
        require_plots()
    loads = sorted(set(args.loads or qoe.LOADS))
    n_points, done = qoe.n_points(loads=len(loads)), 0

    def tick() -> None:
        nonlocal done
        done += 1
        _progress(f"{done} of {n_points} points")

    lengths = qoe.azure_lengths(args.traces) if args.traces else None
    n_requests, seeds = args.requests or qoe.N_REQUESTS, qoe.SEEDS if args.seed is None else (args.seed,)
    figures = qoe.simulate_qoe(lengths, loads=loads, n_requests=n_requests, seeds=seeds, tick=tick)
    if args.plots:
        for path in draw_serving(figures, args.plots):
            _progress(f"drew {path}")
    print(json.dumps(figures) if args.json else summary(figures))
    return 0


def _told(figures: dict[str, Any] | None, table: Callable[[dict[str, Any]], str], *, as_json: bool) -> int:
    """Print what was measured; the exit code."""
    if figures is None:
        return 1
    print(json.dumps(figures) if as_json else table(figures))
    return 0


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measured(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """Run a measurement that has children; none of them outlives this process. None when it was ended by SIGTERM."""
    import asyncio
    import signal

    async def measure() -> dict[str, Any] | None:
        task = asyncio.ensure_future(work)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    figures = asyncio.run(measure())
    if figures is None:
        _progress("ended by SIGTERM")
    return figures


def run_policy(args: argparse.Namespace) -> int:
    """Time the pure core in this process."""
    from pathlib import Path

    from disco_daemon.bench.policy import bench_policy, policy_table
    from disco_daemon.simulate.dispatch import report
    from disco_daemon.simulate.figures import require_plots

    if args.plots:
        require_plots()
    figures = bench_policy(args.repeat)
    if args.plots:
        print(f"drew {report.draw_overhead(figures, Path(args.plots))}", file=sys.stderr)
    print(json.dumps(figures) if args.json else policy_table(figures))
    return 0


def table(figures: dict[str, Any]) -> str:
    """Return the figures as aligned rows, and the machine they are from."""
    width = max(len(label) for label, _, _ in ROWS)
    lines = []
    for label, key, unit in ROWS:
        value = figures[key]
        number = f"{value:,.2f}" if unit == "ms" else f"{value:,.0f}"
        lines.append(f"{label:<{width}}  {number:>10} {unit}".rstrip())
    host = figures["host"]
    lines.append(f"{figures['n']} pairs, Python {host['python']}, {host['cpus']} CPUs, {host['platform']}")
    return "\n".join(lines)


def _count(least: int) -> Any:
    """Return an argument type: an integer of at least `least`."""

    def count(text: str) -> int:
        value = int(text)
        if value < least:
            msg = f"must be at least {least}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return count

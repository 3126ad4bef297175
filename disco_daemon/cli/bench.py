"""`disco bench`: what this machine, and the daemon on it, can do."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

ROWS = (
    ("first token, direct, p50", "direct_ttft_ms_p50", "ms"),
    ("added by the daemon, p50", "added_ttft_ms_p50", "ms"),
    ("added by the daemon, p99", "added_ttft_ms_p99", "ms"),
    ("concurrent streams", "streams", ""),
    ("throughput, direct", "direct_tokens_per_s", "token/s"),
    ("throughput, through the daemon", "tokens_per_s", "token/s"),
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


def run(args: argparse.Namespace) -> int:
    """Measure and print; progress goes to stderr."""
    import asyncio
    import signal

    from disco_daemon.bench.relay import bench_relay

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    async def measure() -> dict[str, Any] | None:
        task = asyncio.ensure_future(bench_relay(n=args.n, streams=args.streams, tokens=args.tokens, progress=progress))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # no child outlives this process
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    figures = asyncio.run(measure())
    if figures is None:
        progress("ended by SIGTERM")
        return 1
    print(json.dumps(figures) if args.json else table(figures))
    return 0


def run_policy(args: argparse.Namespace) -> int:
    """Time the pure core in this process."""
    from pathlib import Path

    from disco_daemon.bench.policy import bench_policy, policy_table
    from disco_daemon.simulate import report

    if args.plots:
        report.require_plots()
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

"""`disco bench`: what this machine, and the daemon on it, can do."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..bench.command import at_least, print_figures, progress, run_measurement
from .terminal import moved

ROWS = (
    ("first token, direct, p50", "direct_ttft_ms_p50", "ms"),
    ("added by the daemon, p50", "added_ttft_ms_p50", "ms"),
    ("added by the daemon, p99", "added_ttft_ms_p99", "ms"),
    ("concurrent streams", "streams", ""),
    ("throughput, direct", "direct_tokens_per_s", "token/s"),
    ("throughput, through the daemon", "tokens_per_s", "token/s"),
    ("the daemon's CPU time for a request", "daemon_ms_per_request", "ms"),
    ("the daemon's CPU time for a token", "daemon_us_per_token", "us"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `disco bench` and its measurements."""
    parser = subparsers.add_parser("bench", help="measure this machine", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    _add_relay(kinds)
    _add_engine(kinds)
    _add_soak(kinds)


def _add_relay(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    relay = kinds.add_parser(
        "relay",
        help="what the daemon adds to a server's first token, and its throughput",
        description="Ask a scripted local server directly and through a daemon of its own, pair by pair.",
    )
    relay.add_argument("--json", action="store_true", help="print one JSON document")
    relay.add_argument("--n", type=at_least(2), default=200, help="pairs of requests (default: %(default)s)")
    relay.add_argument("--streams", type=at_least(1), default=50, help="concurrent streams (default: %(default)s)")
    relay.add_argument("--tokens", type=at_least(1), default=200, help="tokens of each stream (default: %(default)s)")
    relay.add_argument("--shape", action="store_true", help="also measure each API that answers have; --json has them")
    relay.set_defaults(run=run)


def _add_engine(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    engine = kinds.add_parser(
        "engine",
        help="how fast the device reads prompts and writes answers",
        description="Time the embedded model in a daemon of its own: answers at a time, first tokens, and how long a "
        "long prompt holds up those that run. From a checkout, `python -m benchmarks.engine` compares with "
        "llama-server.",
    )
    engine.add_argument("--json", action="store_true", help="print one JSON document")
    engine.add_argument("--repeats", type=at_least(1), default=5, help="turns (default: %(default)s)")
    engine.add_argument("--threads", type=int, default=0, help="(default: one fewer than the cores)")
    engine.set_defaults(run=run_engine)


def _add_soak(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    # For one release the name says where it went. Without a help text no list shows it; without a prefix for options it
    # takes whatever it took before.
    soak = kinds.add_parser("soak", add_help=False, prefix_chars="\0")
    soak.add_argument("words", nargs="*")
    soak.set_defaults(run=run_soak)


def run(args: argparse.Namespace) -> int:
    """Measure and print; progress goes to stderr."""
    from disco_daemon.bench.relay import bench_relay

    shapes = args.shape or args.json
    figures = run_measurement(
        bench_relay(n=args.n, streams=args.streams, tokens=args.tokens, shapes=shapes, progress=progress)
    )
    return print_figures(figures, table, as_json=args.json)


def run_engine(args: argparse.Namespace) -> int:
    """Time the device; progress goes to stderr."""
    from disco_daemon.bench.engine import EngineSetup, bench_engine, table

    figures = run_measurement(bench_engine(EngineSetup(repeats=args.repeats, threads=args.threads), progress))
    return print_figures(figures, table, as_json=args.json)


def run_soak(args: argparse.Namespace) -> int:
    """Name the script that the verb has become."""
    del args
    print(f"disco: {moved('disco bench soak', 'soak')}", file=sys.stderr)
    return 2


def table(figures: dict[str, Any]) -> str:
    """Return the figures as aligned rows, and the machine they are from."""
    width = max(len(label) for label, _, _ in ROWS)
    lines = []
    for label, key, unit in ROWS:
        value = figures[key]
        number = f"{value:,.2f}" if unit == "ms" else f"{value:,.0f}"
        lines.append(f"{label:<{width}}  {number:>10} {unit}".rstrip())
    for name, shape in figures.get("shapes", {}).items():
        lines.append(f"{name}: {shape['ttft_added_ms']:.2f} ms added, {shape['us_per_token']:.1f} us a token")
    host = figures["host"]
    lines.append(f"{figures['n']} pairs, Python {host['python']}, {host['cpus']} CPUs, {host['platform']}")
    return "\n".join(lines)

"""`disco bench`: what this machine, and the daemon on it, can do."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..bench.command import at_least, print_figures, progress, run_measurement

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
# Verbs that became scripts in benchmarks/: for one release their old names say where they went.
# Kinds of measurement that are scripts of a checkout, and their modules in benchmarks/.
MOVED = {"delivery": "qoe.delivery", "handoff": "handoff", "money": "eval.money", "policy": "eval.policy", "qoe": "qoe"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `disco bench` and its measurements."""
    parser = subparsers.add_parser("bench", help="measure this machine", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    _add_relay(kinds)
    _add_engine(kinds)
    _add_soak(kinds)
    for name in MOVED:
        # Without a help text no list shows it; without a prefix for options it takes whatever it took before.
        moved = kinds.add_parser(name, add_help=False, prefix_chars="\0")
        moved.add_argument("words", nargs="*")
        moved.set_defaults(run=run_moved)


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
    soak = kinds.add_parser(
        "soak",
        help="many clients and a fault every two seconds: what is promised holds, and nothing is left behind",
        description="Two daemons with one model, a proxy between them that breaks connections, engines that are killed "
        "and stopped, crowds, reloads; every answer is compared with the one that nothing has disturbed.",
    )
    soak.add_argument("--json", action="store_true", help="print one JSON document")
    soak.add_argument("--minutes", type=_minutes, default=30.0, help="(default: %(default)g)")
    soak.add_argument("--clients", type=at_least(1), default=5, help="at a time (default: %(default)s)")
    soak.add_argument("--seed", type=int, default=1, help="of what is asked and what breaks (default: %(default)s)")
    soak.set_defaults(run=run_soak)


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= 24 * 60:
        raise argparse.ArgumentTypeError("must be above 0, and at most a day")
    return value


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
    """Break things; progress goes to stderr. 1 where a promise was broken."""
    from benchmarks.soak.run import SoakSetup, bench_soak, table

    figures = run_measurement(bench_soak(SoakSetup(args.minutes, args.clients, seed=args.seed), progress))
    code = print_figures(figures, table, as_json=args.json)
    return code or int(bool(figures and figures["broken"]))


def run_moved(args: argparse.Namespace) -> int:
    """Name the script that the verb has become."""
    print(
        f"disco: `disco bench {args.kind}` is a script now: in a checkout of the source, run "
        f"`python -m benchmarks.{MOVED[args.kind]}` with the same options",
        file=sys.stderr,
    )
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

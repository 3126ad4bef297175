"""Many clients and a fault every two seconds: what is promised holds, and nothing is left behind.

python -m benchmarks.soak [--minutes 30] [--clients 5] [--seed 1] [--json]

Two daemons with one model, a proxy between them that breaks connections, engines that are killed and stopped, crowds,
reloads; every answer is compared with the one that nothing has disturbed.
"""

from __future__ import annotations

import argparse
import sys

from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement

from ..command import run_script
from .run import SoakSetup, bench_soak, table


def main(argv: list[str] | None = None) -> int:
    """Break things; progress goes to stderr. 1 where a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--minutes", type=_minutes, default=30.0, help="(default: %(default)g)")
    parser.add_argument("--clients", type=at_least(1), default=5, help="at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what is asked and what breaks (default: %(default)s)")
    args = parser.parse_args(argv)
    figures = run_measurement(bench_soak(SoakSetup(args.minutes, args.clients, seed=args.seed), progress))
    code = print_figures(figures, table, as_json=args.json)
    return code or int(bool(figures and figures["broken"]))


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= 24 * 60:
        raise argparse.ArgumentTypeError("must be above 0, and at most a day")
    return value


if __name__ == "__main__":
    sys.exit(run_script(main))

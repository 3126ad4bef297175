"""Several servers at one daemon: nothing is lost while they fail, and many cost what one does.

    python -m benchmarks.servers [--requests 1000] [--clients 4] [--per-s 20] [--json]
    python -m benchmarks.servers --many 10 [--models 300] [--json]

One stalls, one answers 429 with Retry-After, one resets its connections in mid-answer, one is dear and fast; the first
three fall ill and heal five times. `met` is how many requests met a server that had fallen ill, each time, until it
was gone from the choice, in brackets without those that were sent before it had failed anyone; `back` is with which
request it was back, once it was well and its back-off was over. With `--many` the processor time of a request with one
[server] stands beside that with so many [[servers]], in turns.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement

from ..command import positive, run_script
from .live import PROMISED, measure
from .many import compare


def table(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    if "added_us" in figures:
        one, many = figures["cpu_us"]["one"], figures["cpu_us"]["many"]
        low, high = figures["added_us_95"]
        added = f"{figures['added_us']:+.0f} us ({low:+.0f} to {high:+.0f})"
        return f"a request takes {one:.0f} us of one server, {many:.0f} us of {figures['servers']}: {added}"
    first = figures["first_token_ms"]
    lines = [
        f"{figures['requests']} requests by {figures['clients']} clients: {figures['wrong']} lost, doubled or refused",
        f"{figures['asked_of_servers']} asked of servers, {figures['moves']} moves, {figures['hedges']} hedges",
        f"first token {first['p50']} ms, p99 {first['p99']} ms, at most {first['max']} ms",
        f"behind it silent for {figures['silence_ms']} ms at most",
        f"ledger ${figures['ledger_usd']:.6f}, meters ${figures['meter_usd']:.6f}: {figures['difference']:+.3%}",
        f"{'':10}{'asked':>6}  {'met until gone':20}{'trials':>6}  {'back with':20}{'ledger - meter, $':>18}",
    ]
    for name, one in figures["servers"].items():
        met = " ".join(f"{m}({k})" for m, k in zip(one["met"], one["met_known"], strict=True))
        back = " ".join("-" if b is None else str(b) for b in one["back"])
        lines.append(f"{name:10}{one['asked']:6}  {met:20}{one['trials']:6}  {back:20}{one['difference_usd']:+18.6f}")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; progress goes to stderr. 1 where a promise is not kept."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.servers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=at_least(40), default=1000, help="(default: %(default)s)")
    parser.add_argument("--clients", type=at_least(1), default=4, help="at a time (default: %(default)s)")
    parser.add_argument("--per-s", type=positive, default=20.0, help="requests a second (default: %(default)s)")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="times that they fall ill (default: %(default)s)")
    parser.add_argument("--many", type=at_least(2), metavar="N", help="measure what N servers cost instead")
    parser.add_argument("--models", type=at_least(1), default=300, help="of each of the many (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    if args.many:
        return print_figures(run_measurement(compare(args.many, args.models, progress)), table, as_json=args.json)
    figures = run_measurement(measure(args.requests, args.clients, args.per_s, args.rounds, progress))
    code = print_figures(figures, table, as_json=args.json)
    if figures is None:
        return code
    kept = not figures["wrong"] and figures["met_known_most"] <= PROMISED["met"]
    return 0 if kept and figures["back_most"] <= PROMISED["back"] else 1


if __name__ == "__main__":
    sys.exit(run_script(main))

"""What a second request gains by the share of answers that it is sent for, without the halves of the evaluation.

As `benchmarks.eval.constants` it reads only the halves that policies are fitted to, cuts them in two once more, fits on
one part and plays the other. Told are mean, P99 and CVaR of `optimal-hedged` against `optimal`, with intervals over
traces and the median trace, beside the prompt tokens that the server is sent again. Of the first token's distribution
no programme can choose the share: the sooner the server is asked again, the sooner the first of both answers comes, so
that the objective falls with every share. What it is worth is a matter of what a second request may cost.

python -m benchmarks.eval.hedge_share --traces DIR [--keep FILE]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.bench.command import at_least, print_figures, progress
from disco_daemon.dispatch.optimal import Optimal
from disco_daemon.simulate.figures import align
from disco_daemon.types import Side

from ..command import run_script
from ..formatting import number
from .bootstrap import interval
from .constants import ASKED, BUDGETS, SELECT, fitted_half
from .evaluate import (
    MAX_BUCKETS,
    MIN_TESTED,
    PHONES,
    EvaluationSetup,
    Scene,
    measure,
    play_policy,
)
from .kept import KeptResults, add_arguments, check_arguments, of_part
from .traces import LatencyTrace, Requests, read_requests, read_traces

SHARES = (0.04, 0.08, 0.16)
COLUMNS = (*ASKED, "asked_twice")

Cells = dict[str, list[float]]  # of each column, by budget


def of_trace(trace: LatencyTrace, seen: Requests, n_seeds: int) -> dict[str, Cells] | None:
    """Return the cells of `optimal`, as share "0", and of each share; None for a trace with few tested rows."""
    setup = EvaluationSetup(("optimal",), (PHONES[1],), (Side.DEVICE,), BUDGETS, n_seeds=n_seeds)
    found: dict[str, Cells] = {}
    for share in (0.0, *SHARES):
        scene = Scene.of(trace, seen, replace(setup, hedge_share=share))
        if scene.n_tested < MIN_TESTED:
            return None
        name = "optimal-hedged" if share else "optimal"
        played = play_policy(scene, setup.phones[0], Side.DEVICE, Optimal(max_buckets=MAX_BUCKETS), name, setup)
        cells = [
            measure(scene.stream, trace.name, setup.phones[0], Side.DEVICE, name, b, played, i, n_tested=scene.n_tested)
            for i, b in enumerate(BUDGETS)
        ]
        found[f"{share:g}"] = {column: [float(getattr(cell, column)) for cell in cells] for column in COLUMNS}
    return found


def figures_of(by_trace: Mapping[str, Mapping[str, Cells]]) -> dict[str, Any]:
    """Return what each share changes at each budget, and at all of them, %."""
    rows = []
    for share in SHARES:
        for where in ((0,), tuple(range(len(BUDGETS)))):
            changes = {
                column: [_change(found, share, column, where) for found in by_trace.values()] for column in ASKED
            }
            twice = [np.mean([found[f"{share:g}"]["asked_twice"][i] for i in where]) for found in by_trace.values()]
            rows.append({
                "share": share,
                "budgets": [BUDGETS[i] for i in where],
                "change": {column: 100 * math.expm1(statistics.fmean(logs)) for column, logs in changes.items()},
                "ci95": {c: [100 * math.expm1(end) for end in interval(logs)] for c, logs in changes.items()},
                "median": {c: 100 * math.expm1(statistics.median(logs)) for c, logs in changes.items()},
                "asked_twice": 100 * float(np.mean(twice)),
            })  # fmt: skip
    return {"rows": rows, "n_traces": len(by_trace)}


def _change(found: Mapping[str, Cells], share: float, column: str, where: Sequence[int]) -> float:
    hedged, once = found[f"{share:g}"][column], found["0"][column]
    return statistics.fmean(math.log(hedged[i] / once[i]) for i in where)


def table(figures: Mapping[str, Any]) -> str:
    """One line for each share, at the least budget and at all."""
    head = ["share", "budgets", "twice %"]
    for name in ("mean", "P99", "CVaR"):
        head += [f"{name} %", "95 %", "median %"]
    lines = []
    for row in figures["rows"]:
        line = [f"{row['share']:g}", "all" if len(row["budgets"]) > 1 else f"{row['budgets'][0]:g}"]
        line.append(number(row["asked_twice"], 1))
        for column in ASKED:
            low, high = row["ci95"][column]
            line += [number(row["change"][column], 1, "+"), f"[{low:+.1f}, {high:+.1f}]"]
            line.append(number(row["median"][column], 1, "+"))
        lines.append(line)
    return f"{align(head, lines, 2)}\nagainst optimal, fitted halves only; {figures['n_traces']} traces"


def main(argv: list[str] | None = None) -> int:
    """Read the fitted halves and play them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eval.hedge_share",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", metavar="DIR", type=Path, required=True, help="folder with CSV files")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="users of each trace (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_arguments(parser)
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    seen, _ = read_requests(args.traces).halves()
    kept = KeptResults(args.keep, {"shares": SHARES, "seeds": args.seeds})
    traces = read_traces(args.traces, SELECT)
    for trace in of_part(traces, args.part):
        if trace.label not in kept:
            kept.add(trace.label, of_trace(fitted_half(trace), seen, args.seeds))
            progress(trace.label)
    if args.part is not None:
        return 0
    found = {trace.label: kept[trace.label] for trace in traces}
    whole = {label: cells for label, cells in found.items() if cells is not None}
    return print_figures(figures_of(whole), table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

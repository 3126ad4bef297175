"""Measures how well the budget is kept while learning from nothing: traces as they are, and a regime shift.

    python -m benchmarks.eval.online_budget --traces DIR [--budgets 0.1,0.3,0.5] [--seeds 1] [--keep FILE]

Every trace is played in its order through the daemon's own planner, which sees what the daemon would see. Told, in
points of the budget ratio: the overspend of whole runs, the worst 200 requests in a row (the promise is b + 2, beyond
which only the insurance starts a side, where the other one is silent for longer than ever), and the overspend in the
500 requests after one model of GPT-4 is replaced by the other, three times as slow. With `--no-shadow` a server that
lost the race is cut off, so that its time is censored.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.arrays import FloatArray
from disco_daemon.bench.command import at_least, print_figures, progress
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.pacer import SLACK, WINDOW
from disco_daemon.simulate.figures import align
from disco_daemon.types import Side

from ..command import run_script
from .bootstrap import interval
from .evaluate import PHONES
from .kept import KeptResults, add_arguments, check_arguments, of_part
from .online import planner, play_online
from .player import Stream
from .traces import LatencyTrace, Requests, read_requests, read_traces

AFTER_SHIFT = 500
STATIONARY = "bfcl/*,llmperf/*,llmdrift/*"
SHIFT = ("gpt-4-0613", "gpt-4-0314")
SHIFTED = "shift"  # the label of its runs beside those of the traces
SHIFT_SEEDS = 3  # at least: there is one such trace only
PHONE = PHONES[-1]

Run = dict[str, Any]


def play(
    ttft_s: FloatArray, requests: Requests, args: argparse.Namespace, side: Side, budget: float, seed: int
) -> FloatArray:
    """Return offered and spent tokens of each request, and those of the spent ones that insured; [n, 3]."""
    stream = Stream.draw(ttft_s, requests, len(ttft_s), [seed])
    stream = Stream(stream.prompt, stream.output, ttft_s[:, None], stream.draws)  # in the trace's own order
    one = planner(make_policy(args.policy), side, budget, seed)
    ran, insured = [], []
    for seen in play_online(stream, 0, PHONE, one, shadow=not args.no_shadow):
        ran.append(seen.device_ran if side is Side.DEVICE else seen.server_ran)
        insured.append(seen.insured)
    offered = stream.prompt[:, 0]
    return np.stack([offered, offered * ran, offered * ran * insured], axis=1)


def over(tokens: FloatArray, budget: float) -> float:
    """Return by how much the ratio of spent to offered tokens exceeds the budget, points."""
    offered, spent, _ = tokens.sum(axis=0).tolist()
    return 100.0 * float(spent / offered - budget)


def worst_window(tokens: FloatArray, budget: float) -> tuple[float, float]:
    """Return the same of the worst 200 requests in a row, and how much of it insured, points."""
    sums = np.concatenate([np.zeros((1, 3)), tokens.cumsum(axis=0)])
    offered, spent, insured = (sums[WINDOW:] - sums[:-WINDOW]).T
    worst = int((spent / offered).argmax())
    return 100.0 * float(spent[worst] / offered[worst] - budget), 100.0 * float(insured[worst] / offered[worst])


def cases(args: argparse.Namespace) -> Iterator[tuple[Side, float]]:
    """Yield both constraints with each budget."""
    for side in Side:
        for budget in args.budgets:
            yield side, budget


def runs_of(
    ttft_s: FloatArray, requests: Requests, args: argparse.Namespace, n_seeds: int, after: int | None = None
) -> list[Run]:
    """Play one sequence of TTFTs in all cases; the overspend is of all requests, or of AFTER_SHIFT from `after` on."""
    runs = []
    for side, budget in cases(args):
        for seed in range(n_seeds):
            tokens = play(ttft_s, requests, args, side, budget, seed)
            part = tokens if after is None else tokens[after : after + AFTER_SHIFT]
            window, insured = worst_window(tokens, budget)
            runs.append({
                "side": side.value, "budget": budget, "seed": seed,
                "over": over(part, budget), "window": window, "insured": insured,
            })  # fmt: skip
    return runs


def repeat(trace: LatencyTrace, n: int) -> FloatArray:
    """Return a trace as long as `n` requests at least, around and around."""
    return np.tile(trace.ttft_s, -(-n // len(trace.ttft_s)))


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """Play all traces, or a part of them, which makes no figures."""
    requests = read_requests(args.traces)
    traces = read_traces(args.traces, args.select.split(","))
    setting = {name: getattr(args, name) for name in ("budgets", "policy", "requests", "seeds", "no_shadow")}
    kept = KeptResults(args.keep, setting)
    named = {t.name: t.ttft_s for t in read_traces(args.traces, [f"*/{name}" for name in SHIFT])}
    first, second = (named[name] for name in SHIFT)
    for label, trace in of_part([(SHIFTED, None), *((t.label, t) for t in traces)], args.part):
        if label in kept:
            continue
        if trace is None:
            n_seeds = max(SHIFT_SEEDS, args.seeds)
            kept.add(label, runs_of(np.concatenate([first, second]), requests, args, n_seeds, after=len(first)))
        else:
            kept.add(label, runs_of(repeat(trace, args.requests), requests, args, args.seeds))
        progress(f"{label}: worst 200 requests {max(run['window'] for run in kept[label]):+.2f} points over")
    if args.part is not None:
        return None
    return figures_of({trace.label: kept[trace.label] for trace in traces}, kept[SHIFTED])


def figures_of(by_trace: Mapping[str, Sequence[Run]], shifted: Sequence[Run]) -> dict[str, Any]:
    """Return the figures by what is constrained, of the traces and of the shift; points."""
    rows = []
    for side in Side:
        of_side = {label: [run for run in runs if run["side"] == side] for label, runs in by_trace.items()}
        rows.append(_row(side.value, "traces", of_side))
        # Each run of the shift stands for itself: there is one such trace only.
        after = {str(i): [run] for i, run in enumerate(run for run in shifted if run["side"] == side)}
        rows.append(_row(side.value, SHIFTED, after))
    return {"rows": rows, "promised": 100 * SLACK}


def _row(side: str, of: str, by_unit: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return one line of the table: what is independent is a unit, and its runs are averaged."""
    runs = [run for of_unit in by_unit.values() for run in of_unit]
    means = [statistics.fmean(run["over"] for run in of_unit) for of_unit in by_unit.values()]
    windows = [statistics.fmean(run["window"] for run in of_unit) for of_unit in by_unit.values()]
    worst = max(runs, key=lambda run: run["window"])
    return {
        "constrained": side, "of": of, "runs": len(runs),
        "over_mean": statistics.fmean(means), "over_ci95": interval(means), "over_median": statistics.median(means),
        "over_max": max(run["over"] for run in runs),
        "window_mean": statistics.fmean(windows), "window_median": statistics.median(windows),
        "window_max": worst["window"], "window_max_insured": worst["insured"],
        "window_max_without": max(run["window"] - run["insured"] for run in runs),
        "above_promise": sum(run["window"] > 100 * SLACK for run in runs),
    }  # fmt: skip


def table(figures: Mapping[str, Any]) -> str:
    """One line for each constraint, of the traces and of the shift."""
    head = (
        "constrained", "of", "runs", "over", "95 %", "median", "most", "window", "median", "most", "insured", "above",
    )  # fmt: skip
    lines = [
        [
            row["constrained"], row["of"], str(row["runs"]), f"{row['over_mean']:+.2f}",
            "[{:+.2f}, {:+.2f}]".format(*row["over_ci95"]), f"{row['over_median']:+.2f}", f"{row['over_max']:+.2f}",
            f"{row['window_mean']:+.2f}", f"{row['window_median']:+.2f}", f"{row['window_max']:+.2f}",
            f"{row['window_max_insured']:.2f}", str(row["above_promise"]),
        ]
        for row in figures["rows"]
    ]  # fmt: skip
    return "\n".join([
        align(head, lines, 2),
        "points over the budget. over: whole runs, after the shift its 500 requests, by trace; window: the worst 200",
        "requests in a row of each run; insured: starts that end a silence, in the worst of all; above: runs above",
        f"the {figures['promised']:g} points promised",
    ])  # fmt: skip


def budgets(text: str) -> tuple[float, ...]:
    """Read budgets with commas between them."""
    return tuple(float(part) for part in text.split(","))


def main(argv: list[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eval.online_budget", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="folder with CSV files")
    parser.add_argument("--select", default=STATIONARY, help="names of traces (default: %(default)s)")
    parser.add_argument("--budgets", type=budgets, default="0.1,0.3,0.5", help="(default: %(default)s)")
    parser.add_argument("--policy", default="optimal", help="(default: %(default)s)")
    parser.add_argument("--requests", type=at_least(WINDOW), default=1000, help="of a run (default: %(default)s)")
    parser.add_argument("--seeds", type=at_least(1), default=1, help="runs of a case (default: %(default)s)")
    parser.add_argument("--no-shadow", action="store_true", help="cut a server off that has lost the race")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_arguments(parser)
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    figures = measure(args)
    return 0 if figures is None else print_figures(figures, table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

"""Chooses κ and the tail share of `optimal` without the halves that it is evaluated on.

`benchmarks.eval` fits on one half of each trace and tests on the other. This reads the first of these halves only, cuts
it in two once more, fits on one part and tests on the other. Of a grid of constants those are chosen that lower mean,
P99 and CVaR most, each weighed by what was asked of it: 2, 6 and 7 %. Whether they would be others without some of the
services is told by cross-validation: the models are dealt into folds, the same model at two dates into one, and of each
fold the constants that all others choose are compared with those that it would choose itself.

python -m benchmarks.eval.constants --traces DIR [--keep FILE]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.arrays import FloatArray
from disco_daemon.bench.command import at_least, print_figures, progress
from disco_daemon.dispatch.optimal import KAPPA, TAIL_SHARE, Optimal
from disco_daemon.simulate.figures import align
from disco_daemon.types import Side

from ..command import run_script
from ..formatting import number
from .bootstrap import interval
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

SELECT = ("bfcl/*", "llmdrift/*")  # of the table of all traces those whose halves have rows enough to be cut again
KAPPAS = (0.0, 0.02, 0.04, KAPPA, 0.08, 0.12, 0.2)
TAIL_SHARES = (0.01, 0.0133, TAIL_SHARE, 0.03)
ASKED = {"mean_ttft_s": 2.0, "p99_ttft_s": 6.0, "cvar_ttft_s": 7.0}  # %, lower than the tuned peer
BUDGETS = (0.1, 0.3, 0.5)
N_FOLDS = 5

Constants = tuple[float, float]  # κ, tail share
IN_FORCE: Constants = (KAPPA, TAIL_SHARE)
Scores = Mapping[Constants, Mapping[str, float]]  # of each trace


def fitted_half(trace: LatencyTrace) -> LatencyTrace:
    """Return the half of a trace that policies are fitted to, as a trace to cut in two again."""
    return replace(trace, ttft_s=trace.halves()[0])


def scores(
    traces: Sequence[LatencyTrace],
    requests: Requests,
    grid: Sequence[Constants],
    *,
    n_seeds: int,
    kept: KeptResults | None = None,
    tick: Callable[[], None] = lambda: None,
) -> dict[Constants, dict[str, float]]:
    """Return for each of the constants what each trace makes of them, less than nothing is better than `KAPPA`'s.

    That is the change in % of mean, P99 and CVaR, each over what is asked of it, on average. Traces with fewer than
    MIN_TESTED tested rows are left out: their worst 1 % is one row.
    """
    setup = EvaluationSetup(("optimal",), (PHONES[1],), (Side.DEVICE,), BUDGETS, n_seeds=n_seeds)
    seen, _ = requests.halves()
    kept = KeptResults(None, {}) if kept is None else kept
    found: dict[Constants, dict[str, float]] = {constants: {} for constants in grid}
    measured = list(dict.fromkeys((*grid, IN_FORCE)))
    weights = np.array([1 / asked for asked in ASKED.values()])
    for trace in map(fitted_half, traces):
        scene = Scene.of(trace, seen, setup)
        if scene.n_tested < MIN_TESTED:
            continue
        if trace.label not in kept:
            kept.add(trace.label, [_logs(scene, constants, setup).tolist() for constants in measured])
        logs = dict(zip(measured, np.array(kept[trace.label]), strict=True))
        for constants in grid:
            found[constants][trace.label] = float((100 * (logs[constants] - logs[IN_FORCE]) * weights).mean())
        tick()
    return found


def _logs(scene: Scene, constants: Constants, setup: EvaluationSetup) -> FloatArray:
    """Return the logarithms of mean, P99 and CVaR, means over the budgets; [3]."""
    kappa, tail_share = constants
    phone, policy = setup.phones[0], Optimal(kappa, MAX_BUCKETS, tail_share=tail_share)
    played = play_policy(scene, phone, Side.DEVICE, policy, "optimal", setup)
    cells = [
        measure(scene.stream, scene.trace.name, phone, Side.DEVICE, "optimal", b, played, i, n_tested=scene.n_tested)
        for i, b in enumerate(setup.budgets)
    ]
    logs: FloatArray = np.array([[math.log(getattr(cell, name)) for name in ASKED] for cell in cells]).mean(axis=0)
    return logs


def best(found: Scores, traces: Sequence[str]) -> Constants:
    """Return the constants with the least mean score over some of the traces."""
    return min(found, key=lambda constants: np.mean([found[constants][name] for name in traces]))


def folds(names: Sequence[str], n: int = N_FOLDS) -> list[list[str]]:
    """Deal the traces into `n` folds; those of one model, at whatever date, go into the same one."""
    models = sorted({_model(name) for name in names})
    of_model = {model: i % n for i, model in enumerate(models)}
    return [[name for name in names if of_model[_model(name)] == fold] for fold in range(n)]


def _model(label: str) -> str:
    return label.rpartition("/")[2].partition("@")[0]


def choose(found: Scores) -> dict[str, Any]:
    """Return the constants that all traces choose, and of each fold those that all others do."""
    names = list(next(iter(found.values())))
    chosen = best(found, names)
    dealt = [fold for fold in folds(names) if fold]
    by_fold = [best(found, [name for name in names if name not in fold]) for fold in dealt]
    held_out = [found[constants][name] for constants, fold in zip(by_fold, dealt, strict=True) for name in fold]
    return {
        "kappa": chosen[0],
        "tail_share": chosen[1],
        "score": float(np.mean(list(found[chosen].values()))),
        "score_ci95": interval(list(found[chosen].values())),
        "folds": [{"kappa": c[0], "tail_share": c[1], "n_traces": len(f)} for c, f in zip(by_fold, dealt, strict=True)],
        "held_out": float(np.mean(held_out)),
        "held_out_ci95": interval(held_out),
        "scores": [
            {"kappa": k, "tail_share": s, "score": float(np.mean(list(v.values())))} for (k, s), v in found.items()
        ],
        "n_traces": len(names),
    }


def tables(figures: Mapping[str, Any]) -> str:
    """The grid, what all traces choose, and what they choose without a fold."""
    by_place = {(row["kappa"], row["tail_share"]): row["score"] for row in figures["scores"]}
    kappas, shares = (sorted({place[i] for place in by_place}) for i in range(2))
    grid = align(
        ("kappa", *(f"share {s:g}" for s in shares)),
        [[f"{k:g}", *(number(by_place[k, s], 3) for s in shares)] for k in kappas],
    )
    of_folds = align(
        ("without fold", "traces in it", "kappa", "tail share"),
        [
            [str(i), str(f["n_traces"]), f"{f['kappa']:g}", f"{f['tail_share']:g}"]
            for i, f in enumerate(figures["folds"], 1)
        ],
    )
    (low, high), (out_low, out_high) = figures["score_ci95"], figures["held_out_ci95"]
    return "\n\n".join([
        f"score against kappa {KAPPA:g}, share {TAIL_SHARE:g}; below 0 is better; {figures['n_traces']} traces\n{grid}",
        f"best: {figures['kappa']:g}, share {figures['tail_share']:g}: {figures['score']:.3f} [{low:.3f}, {high:.3f}]",
        f"{of_folds}\nof each fold by the others' constants: {figures['held_out']:.3f} [{out_low:.3f}, {out_high:.3f}]",
        "score: mean of the changes of mean, P99 and CVaR, in shares of 2, 6 and 7 %; brackets: 95 % over traces",
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Read the fitted halves and choose."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eval.constants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", metavar="DIR", type=Path, required=True, help="folder with CSV files")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="users of each trace (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_arguments(parser)
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    traces, requests = read_traces(args.traces, SELECT), read_requests(args.traces)
    grid = [(kappa, share) for kappa in KAPPAS for share in TAIL_SHARES]
    kept = KeptResults(args.keep, {"grid": grid, "seeds": args.seeds, "in_force": IN_FORCE})
    mine = of_part(traces, args.part)
    n_done = iter(range(1, len(mine) + 1))
    found = scores(
        mine,
        requests,
        grid,
        n_seeds=args.seeds,
        kept=kept,
        tick=lambda: progress(f"{next(n_done)} of {len(mine)} traces"),
    )
    return 0 if args.part is not None else print_figures(choose(found), tables, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

"""The cost of dispatch: refits at several sample sizes, one plan, one update of everything that is learned.

python -m benchmarks.eval.policy [--repeat 51] [--plots DIR] [--json]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.bench.command import at_least, print_figures, progress
from disco_daemon.dispatch.optimal import Optimal
from disco_daemon.dispatch.paper import Paper
from disco_daemon.dispatch.planner import Planner
from disco_daemon.dispatch.policy import Policy, PolicyInput
from disco_daemon.estimation.knowledge import Knowledge
from disco_daemon.estimation.lengths import LengthDistribution
from disco_daemon.estimation.survival import kaplan_meier
from disco_daemon.estimation.ttft_context import estimate_contexts
from disco_daemon.simulate.figures import require_plots
from disco_daemon.types import Attempt, Outcome, Plan, Readiness, Side, Usage

from ..command import run_script
from ..yardstick import yardstick_us
from . import report
from .published import REFIT_MS

SIZES = (1_000, 10_000, 100_000)  # the paper's
BUDGET = 0.3
PREFILL_TPS = 50.0
LIMITS = {
    "paper_device_ms": (0.02, 0.05, 1.5), "paper_server_ms": (0.01, 0.02, 0.15), "optimal_ms": (10.0, 12.0, 20.0),
}  # fmt: skip
LIMITS_US = {"plan_us": 25.0, "update_us": 60.0}
N_CALLS = 2_000  # plans and updates; the median counts


def bench_policy(repeat: int) -> dict[str, Any]:
    """Medians over `repeat` fits of each size: ms; of a plan and an update: us; `peer_*_ms`: fits from raw samples.

    A refit starts from what the estimators hold after an update: the survival curve and the histogram of lengths. The
    peer is the same algorithm as a straight reading of the paper has it, sorting all samples and looping over all
    prompts in Python, in the same run.
    """
    figures: dict[str, Any] = {key: {} for key in (*LIMITS, "peer_device_ms", "peer_server_ms")}
    for size in SIZES:
        ttft_s, lengths = _samples(size)
        inputs = {side: _policy_input(ttft_s, lengths, side) for side in Side}
        for key, policy, side in (
            ("paper_device_ms", Paper(), Side.DEVICE),
            ("paper_server_ms", Paper(), Side.SERVER),
            ("optimal_ms", Optimal(), Side.DEVICE),
        ):
            figures[key][str(size)] = _fit_ms(policy, inputs[side], repeat)
        n_peer = 3 if size > SIZES[0] else repeat
        figures["peer_device_ms"][str(size)] = _median(partial(_naive_device, ttft_s, lengths), n_peer) * 1e3
        figures["peer_server_ms"][str(size)] = _median(partial(_naive_server, lengths), n_peer) * 1e3
    figures |= _per_request() | {"yardstick_us": yardstick_us()}
    return figures | {
        "host": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    }


def policy_table(figures: dict[str, Any]) -> str:
    """The figures beside their limits, the peer and what the paper published."""
    published = {f"paper_{side}_ms": tuple(ms.values()) for side, ms in REFIT_MS.items()}
    lines = [f"{'refit, ms':<26}" + "".join(f"{n:>12,}" for n in SIZES)]
    for key in (*LIMITS, "peer_device_ms", "peer_server_ms"):
        lines.append(_row(key, [figures[key][str(n)] for n in SIZES]))
        for what, known in (("limit", LIMITS.get(key)), ("published, on an M1", published.get(key))):
            if known:
                lines.append(_row(f"  {what}", known))
    own = figures["yardstick_us"]
    lines += [
        f"{key:<26}{figures[key]:>12.1f}   (limit {limit:g}; {figures[key] / own:.2f} times the yardstick)"
        for key, limit in LIMITS_US.items()
    ]
    lines.append(f"yardstick: {own:.1f} us to sort and sum 2,000 numbers")
    host = figures["host"]
    return "\n".join([*lines, f"Python {host['python']}, {host['cpus']} CPUs, {host['platform']}"])


def _row(label: str, values: Any) -> str:
    return f"{label:<26}" + "".join(f"{v:>12.4g}" for v in values)


def _samples(n: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(n)
    return rng.lognormal(-0.9, 0.5, n), np.maximum(1, rng.lognormal(2.8, 0.7, n).astype(int))


def _policy_input(ttft_s: Any, lengths: Any, constrained: Side) -> PolicyInput:
    curve = kaplan_meier(ttft_s, np.ones(len(ttft_s), dtype=bool))
    distribution = LengthDistribution.of(lengths)
    # What conditions on the recent TTFTs is a window of 200, as in the daemon.
    recent, scores = ttft_s[-200:], np.log(ttft_s[-201:-1])
    contexts = estimate_contexts(recent, np.ones(200, dtype=bool), np.ones(200), scores)
    return PolicyInput(curve, distribution, distribution.values / PREFILL_TPS, constrained, BUDGET, contexts)


def _fit_ms(policy: Policy, inputs: PolicyInput, repeat: int) -> float:
    return _median(lambda: policy.fit(inputs), repeat) * 1e3


def _median(call: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _per_request() -> dict[str, float]:
    """One plan, one update of all estimators, and that with the pacer's booking: as the daemon makes them; us."""
    planner = Planner(Optimal(), Side.DEVICE, BUDGET, draw=np.random.default_rng(0).random)
    knowledge = Knowledge()
    ttft_s, lengths = _samples(N_CALLS)
    readiness = {side: Readiness() for side in Side}
    plans, updates, settles = [], [], []
    for ttft, length in zip(ttft_s.tolist(), lengths.tolist(), strict=True):
        outcome = _outcome(ttft, length)
        begin = time.perf_counter()
        planned = planner.plan(length, readiness)
        middle = time.perf_counter()
        planner.settle(planned, outcome)
        settled = time.perf_counter()
        knowledge.learn(outcome)
        updates.append(time.perf_counter() - settled)
        settles.append(settled - middle)
        plans.append(middle - begin)
        if planner.due:
            planner.refit()
    medians = {"plan_us": plans, "update_us": updates, "settle_us": settles}
    return {name: statistics.median(times) * 1e6 for name, times in medians.items()}


def _outcome(ttft_s: float, length: int) -> Outcome:
    """An answer that the server gave, after the device had been started too."""
    attempts = (
        Attempt(Side.SERVER, "server", 0.0, ttft_s, censored=False, usage=Usage()),
        Attempt(Side.DEVICE, "device", 0.1, length / PREFILL_TPS, censored=False, usage=Usage()),
    )
    return Outcome(
        request_id="bench", created=0.0, model="disco", policy="optimal", plan=Plan(0.1, 0.0), prompt_tokens=length,
        winner=Side.SERVER, finish_reason="stop", error=None, ttft_s=ttft_s, duration_s=1.0, handoffs=0,
        tokens={Side.SERVER: 100}, attempts=attempts, cost_usd=0.0, energy_j=0.0,
    )  # fmt: skip


def _naive_device(ttft_s: Any, lengths: Any, alpha: float = 0.05) -> list[float]:
    """Algorithm 2 by the letter: sort all TTFTs, sort all prompts, walk through them."""
    ordered = sorted(ttft_s.tolist())
    n, total = len(ordered), float(lengths.sum())
    tail = ordered[min(n - 1, int((1 - alpha) * n))]
    available, waits = BUDGET - alpha, []
    for length in sorted(lengths.tolist()):
        cost = (1 - alpha) * length / total
        waits.append(0.0 if available >= cost else tail)
        available -= cost
    return waits


def _naive_server(lengths: Any) -> int:
    """Algorithm 3 by the letter: walk down from the longest prompt until the budget is spent."""
    left = BUDGET * float(lengths.sum())
    threshold = 0
    for length in sorted(lengths.tolist(), reverse=True):
        if left < length:
            break
        left -= length
        threshold = length
    return threshold


def main(argv: list[str] | None = None) -> int:
    """Time the pure core in this process."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eval.policy",
        description="Time the dispatcher's own work; the paper's figures are printed beside ours.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--plots", metavar="DIR", help="draw refit time against samples, beside the published figures")
    parser.add_argument("--repeat", type=at_least(3), default=51, help="fits of each size (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.plots:
        require_plots()
    figures = bench_policy(args.repeat)
    if args.plots:
        progress(f"drew {report.draw_overhead(figures, Path(args.plots))}")
    return print_figures(figures, policy_table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

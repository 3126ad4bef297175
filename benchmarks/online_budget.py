"""Measures how well the budget is kept while learning from nothing: stationary traces, and a regime shift.

    python benchmarks/online_budget.py --traces DIR [--budgets 0.1,0.3,0.5] [--seeds 3]

Every trace is played in its order through the daemon's own planner, which sees what the daemon would see. Printed, in
points of the budget ratio: the overspend of whole runs, the worst 200 consecutive requests (the promise is b + 2), and
the overspend in the 500 requests after one model of GPT-4 is replaced by the other, three times as slow. With
`--no-shadow` a server that lost the race is cut off, so that its time is censored. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.pacer import WINDOW
from disco_daemon.simulate.dispatch.evaluate import PHONES
from disco_daemon.simulate.dispatch.online import planner, play_online
from disco_daemon.simulate.dispatch.player import Stream
from disco_daemon.simulate.traces import LatencyTrace, Requests, read_requests, read_traces
from disco_daemon.types import Side

AFTER_SHIFT = 500
STATIONARY = "bfcl/*,llmperf/*,llmdrift/*"
SHIFT = ("gpt-4-0613", "gpt-4-0314")
PHONE = PHONES[-1]


def play(
    ttft_s: NDArray[np.float64], requests: Requests, args: argparse.Namespace, seed: int, **how: object
) -> NDArray[np.float64]:
    """Spent and offered tokens of each request, [n, 2]."""
    side, budget = Side(str(how["side"])), float(str(how["budget"]))
    stream = Stream.draw(ttft_s, requests, len(ttft_s), [seed])
    stream = Stream(stream.prompt, stream.output, ttft_s[:, None], stream.draws)  # in the trace's own order
    one = planner(make_policy(args.policy), side, budget, seed)
    ran = [
        seen.device_ran if side is Side.DEVICE else seen.server_ran
        for seen in play_online(stream, 0, PHONE, one, shadow=not args.no_shadow)
    ]
    offered = stream.prompt[:, 0]
    return np.stack([offered * ran, offered], axis=1)


def ratio(tokens: NDArray[np.float64]) -> float:
    spent, offered = tokens.sum(axis=0)
    return float(spent / offered)


def worst_window(tokens: NDArray[np.float64]) -> float:
    """The highest ratio over any 200 consecutive requests."""
    sums = np.concatenate([np.zeros((1, 2)), tokens.cumsum(axis=0)])
    windows = sums[WINDOW:] - sums[:-WINDOW]
    return float((windows[:, 0] / windows[:, 1]).max())


def cases(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for side in Side:
        for budget in (float(b) for b in args.budgets.split(",")):
            yield {"side": side.value, "budget": budget}


def repeat(trace: LatencyTrace, n: int) -> NDArray[np.float64]:
    """A trace as long as `n` requests at least, around and around."""
    return np.tile(trace.ttft_s, -(-n // len(trace.ttft_s)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--select", default=STATIONARY)
    parser.add_argument("--budgets", default="0.1,0.3,0.5")
    parser.add_argument("--policy", default="optimal")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--no-shadow", action="store_true")
    args = parser.parse_args()
    requests = read_requests(args.traces)
    traces = read_traces(args.traces, args.select.split(","))
    over, window = [], []
    for trace in traces:
        for case in cases(args):
            for seed in range(args.seeds):
                tokens = play(repeat(trace, args.requests), requests, args, seed, **case)
                over.append(ratio(tokens) - float(str(case["budget"])))
                window.append(worst_window(tokens) - float(str(case["budget"])))
        print(f"{trace.label:<50} overspend up to {100 * max(over):+.2f}, window {100 * max(window):+.2f}", flush=True)
    named = {t.name: t.ttft_s for t in read_traces(args.traces, [f"*/{name}" for name in SHIFT])}
    after = []
    for case in cases(args):
        for seed in range(max(3, args.seeds)):
            first, second = (named[name] for name in SHIFT)
            tokens = play(np.concatenate([first, second]), requests, args, seed, **case)
            after.append(ratio(tokens[len(first) : len(first) + AFTER_SHIFT]) - float(str(case["budget"])))
            window.append(worst_window(tokens) - float(str(case["budget"])))
    print(
        json.dumps(
            {
                "overspend_points_max": round(100 * max(over), 3),
                "overspend_points_mean": round(100 * float(np.mean(over)), 3),
                "worst_200_requests_points": round(100 * max(window), 3),
                "after_shift_points_max": round(100 * max(after), 3),
                "runs": len(over),
            }
        )
    )


if __name__ == "__main__":
    main()

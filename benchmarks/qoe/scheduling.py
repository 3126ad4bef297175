"""The cost of the token scheduler, and its distance from the optimum: `python -m benchmarks.qoe.scheduling`."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from disco_daemon.arrays import FloatArray
from disco_daemon.bench.command import print_figures
from disco_daemon.scheduler.andes import HORIZON_S, STALL_SHARE, Andes, horizon_s
from disco_daemon.scheduler.jobs import Capacity, Job
from disco_daemon.scheduler.latency import Coefficients, IterationLatency
from disco_daemon.scheduler.timeline import Readers, Timeline

from ..command import run_script
from ..yardstick import yardstick_us

LIMITS_US = {"64": 100.0, "1000": 1000.0}  # one decision
LEAST_RATIO = 0.98  # of the exact optimum
N_INSTANCES = 1_000
QUANTUM_S = 0.5  # between two decisions

# About a 66B model on four A100s: s, s per sequence, s per prompt token, s per cell.
LARGE: Coefficients = (0.025, 5e-4, 3e-4, 4e-7)
LARGE_CELLS = 12_000
# A laptop, in cells of 16 tokens, to keep the dynamic programme's table small.
SMALL: Coefficients = (0.01, 0.012, 0.02, 1.6e-5)
SMALL_CELLS = 256


def bench_scheduling(repeat: int, n_instances: int = N_INSTANCES) -> dict[str, Any]:
    """Median and P99 of `repeat` decisions, us, by the number of jobs, and value / optimum over random instances.

    "paper_us" is the same where any reader may stand still, as in the paper, whose packing the optimum is of.
    """
    figures: dict[str, Any] = {"decision_us": {}, "decision_us_p99": {}, "paper_us": {}, "yardstick_us": yardstick_us()}
    for n in LIMITS_US:
        times = decision_times_us(int(n), repeat)
        figures["decision_us"][n] = statistics.median(times)
        figures["decision_us_p99"][n] = float(np.quantile(times, 0.99))
        figures["paper_us"][n] = statistics.median(decision_times_us(int(n), repeat, stall_share=1.0))
    ratios = np.array([ratio_to_optimum(seed) for seed in range(n_instances)])
    figures["ratio"] = {
        "n": n_instances,
        "min": float(ratios.min()),
        "mean": float(ratios.mean()),
        "below_98_percent": int(np.count_nonzero(ratios < LEAST_RATIO)),
    }
    return figures | {
        "host": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    }


def decision_times_us(n_jobs: int, repeat: int, stall_share: float = STALL_SHARE) -> list[float]:
    """Return the time of each of `repeat` decisions under overload, us; readers get their tokens in between."""
    random = np.random.default_rng(n_jobs)
    latency = IterationLatency(LARGE)
    scheduler = Andes(latency, max_wait_s=1e6, stall_share=stall_share)
    capacity = Capacity(LARGE_CELLS if n_jobs > 100 else LARGE_CELLS // 2, 256)
    jobs = random_jobs(random, n_jobs, 0.0, mean_cells=300)
    now, times = 30.0, []
    for turn in range(repeat):
        begin = time.perf_counter()
        chosen = scheduler.choose(jobs, capacity, now)
        times.append((time.perf_counter() - begin) * 1e6)
        now = _serve(jobs, chosen, latency, now)
        # The oldest of those served has got its answer, and another request has come.
        ended = min(chosen, key=lambda job: job.timeline.arrived_s)
        jobs[jobs.index(ended)] = random_jobs(random, 1, now, mean_cells=300, first_key=n_jobs + turn)[0]
    return times


def _serve(jobs: Sequence[Job], chosen: Sequence[Job], latency: IterationLatency, now: float) -> float:
    """Play a quantum: the chosen jobs get their tokens."""
    running = {id(job) for job in chosen}
    for job in jobs:
        if id(job) not in running and job.running:
            job.waiting_since, job.resident, job.resume_s = now, False, 0.02
    tbt_s = latency.predict(len(chosen), 0, sum(job.n_context for job in chosen))
    n_tokens = max(round(QUANTUM_S / tbt_s), 1)
    for job in chosen:
        job.waiting_since, job.resident, job.resume_s, job.n_missing = None, True, 0.0, 0
        job.timeline.token(now + QUANTUM_S, n_tokens)
        job.n_context += n_tokens
    return now + QUANTUM_S


def random_jobs(random: np.random.Generator, n: int, now: float, *, mean_cells: int, first_key: int = 0) -> list[Job]:
    """Waiting requests of readers at several paces and stages, that came in the 30 s up to `now` + 30 s."""
    arrived = now + random.uniform(0, 30, n) * (n > 1)
    cells = np.maximum(random.lognormal(np.log(mean_cells), 0.7, n), 2).astype(int)
    jobs = []
    for i in range(n):
        timeline = Timeline(float(arrived[i]), 1.0, float(random.choice([3.3, 4.5, 5.2, 6.0])))
        if n > 1 and random.random() < 0.6:
            timeline.token(float(random.uniform(arrived[i], now + 30.0)), int(random.integers(1, 120)))
        missing = int(cells[i]) if timeline.n_tokens == 0 else 0
        job = Job(first_key + i, timeline, int(cells[i]), missing, 0.02 if not missing else 0.0)
        job.waiting_since = float(arrived[i])
        jobs.append(job)
    return jobs


def ratio_to_optimum(seed: int) -> float:
    """Value of the scheduler's choice / the largest there is, over all batch sizes and selections, of one instance."""
    random = np.random.default_rng(seed)
    now, latency = 30.0, IterationLatency(SMALL)
    jobs = random_jobs(random, int(random.integers(8, 33)), 0.0, mean_cells=24)
    capacity = Capacity(SMALL_CELLS, int(random.integers(2, 17)))
    chosen = Andes(latency, max_wait_s=1e6, high_water=1.0, stall_share=1.0).choose(jobs, capacity, now)
    cells = np.array([job.n_context for job in jobs], float)
    gains = all_gains(jobs, cells, capacity, latency, now)
    best = max(float(exact(row, cells, capacity.n_cells)[size]) for size, row in enumerate(gains, 1))
    index = [jobs.index(job) for job in chosen]
    return float(gains[len(chosen) - 1][index].sum()) / best if best > 0 else 1.0


def all_gains(
    jobs: Sequence[Job], cells: FloatArray, capacity: Capacity, latency: IterationLatency, now: float
) -> FloatArray:
    """Q_serve(B) - Q_wait of waiting jobs [B, n], B = 1, 2 .. the number of sequences, as `Andes` predicts them."""
    sizes = np.arange(1, min(capacity.n_seqs, len(jobs)) + 1)
    tbt_s = latency.predict(sizes, 0, np.minimum(sizes * cells.mean(), capacity.n_cells))
    readers = Readers([job.timeline for job in jobs])
    until = now + horizon_s(readers, now, HORIZON_S)
    delay_s = np.array([job.resume_s + latency.coefficients[2] * job.n_missing for job in jobs])
    gains: FloatArray = np.maximum(readers.predicted(now, until, delay_s, tbt_s.tolist()) - readers.qoe(until), 0.0)
    return gains


def exact(gains: FloatArray, cells: FloatArray, n_cells: int) -> FloatArray:
    """The largest sum of gains of at most b jobs in `n_cells` cells, b = 0, 1 .. n: Andes' dynamic programme (§4.2).

    A table over places x cells, once for each job: O(n^2 * n_cells) for one batch size's gains [n].
    """
    best = np.zeros((len(gains) + 1, n_cells + 1))
    for gain, cost in zip(gains.tolist(), cells.astype(int).tolist(), strict=True):
        if cost <= n_cells:
            best[1:, cost:] = np.maximum(best[1:, cost:], best[:-1, : n_cells + 1 - cost] + gain)
    return best[:, -1]


def scheduling_table(figures: dict[str, Any]) -> str:
    """The figures beside their limits, and beside a fixed piece of numpy's work in the same run."""
    own = figures["yardstick_us"]
    lines = [
        f"one decision, {n:>5} jobs {figures['decision_us'][n]:>9.1f} us, P99 {figures['decision_us_p99'][n]:.1f} us "
        f"(limit {limit:g}); {figures['decision_us'][n] / own:.1f} times the yardstick, "
        f"{figures['paper_us'][n] / own:.1f} where anybody may stand still"
        for n, limit in LIMITS_US.items()
    ]
    ratio, host = figures["ratio"], figures["host"]
    lines += [
        f"yardstick: {own:.1f} us to sort and sum 2,000 numbers",
        (
            f"choice / optimum, {ratio['n']} instances: min {ratio['min']:.4f}, mean {ratio['mean']:.5f}, "
            f"{ratio['below_98_percent']} below {LEAST_RATIO:g}"
        ),
    ]
    return "\n".join([*lines, f"Python {host['python']}, {host['cpus']} CPUs, {host['platform']}"])


def main(argv: list[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.qoe.scheduling", description=__doc__)
    parser.add_argument("--repeat", type=int, default=300, help="decisions of each size (default: %(default)s)")
    parser.add_argument("--instances", type=int, default=N_INSTANCES, help="random instances (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    return print_figures(bench_scheduling(args.repeat, args.instances), scheduling_table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

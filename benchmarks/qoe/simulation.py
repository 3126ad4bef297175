"""`benchmarks.qoe --simulate`: our token schedulers against FCFS at the scale of Andes (Liu et al. 2024, 2404.16283).

The same requests go through the engine of `serving_engine` under each scheduler, at rates around what it can serve:
Figures 10 (text), 15b (bursts: Gamma arrivals with a CV of 3), 15c (voice) and Table 4 of the paper, by content. The
machine is the paper's OPT-66B on four A100, for which it has 1.25 times the rate of FCFS (1.6 times is another model).

Readers' paces and their shares are those of the paper's Table 1 as its authors' public code has them (AmberLJC/
vllm-0.6.1, examples/request_dispatcher); everybody expects the first token after 1 s. The paper's prompts are
ShareGPT's. Those are not packaged here: with a folder of traces the lengths are those of Azure's conversations (CC-BY
4.0, Splitwise, ISCA 2024), else lognormal with the means that vLLM's paper (Kwon et al. 2023) states for ShareGPT.

How much there is to gain is bounded by memory, whatever the readers' pace: load 1 is a KV cache that is always full.
Knowing all lengths, serving by the QoE lost a second of delay over the cells that the rest of an answer takes, with as
many preemptions as it likes, keeps a mean QoE of 0.9 up to 1.8 times FCFS's rate for text and 1.9 times for voice, with
3,000 requests; shorter runs give more. Ours know what 1,000 other answers say of the lengths of answers to such prompts
(`andes-blind` does not): where prompts say nothing, as in the lognormal lengths, that is nothing.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.arrays import FloatArray, IntArray
from disco_daemon.errors import ConfigError
from disco_daemon.estimation.given_prompt import WINDOW
from disco_daemon.estimation.lengths import OutputLengths
from disco_daemon.scheduler.andes import STALL_SHARE, Andes
from disco_daemon.scheduler.baselines import Fcfs, RoundRobin
from disco_daemon.scheduler.jobs import TokenScheduler
from disco_daemon.scheduler.latency import IterationLatency

from ..eval.traces import Requests
from .machine import OPT_66B, Machine, SimulatedRun, Simulation, Workload

AZURE_FILE = "arrivals_azure2023_conv.csv"
MAX_CONTEXT = 2048  # of OPT; longer requests are left out
# ShareGPT's means in tokens by vLLM's paper, Fig. 11; the spreads are ours, long-tailed as chats are.
SHAREGPT = {"prompt": (161.0, 1.1), "output": (338.0, 0.9)}  # mean, standard deviation of the logarithm
N_LENGTHS = 20_000

# Shares of readers and their paces, token/s. Text: ages 18-24, 25-44, 45-54, 55-64, 65 and above. Voice: the mean.
READERS = {
    "text": ((0.2804, 0.5187, 0.1119, 0.0556, 0.0333), (1 / 0.196, 1 / 0.230, 1 / 0.240, 1 / 0.249, 1 / 0.264)),
    "voice": ((1.0,), (3.3,)),
}
ARRIVALS_CV = {"poisson": 1.0, "gamma": 3.0}  # standard deviation of the gaps over their mean

SETTINGS = (("text", "poisson"), ("text", "gamma"), ("voice", "poisson"))
LOADS = (0.6, 0.8, 0.9, 1.0, 1.1, 1.16, 1.25, 1.4, 1.6, 1.8, 2.0)  # of what the engine can serve
SCHEDULERS = ("fcfs", "round-robin", "andes", "andes@1")  # the last one lets anybody stand still, as the paper's
BASE, OURS, BLIND = "fcfs", "andes", "-blind"
HIGH_QOE = 0.9
LONG_STALL_S = 10.0
# Under overload the queue of FCFS grows with the run, so that gains in QoE grow with it, and gains in rate shrink.
N_REQUESTS = 3000
SEEDS = (1,)
# Of Andes here; the rest is as in the engine. The paper has no starvation bound. The memory mark is everybody's.
PREEMPTION_CAP, MAX_WAIT_S, HIGH_WATER = 1.0, math.inf, 0.97
SLICE_S = 20.0  # of round robin: with less, whole batches are swapped more than they compute
PRIOR = 1.3  # the scheduler first thinks iterations so many times longer than they are, and learns

Curve = dict[str, Any]


@dataclass(frozen=True, slots=True)
class QoeSetting:
    """One experiment: who reads, how requests arrive, how many, and how often it is repeated."""

    readers: str
    arrivals: str
    n_requests: int = N_REQUESTS
    seeds: tuple[int, ...] = SEEDS


def simulate_qoe(
    lengths: Requests | None = None,
    *,
    settings: Sequence[tuple[str, str]] = SETTINGS,
    loads: Sequence[float] = LOADS,
    schedulers: Sequence[str] = SCHEDULERS,
    n_requests: int = N_REQUESTS,
    seeds: Sequence[int] = SEEDS,
    machine: Machine = OPT_66B,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Every scheduler at every load in every setting, and what ours gains over FCFS.

    `lengths` as of `azure_lengths`, None for `sharegpt_lengths`; `tick` is called after each of `n_points`. The result
    is JSON: "curves" has a point per setting, scheduler and load; "settings" what `gains` finds in each; the figures at
    the top are the setting's with text and Poisson arrivals or else the first's, but for "qoe_gain_max", the largest of
    all. Raises ConfigError for an unknown name.
    """
    lengths = sharegpt_lengths() if lengths is None else lengths
    curves: list[Curve] = []
    for readers, arrivals in settings:
        setting = QoeSetting(readers, arrivals, n_requests, tuple(seeds))
        for load in loads:
            curves += points(setting, load, lengths, schedulers, machine, tick)
    found = [gains([c for c in curves if (c["readers"], c["arrivals"]) == s]) for s in settings]
    by_name = [{"readers": s[0], "arrivals": s[1], **gain} for s, gain in zip(settings, found, strict=True)]
    return {
        **found[0],
        "qoe_gain_max": max(gain["qoe_gain_max"] for gain in found),
        "high_qoe": HIGH_QOE,
        "objective": "average",
        "n_requests": n_requests,
        "n_seeds": len(seeds),
        "capacity_rps": machine.capacity_rps(lengths.prompt, lengths.output),
        "mean_prompt": float(lengths.prompt.mean()),
        "mean_output": float(lengths.output.mean()),
        "settings": by_name,
        "curves": curves,
    }


def points(
    setting: QoeSetting,
    load: float,
    lengths: Requests,
    schedulers: Sequence[str],
    machine: Machine,
    tick: Callable[[], None],
) -> list[Curve]:
    """One point per scheduler; all get the same requests, and learn the machine's latency from the same wrong prior."""
    rate = load * machine.capacity_rps(lengths.prompt, lengths.output)
    head = {"readers": setting.readers, "arrivals": setting.arrivals, "load": load, "rate_rps": rate}
    loads = [workload(setting, lengths, rate, seed) for seed in setting.seeds]
    out: list[Curve] = []
    for name in schedulers:
        runs = []
        for seed, requests in zip(setting.seeds, loads, strict=True):
            latency = IterationLatency(_prior(machine))
            answers = learned(setting, lengths, seed) if name.startswith(OURS) and not name.endswith(BLIND) else None
            runs.append(Simulation(machine, requests, scheduler(name, latency), latency, answers=answers).run())
        out.append({"scheduler": name, **head, **measure(runs)})
        tick()
    return out


def n_points(settings: int = len(SETTINGS), loads: int = len(LOADS), schedulers: int = len(SCHEDULERS)) -> int:
    """Return how often `simulate_qoe` ticks."""
    return settings * loads * schedulers


def scheduler(name: str, latency: IterationLatency) -> TokenScheduler:
    """The scheduler of that name as the engine makes it; `andes@SHARE` lets that share of the readers stand still.

    The names of those that know nothing of answers' lengths end with `BLIND`; that they know, they are told by jobs.
    Raises ConfigError for an unknown name.
    """
    if name == "fcfs":
        return Fcfs(HIGH_WATER)
    if name == "round-robin":
        return RoundRobin(SLICE_S, high_water=HIGH_WATER)
    ours, _, share = name.removesuffix(BLIND).partition("@")
    if ours == OURS and not share:
        return _andes(latency)
    if ours == OURS and (found := _share(share)) is not None:
        return _andes(latency, found)
    msg = f"no token scheduler {name!r}; there are {', '.join(SCHEDULERS)}"
    raise ConfigError(msg)


def _andes(latency: IterationLatency, stall_share: float = STALL_SHARE) -> Andes:
    return Andes(
        latency, preemption_cap=PREEMPTION_CAP, max_wait_s=MAX_WAIT_S, high_water=HIGH_WATER, stall_share=stall_share
    )


def _share(text: str) -> float | None:
    """Return the share of readers that `andes@SHARE` names; None if it names none."""
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0 <= share <= 1 else None


def _prior(machine: Machine) -> tuple[float, float, float, float]:
    a, b, c, d = machine.latency
    return PRIOR * a, PRIOR * b, PRIOR * c, PRIOR * d


# --- requests ---------------------------------------------------------------------------------------------------------


def sharegpt_lengths() -> Requests:
    """Lengths as of ShareGPT: lognormal, both bounded by half of MAX_CONTEXT; always the same."""
    random = np.random.default_rng(66)
    columns = []
    for mean, sigma in (SHAREGPT["prompt"], SHAREGPT["output"]):
        drawn = np.clip(random.lognormal(math.log(mean) - sigma**2 / 2, sigma, N_LENGTHS), 4, MAX_CONTEXT // 2)
        columns.append(np.rint(drawn * mean / drawn.mean()).clip(2, MAX_CONTEXT // 2).astype(np.int64))
    return Requests(*columns)


def azure_lengths(folder: Path) -> Requests:
    """Lengths of Azure's conversations that fit OPT's context, from `common/` of a folder of traces.

    Raises ConfigError where the file cannot be read or has no such lengths.
    """
    path = folder / "common" / AZURE_FILE
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            pairs = np.array([(row["in_tok"], row["out_tok"]) for row in csv.DictReader(file)], dtype=np.float64)
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError) as e:
        msg = f"{path} cannot be read as a CSV file with the columns in_tok and out_tok: {e}"
        raise ConfigError(msg) from e
    fits = pairs[(pairs.sum(1) <= MAX_CONTEXT) & (pairs.min(1) >= 1)] if len(pairs) else pairs
    if not len(fits):
        msg = f"{path} has no request of at most {MAX_CONTEXT} tokens"
        raise ConfigError(msg)
    return Requests(fits[:, 0].astype(np.int64), fits[:, 1].astype(np.int64))


def workload(setting: QoeSetting, lengths: Requests, rate_rps: float, seed: int) -> Workload:
    """Requests drawn at random; those of a seed are the same at every rate, but nearer to each other.

    Raises ConfigError for readers or arrivals that are not known.
    """
    if setting.readers not in READERS or setting.arrivals not in ARRIVALS_CV:
        msg = f"readers are {', '.join(READERS)}, arrivals {', '.join(ARRIVALS_CV)}"
        raise ConfigError(msg)
    gaps, which, random = _drawn(setting, lengths, seed)
    shares, paces = READERS[setting.readers]
    pace = random.choice(np.array(paces), setting.n_requests, p=np.array(shares) / sum(shares))
    return Workload(np.cumsum(gaps) / rate_rps, lengths.prompt[which], lengths.output[which], pace)


def _drawn(setting: QoeSetting, lengths: Requests, seed: int) -> tuple[FloatArray, IntArray, np.random.Generator]:
    """Draw the gaps between requests, of mean 1, and which lengths they have."""
    random, n = np.random.default_rng(seed), setting.n_requests
    shape = ARRIVALS_CV[setting.arrivals] ** -2  # of the Gamma distribution of the gaps; 1 is exponential
    gaps = random.gamma(shape, 1 / shape, n)
    return gaps, random.integers(0, len(lengths.prompt), n), random


def learned(setting: QoeSetting, lengths: Requests, seed: int) -> OutputLengths:
    """Return what a daemon has learned of answers before the run: from others than are played, at random."""
    others = np.ones(len(lengths.prompt), np.bool_)
    others[_drawn(setting, lengths, seed)[1]] = False
    answers, left = OutputLengths(), others.nonzero()[0]
    for i in np.random.default_rng((seed, 1)).permutation(left)[:WINDOW].tolist():
        answers.add(int(lengths.output[i]), censored=False, prompt=int(lengths.prompt[i]))
    return answers


# --- results ----------------------------------------------------------------------------------------------------------


def measure(runs: Sequence[SimulatedRun]) -> dict[str, float]:
    """Return the figures of a scheduler at one rate; quantiles over the requests of all runs (seeds)."""
    columns = {
        "qoe_{}": [r.qoes() for r in runs],
        "ttft_{}_s": [r.ttfts() for r in runs],
        "tds_{}": [r.speeds() for r in runs],
    }
    qoes = np.concatenate(columns["qoe_{}"])
    out = {"qoe_mean": float(qoes.mean()), "qoe_perfect": float((qoes > 1 - 1e-9).mean())}
    worst = np.partition(qoes, len(qoes) // 10)[: max(1, len(qoes) // 10)]
    out["qoe_worst_tenth"] = float(worst.mean())
    out |= stalls(np.concatenate([r.stalls() for r in runs]))
    for name, values in columns.items():
        own = np.concatenate(values)
        out |= {name.format(f"p{q}"): float(np.percentile(own, q)) for q in (10, 50, 90)}
    out["throughput_tps"] = float(np.mean([r.throughput_tps() for r in runs]))
    out["preemptions_per_request"] = sum(r.n_preempted for r in runs) / len(qoes)
    return out


def stalls(longest_s: FloatArray) -> dict[str, float]:
    """Return the share of readers who stood still for over 10 s at once, and the P99 of their longest stalls [n], s."""
    return {
        "stalled_10s": float((longest_s > LONG_STALL_S).mean()),
        "stall_p99_s": float(np.percentile(longest_s, 99)),
    }


def gains(curves: Sequence[Curve]) -> dict[str, float]:
    """Ours against FCFS in one setting.

    qoe_gain_max: the largest ratio of mean QoEs at the same rate. rate_gain: the ratio of the rates up to which the
    mean QoE is at least HIGH_QOE, between points in a straight line; a lower bound where ours is that good at all
    rates. throughput_loss: the largest share of tokens/s lost at a rate. preemptions_per_request: the largest.
    """
    ours, base = (sorted((c for c in curves if c["scheduler"] == s), key=lambda c: c["load"]) for s in (OURS, BASE))
    pairs = list(zip(ours, base, strict=True))
    return {
        "qoe_gain_max": max(a["qoe_mean"] / b["qoe_mean"] for a, b in pairs),
        "rate_gain": rate_at(ours, HIGH_QOE) / rate_at(base, HIGH_QOE),
        "throughput_loss": max(0.0, *(1 - a["throughput_tps"] / b["throughput_tps"] for a, b in pairs)),
        "preemptions_per_request": max(a["preemptions_per_request"] for a in ours),
    }


def rate_at(curve: Sequence[Curve], least: float) -> float:
    """The rate up to which the mean QoE is `least` or more; the first or last where that is never or always so."""
    for before, after in pairwise(curve):
        if after["qoe_mean"] < least:
            drop = before["qoe_mean"] - after["qoe_mean"]
            share = (before["qoe_mean"] - least) / drop if drop > 0 else 0.0
            return float(before["rate_rps"] + max(0.0, share) * (after["rate_rps"] - before["rate_rps"]))
    return float(curve[-1]["rate_rps"])

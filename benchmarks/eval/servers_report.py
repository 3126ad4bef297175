"""What the choice among servers was worth: ratios to the best single server, chosen afterwards. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from disco_daemon.arrays import BoolArray, FloatArray
from disco_daemon.dispatch.share import WINDOW
from disco_daemon.simulate.figures import align
from disco_daemon.simulate.server_player import Played

from ..formatting import number
from .bootstrap import N_RESAMPLES, SEED, SHARE
from .server_shifts import LONG_TAIL
from .servers import Draw

P99 = 0.99


def figures_of(draws: Sequence[Draw], by_rule: Mapping[str, Sequence[Played]]) -> dict[str, Any]:
    """Return the figures of the pool, and of each rule beside it."""
    is_long = np.array([_p99(draw.best_s) > LONG_TAIL * float(np.median(draw.best_s)) for draw in draws])
    resampled = _resampled(draws)
    rules = {name: _of_rule(draws, played, is_long, resampled) for name, played in by_rule.items()}
    return {
        **rules["pool"],
        "n_draws": len(draws),
        "n_long_tail": int(is_long.sum()),
        "n_traces": len({name for draw in draws for name in draw.names}),
        "rules": rules,
    }


def _of_rule(
    draws: Sequence[Draw], played: Sequence[Played], is_long: BoolArray, resampled: FloatArray
) -> dict[str, Any]:
    mean = np.log([np.mean(p.waits_s) / d.best_s.mean() for p, d in zip(played, draws, strict=True)])
    p99 = np.log([_p99(np.array(p.waits_s)) / _p99(d.best_s) for p, d in zip(played, draws, strict=True)])
    figures: dict[str, Any] = {}
    for name, logs, of in (
        ("mean_ratio", mean, np.ones(len(draws), np.bool_)),
        ("p99_ratio", p99, np.ones(len(draws), np.bool_)),
        ("p99_ratio_long_tail", p99, is_long),
        ("p99_ratio_other", p99, ~is_long),
    ):
        figures |= _ratio(name, logs[of], resampled[:, of])
    hedged = [share for p in played for share in _shares(p.hedged)]
    figures["hedged_share"] = sum(sum(p.hedged) for p in played) / sum(len(p.hedged) for p in played)
    figures["hedged_share_most"] = max(hedged)
    return figures


def _ratio(name: str, logs: FloatArray, weights: FloatArray) -> dict[str, Any]:
    """The geometric mean, its interval, and the median."""
    if not len(logs):
        return {name: None, f"{name}_ci95": None, f"{name}_median": None}
    with np.errstate(invalid="ignore"):
        means = weights @ logs / weights.sum(axis=1)
    low, high = np.nanquantile(means, ((1 - SHARE) / 2, (1 + SHARE) / 2)).tolist()
    return {
        name: math.exp(float(logs.mean())),
        f"{name}_ci95": [math.exp(low), math.exp(high)],
        f"{name}_median": math.exp(float(np.median(logs))),
    }


def _resampled(draws: Sequence[Draw]) -> FloatArray:
    """Weights [resamples, draws] of draws whose traces were resampled, since each trace is in many draws."""
    names = sorted({name for draw in draws for name in draw.names})
    place = {name: i for i, name in enumerate(names)}
    rng = np.random.default_rng(SEED)
    counts = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), N_RESAMPLES)
    which = np.array([[place[name] for name in draw.names] for draw in draws])
    weights: FloatArray = counts[:, which].prod(axis=2).astype(np.float64)
    return weights


def _shares(hedged: Sequence[bool]) -> list[float]:
    """The share of each window of WINDOW requests that was asked twice."""
    sums = np.concatenate([[0], np.cumsum(hedged)])
    size = min(WINDOW, len(hedged))
    shares: list[float] = ((sums[size:] - sums[:-size]) / WINDOW).tolist()
    return shares


def _p99(times_s: FloatArray) -> float:
    return float(np.quantile(times_s, P99))


def table(figures: Mapping[str, Any]) -> str:
    """One line for each rule, and the regime shift."""
    head = ["rule", "mean", "95 %", "median", "P99", "95 %", "median", "P99, long tail", "95 %", "median", "twice %"]
    lines = []
    for name, row in figures["rules"].items():
        line = [name]
        for column in ("mean_ratio", "p99_ratio", "p99_ratio_long_tail"):
            line += _cells(row, column)
        lines.append([*line, number(100 * row["hedged_share"], 1)])
    left = f"{figures['n_draws']} draws of {figures['n_traces']} traces, {figures['n_long_tail']} with a long tail"
    told = [f"{align(head, lines)}\n\nratios to the best single server, chosen afterwards; {left}"]
    for kind, shift in (figures.get("shift") or {}).items():
        if shift["n"]:
            followed = f"followed after {shift['median']:g} requests at the median, at most {shift['most']}"
            told.append(
                f"a server becomes {kind}: {followed}, {100 * shift['within_20']:.0f} % within 20; {shift['n']}"
            )
    return "\n".join(told)


def _cells(row: Mapping[str, Any], column: str) -> list[str]:
    if row[column] is None:
        return ["-", "-", "-"]
    low, high = row[f"{column}_ci95"]
    return [number(row[column], 3), f"[{low:.3f}, {high:.3f}]", number(row[f"{column}_median"], 3)]

"""Plays the learned chance that the device's answer will do: what is sent to the server, and what quality that keeps.

python -m benchmarks.eval.quality [--folder FOLDER] [--json]

The prompts and their grades are those of `benchmarks.eval.graded`. In each of some random splits a curve is fitted, by
the product's own code, to what a history would show of some answers of the device: a wrong one is redone by half of
its readers, a right one by few. Then the others are played: those least likely to do are sent to the server. Beside it
stand a choice at random, one by the same code that is told the length alone, and one that knows whether the device
answers rightly. For our own questions, whose server has the right answer, the device's log-probabilities are known too;
the product does not look at them yet. Intervals go over the splits and over prompts, drawn anew. Nothing is chosen by
the prompts that are played.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.arrays import FloatArray
from disco_daemon.bench.command import print_figures
from disco_daemon.errors import ConfigError
from disco_daemon.estimation.will_do import features, fitted

from ..command import run_script
from .bootstrap import SEED, SHARE
from .graded import CHECKED, CHECKED_COLUMNS, GRADED, GRADED_COLUMNS, GRADES

N_SPLITS, N_DRAWN = 40, 25  # splits, and times that the prompts of each are drawn anew
N_KNOWN = {GRADED: (100, 400, 2000), CHECKED: (200,)}  # answers that are known when the others are played
REDONE_WRONG, REDONE_RIGHT = 0.5, 0.03  # share of readers who have a wrong, and a right, answer made again
SHARES = np.linspace(0, 1, 11)
WIDTH = 60  # characters of the picture


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts in a row: each one's length, kinds, other facts, and whether device and server answer it rightly."""

    tokens: Sequence[int]
    kinds: Sequence[frozenset[str]]
    facts: Mapping[str, FloatArray]
    device: FloatArray
    server: FloatArray

    def by_length(self) -> FloatArray:
        """Return the features of the lengths alone, one row for each prompt."""
        return np.array([features(n, ()) for n in self.tokens])

    def by_product(self) -> FloatArray:
        """Return what the product tells prompts by."""
        return np.array([features(n, kinds) for n, kinds in zip(self.tokens, self.kinds, strict=True)])

    def with_facts(self, *names: str) -> FloatArray:
        """Return what the product tells prompts by, and facts that it does not look at."""
        return np.column_stack([self.by_product(), *(self.facts[name] for name in names)])


def read(path: Path) -> Prompts:
    """Read prompts of either file. Raises ConfigError where it cannot be read."""
    wanted = {GRADED: GRADED_COLUMNS, CHECKED: CHECKED_COLUMNS}[path.name]
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        facts = {name: np.array([float(row[name]) for row in rows]) for name in wanted if "_" in name}
        right = [np.array([float(row[name]) for row in rows]) for name in wanted if name in {"small", "large", "right"}]
        tokens, kinds = [int(row["tokens"]) for row in rows], [frozenset(row["kinds"].split()) for row in rows]
    except (OSError, KeyError, ValueError) as e:
        msg = f"{path} cannot be read as prompts with grades: {e!r}"
        raise ConfigError(msg) from e
    device, server = right if len(right) > 1 else (right[0], np.ones(len(rows)))
    return Prompts(tokens, kinds, facts, device, server)


def routers(prompts: Prompts) -> dict[str, FloatArray]:
    """Return what each way to choose looks at, by its name."""
    found = {"length": prompts.by_length(), "learned": prompts.by_product()}
    if prompts.facts:
        found["+ prompt's"] = prompts.with_facts("prompt_mean", "prompt_least")
        found["+ answer's"] = prompts.with_facts("first_mean", "first_least")
    return found


def curve(chances: FloatArray, device: FloatArray, server: FloatArray) -> FloatArray:
    """Return the share of right answers at each of SHARES, where those of the least chances are sent to the server."""
    order = np.argsort(chances, kind="stable")
    gained = np.concatenate([[0.0], np.cumsum((server - device)[order])])
    found: FloatArray = (device.sum() + gained[np.rint(SHARES * len(order)).astype(int)]) / len(order)
    return found


@dataclass(frozen=True, slots=True)
class Played:
    """What came of each way to choose, in the same draws; `random` is among them, and who knows the device's answer.

    `curves` has the share of right answers [draw, share]; `told_apart` has how often the right one of two answers of
    the device has the better chance [draw].
    """

    curves: Mapping[str, FloatArray]
    told_apart: Mapping[str, FloatArray]

    def recovered(self, name: str) -> FloatArray:
        """Return how much of the gap between both sides is closed, on average over all shares, in each draw.

        0.5 is what chance closes.
        """
        ours, both = self.curves[name], self.curves["random"]
        gap = both[:, -1:] - both[:, :1]
        closed = (ours - both[:, :1]) / gap
        found: FloatArray = (closed[:, 1:] + closed[:, :-1]).mean(axis=1) / 2
        return found


def play(prompts: Prompts, n_known: int) -> Played:
    """Play each way to choose, with `n_known` answers of the device known."""
    rng = np.random.default_rng(SEED)
    curves, apart = dict[str, list[FloatArray]](), dict[str, list[float]]()
    looks, n = routers(prompts), len(prompts.tokens)
    for _ in range(N_SPLITS):
        mixed = rng.permutation(n)
        known, others = mixed[:n_known], mixed[n_known:]
        did = (rng.random(n_known) >= np.where(prompts.device[known] > 0, REDONE_RIGHT, REDONE_WRONG)).tolist()
        chances = {name: look[others] @ fitted(look[known].tolist(), did) for name, look in looks.items()}
        for _ in range(N_DRAWN):
            drawn = rng.integers(0, len(others), len(others))
            device, server = prompts.device[others[drawn]], prompts.server[others[drawn]]
            for name, chance in chances.items():
                curves.setdefault(name, []).append(curve(chance[drawn], device, server))
                apart.setdefault(name, []).append(told_apart(chance[drawn], device))
            curves.setdefault("all known", []).append(curve(device, device, server))
            apart.setdefault("all known", []).append(1.0)
            curves.setdefault("random", []).append(device.mean() + SHARES * (server.mean() - device.mean()))
            apart.setdefault("random", []).append(0.5)
    return Played(*({name: np.array(of_one) for name, of_one in of.items()} for of in (curves, apart)))


def told_apart(chances: FloatArray, right: FloatArray) -> float:
    """Return the share of pairs of a right and a wrong answer of which the right one has the better chance."""
    _, at, counts = np.unique(chances, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[at]
    n_right = right.sum()
    return float((ranks[right > 0].sum() - n_right * (n_right + 1) / 2) / (n_right * (len(right) - n_right)))


def with_interval(values: FloatArray) -> dict[str, float]:
    """Return the mean of draws, and the ends of their 95 % interval."""
    low, high = np.quantile(values, ((1 - SHARE) / 2, (1 + SHARE) / 2)).tolist()
    return {"mean": float(values.mean()), "low": low, "high": high}


def figures(folder: Path) -> dict[str, Any]:
    """Return, in `sets`, the figures of each set of prompts and number of known answers."""
    found = []
    for name, numbers in N_KNOWN.items():
        prompts = read(folder / name)
        for n_known in numbers:
            played = play(prompts, n_known)
            closed = {router: played.recovered(router) for router in played.curves}
            found.append({
                "set": name.removesuffix(".csv"), "prompts": len(prompts.tokens), "known": n_known,
                "device": float(prompts.device.mean()), "server": float(prompts.server.mean()),
                "routers": {
                    router: {
                        "told_apart": with_interval(played.told_apart[router]),
                        "recovered": with_interval(closed[router]),
                        "against_length": with_interval(closed[router] - closed["length"]),
                        "curve": [
                            {"share": float(share), **with_interval(ours[:, at])} for at, share in enumerate(SHARES)
                        ],
                    }
                    for router, ours in played.curves.items()
                },
            })  # fmt: skip
    return {"sets": found}


def text_of(found: Mapping[str, Any]) -> str:
    """Return the figures as tables, and the largest of each set as a picture."""
    lines: list[str] = []
    shares = "".join(f"{share:>7.0%}" for share in SHARES[2:-1:2])
    for one in found["sets"]:
        what = f"{one['prompts']} prompts, {one['known']} answers known"
        lines.append(f"{one['set']}: {what}; device right {one['device']:.1%}, server {one['server']:.1%}")
        lines.append(f"choice      told apart  gap closed  95 %              against length           {shares}")
        for router, its in one["routers"].items():
            kept = "".join(f"{its['curve'][at]['mean'] / one['server']:7.1%}" for at in range(2, 10, 2))
            closed, more = its["recovered"], its["against_length"]
            lines.append(
                f"{router:<11} {its['told_apart']['mean']:10.3f}  {closed['mean']:10.3f}  {_ends(closed):<16}  "
                f"{more['mean']:+.3f} {_ends(more):<16} {kept}"
            )
        lines += ["", *_picture(one), ""]
    return "\n".join(lines)


def _ends(one: Mapping[str, float]) -> str:
    return f"[{one['low']:+.3f}, {one['high']:+.3f}]"


def _picture(one: Mapping[str, Any]) -> list[str]:
    """Draw what is kept of the server's quality at each share: `learned` with its interval, and two others."""
    drawn = one["routers"]
    least = min(curve["low"] for its in drawn.values() for curve in its["curve"])
    most = max(curve["high"] for its in drawn.values() for curve in its["curve"])
    place: Callable[[float], int] = lambda value: round((WIDTH - 1) * (value - least) / (most - least))  # noqa: E731
    lines = [f"sent   {least / one['server']:.0%} kept{'':<{WIDTH - 14}}{most / one['server']:.0%}"]
    for at, share in enumerate(SHARES):
        row = [" "] * WIDTH
        ours = drawn["learned"]["curve"][at]
        row[place(ours["low"]) : place(ours["high"]) + 1] = "-" * (place(ours["high"]) - place(ours["low"]) + 1)
        for name, mark in (("random", "."), ("length", "o"), ("learned", "#")):
            row[place(drawn[name]["curve"][at]["mean"])] = mark
        lines.append(f"{share:4.0%}   {''.join(row).rstrip()}")
    return [*lines, "# learned, with its interval; o by length alone; . at random"]


def main(argv: list[str] | None = None) -> int:
    """Play both sets, and print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eval.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=GRADES, help="with graded.csv and checked.csv")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    return print_figures(figures(args.folder), text_of, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

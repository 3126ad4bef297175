"""Which of several models stay in memory: cold starts on simulated days, by several rules.

    python -m benchmarks.several [--days office person alike] [--seeds 21 22 23] [--json]

Four models of which two fit, some 2,000 requests a day. Ten days teach each rule and fill the memory, the two behind
them count. A cold start is a request that makes its model load. Of rules by count the best of five memories is taken,
for each day by itself, with these very requests before its eyes; ours has one setting for all, chosen on other seeds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence

from disco_daemon.bench.command import progress

from ..command import run_script
from .days import DAY_S, DAYS, LIMIT, Model, Request, requests
from .keeping import Count, Expected, Foresight, LeastRecent, Played, Rule, play

LEARNED, COUNTED = 10, 2  # days
WINDOWS_S = (math.inf, 86_400.0, 14_400.0, 3600.0, 1200.0)


def main() -> int:
    """Print a table for each kind of day."""
    parser = argparse.ArgumentParser(prog="benchmarks.several", description=__doc__)
    parser.add_argument("--days", nargs="+", choices=sorted(DAYS), default=list(DAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[21, 22, 23])
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    found = {day: compare(DAYS[day], args.seeds) for day in args.days}
    if args.json:
        print(json.dumps({day: [as_json(p) for p in rules] for day, rules in found.items()}))
    else:
        for day, rules in found.items():
            print("\n".join(lines(day, rules)))
    return 0


def compare(models: tuple[Model, ...], seeds: Sequence[int]) -> list[Played]:
    """Return what each rule came to, over all seeds; of those by count the best one."""
    found = dict[str, Played]()
    for seed in seeds:
        asked = requests(models, LEARNED + COUNTED, seed)
        for make in _rules(models, asked):
            rule = make()
            progress(f"seed {seed}: {rule.name}")
            one = play(rule, models, asked, LIMIT, LEARNED * DAY_S)
            found[one.name] = found[one.name].plus(one) if one.name in found else one
    counts = [p for p in found.values() if p.name.startswith(Count.prefix)]
    best = min(counts, key=lambda p: p.cold)
    return [p for p in found.values() if p is best or p not in counts]


def _rules(models: tuple[Model, ...], asked: Sequence[Request]) -> list[Callable[[], Rule]]:
    counts = [lambda s=window_s: Count(s) for window_s in WINDOWS_S]
    ours = [lambda: Expected(models), lambda: Expected(models, brings_back=False)]
    return [LeastRecent, *counts, *ours, lambda: Foresight(asked)]


def as_json(played: Played) -> dict[str, object]:
    """Return a rule's figures."""
    return {name: getattr(played, name) for name in Played.__slots__}


def lines(day: str, rules: Sequence[Played]) -> list[str]:
    """Return the table of one kind of day; fewer cold starts are better."""
    least = min(p.cold for p in rules if p.name == LeastRecent.name or p.name.startswith(Count.prefix))
    head = f"{day + ', ' + str(rules[0].requests) + ' requests':34}{'cold':>6}{'waited':>9}{'ahead':>7}{'fewer':>8}"
    rows = [f"{p.name:34}{p.cold:6}{p.waited_s:7.0f} s{p.ahead:7}{100 * (1 - p.cold / least):6.0f} %" for p in rules]
    return ["", head, *rows]


if __name__ == "__main__":
    raise SystemExit(run_script(main))

"""Which of several models stay in memory: cold starts on simulated days, by several rules.

    python -m benchmarks.several --live 200 [--faster 20] [--days recorded --traces FOLDER] [--json]
    python -m benchmarks.several [--days office person alike recorded] [--seeds 21 22 23] [--traces FOLDER] [--json]

Four models of which two fit, some 2,000 requests a day. Ten days teach each rule and fill the memory, the two behind
them count. A cold start is a request that makes its model load. Of rules by count the best of five memories is taken,
for each day by itself, with these very requests before its eyes; ours has one setting for all, chosen on other seeds.
Beside them stands the least that a rule could have which knows all requests, and loads what is asked for only: loads
ahead, which nobody waits for and which cost energy, are how one can be below that. Recorded days want --traces.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from disco_daemon.bench.command import at_least, progress, run_measurement

from ..command import positive, run_script
from .bound import least_loads
from .days import DAY_S, DAYS, LIMIT, Model, Request, requests
from .keeping import Count, Expected, Foresight, LeastRecent, Played, Rule, play
from .recorded import recorded

LEARNED, COUNTED = 10, 2  # days
RECORDED, BOUND = "recorded", "all known ahead, no load ahead"
WINDOWS_S = (math.inf, 86_400.0, 14_400.0, 3600.0, 1200.0)


def main() -> int:
    """Print a table for each kind of day."""
    parser = argparse.ArgumentParser(prog="benchmarks.several", description=__doc__)
    parser.add_argument("--days", nargs="+", choices=[*sorted(DAYS), RECORDED])
    parser.add_argument("--traces", type=Path, help="a folder of traces, with arrivals in `common/`")
    parser.add_argument("--seeds", nargs="+", type=int, default=[21, 22, 23])
    parser.add_argument(
        "--live", type=at_least(1), metavar="N", help="ask a real daemon N requests in place of all that"
    )
    parser.add_argument("--faster", type=positive, default=20.0, help="how much time is compressed then (default: 20)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.live:
        traces = args.traces if args.days == [RECORDED] else None
        return _live(args.live, args.faster, args.seeds[0], traces)
    found = {
        day: compare(day, args.seeds, args.traces) for day in args.days or [*DAYS, *[RECORDED] * bool(args.traces)]
    }
    if args.json:
        print(json.dumps({day: [as_json(p) for p in rules] for day, rules in found.items()}))
    else:
        for day, rules in found.items():
            print("\n".join(lines(day, rules)))
    return 0


def _live(n: int, faster: float, seed: int, traces: Path | None) -> int:
    from .live import busy_hour, measure, recorded_day  # the other figures need no daemon

    if traces is None:
        models, asked = busy_hour(n, faster, seed)
    else:
        models, asked = recorded_day(traces, n, faster, seed)
    figures = run_measurement(measure(models, asked, n, faster))
    if figures is None:
        return 1
    print(json.dumps(figures))
    return 1 if figures["failed"] or figures["over_limit"] else 0


def compare(day: str, seeds: Sequence[int], traces: Path | None = None) -> list[Played]:
    """Return what each rule came to, over all seeds; of those by count the best one. Raises ConfigError."""
    found = dict[str, Played]()
    models = DAYS.get(day, DAYS["office"])
    for seed in seeds:
        if day == RECORDED:
            asked = recorded(traces or Path(), LEARNED + COUNTED, seed)
        else:
            asked = requests(models, LEARNED + COUNTED, seed)
        bound = Played(BOUND, cold=least_loads(models, asked, LIMIT, LEARNED * DAY_S))
        found[BOUND] = found[BOUND].plus(bound) if BOUND in found else bound
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
    return {name: getattr(played, name) for name in Played.__slots__} | {"load_j": played.load_j}


def lines(day: str, rules: Sequence[Played]) -> list[str]:
    """Return the table of one kind of day; fewer cold starts are better."""
    least = min(p.cold for p in rules if p.name == LeastRecent.name or p.name.startswith(Count.prefix))
    n = f"{day}, {max(p.requests for p in rules)} requests"
    head = f"{n:34}{'cold':>6}{'waited':>9}{'ahead':>7}{'loads':>10}{'fewer':>8}"
    return ["", head, *(_line(p, least) for p in rules)]


def _line(p: Played, least: int) -> str:
    fewer = f"{100 * (1 - p.cold / least):6.0f} %"
    if p.name == BOUND:
        return f"{p.name:34}{p.cold:6}{'':26}{fewer}"
    return f"{p.name:34}{p.cold:6}{p.waited_s:7.0f} s{p.ahead:7}{p.load_j / 1000:7.1f} kJ{fewer}"


if __name__ == "__main__":
    raise SystemExit(run_script(main))

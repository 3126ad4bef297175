"""Which of several models stay in memory: cold starts on simulated days, by several rules.

    python -m benchmarks.several --live 200 [--faster 10] [--days recorded --traces FOLDER] [--seeds 21 22 23]
    python -m benchmarks.several [--days office person alike recorded] [--seeds 21 22 23] [--traces FOLDER] [--json]
                                 [--pieces 200]

Four models of which two fit, some 2,000 requests a day. Ten days teach each rule and fill the memory, the two behind
them count. A cold start is a request that makes its model load. Of rules by count the best of five memories is taken,
for each day by itself, with these very requests before its eyes; ours has one setting for all, chosen on other seeds.
Beside them stands the least that a rule could have which knows all requests, and loads what is asked for only: loads
ahead, which nobody waits for and which cost energy, are how one can be below that. Recorded days want --traces.
--pieces says how much chance there is in so many requests; --live asks a daemon the last ones of each seed's days.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from disco_daemon.bench.command import at_least, progress, run_measurement
from disco_daemon.errors import ConfigError

from ..command import positive, run_script
from .bound import least_loads
from .days import DAY_S, DAYS, LIMIT, Model, Request, requests
from .keeping import Count, Expected, Foresight, LeastRecent, Played, Rule, play
from .recorded import recorded

LEARNED, COUNTED = 10, 2  # days
RECORDED, BOUND = "recorded", "all known ahead, no load ahead"
WANTED = 30.0  # % fewer cold starts than by the other rules
WINDOWS_S = (math.inf, 86_400.0, 14_400.0, 3600.0, 1200.0)


def main() -> int:
    """Print a table for each kind of day."""
    parser = argparse.ArgumentParser(prog="benchmarks.several", description=__doc__)
    parser.add_argument("--days", nargs="+", choices=[*sorted(DAYS), RECORDED])
    parser.add_argument("--traces", type=Path, help="a folder of traces, with arrivals in `common/`")
    parser.add_argument("--seeds", nargs="+", type=int, default=[21, 22, 23])
    parser.add_argument("--pieces", type=at_least(1), metavar="N", help="say what N requests in a row come to, too")
    parser.add_argument("--live", type=at_least(1), metavar="N", help="ask a real daemon N requests of each seed")
    parser.add_argument("--faster", type=positive, default=10.0, help="how much time is compressed then (default: 10)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.live:
        return _live((args.days or ["office"])[0], args.seeds, args.traces, args.live, args.faster)
    found = {
        day: compare(day, args.seeds, args.traces) for day in args.days or [*DAYS, *[RECORDED] * bool(args.traces)]
    }
    if args.json:
        print(json.dumps({day: [as_json(p) for p in rules] for day, rules in found.items()}))
    else:
        for day, rules in found.items():
            print("\n".join(lines(day, rules)))
            if args.pieces:
                print(pieces(rules, args.pieces))
    return 0


def _live(day: str, seeds: Sequence[int], traces: Path | None, n: int, faster: float) -> int:
    from .live import measure  # the other figures need no daemon

    days = {seed: _asked(day, seed, traces) for seed in seeds}
    figures = run_measurement(measure(_models(day), days, n, faster))
    if figures is None:
        return 1
    print(json.dumps(figures))
    return 1 if figures["failed"] or figures["over_limit"] else 0


def _models(day: str) -> tuple[Model, ...]:
    return DAYS.get(day, DAYS["office"])


def _asked(day: str, seed: int, traces: Path | None) -> list[Request]:
    """Return all requests of one seed's days. Raises ConfigError."""
    if day == RECORDED:
        return recorded(traces or Path(), LEARNED + COUNTED, seed)
    return requests(_models(day), LEARNED + COUNTED, seed)


def compare(day: str, seeds: Sequence[int], traces: Path | None = None) -> list[Played]:
    """Return what each rule came to, over all seeds; of those by count the best one. Raises ConfigError."""
    found = dict[str, Played]()
    models = _models(day)
    for seed in seeds:
        asked = _asked(day, seed, traces)
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
    return {name: getattr(played, name) for name in Played.__slots__ if name != "was_cold"} | {"load_j": played.load_j}


def lines(day: str, rules: Sequence[Played]) -> list[str]:
    """Return the table of one kind of day; fewer cold starts are better."""
    least = min(p.cold for p in rules if p.name == LeastRecent.name or p.name.startswith(Count.prefix))
    n = f"{day}, {max(p.requests for p in rules)} requests"
    head = f"{n:34}{'cold':>6}{'waited':>9}{'ahead':>7}{'loads':>10}{'fewer':>8}"
    return ["", head, *(_line(p, least) for p in rules)]


def pieces(rules: Sequence[Played], n: int) -> str:
    """Return what `n` requests in a row come to: how many cold starts fewer than by both others, for each piece.

    Raises ConfigError where there are fewer.
    """
    ours = next(p for p in rules if p.name == Expected.name)
    others = [p for p in rules if p.name == LeastRecent.name or p.name.startswith(Count.prefix)]
    fewer = []
    for end in range(len(ours.was_cold), n - 1, -n):
        least = min(sum(p.was_cold[end - n : end]) for p in others)
        fewer.append(100 * (1 - sum(ours.was_cold[end - n : end]) / max(1, least)))
    if not fewer:
        raise ConfigError(f"there is no piece of {n} requests: there are {len(ours.was_cold)}")
    middle, low, high = np.percentile(fewer, (50, 10, 90))
    enough = sum(one >= WANTED for one in fewer) / len(fewer)
    return (
        f"{len(fewer)} pieces of {n} requests: {middle:.0f} % fewer than by both others ({low:.0f} to {high:.0f} "
        f"from the 10th to the 90th percentile); at least {WANTED:.0f} % in {100 * enough:.0f} % of the pieces"
    )


def _line(p: Played, least: int) -> str:
    fewer = f"{100 * (1 - p.cold / least):6.0f} %"
    if p.name == BOUND:
        return f"{p.name:34}{p.cold:6}{'':26}{fewer}"
    return f"{p.name:34}{p.cold:6}{p.waited_s:7.0f} s{p.ahead:7}{p.load_j / 1000:7.1f} kJ{fewer}"


if __name__ == "__main__":
    raise SystemExit(run_script(main))

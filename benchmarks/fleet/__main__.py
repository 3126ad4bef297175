"""One model over several machines: `python -m benchmarks.fleet`, with processes of this machine; or `--simulate`.

Four A100 of 40 GB on PCIe, Llama-13B and -70B, answers as long as Alpaca's, 3 to 50 requests/s: the fleet's placement
by the policy `measured` beside static batches (as Hugging Face Transformers), continuous batching (as vLLM), and two
and four whole instances. benchmarks/fleet/fleet_constants.py has all constants. What is live is in
benchmarks/fleet/live.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from disco_daemon.bench.command import Figures, print_figures, progress
from disco_daemon.system.control_groups import n_processors

from ..command import run_script
from .decisions import decision_ms
from .figures import ASKED, simulate
from .fleet_constants import MOVED_SEEDS, SEEDS


def named_figures(figures: Figures) -> Iterator[tuple[str, float | None]]:
    """Yield each ratio with its name, such as `versus_hft.13b_low.throughput`."""
    for group in ("versus_hft", "versus_vllm"):
        for load, both in figures[group].items():
            yield from ((f"{group}.{load}.{name}", value) for name, value in both.items())
    yield from ((f"versus_4_instances.{name}", value) for name, value in figures["versus_4_instances"].items())
    yield from ((name, figures[name]) for name in ("oom_ratio", "slo_rate_ratio", "flow_gain", "flow_moved_gain"))


def asked(name: str) -> float | None:
    """Return what is asked of a figure, or None."""
    group, _, last = name.rpartition(".")
    return ASKED.get(group, {}).get(last) if name not in ASKED else ASKED[name][""]


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def table(figures: Figures) -> str:
    """Return the figures as text: each ratio with what was asked, and its range with every constant moved."""
    moved = [dict(named_figures(one)) for both in figures["moved"].values() for one in both.values()]
    lines = ["Simulated, not measured. Ranges: each constant 30 % lower and higher, one at a time.", ""]
    lines.append(f"{'figure':42} {'here':>8} {'asked':>7} {'reached':>8}  range")
    for name, value in named_figures(figures):
        goal, others = asked(name), [found for one in moved if (found := one[name]) is not None]
        below = name.endswith(".memory")
        reached = (
            "" if goal is None or value is None else "yes" if (value <= goal if below else value >= goal) else "no"
        )
        span = f"{min(others):.3g} to {max(others):.3g}" if others else "-"
        lines.append(f"{name:42} {shown(value):>8} {shown(goal):>7} {reached:>8}  {span}")
    oom = figures["oom"]
    lines += [
        "",
        (
            f"out of memory at high load: {oom['hft']:.0%} of static batches, {oom['fleet']:.0%} in the fleet "
            f"({oom['fleet_preempted']:.1%} of its answers were interrupted)"
        ),
        "",
        *_curves(figures["curves"]),
        "",
        "token/s where more is asked than any can do (one seed):",
        *(
            f"{model}: " + ", ".join(f"{k} {v:.0f}" for k, v in by.items())
            for model, by in figures["saturated"].items()
        ),
        "",
        *_paper(figures["paper_tables"]),
        "",
        (
            f"one decision of 16 hosts and 80 layers: {figures['decision_ms']['median']:.0f} ms, at most "
            f"{figures['decision_ms']['max']:.0f} ms of processor time (asked: 100)"
        ),
        "",
        f"{figures['cpu_s']:.0f} CPU seconds, {figures['wall_s']:.0f} s",
    ]
    return "\n".join(lines)


def _curves(rows: Sequence[dict[str, Any]]) -> list[str]:
    rates = sorted({row["rate"] for row in rows})
    lines = [
        "token/s / mean latency, s / share in time, by requests/s",
        f"{'':20}" + "".join(f"{r:>18g}" for r in rates),
    ]
    for model, system in dict.fromkeys((row["model"], row["system"]) for row in rows):
        own = {row["rate"]: row for row in rows if (row["model"], row["system"]) == (model, system)}
        cells = (f"{own[r]['throughput']:.0f}/{own[r]['latency_s']:.1f}/{own[r]['in_time']:.0%}" for r in rates)
        lines.append(f"{model + ' ' + system:20}" + "".join(f"{cell:>18}" for cell in cells))
    return lines


def _paper(tables: dict[str, Any]) -> list[str]:
    three = tables["figure_3"]
    lines = ["Figure 3, static batches at the highest rate: mean latency, s / share of batches out of memory"]
    lines += [f"{name:16} {one['latency_s']:7.1f} {one['out_of_memory']:5.0%}" for name, one in three.items()]
    lines += ["Figure 6, saturated, one batch scattered: gain by replicas", "layers degree simulated Eq. 4 paper"]
    lines += [
        f"{r['layers']:6} {r['degree']:6} {r['simulated']:9.0%} {r['equation_4']:5.0%} {r['paper']:5.0%}"
        for r in tables["figure_6"]
    ]
    lines += ["Table 1: MiB, GFLOP of 256 tokens, the paper's"]
    lines += [f"{k:16} {m['mib']:6.0f} {m['gflop']:7.2f} {m['paper_gflop']:7.2f}" for k, m in tables["table_1"].items()]
    lines += ["Table 2: layers, s at the link's rate, the paper's s"]
    return lines + [f"{c['layers']:6} {c['link_s']:7.3f} {c['paper_s']:7.3f}" for c in tables["table_2"]]


def joined(lines: Callable[[Figures], list[str]], figures: Figures) -> str:
    """Return figures as one text."""
    return "\n".join(lines(figures))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--simulate", action="store_true", help="simulate four GPUs")
    parser.add_argument(
        "--full", action="store_true", help="all that is asked; simulated: each constant moved with all seeds"
    )
    parser.add_argument("--runs", type=int, metavar="N", help="live: so many runs of each")
    parser.add_argument("--cut", type=int, nargs=2, metavar=("FIRST", "LAST"), help="live: the layers of the host")
    parser.add_argument(
        "--equal", type=int, metavar="N", help="live: only N answers over 1, 2 and 3 hosts, and 50 N steps"
    )
    parser.add_argument("--operations", type=int, metavar="N", help="live: only moves and replicas, N times each")
    parser.add_argument(
        "--predictions", type=int, metavar="N", help="live: only forecasts, N runs of each plan and load"
    )
    parser.add_argument("--lines", type=int, metavar="N", help="live: only lines of some delays and rates, N runs each")
    parser.add_argument("--failures", type=int, metavar="N", help="live: only hosts that fail, N times")
    parser.add_argument(
        "--pressure", action="store_true", help="live: only a host whose machine is short of memory, in a control group"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    if args.pressure:
        from . import pressure

        found = pressure.pressure(pressure.Plan())
        return print_figures(found, partial(joined, pressure.pressure_lines), as_json=args.json)
    if not args.simulate:
        from . import lines, live, operations, prediction

        parts = {
            live.EQUAL: (args.equal, live.equal_lines),
            live.FAILURE: (args.failures, live.failure_lines),
            live.OPERATIONS: (args.operations, operations.operation_lines),
            live.LINES: (args.lines, lines.line_lines),
            live.PREDICTION: (args.predictions, prediction.prediction_lines),
        }
        for kind, (number, lines_of) in parts.items():
            if number:
                found = live.only(kind, number)
                return print_figures(found, partial(joined, lines_of), as_json=args.json)
        cut = (args.cut[0], args.cut[1]) if args.cut else None
        counts = (live.ALL_ANSWERS, live.ALL_FAULTS) if args.full else ()
        found = live.live(args.runs or (5 if args.full else 3), cut, *counts)
        return print_figures(found, live.table, as_json=args.json)
    begin = time.monotonic()
    seeds = SEEDS if args.full else MOVED_SEEDS
    figures = simulate(SEEDS, seeds, min(2, n_processors()), progress)
    figures["decision_ms"] = decision_ms()
    used = os.times()
    cpu_s = used.user + used.system + used.children_user + used.children_system
    return print_figures(figures | {"cpu_s": cpu_s, "wall_s": time.monotonic() - begin}, table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

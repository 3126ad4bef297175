"""How well the throughput of a fleet is forecast: by measured costs, and by the paper's speed-up. Part of the live run.

Home on one core, one host on the other. Costs are fitted to what the engine measures of ranges in plans that are not
judged, the whole model at home among them; then each judged plan is forecast and measured under each load. The paper's
forecast is the throughput with all layers at home, as measured, times S of Equation 3; that has a pipeline nowhere, so
moved layers alone bring nothing there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from disco_daemon.engine import wire
from disco_daemon.engine.hosts.home import HERE, Ends, HomeLlama
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.llama.memory import N_SEQS
from disco_daemon.engine.llama.model import AbortFlag
from disco_daemon.engine.serve.admission import SCHEDULERS, Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.engine.serve.home import FleetHome
from disco_daemon.engine.wire import FLIGHTS
from disco_daemon.fleet.costs import ModuleCosts
from disco_daemon.fleet.forecast import FleetLoad, FleetModel
from disco_daemon.fleet.layout import FleetLayout, PlacedRange
from disco_daemon.fleet.placement import FleetHost, ModelModules
from disco_daemon.machines.fleet.layer_files import Shares
from disco_daemon.machines.fleet.layer_plan import modules_of
from disco_daemon.machines.fleet.range_costs import CostBook
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import SegmentFiles, read_head
from disco_daemon.scheduler.latency import IterationLatency

from .local_hosts import LocalHosts
from .speedup import LayerReplica, speedup

N_LAYERS, FIRST, LAST = 30, 2, 28  # of the default model; home keeps those below FIRST and from LAST on
LOADS = (2, 4, 8)  # answers at a time
N_TOKENS, CONTEXT = 48, 60.0  # of each answer, and on average in the cache
HOME, HOST, BOTH = (0,), (1,), (0, 1)
Plan = tuple[tuple[int, tuple[int, ...]], ...]  # from which layer on, and where, up to the next one
LEARNED: tuple[Plan, ...] = (
    ((2, HOME),),
    ((2, HOME), (10, HOST), (20, HOME)),
    ((2, HOST), (16, HOME)),
)
JUDGED: tuple[Plan, ...] = (
    ((2, HOME), (6, HOST), (10, HOME)),
    ((2, HOME), (5, HOST), (21, HOME)),
    ((2, HOME), (8, HOST), (24, HOME)),
    ((2, HOST),),
    ((2, HOME), (14, HOST)),
    ((2, HOST), (8, HOME), (20, HOST)),
    ((2, HOME), (8, BOTH), (22, HOME)),
    ((2, BOTH), (15, HOST)),
    ((2, BOTH),),
)


def layout_of(plan: Plan) -> FleetLayout:
    """Return a plan as a layout."""
    bounds = [first for first, _ in plan] + [LAST]
    ranges = (PlacedRange(a, b, hosts) for (a, b), (_, hosts) in zip(pairwise(bounds), plan, strict=True))
    return FleetLayout(N_LAYERS, tuple(ranges))


def ends_of(plan: Plan, model: Path, folder: Path, shares: Shares = ()) -> Ends:
    """Write the files of a plan's ranges; return them as the engine takes them, with the hosts' shares."""
    ranges = layout_of(plan).ranges
    paths = SegmentFiles(folder, 8 << 30, one_embedding=True).write(model, [layers for layers, _ in ranges])
    hosts = tuple(tuple(number or HERE for number in at) for _, at in ranges[1:-1])
    return Ends(tuple(map(str, paths)), tuple(layers for layers, _ in ranges), hosts, shares)


class Played(NamedTuple):
    """What answers gave: token/s, what the runs of ranges took, and for how long that was measured, s."""

    tokens_per_s: float
    usage: wire.FleetUsage
    seconds: float


@dataclass
class Measured:
    """A fleet whose layers move from plan to plan, and what each gave."""

    llama: HomeLlama
    model: Path
    folder: Path

    def take(self, plan: Plan, shares: Shares = ()) -> None:
        """Let layers lie as in a plan, and answers be shared so. Raises RuntimeError if that cannot be."""
        _, home = self._batcher()
        home.begin_move(ends_of(plan, self.model, self.folder, shares))
        while self.llama.is_moving:
            home.look()
        if error := self.llama.moves[-1].error:
            raise RuntimeError(error)

    def play(self, n_answers: int, begin: Callable[[], None] = lambda: None) -> Played:
        """Measure so many answers while all are drawn; `begin` is called when each has its first token."""
        self.llama.clear()
        batcher, home = self._batcher()
        for number in range(n_answers):
            messages = [{"role": "user", "content": f"Tell me a long story about house {number}."}]
            order = wire.Generate(id=str(number), messages=messages, temperature=0, max_tokens=N_TOKENS)
            batcher.add(order)
        while not all(s.draw.n_drawn for s in batcher.admission.sequences.values()):
            batcher.step()
        home.fleet_usage()  # of the prompts, which are forgotten
        begin()
        began, before = batcher.clock(), batcher.counters.completion_tokens
        while len(batcher.admission.sequences) == n_answers:
            batcher.step()
        seconds = batcher.clock() - began
        rate, usage = (batcher.counters.completion_tokens - before) / seconds, home.fleet_usage()
        for key in list(batcher.admission.sequences):
            batcher.cancel(key)
        return Played(rate, usage, seconds)

    def _batcher(self) -> tuple[Batcher, FleetHome]:
        latency = IterationLatency(self.llama.latency_prior)
        admission = Admission(Cells(self.llama, N_SEQS, self.llama.n_cells), SCHEDULERS["andes"](latency), latency)
        home = FleetHome()
        return Batcher(self.llama, lambda _: None, admission, remote=home), home


def forecast(plan: Plan, n_answers: int, model: ModelModules, costs: ModuleCosts) -> tuple[float, Shares]:
    """Return the token/s by measured costs, of home and a host with a core each, and the shares for that."""
    layout = layout_of(plan)
    hosts = tuple(FleetHost(name, 1.0, 1e12, cpu_share=1.0) for name in ("home", "host"))
    fleet = FleetModel(
        hosts, layout.modules(model, 0), costs, FleetLoad(float(n_answers), CONTEXT), max_flights=FLIGHTS
    )
    found = fleet.forecast(layout.placement)
    return found.tokens_per_s, layout.shares(found.shares)


def paper_speedup(plan: Plan, n_answers: int) -> float:
    """Return S of Equation 3 for equal hosts, without time for what travels: the most that it can say."""
    before = [[LayerReplica(n_answers, 1.0, float("inf"))]] * N_LAYERS
    after = [[LayerReplica(n_answers / n, 1.0, float("inf"))] * n for n in layout_of(plan).parallelism]
    return speedup(before, after, 1.0, 1.0, 0.0)


def predictions(
    model: Path, folder: Path, cores: Sequence[int], repeats: int, n_plans: int | None = None
) -> dict[str, Any]:
    """Return the median errors of both forecasts over judged plans and loads, and each of them; rates are medians."""
    hosts = LocalHosts(cpus=cores[1:])
    load = wire.Load(model_path=str(model), n_ctx=512, n_cells=4096, n_threads=1, n_gpu_layers=0, speculate=False)
    judged = JUDGED[: n_plans or len(JUDGED)]
    modules = modules_of(read_head(model)[1], N_LAYERS)
    llama = HomeLlama(load, ends_of(LEARNED[0], model, folder), AbortFlag(), hosts.open)
    measured = Measured(llama, model, folder)
    book, alone = CostBook(), dict[int, float]()
    try:
        for plan in LEARNED:
            if plan is not LEARNED[0]:
                measured.take(plan)
            for n in LOADS:
                rates = []
                for _ in range(repeats):
                    rate, usage, _ = measured.play(n)
                    book.observe(usage.samples)
                    rates.append(rate)
                if plan is LEARNED[0]:
                    alone[n] = statistics.median(rates)
        if (costs := book.costs(layout_of(LEARNED[0]))) is None:
            raise RuntimeError("the plans did not show what each module takes")
        found = list(_judge(measured, judged, modules, costs, alone, repeats))
    finally:
        measured.llama.close()
        hosts.close()
    return {
        "measured": statistics.median(one["error"] for one in found),
        "paper": statistics.median(one["paper_error"] for one in found),
        "worst_measured": max(one["error"] for one in found),
        "plans": len(judged),
        "loads": list(LOADS),
        "by_kind": by_kind(found),
        "found": found,
    }


def _judge(
    measured: Measured,
    judged: Sequence[Plan],
    modules: ModelModules,
    costs: ModuleCosts,
    alone: dict[int, float],
    repeats: int,
) -> Iterator[dict[str, Any]]:
    for plan in judged:
        measured.take(plan)
        for n in LOADS:
            (by_costs, shares), by_paper = forecast(plan, n, modules, costs), alone[n] * paper_speedup(plan, n)
            measured.take(plan, shares)
            live = statistics.median(measured.play(n)[0] for _ in range(repeats))
            yield {
                "plan": [[first, list(hosts)] for first, hosts in plan],
                "answers": n,
                "shares": shares,
                "live": live,
                "measured": by_costs,
                "paper": by_paper,
                "error": abs(by_costs / live - 1),
                "paper_error": abs(by_paper / live - 1),
            }


def prediction_lines(found: dict[str, Any]) -> list[str]:
    """Return as text how far forecasts were off, of plans with replicas and of those without."""
    by_kind = {name: found["by_kind"][name] for name in ("alone", "replicas") if name in found["by_kind"]}
    return [
        (
            f"forecast of {found['plans']} plans under {len(found['loads'])} loads: off by {found['measured']:.0%} by "
            f"measured costs (asked: at most 15 %), by {found['paper']:.0%} as the paper has it; medians"
        ),
        ", ".join(
            f"{'with' if name == 'replicas' else 'without'} replicas {low:+.0%} to {high:+.0%}, median {median:+.0%}"
            for name, (low, median, high) in by_kind.items()
        ),
    ]


def by_kind(found: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """Return by how much plans with replicas and others were forecast too high: least, median and most."""
    kinds: dict[str, list[float]] = {}
    for one in found:
        kind = "replicas" if any(len(hosts) > 1 for _, hosts in one["plan"]) else "alone"
        kinds.setdefault(kind, []).append(one["measured"] / one["live"] - 1)
    return {kind: (min(errors), statistics.median(errors), max(errors)) for kind, errors in kinds.items()}


def main() -> int:
    """Forecast and measure some plans by themselves."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet.prediction", description="See benchmarks.fleet.")
    parser.add_argument("--plans", type=int, default=len(JUDGED), help="so many of them")
    parser.add_argument("--runs", type=int, default=1, help="of each plan and load")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores[:1])
    with tempfile.TemporaryDirectory() as name:
        found = predictions(default_model_path(), Path(name), cores, args.runs, args.plans)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

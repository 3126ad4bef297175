"""The figures of the simulated fleet: every system at every rate, ratios, each constant moved by 30 %.

Systems are named as in the table: `hft` takes static batches of what fits by reckoning, `hft15` of 15 (the paper's),
the better of both is the baseline; `vllm` is one engine with continuous batching, over four GPUs by tensor parallelism
or in a pipeline (70B; the better one counts); `fleet` is the placement that the policy `measured` plans for the rate,
answered in flights. `n_hft` and `n_batched` are n whole instances, static and with continuous batching; `2_fleet` are
two instances and some layers more, spread over the four GPUs, in the memory that the paper's two instances took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from disco_daemon.fleet.forecast import FleetLoad, FleetModel
from disco_daemon.fleet.measured import next_steps
from disco_daemon.fleet.placement import MAX_HOSTS, MEMORY_SHARE, Placement
from disco_daemon.fleet.steps import FleetStep

from .fleet_constants import (
    EXTRA_LAYERS,
    FLOW_EXTRA_LAYERS,
    HFT_PAPER_BATCH,
    LLAMA_13B,
    LLAMA_70B,
    MAX_NEW_TOKENS,
    MIB,
    MOVED_SEEDS,
    N_GPUS,
    PAPER_MEMORY_MIB,
    RATES_HIGH,
    RATES_LOW,
    SLO_HOLDS,
    VARIATION,
    Constants,
    LlamaShape,
)
from .machines import Engine, Flow, Gpu, WholeModel, fleet_model, flow_of, scatter_rate, spread_evenly
from .queue import Metrics, Served, deal, make_requests, measure, serve_continuously, serve_in_batches
from .speedup import equal_hosts_speedup

RATES = (*RATES_LOW, *RATES_HIGH)
MAX_STEPS = 4 * MAX_HOSTS  # of a plan
PLAN_ROUNDS = 2  # the load depends on the placement, and the placement on the load
SATURATED = 100_000.0  # answers that want to run: more than fit anywhere
SATURATING_RATE = 400.0  # requests/s, more than any of the systems serves; not one of the paper's loads
SATURATED_SYSTEMS = {
    "13b": ("vllm", "fleet", "2_batched", "2_fleet", "4_batched"),
    "70b": ("vllm", "vllm_pipeline", "fleet"),
}
MODELS = (LLAMA_13B, LLAMA_70B)
SYSTEMS = {
    "13b": ("hft", "hft15", "vllm", "fleet", "2_hft", "4_hft", "2_batched", "4_batched", "2_fleet"),
    "70b": ("hft", "hft15", "vllm", "vllm_pipeline", "fleet"),
}
ASKED = {  # what the issue asks for, by figure; `latency_cut` as a share
    "versus_hft.13b_low": {"throughput": 2.1, "latency_cut": 0.57},
    "versus_hft.70b_high": {"throughput": 3.9, "latency_cut": 0.74},
    "versus_vllm.13b_low": {"throughput": 1.16, "latency_cut": 0.14},
    "versus_vllm.13b_high": {"throughput": 1.16, "latency_cut": 0.14},
    "versus_vllm.70b_low": {"throughput": 1.16, "latency_cut": 0.14},
    "versus_vllm.70b_high": {"throughput": 1.16, "latency_cut": 0.14},
    "versus_4_instances": {"throughput": 0.9, "memory": 0.54},
    "slo_rate_ratio": {"": 1.6},
    "flow_gain": {"": 1.5},
}
Curves = dict[tuple[str, str, float], Metrics]


def mean_context(constants: Constants) -> float:
    """Return the tokens that a running answer has on average: long answers run longer."""
    answers = [one.n_answer for one in make_requests(50.0, 0, constants, 600.0)]
    squares = sum(n * n for n in answers) / max(1, sum(answers))
    return constants.mean_prompt_tokens + squares / 2


def plan_steps(fleet: FleetModel, placement: Placement) -> tuple[Placement, list[FleetStep]]:
    """Return all steps until none gains enough, and where they lead."""
    steps: list[FleetStep] = []
    while len(steps) < MAX_STEPS and (more := next_steps(fleet, placement)):
        for step in more:
            placement = step.apply(placement)
        steps += more
    return placement, steps


@lru_cache(maxsize=64)
def planned_flow(shape: LlamaShape, constants: Constants, rate: float) -> Flow:
    """Return the engine that the policy `measured` plans for a rate of requests."""
    gpu, n = Gpu(shape, constants), 1.0
    context = mean_context(constants)
    fits_one = shape.weight_bytes < constants.usable_bytes
    begin = Placement.at_home(shape.n_layers + 2) if fits_one else spread_evenly(shape, N_GPUS)
    step_s = WholeModel(gpu).step_s(1, 1, context)
    for _ in range(PLAN_ROUNDS):
        n = max(1.0, rate * constants.mean_answer_tokens * step_s)  # Little's law
        fleet = fleet_model(gpu, FleetLoad(n, context))
        placement, _ = plan_steps(fleet, begin)
        found = fleet.forecast(placement)
        step_s = found.round_s if math.isfinite(found.round_s) else step_s
    return flow_of(fleet, placement, found, gpu)


@lru_cache(maxsize=64)
def two_instances_flow(constants: Constants) -> Flow:
    """Return two instances of 13B and EXTRA_LAYERS more, a pair of GPUs each, in the paper's memory of two."""
    shape, half = LLAMA_13B, LLAMA_13B.n_layers // 2
    gpu = Gpu(shape, constants)
    overlap = int(EXTRA_LAYERS) // 4  # of the one half that the GPU of the other half has as well
    masks = [
        (0b0101 if layer < half + overlap else 0) | (0b1010 if layer >= half - overlap else 0)
        for layer in range(shape.n_layers)
    ]
    fleet = fleet_model(gpu, FleetLoad(SATURATED, mean_context(constants)))
    budget = PAPER_MEMORY_MIB["cocoserve_2"] * MIB / N_GPUS / MEMORY_SHARE
    hosts = tuple(replace(host, memory_bytes=min(budget, host.memory_bytes)) for host in fleet.hosts)
    fleet = replace(fleet, hosts=hosts)
    placement = Placement((0b0101, *masks, 0b0101))
    return flow_of(fleet, placement, fleet.forecast(placement), gpu)


def reckoned_batch(engine: Engine, constants: Constants) -> int:
    """Return how many answers fit if prompts are of mean length and answers as long as allowed."""
    return max(1, int(engine.room_tokens / (constants.mean_prompt_tokens + MAX_NEW_TOKENS)))


def run_system(shape: LlamaShape, system: str, rate: float, seed: int, constants: Constants) -> Metrics:
    """Serve one minute's requests by one system."""
    gpu = Gpu(shape, constants)
    n_gpus = 1 if shape is LLAMA_13B else N_GPUS
    requests = make_requests(rate, seed, constants)
    number, _, kind = system.rpartition("_") if system[0].isdigit() else ("1", "", system)
    n = int(number)
    if kind in ("hft", "hft15"):
        engine: Engine = WholeModel(gpu, n_gpus, eager=True)
        batch = HFT_PAPER_BATCH if kind == "hft15" else reckoned_batch(engine, constants)
        runs = [serve_in_batches(engine, part, batch) for part in deal(requests, n)] if engine.room_tokens else []
    else:
        engine = _continuous_engine(kind, n, n_gpus, gpu, rate)
        parts = deal(requests, n) if kind == "batched" else [requests]
        runs = [serve_continuously(engine, constants, part) for part in parts] if engine.room_tokens else []
    return measure(runs or [Served(requests)], constants)


def _continuous_engine(kind: str, n: int, n_gpus: int, gpu: Gpu, rate: float) -> Engine:
    match kind:
        case "vllm":
            return WholeModel(gpu, n_gpus, tensor=n_gpus > 1)
        case "vllm_pipeline":
            return pipeline(gpu)
        case "fleet":
            return two_instances_flow(gpu.constants) if n > 1 else planned_flow(gpu.shape, gpu.constants, rate)
    return WholeModel(gpu)


def pipeline(gpu: Gpu) -> Flow:
    """Return vLLM's pipeline: equal runs of layers, and as many batches under way as GPUs."""
    fleet = fleet_model(gpu, FleetLoad(1.0, 1.0))
    placement = spread_evenly(gpu.shape, N_GPUS)
    flow = flow_of(fleet, placement, fleet.forecast(placement), gpu)
    return replace(flow, max_flights=N_GPUS)


def _mean(runs: Sequence[Metrics]) -> Metrics:
    names = Metrics.__dataclass_fields__
    return Metrics(**{name: sum(getattr(run, name) for run in runs) / len(runs) for name in names})


def run_all(constants: Constants, seeds: Sequence[int]) -> Curves:
    """Run every system at every rate; means over the seeds."""
    return {
        (shape.name, system, rate): _mean([run_system(shape, system, rate, seed, constants) for seed in seeds])
        for shape in MODELS
        for system in SYSTEMS[shape.name]
        for rate in RATES
    }


# --- figures ----------------------------------------------------------------------------------------------------------


def _ratio(a: float, b: float) -> float | None:
    return a / b if b and math.isfinite(a) and math.isfinite(b) else None


def _average(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def _versus(curves: Curves, model: str, others: Sequence[str], rates: Sequence[float]) -> dict[str, float | None]:
    """Return the mean over the rates of throughput / theirs, and of latency saved, against the best of `others`."""
    throughputs, cuts = [], []
    for rate in rates:
        ours = curves[model, "fleet", rate]
        if not ours.throughput:
            return {"throughput": None, "latency_cut": None}
        theirs = [curves[model, other, rate] for other in others]
        throughputs.append(_ratio(ours.throughput, max(one.throughput for one in theirs)))
        saved = _ratio(ours.latency_s, min(one.latency_s for one in theirs))
        cuts.append(None if saved is None else 1 - saved)
    return {"throughput": _average(throughputs), "latency_cut": _average(cuts)}


def _slo_rate_ratio(curves: Curves) -> float | None:
    """Return the highest rate up to which the fleet is in time / the lowest at which every static batching is not."""
    held = [rate for rate in RATES if curves["13b", "fleet", rate].in_time >= SLO_HOLDS]
    best = {rate: max(curves["13b", name, rate].in_time for name in ("hft", "hft15")) for rate in RATES}
    failing = [rate for rate in RATES if best[rate] < SLO_HOLDS]
    return held[-1] / failing[0] if held and failing else None


def flow_gain(constants: Constants) -> dict[str, float | None]:
    """Return the saturated rate of flights / scatter and gather, with the same replicas in the same memory."""
    shape = LLAMA_13B
    gpu, context = Gpu(shape, constants), mean_context(constants)
    free = constants.usable_bytes - shape.weight_bytes
    if free <= 0:
        return {"flow_gain": None, "flow_moved_gain": None}
    n = FLOW_EXTRA_LAYERS
    extra = [1 + min(3, layer // n) for layer in range(shape.n_layers - n)]  # the GPU that has a layer besides home
    in_step = scatter_rate(gpu, [2] * len(extra) + [1] * n, free, context)
    fleet = fleet_model(gpu, FleetLoad(SATURATED, context))
    most = float(constants.max_sequences * N_GPUS)
    replicated = Placement((1, *(1 | 1 << one for one in extra), *[1] * n, 1))
    moved = Placement((1, *(1 << one for one in extra), *[1] * n, 1))
    rates = []
    for placement in (replicated, moved):
        flow = flow_of(fleet, placement, fleet.forecast(placement), gpu)
        answers = min(most, flow.room_tokens / context)
        rates.append(answers / flow.step_s(int(answers), int(answers), answers * context))
    return {"flow_gain": rates[0] / in_step, "flow_moved_gain": rates[1] / in_step}


def figures(curves: Curves, constants: Constants) -> dict[str, Any]:
    """Return the figures by the names that other programs read."""
    hft = ("hft", "hft15")
    loads = {"low": RATES_LOW, "high": RATES_HIGH}
    versus_hft = {f"{m}_{load}": _versus(curves, m, hft, rates) for m in SYSTEMS for load, rates in loads.items()}
    vllm = {"13b": ("vllm",), "70b": ("vllm", "vllm_pipeline")}
    versus_vllm = {f"{m}_{load}": _versus(curves, m, vllm[m], rates) for m in SYSTEMS for load, rates in loads.items()}
    two = {rate: curves["13b", "2_fleet", rate].throughput for rate in RATES}
    flow = two_instances_flow(constants)
    taken = PAPER_MEMORY_MIB["cocoserve_2"] * MIB
    token_bytes = LLAMA_13B.n_layers * LLAMA_13B.kv_bytes_per_layer
    peak = max(curves["13b", "4_hft", rate].peak_tokens for rate in RATES)
    four_bytes = N_GPUS * LLAMA_13B.weight_bytes + peak * token_bytes
    oom = {name: max(curves["13b", name, rate].out_of_memory for rate in RATES_HIGH) for name in ("hft", "fleet")}
    preempted = max(curves["13b", "fleet", rate].preempted for rate in RATES_HIGH)
    return {
        "versus_hft": versus_hft,
        "versus_vllm": versus_vllm,
        "versus_4_instances": {
            "throughput": _average(_ratio(two[r], curves["13b", "4_hft", r].throughput) for r in RATES),
            "memory": taken / four_bytes if flow.room_tokens else None,
            "throughput_batched": _average(_ratio(two[r], curves["13b", "4_batched", r].throughput) for r in RATES),
            "memory_batched": taken / (N_GPUS * constants.usable_bytes),
        },
        "oom_ratio": _ratio(oom["hft"], oom["fleet"]),
        "oom": oom | {"fleet_preempted": preempted},
        "slo_rate_ratio": _slo_rate_ratio(curves),
    } | flow_gain(constants)


def saturated(seed: int) -> dict[str, dict[str, float]]:
    """Return the tokens/s of each system with continuous batching when more is asked of it than it can do."""
    constants = Constants()
    return {
        shape.name: {
            system: run_system(shape, system, SATURATING_RATE, seed, constants).throughput
            for system in SATURATED_SYSTEMS[shape.name]
        }
        for shape in MODELS
    }


def _moved(task: tuple[str, float, tuple[int, ...]]) -> tuple[str, float, dict[str, Any]]:
    name, factor, seeds = task
    constants = Constants().moved(name, factor)
    return name, factor, figures(run_all(constants, seeds), constants)


def _seed(seed: int) -> Curves:
    return run_all(Constants(), (seed,))


def simulate(
    seeds: Sequence[int], moved_seeds: tuple[int, ...], n_processes: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return all figures, the curves they come of, and the figures with each constant moved down and up."""
    tasks = [(name, factor, moved_seeds) for name in Constants.names() for factor in (1 - VARIATION, 1 + VARIATION)]
    with ProcessPoolExecutor(n_processes) as pool:
        by_seed = list(pool.map(_seed, seeds))
        say(f"{len(seeds)} seeds simulated")
        curves = {key: _mean([one[key] for one in by_seed]) for key in by_seed[0]}
        found = figures(curves, Constants())
        moved: dict[str, dict[str, Any]] = {}
        for name, factor, its in pool.map(_moved, tasks):
            moved.setdefault(name, {})["down" if factor < 1 else "up"] = its
            say(f"{name} x {factor:.1f}")
    rows = [
        {"model": model, "system": system, "rate": rate} | asdict(metrics)
        for (model, system, rate), metrics in curves.items()
    ]
    return found | {
        "curves": rows,
        "moved": moved,
        "saturated": saturated(seeds[0]),
        "paper_tables": paper_tables(),
        "sources": Constants.sources(),
        "constants": asdict(Constants()),
    }


def moved_layer(constants: Constants) -> dict[str, dict[str, float]]:
    """Return what moving one layer away gives static batches at the highest rate: Figure 3, whose 37 s become 11.2."""
    found = {}
    for name, n_moved in (("default", 0), ("one_layer_moved", 1)):
        engine = WholeModel(Gpu(LLAMA_13B, constants), eager=True, n_moved=n_moved)
        batch = reckoned_batch(WholeModel(Gpu(LLAMA_13B, constants), eager=True), constants)
        requests = make_requests(RATES_HIGH[-1], MOVED_SEEDS[0], constants)
        metrics = measure([serve_in_batches(engine, requests, batch)], constants)
        found[name] = {"latency_s": metrics.latency_s, "out_of_memory": metrics.out_of_memory}
    return found


# --- the paper's tables -----------------------------------------------------------------------------------------------


def paper_tables() -> dict[str, Any]:
    """Return the paper's Figure 6 and Tables 1 and 2 by content, as the model and these constants have them."""
    constants, shape = Constants(), LLAMA_13B
    gpu, context = Gpu(shape, constants), mean_context(constants)
    free = constants.usable_bytes - shape.weight_bytes
    alone = scatter_rate(gpu, [1] * shape.n_layers, free, context)
    replicas = []
    for n, degree, told in ((15, 2, 0.4507), (20, 2, 0.908), (25, 2, 1.931), (30, 2, 3.2942), (20, 4, 1.6368)):
        parallelism = [degree] * n + [1] * (shape.n_layers - n)
        gain = scatter_rate(gpu, parallelism, free, context) / alone - 1
        equation = equal_hosts_speedup(parallelism, 0.0) - 1
        replicas.append({"layers": n, "degree": degree, "simulated": gain, "equation_4": equation, "paper": told})
    projection = 2 * 256 * shape.d_model**2 / 1e9  # one sequence of 256 tokens
    scores = 4 * 256**2 * shape.d_model / 1e9
    ffn = 2 * 256 * shape.d_model * shape.d_ff / 1e9
    modules = {
        "projection": {"mib": 2 * shape.d_model**2 / MIB, "gflop": projection, "paper_gflop": 13.42},
        "self_attention": {"mib": 8 * shape.d_model**2 / MIB, "gflop": 4 * projection + scores, "paper_gflop": 55.02},
        "ffn_projection": {"mib": 2 * shape.d_model * shape.d_ff / MIB, "gflop": ffn, "paper_gflop": 36.24},
        "layer": {
            "mib": shape.layer_bytes / MIB,
            "gflop": 4 * projection + scores + 3 * ffn,
            "paper_gflop": 127.5,
        },
    }
    told_s = {1: 0.2987, 10: 0.3581, 20: 0.3826, 30: 0.4947, 40: 0.8938}
    copies = [
        {"layers": n, "link_s": n * shape.layer_bytes / constants.link_bytes_per_s, "paper_s": seconds}
        for n, seconds in told_s.items()
    ]
    return {"figure_3": moved_layer(constants), "figure_6": replicas, "table_1": modules, "table_2": copies}

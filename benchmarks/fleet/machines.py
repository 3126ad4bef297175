"""How long the machines of the simulation take for an iteration, and what fits their memory.

An iteration computes a row for each running answer and for each token of the prompts that come in. A layer takes as
long as reading its weights or computing its rows, whichever is longer (a roofline), and reading the KV cache on top.
All systems have the same GPUs, the same kernels and the same memory; they differ in what they run when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from disco_daemon.fleet.costs import CostCurve, ModuleCosts
from disco_daemon.fleet.forecast import FleetForecast, FleetLoad, FleetModel
from disco_daemon.fleet.placement import CPU_SHARE, MEMORY_SHARE, FleetHost, ModelModules, Placement

from .fleet_constants import N_FLIGHTS_PER_HOST, N_GPUS, Constants, LlamaShape

CURVE_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 192.0, 256.0, 512.0, 1024.0)  # sizes of which costs are told


class Engine(Protocol):
    """One serving engine, on one GPU or over several."""

    @property
    def room_tokens(self) -> float:
        """Tokens of KV cache."""

    @property
    def max_sequences(self) -> int:
        """Answers at a time."""

    def step_s(self, n_running: int, n_rows: int, n_context: float) -> float:
        """Return the time until each running answer has one token more; `n_rows` includes prompts' tokens."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What one GPU takes for the parts of a model."""

    shape: LlamaShape
    constants: Constants

    @property
    def bytes_per_s(self) -> float:
        return self.constants.memory_bytes_per_s * min(1.0, self.constants.memory_efficiency)

    @property
    def flops_per_s(self) -> float:
        return self.constants.flops_per_s * min(1.0, self.constants.compute_efficiency)

    def layer_s(self, n_rows: float) -> float:
        weights_s = self.shape.layer_bytes / self.bytes_per_s
        return max(weights_s, 2 * self.shape.layer_parameters * n_rows / self.flops_per_s)

    def head_s(self, n_rows: float) -> float:
        return max(self.shape.head_bytes / self.bytes_per_s, self.shape.head_bytes * n_rows / self.flops_per_s)

    def kv_s(self, n_context: float) -> float:
        """Reading the KV cache of one layer, s."""
        return self.shape.kv_bytes_per_layer * n_context / self.bytes_per_s

    @property
    def row_bytes(self) -> int:
        return 2 * self.shape.d_model


@dataclass(frozen=True, slots=True)
class WholeModel:
    """The whole model: on one GPU, or its layers one after the other on several (`device_map`), or each cut (`tensor`).

    With `eager` each layer's kernels are launched one by one, as Hugging Face Transformers does. `n_moved` layers are
    on another GPU, with their KV cache.
    """

    gpu: Gpu
    n_gpus: int = 1
    eager: bool = False
    tensor: bool = False
    n_moved: int = 0

    @property
    def room_tokens(self) -> float:
        shape = self.gpu.shape
        weights = shape.weight_bytes - self.n_moved * shape.layer_bytes
        free = self.n_gpus * self.gpu.constants.usable_bytes - weights
        return max(0.0, free / ((shape.n_layers - self.n_moved) * shape.kv_bytes_per_layer))

    @property
    def max_sequences(self) -> int:
        return int(self.gpu.constants.max_sequences)

    def step_s(self, n_running: int, n_rows: int, n_context: float) -> float:
        gpu, constants, n_layers = self.gpu, self.gpu.constants, self.gpu.shape.n_layers
        computed = n_layers * (gpu.layer_s(n_rows) + gpu.kv_s(n_context)) + gpu.head_s(n_running)
        if self.eager:
            n_crossings = self.n_gpus - 1 + 2 * bool(self.n_moved)
            return max(computed, n_layers * constants.eager_layer_s) + n_crossings * constants.crossing_s
        if not self.tensor:
            return computed + constants.step_overhead_s
        share = 2 * (self.n_gpus - 1) / self.n_gpus  # of the rows that a ring carries over each link
        reduce_s = constants.all_reduce_s + share * n_rows * gpu.row_bytes / constants.link_bytes_per_s
        return computed / self.n_gpus + 2 * n_layers * reduce_s + constants.step_overhead_s


@dataclass(frozen=True)
class Flow:
    """Layers over several GPUs, answers in flights along routes: what each GPU computes follows from shares.

    `layers` and `heads` are the parts of a pass on each GPU, `crossings` the changes of GPU of one pass.
    """

    gpu: Gpu
    layers: tuple[float, ...]
    heads: tuple[float, ...]
    crossings: float
    kv_bytes: tuple[float, ...]
    max_flights: int

    @property
    def room_tokens(self) -> float:
        per_layer = self.gpu.shape.kv_bytes_per_layer
        rooms = [b / (n * per_layer) for b, n in zip(self.kv_bytes, self.layers, strict=True) if n > 1e-9]
        return max(0.0, min(rooms))

    @property
    def max_sequences(self) -> int:
        return int(self.gpu.constants.max_sequences) * len(self.layers)

    def step_s(self, n_running: int, n_rows: int, n_context: float) -> float:
        gpu, constants = self.gpu, self.gpu.constants
        best = float("inf")
        n_flights = 1
        while n_flights <= min(self.max_flights, n_running):
            rows = n_rows / n_flights
            layer_s = gpu.layer_s(rows) + gpu.kv_s(n_context / n_flights)
            head_s = gpu.head_s(n_running / n_flights)
            times = [n * layer_s + h * head_s for n, h in zip(self.layers, self.heads, strict=True)]
            times[0] += constants.step_overhead_s
            hop_s = constants.crossing_s + rows * gpu.row_bytes / constants.link_bytes_per_s
            best = min(best, max(sum(times) + self.crossings * hop_s, n_flights * max(times)))
            n_flights += 1
        return best


def fleet_model(gpu: Gpu, load: FleetLoad, n_gpus: int = N_GPUS) -> FleetModel:
    """Return the fleet that the policy looks at: equal hosts with these GPUs' costs, embedding and head pinned."""
    constants, shape = gpu.constants, gpu.shape

    def curve(of: list[float]) -> CostCurve:
        return CostCurve(CURVE_ROWS, tuple(of))

    costs = ModuleCosts(
        CostCurve((1.0,), (constants.step_overhead_s,)),
        curve([gpu.layer_s(rows) + gpu.kv_s(rows * load.context_tokens) for rows in CURVE_ROWS]),
        curve([gpu.head_s(rows) for rows in CURVE_ROWS]),
        CostCurve((1.0,), (0.0,)),
    )
    hosts = tuple(
        FleetHost(
            f"gpu{number}",
            1 / CPU_SHARE,  # the simulated GPUs serve nothing else, and `usable_bytes` is what may be used of them
            constants.usable_bytes / MEMORY_SHARE,
            delay_s=constants.crossing_s,
            bytes_per_s=constants.link_bytes_per_s,
        )
        for number in range(n_gpus)
    )
    modules = ModelModules(
        (shape.head_bytes, *[shape.layer_bytes] * shape.n_layers, shape.head_bytes),
        shape.kv_bytes_per_layer,
        gpu.row_bytes,
    )
    return FleetModel(hosts, modules, costs, load, frozenset({0, shape.n_layers + 1}))


def spread_evenly(shape: LlamaShape, n_gpus: int) -> Placement:
    """Return a placement with the layers in equal runs over the GPUs, embedding and head on the first."""
    per_gpu = shape.n_layers / n_gpus
    return Placement((1, *(1 << int(layer / per_gpu) for layer in range(shape.n_layers)), 1))


def flow_of(fleet: FleetModel, placement: Placement, found: FleetForecast, gpu: Gpu) -> Flow:
    """Return the engine of a placement, with the forecast's shares."""
    layers = tuple(float(x) for x in found.shares[1:-1].sum(axis=0))
    heads = tuple(float(x) for x in found.shares[-1])
    free = tuple(
        max(0.0, host.room_bytes - placement.weights_on(number, fleet.model)) for number, host in enumerate(fleet.hosts)
    )
    return Flow(gpu, layers, heads, found.crossings, free, N_FLIGHTS_PER_HOST * len(fleet.hosts))


def scatter_rate(gpu: Gpu, parallelism: list[int], home_free_bytes: float, context_tokens: float) -> float:
    """Return the tokens/s of the paper's way, saturated: one batch, scattered at the begin of a replicated run.

    All passes go in step: a layer takes as long as its replica with the largest part of the batch. Each run of layers
    with the same number of replicas is entered and left by two transfers.
    """
    constants, shape = gpu.constants, gpu.shape
    kv_layers = sum(1 / p for p in parallelism)  # of the KV cache that home keeps
    n = home_free_bytes / (kv_layers * shape.kv_bytes_per_layer * context_tokens)
    n = min(n, constants.max_sequences * N_GPUS)
    changes = sum(a != b for a, b in zip([1, *parallelism], [*parallelism, 1], strict=True))
    step_s = sum(gpu.layer_s(n / p) + gpu.kv_s(n * context_tokens / p) for p in parallelism) + gpu.head_s(n)
    step_s += changes * (constants.crossing_s + n * gpu.row_bytes / constants.link_bytes_per_s)
    return n / (step_s + constants.step_overhead_s)

"""Which inner layers a host of this machine should have, and what that brings: `disco fleet plan`. Pure.

The room `fleet` forecasts it from what the whole model was measured to take for a token: a layer and the head take
their shares of that by the bytes of their weights. Home and the hosts share the threads that the whole model would
have, so on a machine whose processors are all in use a fleet gains nothing, and the plan says so. What can be done so
far is one move of a run of inner layers to one host; it is the best of all such moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec

from ..errors import ConfigError
from ..fleet.costs import CostCurve, ModuleCosts
from ..fleet.forecast import FleetLoad, FleetModel
from ..fleet.measured import LEAST_GAIN
from ..fleet.placement import FleetHost, ModelModules, Placement, runs
from ..fleet.steps import StepKind
from ..models.gguf import Header
from ..models.segments import NotCuttableError, is_recurrent, n_layers
from ..types import LayerRange
from .split_plan import FLOAT_BYTES, kv_bytes_per_layer, weights_of

HOME = "home"
N_ANSWERS = 8.0  # at a time, for which a plan is made: as many as `python -m benchmarks.fleet` asks
CONTEXT_TOKENS = 512.0  # that each of them has: a question and some paragraphs
LEAST_LAYERS = 3  # of a model in a fleet: home has the first and the last one
CALL_S = 1.2e-3  # of a range, whatever it computes: 15.0 to 17.4 ms a token with two calls more (docs/fleet.md)
# Rows in a batch, and what they take by what one takes: 15.7, 39 and 70 ms (the default model, one thread).
BATCHES, BATCH_TIMES = (1.0, 4.0, 8.0), (1.0, 2.5, 4.5)


class PlannedStep(msgspec.Struct, frozen=True):
    """A step as other programs read it: layers from `first` up to `last` (exclusive); what is not measured is None."""

    kind: str
    first: int
    last: int
    source: str | None
    target: str | None
    why: str
    predicted: float
    measured: float | None = None
    seconds: float | None = None
    pause_s: float | None = None


class FleetPlan(msgspec.Struct, frozen=True):
    """What would be done now, what it should bring beside the whole model, and the memory that hosts take then."""

    steps: list[PlannedStep]
    speedup_predicted: float
    memory_bytes: int


@dataclass(frozen=True)
class FleetPlanInput:
    """What a plan rests on: the whole model's time for a token, s, the threads for it and for each process of a fleet.

    `n_cells` tokens are in the KV cache, and the machine has `machine_bytes` of memory. `assumed` says what was not
    measured.
    """

    model: ModelModules
    token_s: float
    n_threads: int
    n_threads_each: int
    n_cells: int
    machine_bytes: float
    assumed: str = ""

    @property
    def n_layers(self) -> int:
        """The model's number of layers."""
        return self.model.n_layers

    @cached_property
    def costs(self) -> ModuleCosts:
        """What the modules take, by their weights."""
        *layers, head = self.model.weights[1:]
        of_byte = self.token_s / max(1, sum(layers) + head)
        layer_s, head_s = sum(layers) * of_byte / max(1, len(layers)), head * of_byte
        return ModuleCosts(_curve(0.0), _curve(layer_s), _curve(head_s), CostCurve((1.0,), (CALL_S,)))

    def rate(self, away: LayerRange | None) -> float:
        """Return the token/s that are expected with these layers at a host; None: with the whole model in one process.

        Home and hosts share the memory, so each counts with a part of it.
        """
        n = 1 if away is None else 2
        speed = 1.0 if away is None else self.n_threads_each / self.n_threads
        hosts = tuple(FleetHost(host_name(number), speed, self.machine_bytes / n) for number in range(n))
        placement = Placement.at_home(len(self.model.weights))
        if away is not None:
            placement = placement.move(_modules(away), 0, 1)
        load = FleetLoad(N_ANSWERS, CONTEXT_TOKENS)
        return FleetModel(hosts, self.model, self.costs, load).forecast(placement).tokens_per_s

    def speedup(self, away: LayerRange | None) -> float:
        """Return the factor by which the rate changes with these layers at a host; 0 where no answer has room."""
        alone = self.rate(None)
        return self.rate(away) / alone if alone else 0.0

    def memory_bytes(self, away: LayerRange | None) -> int:
        """Return what a host takes for these layers: weights, and their KV cache."""
        if away is None:
            return 0
        weights = sum(self.model.weights[module] for module in _modules(away))
        return weights + self.n_cells * self.model.kv_bytes * away.n_layers


def require_layers(name: str, header: Header) -> int:
    """Return the number of a model's layers. Raises ConfigError, with the reason, if a fleet cannot serve it."""
    try:
        n = n_layers(header)
    except NotCuttableError as e:
        msg = f"{name} cannot be cut into ranges of layers: {e}"
        raise ConfigError(msg) from e
    if is_recurrent(header):
        msg = (
            f"{name} is a recurrent model: nothing that it has read can be taken back, so a host that is lost could "
            "not be replaced; set fleet.enabled to false"
        )
        raise ConfigError(msg)
    if n < LEAST_LAYERS:
        msg = f"{name} has {n} layers, and a fleet needs {LEAST_LAYERS}: the first and the last one stay at home"
        raise ConfigError(msg)
    return n


def modules_of(header: Header, n: int) -> ModelModules:
    """Return what the modules of a model with `n` layers take."""
    layers, head = weights_of(header, n)
    embedding = next((t.n_bytes or 0 for t in header.tensors if t.name == "token_embd.weight"), 0)
    n_embd = header.number(f"{header.architecture}.embedding_length") or 0
    return ModelModules((embedding, *layers, head), kv_bytes_per_layer(header), n_embd * FLOAT_BYTES)


def best_layers(given: FleetPlanInput) -> LayerRange:
    """Return the inner layers that a host should have; of runs that are as good, the one in the middle."""
    n = given.n_layers
    choices = [_middle(count, n) for count in range(1, n - 1)]
    return max(choices, key=lambda away: (round(given.rate(away), 6), -away.n_layers))


def plan_fleet(given: FleetPlanInput, now: LayerRange | None) -> FleetPlan:
    """Return the plan where `now` these layers are at a host; without steps where none would gain enough."""
    best = best_layers(given)
    before, after = given.speedup(now), given.speedup(best)
    if best == now or after < before * (1 + LEAST_GAIN):
        return FleetPlan([], before, given.memory_bytes(now))
    gain = after / before if before else after
    why = (
        f"{given.rate(now):.1f} to {given.rate(best):.1f} token/s expected, {N_ANSWERS:g} answers at a time"
        f"{given.assumed}"
    )
    host, there, wanted = host_name(1), _layers(now), _layers(best)
    moves = [(run, HOME, host) for run in runs(sorted(wanted - there))]
    moves += [(run, host, HOME) for run in runs(sorted(there - wanted))]
    steps = [
        PlannedStep(StepKind.MOVE.value, run.start, run.stop, source, target, why, gain)
        for run, source, target in moves
    ]
    return FleetPlan(steps, after, given.memory_bytes(best))


def host_name(number: int) -> str:
    """Return what a host of this machine is called; 0 is home."""
    return f"local-{number}" if number else HOME


def _middle(count: int, n: int) -> LayerRange:
    first = (n - count) // 2
    return LayerRange(first, first + count, n)


def _layers(away: LayerRange | None) -> set[int]:
    return set() if away is None else set(range(away.first, away.last))


def _modules(away: LayerRange) -> range:
    return range(away.first + 1, away.last + 1)  # the embedding is module 0


def _curve(seconds: float) -> CostCurve:
    return CostCurve(BATCHES, tuple(seconds * times for times in BATCH_TIMES))

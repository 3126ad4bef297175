"""Which inner layers the hosts of this machine should have, and what that brings: `disco fleet plan`. Pure.

The room `fleet` forecasts it from what the whole model was measured to take for a token: a layer and the head take
their shares of that by the bytes of their weights. Home and the hosts share the threads that the whole model would
have, so on a machine whose processors are all in use a fleet gains nothing, and the plan says so. It looks at a run of
inner layers in the middle of the model, of which each host gets an equal part; replicas are the controller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec

from ...engine.wire import FLIGHTS
from ...errors import ConfigError
from ...fleet.costs import CostCurve, ModuleCosts
from ...fleet.forecast import FleetLoad, FleetModel
from ...fleet.layout import FleetLayout, PlacedRange
from ...fleet.measured import LEAST_GAIN
from ...fleet.placement import FleetHost, ModelModules, Placement, runs
from ...fleet.steps import StepKind
from ...models.gguf import Header
from ...models.segments import NotCuttableError, has_one_embedding, is_recurrent, n_layers
from ..split.cut_plan import FLOAT_BYTES, kv_bytes_per_layer, weights_of

HOME = "home"
N_ANSWERS = 8.0  # at a time, for which a plan is made: as many as `python -m benchmarks.fleet` asks
CONTEXT_TOKENS = 512.0  # that each of them has: a question and some paragraphs
OWN_LAYERS = 2  # at least: home has the first and the last one, and each host one
CALL_S = 1.2e-3  # of a range, whatever it computes: two calls more took 2.4 ms a token (the default model, one thread)
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


class StepDone(PlannedStep, frozen=True):
    """A step that has ended, with its parts, s; None where nothing was to be moved.

    Files were written and fetched for `stage_s`, segments loaded for `load_s`, and cells copied for `copy_s` from then
    on; the rest of `seconds` is the switch, for which flights land.
    """

    stage_s: float | None = None
    load_s: float | None = None
    copy_s: float | None = None


class FleetPlan(msgspec.Struct, frozen=True):
    """What would be done now, what it should bring beside the whole model, and the memory that hosts take then."""

    steps: list[PlannedStep]
    speedup_predicted: float
    memory_bytes: int


@dataclass(frozen=True)
class FleetPlanInput:
    """What a plan rests on: the whole model's time for a token, s, the threads for it and for each process of a fleet.

    `n_cells` tokens are in the KV cache, and the machine has `machine_bytes` of memory and `n_cores` processors (0 = as
    many as are wanted) for home and `n_hosts`, of which `n_lent` are other machines'. `assumed` says what was not
    measured.
    """

    model: ModelModules
    token_s: float
    n_threads: int
    n_threads_each: int
    n_cells: int
    machine_bytes: float
    assumed: str = ""
    n_hosts: int = 1
    n_cores: int = 0
    n_lent: int = 0

    @property
    def speed(self) -> float:
        """What each process of a fleet computes of what the whole model in one process would, all of them at work."""
        n_wanted = (self.n_hosts - self.n_lent + 1) * self.n_threads_each
        return self.n_threads_each / self.n_threads * min(1.0, (self.n_cores or n_wanted) / n_wanted)

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

    def rate(self, layout: FleetLayout | None) -> float:
        """Return the token/s that are expected of a layout; None: with the whole model in one process.

        Home and hosts share the memory, so each counts with a part of it.
        """
        n = 1 if layout is None else self.n_hosts + 1
        speed = 1.0 if layout is None else self.speed
        hosts = tuple(FleetHost(host_name(number), speed, self.machine_bytes / n) for number in range(n))
        placement = Placement.at_home(len(self.model.weights))
        if layout is not None:
            masks = [sum(1 << host for host in at) for layers, at in layout.ranges for _ in range(layers.n_layers)]
            placement = Placement((1, *masks, 1))
        load = FleetLoad(N_ANSWERS, CONTEXT_TOKENS)
        return FleetModel(hosts, self.model, self.costs, load, max_flights=FLIGHTS).forecast(placement).tokens_per_s

    def whole_tps(self, load: FleetLoad) -> float | None:
        """Return the token/s that the whole model gives in one process under a load; None if it was not measured."""
        if self.assumed:
            return None
        alone = FleetHost(HOME, 1.0, self.machine_bytes, cpu_share=1.0)
        return (
            FleetModel((alone,), self.model, self.costs, load)
            .forecast(Placement.at_home(len(self.model.weights)))
            .tokens_per_s
            or None
        )

    def speedup(self, layout: FleetLayout | None) -> float:
        """Return the factor by which the rate changes with a layout; 0 where no answer has room."""
        alone = self.rate(None)
        return self.rate(layout) / alone if alone else 0.0

    def memory_bytes(self, layout: FleetLayout | None) -> int:
        """Return what the hosts take for their layers: weights, and their KV cache."""
        there = [] if layout is None else [one for host in range(1, self.n_hosts + 1) for one in layout.on(host)]
        weights = sum(self.model.weights[module] for one in there for module in range(one.first + 1, one.last + 1))
        return weights + self.n_cells * self.model.kv_bytes * sum(one.n_layers for one in there)


def require_layers(name: str, header: Header, n_hosts: int = 1) -> int:
    """Return the number of a model's layers. Raises ConfigError, with the reason, if a fleet cannot serve it."""
    try:
        n = n_layers(header)
    except NotCuttableError as e:
        raise ConfigError(f"{name} cannot be cut into ranges of layers: {e}") from e
    if is_recurrent(header):
        msg = (
            f"{name} is a recurrent model: nothing that it has read can be taken back, so a host that is lost could "
            "not be replaced; set fleet.enabled to false"
        )
        raise ConfigError(msg)
    if n < (least := n_hosts + OWN_LAYERS):
        raise ConfigError(f"{name} has {n} layers, and a fleet needs {least}: the first and the last one stay at home")
    return n


def modules_of(header: Header, n: int) -> ModelModules:
    """Return what the modules of a model with `n` layers take; an embedding that is the head as well counts once."""
    layers, head = weights_of(header, n)
    words = next((t.n_bytes or 0 for t in header.tensors if t.name == "token_embd.weight"), 0)
    embedding = 0 if has_one_embedding(header) else words
    n_embd = header.number(f"{header.architecture}.embedding_length") or 0
    return ModelModules((embedding, *layers, head), kv_bytes_per_layer(header), n_embd * FLOAT_BYTES)


def best_layout(given: FleetPlanInput) -> FleetLayout:
    """Return where the inner layers should lie; of runs that are as good, the one in the middle."""
    n = given.n_layers
    choices = [_shared(count, given.n_hosts, n) for count in range(given.n_hosts, n - 1)]
    return max(choices, key=lambda layout: (round(given.rate(layout), 6), layout.first - layout.last))


def plan_fleet(given: FleetPlanInput, now: FleetLayout | None) -> FleetPlan:
    """Return the plan where layers lie as they do `now`; without steps where none would gain enough."""
    best = best_layout(given)
    before, after = given.speedup(now), given.speedup(best)
    if best == now or after < before * (1 + LEAST_GAIN):
        return FleetPlan([], before, given.memory_bytes(now))
    gain = after / before if before else after
    why = (
        f"{given.rate(now):.1f} to {given.rate(best):.1f} token/s expected, {N_ANSWERS:g} answers at a time"
        f"{given.assumed}"
    )
    return FleetPlan(
        [
            PlannedStep(kind.value, run.start, run.stop, _name(source), _name(target), why, gain)
            for (kind, source, target), layers in _changes(now, best).items()
            for run in runs(layers)
        ],
        after,
        given.memory_bytes(best),
    )


Change = tuple[StepKind, int | None, int | None]  # a step's kind, and its hosts


def _changes(now: FleetLayout | None, best: FleetLayout) -> dict[Change, list[int]]:
    """Return which layers are moved, replicated and evicted on the way, in their order."""
    before, after = _hosts_of(now, best.n_layers), _hosts_of(best, best.n_layers)
    found: dict[Change, list[int]] = {}
    for layer in range(best.n_layers):
        gone, come = sorted(before[layer] - after[layer]), sorted(after[layer] - before[layer])
        n = min(len(gone), len(come))
        for source, target in zip(gone, come, strict=False):
            found.setdefault((StepKind.MOVE, source, target), []).append(layer)
        for target in come[n:]:
            found.setdefault((StepKind.REPLICATE, None, target), []).append(layer)
        for source in gone[n:]:
            found.setdefault((StepKind.EVICT, source, None), []).append(layer)
    return found


def host_name(number: int) -> str:
    """Return what a host of this machine is called; 0 is home."""
    return f"local-{number}" if number else HOME


def _name(number: int | None) -> str | None:
    return None if number is None else host_name(number)


def _shared(count: int, n_hosts: int, n: int) -> FleetLayout:
    """Return the layout with `count` layers in the middle at hosts, which share them as evenly as can be."""
    first = (n - count) // 2
    cuts = [first + count * host // n_hosts for host in range(n_hosts + 1)]
    ranges = (PlacedRange(a, b, (host,)) for host, (a, b) in enumerate(pairwise(cuts), start=1))
    return FleetLayout(n, tuple(ranges))


def _hosts_of(layout: FleetLayout | None, n: int) -> list[set[int]]:
    """Return the hosts of each layer."""
    if layout is None:
        return [{0}] * n
    return [set(hosts) for layers, hosts in layout.ranges for _ in range(layers.n_layers)]


def _curve(seconds: float) -> CostCurve:
    return CostCurve(BATCHES, tuple(seconds * times for times in BATCH_TIMES))

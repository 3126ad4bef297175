"""The device as a fleet of processes of this machine: made from the settings, and planned."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace as replace_fields

from ...clock import Clock
from ...config.schema import Config
from ...engine import wire
from ...engine.measure.tune_messages import Knobs
from ...engine.supervisor import Engine
from ...errors import ConfigError
from ...fleet.layout import FleetLayout
from ...models.gguf import Header
from ...models.segment_files import read_head
from ...models.segments import NotCuttableError, cut
from ...system.control_groups import memory, n_processors
from ..device_settings import knobs_for, model_path, token_s
from ..split.check import segment_files
from ..split.cut_plan import MEMORY_BYTES_PER_S
from .fleet_device import FleetDevice
from .host_processes import HostProcesses
from .layer_files import FleetLayers
from .layer_plan import FleetPlan, FleetPlanInput, best_layout, modules_of, plan_fleet, require_layers
from .members import FleetMembers
from .observations import process_bytes
from .status_document import LocalFleet

NOT_MEASURED = (
    "; how long the model takes for a token is not measured (`disco tune` does that) and reckoned as its weights' way "
    "from memory"
)


def n_hosts(config: Config, members: FleetMembers | None) -> int:
    """Return the number of hosts: those of this machine, then one for each other machine; or as the cuts say.

    A host that is no machine's yet is a process of this one. Without any the device is whole. A machine for which the
    cuts have no layers is a host as well where some may move to it.
    """
    n_places = members.n_places() if members is not None else 0
    n = config.fleet.hosts + n_places
    if config.fleet.cuts:
        may_get_some = config.fleet.mode == "auto" and n_places
        return max(len(config.fleet.cuts) - 1, n if may_get_some else 0)
    return n


def make_fleet(
    config: Config, whole: wire.Load, name: str, clock: Clock, members: FleetMembers | None = None
) -> FleetDevice:
    """Return the device as a fleet; `whole` is how the whole model would be loaded. Raises ConfigError.

    `members` lend the hosts above those of this machine. Files are written when the engine starts, not here.
    """
    settings = config.device
    whole = replace_fields(whole, n_ctx=whole.n_ctx or settings.divided_n_ctx, kv_type=settings.divided_kv_type)
    model, n = Path(whole.model_path), n_hosts(config, members)
    head, header = read_head(model)
    # An engine that has begun without another machine has perhaps computed private texts: it stays without.
    lenders = members if members is not None and members.n_places() else None
    n_lent = 0 if lenders is None else min(lenders.n_places(), max(0, n - config.fleet.hosts))
    given = plan_input(config, model, header, n, n_lent)
    layout = first_layout(config, model, given)
    _require_ranges(model, head, header, layout)
    layers = FleetLayers(model, segment_files(one_embedding=True), layout)

    def needs(host: int) -> float:
        modules = layers.layout.modules(given.model, given.n_cells)
        return process_bytes(given.n_cells) + layers.layout.placement.weights_on(host, modules)

    hosts = HostProcesses(n, layers.write, config.fleet.hosts, layers.files_of, lenders, layers.coming_to, needs)
    engine = Engine(
        _home_config(config, whole, layers.range_files(layout)),
        clock,
        hosts=hosts,
        keep_alive_s=config.device.keep_alive_s,
    )
    fleet = LocalFleet(engine, hosts, layers, given, config)
    return FleetDevice(engine, fleet, name, tuple(config.device.adapters))


def plan(config: Config) -> FleetPlan:
    """Return what should be done with the layers of the configured model. Raises ConfigError."""
    model = model_path(config.device)
    head, header = read_head(model)
    given = plan_input(config, model, header, max(1, n_hosts(config, None)))
    layout = first_layout(config, model, given)
    _require_ranges(model, head, header, layout)
    return plan_fleet(given, layout if config.fleet.enabled else None)


def plan_input(config: Config, model: Path, header: Header, n: int, n_lent: int = 0) -> FleetPlanInput:
    """Return what a plan for this machine and `n` hosts rests on, of which other machines lend `n_lent`.

    Raises ConfigError if they cannot serve the model.
    """
    modules = modules_of(header, require_layers(model.name, header, n))
    knobs, measured_s = knobs_for(config, model), token_s(config, model)
    return FleetPlanInput(
        modules,
        measured_s or max(1, sum(modules.weights[1:])) / MEMORY_BYTES_PER_S,
        knobs.n_threads,
        shared_knobs(knobs, config.fleet.hosts).n_threads,
        config.device.n_cells or 2 * config.device.divided_n_ctx,
        float(memory()[0]),
        "" if measured_s else NOT_MEASURED,
        n,
        n_processors(),
        n_lent,
    )


def first_layout(config: Config, model: Path, given: FleetPlanInput) -> FleetLayout:
    """Return where layers lie at the start: as the settings say, else where is best. Raises ConfigError."""
    cuts, n = config.fleet.cuts, given.n_layers
    if not cuts:
        return best_layout(given)
    if cuts[-1] >= n:
        msg = f"fleet.cuts = {list(cuts)}: {model.name} has {n} layers, and the last one stays at home: cut below {n}"
        raise ConfigError(msg)
    return FleetLayout.of_cuts(cuts, n)


def _require_ranges(model: Path, head: bytes, header: Header, layout: FleetLayout) -> None:
    """Raise ConfigError, with the reason, if a model cannot be cut so."""
    try:
        for layers, _ in layout.ranges:
            cut(head, header, layers)
    except NotCuttableError as e:
        raise ConfigError(f"{model.name} cannot be cut into ranges of layers: {e}") from e


def shared_knobs(knobs: Knobs, n_hosts: int) -> Knobs:
    """Return the knobs of each of a fleet's processes on one machine: they share the threads of one."""
    n = n_hosts + 1
    each, each_batch = max(1, knobs.n_threads // n), max(1, knobs.n_threads_batch // n)
    return replace_fields(knobs, n_threads=each, n_threads_batch=each_batch)


def _home_config(config: Config, whole: wire.Load, ranges: tuple[wire.RangeFile, ...]) -> wire.Load:
    """Return how home is loaded: as the whole model would be, but for what a fleet cannot do.

    It rounds exactly unless the settings say otherwise: what a new host computes again from kept rows has the bits of
    the lost one then.
    """
    knobs = shared_knobs(knobs_for(config, Path(whole.model_path)), config.fleet.hosts)
    exact = config.device.rounding != "fast" and config.device.flash_attn != "off"
    return replace_fields(
        whole, ranges=ranges, keep_home=config.fleet.keep_home, exact=exact, adapters=(), speculate=False,
        draft_path="", n_gpu_layers=0, n_threads=knobs.n_threads, n_threads_batch=knobs.n_threads_batch,
    )  # fmt: skip

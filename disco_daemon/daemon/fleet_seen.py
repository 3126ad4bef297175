"""What a controller is shown of a fleet whose hosts are processes of this machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.schema import FleetSettings
from ..engine.fleet_wire import FLIGHTS
from ..fleet.control import FleetSeen
from ..fleet.costs import ModuleCosts
from ..fleet.forecast import FleetLoad, FleetModel
from ..fleet.layout import FleetLayout
from ..fleet.placement import FleetHost
from ..fleet.reduction import ReducedState
from .fleet_monitor import MachineLoad, ProcessLoad
from .fleet_plan import FleetPlanInput, host_name

GIB = 2.0**30
PROCESS_BYTES = 100e6  # of a process without layers: Python, numpy and llama.cpp; 60 to 100 MB were measured
NO_ROOM = 1.0  # byte, of a host that may have nothing


@dataclass(frozen=True, slots=True)
class FleetMoment:
    """A fleet at one moment, but for the machine: its layers, its load, and what its owner wants.

    Of the `n_answers` that ended since the last look `n_late` were later than their readers expect. `batch` answers
    run at a time, of `full_batch` without a reduction. Hosts `drained` are to be without layers.
    """

    layout: FleetLayout
    given: FleetPlanInput
    settings: FleetSettings
    costs: ModuleCosts
    load: FleetLoad
    n_cells: int
    batch: int
    full_batch: int
    offloaded: bool = False
    drained: frozenset[int] = frozenset()
    tokens_per_s: float = 0.0
    n_answers: int = 0
    n_late: int = 0


def seen_of(moment: FleetMoment, machine: MachineLoad) -> FleetSeen:
    """Return what a controller is shown."""
    settings, given = moment.settings, moment.given
    modules, placement = moment.layout.modules(given.model, moment.n_cells), moment.layout.placement
    numbers = range(given.n_hosts + 1)
    leaving = moment.drained | (frozenset(numbers[1:]) if is_closed(settings, machine) else frozenset())
    allowed = settings.memory_gib * GIB
    machine_share = 1 - machine.memory_free_bytes / max(1, machine.memory_bytes)
    hosts, cpu, memory, excess = [], [], [], []
    for number in numbers:
        load, needs = machine.processes.get(number, ProcessLoad()), placement.weights_on(number, modules)
        others = machine.memory_bytes - machine.memory_free_bytes - load.rss_bytes
        room = settings.memory_share * machine.memory_bytes - max(0.0, others) - PROCESS_BYTES
        if not number and settings.keep_home:
            room -= sum(weight for weight, mask in zip(modules.weights, placement.masks, strict=True) if not mask & 1)
        memory_share = machine_share / settings.memory_share
        if number and allowed:
            room = min(room, allowed - PROCESS_BYTES)
            memory_share = max(memory_share, (PROCESS_BYTES + needs) / allowed)
        threads = given.n_threads_each
        hosts.append(
            FleetHost(
                host_name(number), given.speed, max(NO_ROOM, room), cpu_used=machine.others_share,
                accepts=number not in leaving, cpu_share=settings.cpu_share, memory_share=1.0,
            )
        )  # fmt: skip
        cpu.append(min(1.0, max(load.cpu_got / threads + machine.others_share, load.cpu_wanted / threads)))
        memory.append(min(1.0, memory_share))
        excess.append(max(0.0, needs - room))
    fleet = FleetModel(tuple(hosts), modules, moment.costs, moment.load, frozenset((0, modules.head)), FLIGHTS)
    state = ReducedState(placement, moment.batch, moment.offloaded)
    return FleetSeen(
        fleet, state, moment.full_batch, tuple(cpu), tuple(memory), moment.n_answers, moment.n_late,
        moment.tokens_per_s, leaving, tuple(excess),
    )  # fmt: skip


def is_closed(settings: FleetSettings, machine: MachineLoad) -> bool:
    """Whether the owner's settings let no host compute at present; unknown counts as at work."""
    is_disturbing = settings.only_idle and machine.owner_at_work is not False
    return is_disturbing or (settings.only_mains and not machine.on_mains)

"""What a controller is shown of a fleet, whose hosts are processes of this machine or of others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...config.schema import FleetSettings
from ...engine.wire import FLIGHTS
from ...fleet.control import FleetSeen
from ...fleet.costs import ModuleCosts
from ...fleet.forecast import FleetLoad, FleetModel
from ...fleet.layout import FleetLayout
from ...fleet.placement import FleetHost
from ...fleet.reduction import ReducedState
from ...link.relay.handshake import TellLoad
from .host_places import LentMachine
from .layer_plan import FleetPlanInput, host_name
from .monitor import MachineLoad, ProcessLoad

GIB = 2.0**30
PROGRAM_BYTES = 72e6  # of a process without layers, as RLIMIT_DATA counts (measured)
SEGMENT_BYTES = 90e6  # of each range of layers beside weights and cells, for llama.cpp to compute in (measured)
CELL_BYTES = 2048.0  # of each cell of a range, which of 512 rows may see it (measured)
NO_ROOM = 1.0  # byte, of a host that may have nothing


@dataclass(frozen=True, slots=True)
class HostElsewhere:
    """A host that is of another machine; `machine` is None while that is not there.

    `compute` is its speed as `FleetHost` has it, `delay_s` (one way) and `bytes_per_s` are of the way there.
    """

    machine: LentMachine | None
    compute: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float = float("inf")

    @property
    def computes(self) -> LentMachine | None:
        """The machine, if it computes what is there, or would."""
        return None if self.machine is None or self.machine.stood_in else self.machine


@dataclass(frozen=True, slots=True)
class FleetMoment:
    """A fleet at one moment, but for this machine: its layers, its load, what its owner wants, and other machines.

    Of the `n_answers` that ended since the last look `n_late` were later than their readers expect. `batch` answers
    run at a time, of `full_batch` without a reduction. Hosts `drained` are to be without layers; those `elsewhere` are
    of other machines.
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
    elsewhere: Mapping[int, HostElsewhere] = field(default_factory=dict)


def segment_bytes(n_cells: int) -> float:
    """Return what a loaded range takes of a host besides its weights and cells."""
    return SEGMENT_BYTES + CELL_BYTES * n_cells


def process_bytes(n_cells: int) -> float:
    """Return what a host's process takes besides weights and cells, with one range of layers."""
    return PROGRAM_BYTES + segment_bytes(n_cells)


def seen_of(moment: FleetMoment, machine: MachineLoad) -> FleetSeen:
    """Return what a controller is shown; what is not known of another machine counts as taken."""
    given = moment.given
    modules, placement = moment.layout.modules(given.model, moment.n_cells), moment.layout.placement
    leaving, found = leaving_of(moment, machine), list[_SeenHost]()
    for number in range(given.n_hosts + 1):
        needs, other = placement.weights_on(number, modules), moment.elsewhere.get(number)
        if other is not None and other.computes is not None:
            found.append(_lent(moment, number, other, other.computes, needs))
        else:
            found.append(_own(moment, number, machine, needs))
    hosts = tuple(
        replace(one.host, accepts=one.host.accepts and number not in leaving) for number, one in enumerate(found)
    )
    fleet = FleetModel(hosts, modules, moment.costs, moment.load, frozenset((0, modules.head)), FLIGHTS)
    state = ReducedState(placement, moment.batch, moment.offloaded)
    return FleetSeen(
        fleet, state, moment.full_batch, tuple(one.cpu for one in found), tuple(one.memory for one in found),
        moment.n_answers, moment.n_late, moment.tokens_per_s, leaving, tuple(one.excess for one in found),
    )  # fmt: skip


def leaving_of(moment: FleetMoment, machine: MachineLoad) -> frozenset[int]:
    """Return the hosts that owners want to be left.

    Another machine's owner is heeded where layers come back by themselves. Else a process stands in while it is away.
    """
    settings = moment.settings
    found = set(moment.drained)
    if is_closed(settings, machine):
        found.update(set(range(1, moment.given.n_hosts + 1)) - moment.elsewhere.keys())
    if settings.mode == "auto":
        found.update(number for number, other in moment.elsewhere.items() if _said_leaving(other))
    return frozenset(found)


def is_closed(settings: FleetSettings, machine: MachineLoad) -> bool:
    """Whether the owner's settings let no host compute at present; unknown counts as at work."""
    is_disturbing = settings.only_idle and machine.owner_at_work is not False
    return is_disturbing or (settings.only_mains and not machine.on_mains)


@dataclass(frozen=True, slots=True)
class _SeenHost:
    """A host, the shares of processors and memory in use there, and the bytes beyond what its owner allows."""

    host: FleetHost
    cpu: float
    memory: float
    excess: float


def _own(moment: FleetMoment, number: int, machine: MachineLoad, needs: float) -> _SeenHost:
    """Return home, or a host of this machine; one that stands in for another machine's gets nothing.

    That has no more than the other machine's owner allows, if it is there: it could not have its layers back.
    """
    settings, given, other = moment.settings, moment.given, moment.elsewhere.get(number)
    load, allowed = machine.processes.get(number, ProcessLoad()), settings.memory_gib * GIB if number else 0.0
    if other is not None and other.machine is not None:
        allowed = _least(allowed, other.machine.memory_bytes)
    own_bytes = process_bytes(moment.n_cells)
    room = _room(settings, machine, load, own_bytes)
    if not number and settings.keep_home:
        modules, masks = moment.layout.modules(given.model, moment.n_cells), moment.layout.placement.masks
        room -= sum(weight for weight, mask in zip(modules.weights, masks, strict=True) if not mask & 1)
    host = FleetHost(
        host_name(number), given.speed, max(NO_ROOM, _within(room, allowed, own_bytes)), cpu_used=machine.others_share,
        accepts=other is None, cpu_share=settings.cpu_share, memory_share=1.0,
    )  # fmt: skip
    taken = _taken(settings, machine, needs + own_bytes, allowed)
    return _seen(host, machine, load, given.n_threads_each, taken, needs)


def _lent(moment: FleetMoment, number: int, other: HostElsewhere, machine: LentMachine, needs: float) -> _SeenHost:
    """Return a host that another machine lends; one that has said nothing of itself lately gets nothing."""
    settings, said, own_bytes = moment.settings, machine.said, process_bytes(moment.n_cells)
    allowed = _least(settings.memory_gib * GIB, machine.memory_bytes)
    room = needs if said is None else _room(settings, load_of(said), _process_of(said), own_bytes)
    host = FleetHost(
        host_name(number), other.compute, max(NO_ROOM, _within(room, allowed, own_bytes)),
        cpu_used=0.0 if said is None else said.others_share, delay_s=other.delay_s, bytes_per_s=other.bytes_per_s,
        accepts=said is not None and not said.leaving, cpu_share=settings.cpu_share, memory_share=1.0,
    )  # fmt: skip
    if said is None:
        # Nothing of it is vacant, and yet it is not the first one that gives way where answers are late.
        return _SeenHost(host, settings.cpu_share, 1.0, max(0.0, needs - host.memory_bytes))
    taken = _taken(settings, load_of(said), needs + own_bytes, allowed)
    return _seen(host, load_of(said), _process_of(said), machine.n_threads, taken, needs)


def load_of(said: TellLoad) -> MachineLoad:
    """Return another machine as this one is seen."""
    return MachineLoad(said.n_cpus, said.others_share, said.memory_bytes, said.memory_free_bytes)


def _process_of(said: TellLoad) -> ProcessLoad:
    return ProcessLoad(said.cpu_got, said.cpu_wanted, said.rss_bytes)


def _seen(
    host: FleetHost, machine: MachineLoad, load: ProcessLoad, n_threads: int, memory: float, needs: float
) -> _SeenHost:
    threads = max(1, n_threads)
    cpu = max(load.cpu_got / threads + machine.others_share, load.cpu_wanted / threads)
    return _SeenHost(host, min(1.0, cpu), min(1.0, memory), max(0.0, needs - host.memory_bytes))


def _room(settings: FleetSettings, machine: MachineLoad, load: ProcessLoad, own_bytes: float) -> float:
    """Return what a process may have on a machine, bytes, besides the `own_bytes` that it takes itself."""
    others = machine.memory_bytes - machine.memory_free_bytes - load.rss_bytes
    return settings.memory_share * machine.memory_bytes - max(0.0, others) - own_bytes


def _taken(settings: FleetSettings, machine: MachineLoad, n_bytes: float, allowed: float) -> float:
    """Return the share of the memory that is in use of that which may be; `n_bytes` are the process's, with layers."""
    share = (1 - machine.memory_free_bytes / max(1, machine.memory_bytes)) / settings.memory_share
    return max(share, n_bytes / allowed) if allowed else share


def _within(room: float, allowed: float, own_bytes: float) -> float:
    """Return the room where so much is allowed; 0 = no less than there is."""
    return min(room, allowed - own_bytes) if allowed else room


def _least(one: float, other: float) -> float:
    """Return the smaller of two bounds, of which 0 is none."""
    return min(one or other, other or one)


def _said_leaving(other: HostElsewhere) -> bool:
    return other.computes is not None and other.computes.said is not None and bool(other.computes.said.leaving)

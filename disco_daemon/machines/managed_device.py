"""What a device is to the daemon, beside an endpoint: it follows settings, says how it is, and ends with them.

A kind of device is one file: a `DeviceKind`, which says when the settings ask for it and makes it, and what it makes.
That is a `ManagedDevice`, in which each method stands for one question of the daemon; a kind answers those that it has
an answer to. The daemon itself knows no kind; `kinds` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..clock import Clock
from ..config.schema import Config
from ..endpoints.base import Endpoint
from ..endpoints.device import Device
from ..endpoints.shaper import Shape
from ..errors import ConfigError
from ..types import DeviceHealth, EngineHealth, Outcome, Side

if TYPE_CHECKING:
    from ..engine.early import EarlyEngine
    from ..profiling.autotuner import Autotuner
    from ..profiling.saved import Measured
    from .fleet.members import FleetMembers

ANSWERS = ("running", "paused", "swapped", "waiting")  # what the engine's statistics count


class FleetStatus(Protocol):
    """What a fleet says of itself, and how it is steered."""

    @property
    def n_hosts(self) -> int:
        """How many hosts there may be, with and without layers."""
        ...

    @property
    def may_borrow(self) -> bool:
        """Whether rows may reach another machine, now or during the next answer."""
        ...

    def brief(self) -> dict[str, Any]:
        """Return `hosts`, `layers_away`, `replicas` and `state`, for `disco status`."""
        ...

    def document(self) -> dict[str, Any]:
        """Return all there is to say, for `disco fleet status`."""
        ...

    @property
    def n_moves(self) -> int:
        """How many times layers were moved, replicated or evicted."""
        ...

    def follow(self, config: Config) -> None:
        """Go by other live settings from now on."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Take an answer that has ended."""
        ...

    def pause(self) -> None:
        """Let nothing be moved by itself until `resume`."""
        ...

    def resume(self) -> None:
        """End a pause, and let drained hosts have layers again."""
        ...

    def drain(self, name: str) -> None:
        """Let all layers leave a host, and none come. Raises ConfigError for an unknown one."""
        ...

    async def run(self) -> None:
        """Look after the fleet until cancelled."""
        ...


def whole_device() -> dict[str, Any]:
    """Return the document of `disco fleet status` for a device without hosts."""
    return {
        "mode": "manual",
        "policy": None,
        "paused": False,
        "hosts": [],
        "parallelism": [],
        "speedup_predicted": None,
        "speedup_measured": None,
        "slo_violation": None,
        "vacancy": None,
        "last_steps": [],
    }


class ManagedDevice:
    """The daemon's questions to a device. Here they have the answers of one that has nothing to follow or to say.

    With a `fleet` it is steered by `disco fleet`.
    """

    fleet: FleetStatus | None = None

    # --- settings -----------------------------------------------------------------------------------------------------

    def is_same(self, other: Endpoint) -> bool:
        """Whether a device of other settings would be this one: then a reload keeps that one, with its model."""
        del other
        return False

    def check(self, config: Config) -> None:
        """Raise ConfigError where this device cannot go by these live settings; nothing is changed."""

    def follow(self, config: Config, server: Endpoint | None) -> None:
        """Go by live settings that were checked, beside that server, from the next request on. Never fails."""

    async def hold(self, *, private: bool) -> None:
        """Let nothing leave this machine while `private`: when this returns, nothing is on its way."""

    # --- work ---------------------------------------------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> None:
        """Take an answer that has ended, whichever side made it. Never blocks."""

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what has to run beside it, by a name for each."""
        return {}

    def make_autotuner(self, config: Config, busy: Callable[[], bool], clock: Clock) -> Autotuner | None:
        """Return what measures its knobs while nobody asks; None where there is nothing to find out."""
        del config, busy, clock
        return None

    def partner_token_j(self) -> tuple[float, float]:
        """Return what another machine spends on a prefill and on a decode token, J; 0 where none computes."""
        return 0.0, 0.0

    # --- documents ----------------------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """Return its own parts of `disco status`, by their keys, beside its endpoint's `status`."""
        return {}

    def health(self) -> DeviceHealth:
        """Return how it is, for /metrics."""
        return DeviceHealth()


class EngineDevice(ManagedDevice, Device):
    """A device over an engine of this machine: it is the same while its engine would be."""

    def is_same(self, other: Endpoint) -> bool:
        """Whether the other one is of this kind, and has an engine that was started with the same settings."""
        return type(other) is type(self) and other.engine.is_set_as(self.engine)

    def health(self) -> DeviceHealth:
        """Return how the engine is."""
        engine = self.engine
        stats, info = engine.stats, engine.info
        return DeviceHealth(
            EngineHealth(
                up=self.ready,
                restarts=engine.restarts,
                answers=dict.fromkeys(ANSWERS, 0)
                if stats is None
                else {name: getattr(stats, name) for name in ANSWERS},
                cells_used=None if stats is None else stats.cells_used,
                cells=None if info is None else info.n_cells,
            )
        )


@dataclass(frozen=True, slots=True)
class Making:
    """What devices are made with: the `shape` of an experiment, `members` that lend hosts, a process begun `early`."""

    clock: Clock
    shape: Shape | None = None
    members: FleetMembers | None = None
    early: EarlyEngine | None = None

    def require_unshaped(self, setting: str) -> None:
        """Raise ConfigError for an experiment's timing of a device that this setting asks for."""
        if self.shape is not None:
            msg = f"--shape-ttft and --shape-tps work with a whole model of this machine only, not with {setting}"
            raise ConfigError(msg)


class DeviceKind(Protocol):
    """A kind of device: when the settings ask for it, and how it is made."""

    def is_wanted(self, config: Config) -> bool:
        """Whether the settings ask for this kind; the first kind of the list that says so makes the device."""
        ...

    def identity(self, config: Config) -> str:
        """Return which device it is: what was learned of a device is used for one of the same identity only."""
        ...

    def measured(self, config: Config) -> Measured | None:
        """Return what `disco profile` measured of such a device, which is of whole models only. Raises ConfigError."""
        del config
        return None

    def make(self, config: Config, making: Making) -> Endpoint:
        """Return the device, not started yet; the daemon manages it if it is a `ManagedDevice`. Raises ConfigError."""
        ...


def device_of(endpoints: Mapping[Side, Endpoint]) -> ManagedDevice:
    """Return the device among endpoints, to be asked; where there is none to manage, one without an answer."""
    found = endpoints.get(Side.DEVICE)
    return found if isinstance(found, ManagedDevice) else ManagedDevice()

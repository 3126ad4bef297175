"""The device as a fleet: the engine is home to the first and the last layers, and hosts have the inner ones.

The engine answers as that of a whole model does. So all that is different here is what cannot be served this way, and
what is said about the hosts.
"""

from __future__ import annotations

from typing import Any, Protocol

from ...endpoints.device import Device
from ...engine.supervisor import Engine
from ...errors import EndpointError
from ...types import Embedding, GenerationRequest, Outcome, Refusal

PRIVATE = (
    "a private request is not sent to the machines that have joined this one's fleet, and they compute inner layers of "
    "the device's model: `disco config set fleet.enabled false` makes the device whole again"
)


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


class FleetDevice(Device):
    """`Endpoint` over an engine whose inner layers are in other processes, and the view of that `fleet`.

    `adapters` are the names of the configured LoRA adapters, which are for a whole model.
    """

    def __init__(self, engine: Engine, fleet: FleetStatus, name: str = "", adapters: tuple[str, ...] = ()) -> None:
        super().__init__(engine, name)
        self.fleet = fleet
        self._unused = dict.fromkeys(adapters, "the device is a fleet, and an adapter is for a whole model")

    @property
    def adapters(self) -> dict[str, str]:
        """The configured adapters, and why none can be used."""
        return self._unused

    def refuses(self, request: GenerationRequest) -> str | None:
        """As a whole device, and private requests where rows may reach another machine: they can be read there."""
        if request.private and self.fleet.may_borrow:
            return Refusal(PRIVATE, "disco")
        return super().refuses(request)

    async def embed(self, given: str | tuple[int, ...]) -> Embedding:
        """Raise EndpointError: embeddings need all layers in one process."""
        del given
        message = "the device is a fleet, and makes no embeddings: they need all of the model's layers in one process"
        raise EndpointError(self.side, "unsupported", message, your_fault=True)

    def status(self) -> dict[str, Any]:
        """Engine state, its last failure, and the fleet."""
        return super().status() | {"fleet": self.fleet.brief()}

"""The device as a fleet: the engine is home to the first and the last layers, and hosts have the inner ones.

The engine answers as that of a whole model does. So all that is different here is what cannot be served this way, and
what is said about the hosts.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from ...config.schema import Config
from ...endpoints.base import Endpoint
from ...engine.supervisor import Engine
from ...errors import EndpointError
from ...types import (
    DeviceHealth,
    Embedding,
    FleetHealth,
    GenerationRequest,
    Given,
    Outcome,
    Refusal,
    TextTask,
    Usage,
)
from ..managed_device import EngineDevice, FleetStatus

PRIVATE = (
    "a private request is not sent to the machines that have joined this one's fleet, and they compute inner layers of "
    "the device's model: `disco config set fleet.enabled false` makes the device whole again"
)


class FleetDevice(EngineDevice):
    """`Endpoint` over an engine whose inner layers are in other processes, and the view of that `fleet`.

    `adapters` are the names of the configured LoRA adapters, which are for a whole model.
    """

    fleet: FleetStatus

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

    async def embed(self, texts: Sequence[Given], task: TextTask, usage: Usage) -> Embedding:
        """Raise EndpointError: embeddings need all layers in one process."""
        del texts, task, usage
        message = "the device is a fleet, and makes no embeddings: they need all of the model's layers in one process"
        raise EndpointError(self.side, "unsupported", message, your_fault=True)

    def status(self) -> dict[str, Any]:
        """Engine state, its last failure, and the fleet."""
        return super().status() | {"fleet": self.fleet.brief()}

    def health(self) -> DeviceHealth:
        """Return how the engine and its hosts are."""
        brief = self.fleet.brief()
        return replace(super().health(), fleet=FleetHealth(brief["hosts"], brief["layers_away"], self.fleet.n_moves))

    def is_same(self, other: Endpoint) -> bool:
        """Whether the other one has the same engine and as many hosts, of other machines or of none."""
        return isinstance(other, FleetDevice) and super().is_same(other) and _hosts(self.fleet) == _hosts(other.fleet)

    def follow(self, config: Config, server: Endpoint | None) -> None:
        """Move layers by these settings from now on."""
        del server
        self.fleet.follow(config)

    def observe(self, outcome: Outcome) -> None:
        """Take an answer that has ended."""
        self.fleet.observe(outcome)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what looks after the fleet."""
        return {"fleet": self.fleet.run()}


def _hosts(fleet: FleetStatus) -> tuple[bool, int]:
    return fleet.may_borrow, fleet.n_hosts

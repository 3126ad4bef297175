"""What /metrics says of a device, whichever kind it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The engine process: `answers` in it by their status, `cells` of its KV cache (one token each)."""

    up: bool
    restarts: int
    answers: Mapping[str, int] = field(default_factory=dict)
    cells_used: int | None = None
    cells: int | None = None


@dataclass(frozen=True, slots=True)
class LinkHealth:
    """The link of a split device to its partner; `rtt_s` is the latest round trip between the machines, if known."""

    up: bool
    rtt_s: float | None = None


@dataclass(frozen=True, slots=True)
class FleetHealth:
    """The hosts that live beside the engine, the layers that they compute, and how often layers were moved."""

    hosts: int
    layers_away: int
    moves: int = 0


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """What there is to say of a device; None for what it does not have."""

    engine: EngineHealth | None = None
    split: LinkHealth | None = None
    fleet: FleetHealth | None = None

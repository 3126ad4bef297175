"""What a partner's relay last said of the machines that are linked to it."""

from __future__ import annotations

import time
from typing import Any

from msgspec.structs import replace

from ...clock import Clock
from ...link.relay.orders import LinkStats, LinkUp

WORKING_S = 5.0  # after the latest rows: a link tells of them once a second


class LinkedMachines:
    """The links by the names of their machines."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: dict[str, LinkUp] = {}
        self._stats: dict[str, LinkStats] = {}
        self._worked_at = -WORKING_S

    @property
    def is_working(self) -> bool:
        """Whether rows of a machine came just now."""
        return self._clock.now() - self._worked_at < WORKING_S

    def add(self, up: LinkUp) -> None:
        """A machine is linked."""
        self._links[up.name] = up

    def remove(self, name: str) -> None:
        """A machine is not linked any more."""
        self._links.pop(name, None)

    def clear(self) -> None:
        """No machine is linked any more."""
        self._links.clear()

    def observe(self, stats: LinkStats) -> None:
        """Rows came over a link."""
        self._stats[stats.name], self._worked_at = stats, self._clock.now()

    def describe(self, name: str, joined_at: float, build: str, *, has_all: bool) -> dict[str, Any]:
        """Return a member for `disco machines list`; `build` is by which the layers here are computed.

        Where this machine `has_all` of them, the bits are its own, whatever computes drafts.
        """
        up, stats = self._links.get(name), self._stats.get(name)
        return {
            "name": name,
            "since": time.strftime("%Y-%m-%d", time.localtime(joined_at)),
            "connected": up is not None,
            "address": up.address if up is not None else None,
            "same_bits": (up.build if not has_all else replace(up.build, llama=build)).same_bits(build)
            if up is not None and build
            else None,
            "rtt_ms": stats.rtt_ms if stats is not None else None,
            "rows": stats.n_rows if stats is not None else 0,
            "bytes": {"up": stats.n_bytes_received, "down": stats.n_bytes_sent} if stats is not None else None,
        }

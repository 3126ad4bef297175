"""What the API shows of a daemon: `api.documents.Reports`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.layers import with_values

if TYPE_CHECKING:
    from .daemon import Daemon


@dataclass(frozen=True, slots=True)
class Reports:
    """Each document is the daemon's own."""

    daemon: Daemon

    def state(self) -> dict[str, Any]:
        """See `api.documents.Reports`."""
        return self.daemon.state()

    def history(self, limit: int) -> list[dict[str, Any]]:
        """See `api.documents.Reports`."""
        return self.daemon.recent(limit)

    def ledger(self, days: int) -> list[dict[str, Any]]:
        """See `api.documents.Reports`."""
        return self.daemon.ledger(days)

    def plan(self, tokens: int, waited_s: float) -> dict[str, Any]:
        """See `api.documents.Reports`."""
        return self.daemon.plan(tokens, waited_s)

    def settings(self) -> dict[str, Any]:
        """See `api.documents.Reports`."""
        return self.daemon.settings()

    async def whatif(self, usd_per_kwh: float, budget: float, tail: Mapping[str, float]) -> dict[str, Any]:
        """See `api.documents.Reports`."""
        config = with_values(self.daemon.config, {f"policy.{knob}": value for knob, value in tail.items()})
        return await self.daemon.foresight.predict(config, usd_per_kwh, budget)

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """See `api.documents.Reports`."""
        return await self.daemon.change(changes)

    def providers(self) -> dict[str, Any]:
        """See `api.documents.Reports`."""
        return self.daemon.servers.known()

    async def check_server(self, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """See `api.documents.Reports`."""
        return await self.daemon.servers.check(base_url, api_key, model)

    async def set_server(self, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """See `api.documents.Reports`."""
        return await self.daemon.set_server(base_url, api_key, model)

    async def set_device(self, model: str) -> dict[str, Any]:
        """See `api.documents.Reports`."""
        return await self.daemon.set_device(model)

    async def reload(self) -> dict[str, Any]:
        """See `api.documents.Reports`."""
        return await self.daemon.reload()

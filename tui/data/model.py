"""The daemon's documents as frozen values for the screens, and the protocols that the screens rely on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Json = Mapping[str, Any]


class DaemonApi(Protocol):
    """The part of `client.stream.Link` that control panel, dashboard and timeline use. All raise DaemonError."""

    async def state(self) -> dict[str, Any]:
        """GET /disco/v1/state."""
        ...

    async def settings(self) -> dict[str, Any]:
        """GET /disco/v1/settings."""
        ...

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """PATCH /disco/v1/settings."""
        ...

    async def history(self, limit: int) -> list[dict[str, Any]]:
        """GET /disco/v1/history, newest first."""
        ...

    async def plan(self, tokens: int) -> dict[str, Any]:
        """GET /disco/v1/plan."""
        ...

    async def ledger(self, days: int) -> list[dict[str, Any]]:
        """GET /disco/v1/ledger, newest first."""
        ...

    async def whatif(
        self, rate: float, budget: float, *, alpha: float | None = None, kappa: float | None = None
    ) -> dict[str, Any] | None:
        """GET /disco/v1/whatif; None if there is too little history."""
        ...

    async def trace(self, request_id: str) -> dict[str, Any] | None:
        """GET /disco/v1/trace/ID; None if it is not kept."""
        ...


class HostApp(Protocol):
    """The application as these screens see it. `plain`: no boxes, words in place of pictures.

    `undo_log` has the settings before each change, the last change last; it outlives the screen.
    """

    link: DaemonApi
    plain: bool
    undo_log: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Cap:
    """One limit on spending: `spent` of `limit`, both in `unit`."""

    name: str
    unit: str
    limit: float
    spent: float


@dataclass(frozen=True, slots=True)
class Money:
    """The exchange rate, $/kWh, as set and as it counts now, and its effects. `scarcer` is None without a server."""

    rate: float = 0.3
    effective: float = 0.3
    scarcer: str | None = None
    threshold: float | None = None
    charge: float | None = None
    on_mains: bool = True
    throttled: bool = False
    usd_today: float = 0.0
    usd_this_month: float = 0.0
    wh_today: float = 0.0
    caps: tuple[Cap, ...] = ()

    @classmethod
    def of(cls, money: Json) -> Money:
        """Read `money` of the daemon's state, or of its answer to a change."""
        power, spent = money.get("power", {}), money.get("spent", {})
        caps = money.get("caps", {}).items()
        return cls(
            rate=money["usd_per_kwh"],
            effective=money["effective_usd_per_kwh"],
            scarcer=money.get("scarcer"),
            threshold=money.get("threshold_usd_per_kwh"),
            charge=power.get("charge"),
            on_mains=power.get("on_mains", True),
            throttled=power.get("throttled", False),
            usd_today=spent.get("usd_today", 0.0),
            usd_this_month=spent.get("usd_this_month", 0.0),
            wh_today=spent.get("wh_today", 0.0),
            caps=tuple(Cap(name, c["unit"], c["limit"], c["spent"]) for name, c in caps if c.get("spent") is not None),
        )

    @property
    def source(self) -> str:
        """The source of the energy, in words."""
        if self.on_mains:
            where = "on mains"
        else:
            where = "on battery" if self.charge is None else f"battery at {100 * self.charge:.0f} %"
        return where + (", throttled by heat" if self.throttled else "")


@dataclass(frozen=True, slots=True)
class Prediction:
    """The what-if: what one setting would have done to the requests on record. TTFTs are in s."""

    mean_s: float
    p99_s: float
    usd_per_day: float
    wh_per_day: float
    scarcer: str
    requests: int

    @classmethod
    def of(cls, said: Json) -> Prediction:
        """Read the answer to /disco/v1/whatif."""
        return cls(
            said["mean_ttft_s"], said["p99_ttft_s"], said["usd_per_day"], said["wh_per_day"], said["scarcer"],
            said["requests"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One row of the history. `ttft_s` and `winner` are None if no answer came; `server_usd` is the server's bill."""

    request_id: str
    created: float
    winner: str | None
    error: str | None
    handoffs: int
    prompt_tokens: int
    tokens: int
    ttft_s: float | None
    qoe: float | None
    server_usd: float

    @classmethod
    def of(cls, row: Json) -> RequestRow:
        """Read a row of /disco/v1/history."""
        return cls(
            request_id=row["request_id"],
            created=row["created"],
            winner=row["winner"],
            error=row["error"],
            handoffs=row["handoffs"],
            prompt_tokens=row["prompt_tokens"],
            tokens=row["device_tokens"] + row["server_tokens"],
            ttft_s=row["ttft_s"],
            qoe=row.get("qoe"),
            server_usd=row["server_usd"],
        )


@dataclass(frozen=True, slots=True)
class DashboardSnapshot:
    """The documents behind the dashboard, fetched at about the same time."""

    state: Json
    plan: Json
    ledger: Sequence[Json]
    rows: Sequence[Json]

    @property
    def money(self) -> Money:
        """The exchange rate and the spending."""
        return Money.of(self.state["money"])

    @property
    def requests(self) -> list[RequestRow]:
        """The recent requests, newest first, without the daemon's own probes."""
        return [RequestRow.of(row) for row in self.rows if row.get("policy") != "probe"]


FILTERS = {
    "all": "all",
    "device": "device won",
    "server": "server won",
    "moved": "moved",
    "errors": "errors",
}


_KEEPS: Mapping[str, Callable[[RequestRow], bool]] = {
    "all": lambda r: True,
    "device": lambda r: r.winner == "device",
    "server": lambda r: r.winner == "server",
    "moved": lambda r: r.handoffs > 0,
    "errors": lambda r: r.error is not None,
}


def filter_requests(requests: Sequence[RequestRow], chosen: str) -> list[RequestRow]:
    """Return the requests that a filter of FILTERS lets through."""
    return [request for request in requests if _KEEPS[chosen](request)]

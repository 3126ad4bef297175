"""The daemon's health at the moment of a scrape, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...types import DeviceHealth, EngineHealth, Side


@dataclass(frozen=True, slots=True)
class Budget:
    """The share of all prompt tokens that the scarcer side may process, 0 to 1; `used` over the last 200 requests."""

    side: Side
    allowed: float
    handed_out: float
    used: float | None


@dataclass(frozen=True, slots=True)
class CapUse:
    """Shares of a cap: spent, and reserved by running answers."""

    spent: float
    reserved: float


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """All figures that are looked up, not counted. `usd_per_kwh` is the exchange rate in force.

    `breakers` are how far each server's is open: 0, a half while one request at a time tries the server, 1.
    """

    version: str
    in_flight: int
    may_serve: Mapping[Side, bool]
    breakers: Mapping[str, float]
    budget: Budget
    caps: Mapping[str, CapUse]
    usd_per_kwh: float
    rows_dropped: int
    device: DeviceHealth


class Present(Collector):
    """Collects the health snapshot at each scrape."""

    def __init__(self, health: Callable[[], HealthSnapshot]) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        health = self._health()
        yield from _daemon(health)
        yield from _money(health)
        yield from _device(health.device)


def _gauge(name: str, told: str, value: float | None) -> GaugeMetricFamily:
    """Return one gauge; without a sample where the value is not known (None)."""
    return GaugeMetricFamily(name, told, value)


def _gauges(name: str, told: str, label: str, values: Mapping[str, float | None]) -> GaugeMetricFamily:
    """Return one gauge for each value of a label, without those that are not known."""
    family = GaugeMetricFamily(name, told, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    return family


def _daemon(now: HealthSnapshot) -> Iterator[Metric]:
    yield _gauges("disco_build_info", "The daemon's version; always 1.", "version", {now.version: 1})
    yield _gauge("disco_answers_in_flight", "Answers being made now.", now.in_flight)
    up = {side.value: float(serves) for side, serves in now.may_serve.items()}
    yield _gauges("disco_endpoint_up", "Whether an endpoint can be asked.", "endpoint", up)
    told = "Whether a server is left alone, 1; 0.5 while one request at a time tries it again."
    yield _gauges("disco_breaker_open", told, "endpoint", now.breakers)
    told = "Answers missing in the history: the disk did not keep up, or refused."
    yield CounterMetricFamily("disco_history_rows_dropped", told, now.rows_dropped)


def _money(now: HealthSnapshot) -> Iterator[Metric]:
    yield _gauge("disco_exchange_rate_usd_per_kwh", "What a kWh here is worth now, $.", now.usd_per_kwh)
    budget, side = now.budget, now.budget.side.value
    told = "Share of all prompt tokens that the scarcer endpoint may process."
    yield _gauges("disco_budget_allowed_ratio", told, "endpoint", {side: budget.allowed})
    told = "Share of the prompt tokens that it processed, over the last 200 requests."
    yield _gauges("disco_budget_used_ratio", told, "endpoint", {side: budget.used})
    told = "The budget that the next request is planned with, after what was saved or overspent."
    yield _gauges("disco_budget_handed_out_ratio", told, "endpoint", {side: budget.handed_out})
    spent = {name: cap.spent for name, cap in now.caps.items()}
    yield _gauges("disco_cap_spent_ratio", "Share of a cap that is spent.", "cap", spent)
    reserved = {name: cap.reserved for name, cap in now.caps.items()}
    yield _gauges("disco_cap_reserved_ratio", "Share of a cap held for running answers.", "cap", reserved)


def _device(now: DeviceHealth) -> Iterator[Metric]:
    if now.engine is not None:
        yield from _engine(now.engine)
    if now.split is not None:
        yield _gauge("disco_split_up", "Whether the partner can be asked.", float(now.split.up))
        yield _gauge("disco_split_rtt_seconds", "Round trip between the two machines.", now.split.rtt_s)
    if now.fleet is not None:
        yield _gauge("disco_fleet_hosts", "Hosts that live, besides the engine.", now.fleet.hosts)
        told = "Layers of the device's model that hosts compute."
        yield _gauge("disco_fleet_layers_away", told, now.fleet.layers_away)
        told = "Times that layers were moved, replicated or evicted."
        yield CounterMetricFamily("disco_fleet_moves", told, now.fleet.moves)


def _engine(now: EngineHealth) -> Iterator[Metric]:
    yield _gauge("disco_engine_up", "Whether the engine has its model in memory.", float(now.up))
    yield CounterMetricFamily("disco_engine_restarts", "Times the engine was started again.", now.restarts)
    yield _gauges("disco_engine_answers", "Answers in the engine, by what they do.", "state", now.answers)
    yield _gauge("disco_engine_cells_used", "Tokens in the KV cache.", now.cells_used)
    yield _gauge("disco_engine_cells", "Tokens that the KV cache can hold.", now.cells)

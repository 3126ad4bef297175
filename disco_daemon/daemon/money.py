"""Makes spending and sensors from the settings: the server's price, the caps with amounts spent, what a probe costs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..clock import Clock, local_zone
from ..conductor import Privacy
from ..config.pricelist import load
from ..config.schema import Config
from ..dispatch.mover import DECODE_TPS
from ..errors import DiscoError
from ..estimation.knowledge import DEVICE_TPS
from ..money.caps import SERVER_CONTEXT, CapLimits, Caps, Spent, since
from ..money.catalog import Catalog, Price
from ..money.prices import J_PER_WH
from ..money.spending import CostBound, Speeds, Spending
from ..power.sensors import Sensors, of_this_machine
from ..store import History
from ..types import Attempt, EntryKind, LedgerEntry, Side, Usage
from .device import n_gpu_layers

log = logging.getLogger("disco.money")

PROBE = CostBound(200, max_tokens=200)  # what a probe may cost, tokens; it asks several times, in little pieces


def make_spending(config: Config, own: Path, clock: Clock, caps: Caps | None = None) -> Spending:
    """Return the prices in force and the caps: `caps` in use, with what is spent of them, or new ones (see `restore`).

    Caps in use keep their limits until somebody sets those of the new settings. `own` is the folder of the user's own
    price lists. Raises ConfigError.
    """
    catalog = load(own)
    price = price_of(config, catalog)
    if config.server.base_url and not price.known:
        log.warning("%s", catalog.advice(config.server.base_url, config.server.model, str(own / "mine.toml")))
    limits = limits_of(config)
    return Spending(
        price,
        caps or Caps(limits, local_zone(), clock.wall()),
        limits=limits,
        usd_per_kwh=config.device.usd_per_kwh,
        watts=config.device.watts,
        speeds=Speeds(DEVICE_TPS, DECODE_TPS[Side.DEVICE]),
        context=config.device.n_ctx or SERVER_CONTEXT,
        stops_billing=catalog.stops_billing(config.server.base_url),
    )


def price_of(config: Config, catalog: Catalog) -> Price:
    """Return the configured server's price: from the settings, else from the price lists; zero without a server."""
    server = config.server
    if not server.base_url:
        return Price(0.0, 0.0, 0.0)
    listed, given = (
        catalog.price(server.base_url, server.model),
        (server.input_usd_per_mtok, server.output_usd_per_mtok),
    )
    if given == (None, None):
        return listed
    put = listed.input if given[0] is None else given[0]
    out = listed.output if given[1] is None else given[1]
    cached = listed.cached_input if given[0] is None else put
    whole = None not in given
    return replace(
        listed,
        input=put,
        cached_input=cached,
        output=out,
        source="your settings",
        as_of=None,
        known=listed.known or whole,
    )


def limits_of(config: Config) -> CapLimits:
    """Return the caps as set."""
    caps = config.caps
    return CapLimits(caps.usd_per_day, caps.usd_per_month, caps.wh_per_day, caps.battery_floor)


def restore(spending: Spending, history: History, clock: Clock) -> None:
    """Count what was spent this day and month by the ledger; blocks on disk."""
    now = clock.wall()
    today, first = since(now, local_zone())
    try:
        day, month = history.spent(today, today), history.spent(first, today)
    except DiscoError as e:
        log.warning("the caps start from nothing spent: %s", e)
        return
    spending.caps.restore(Spent(day.server_usd, month.server_usd, day.energy_j / J_PER_WH), now)


@dataclass(frozen=True, slots=True)
class ProbeAccount:
    """Admits probes of the server, and books their cost in the caps and, by `enter`, in the ledger.

    `model` is the server's.
    """

    spending: Spending
    model: str
    enter: Callable[[LedgerEntry], None]
    clock: Clock
    privacy: Privacy

    def affordable(self) -> bool:
        """Whether the server may be probed now: nothing is private, and no cap closes it."""
        return not self.privacy.on and self.spending.check(Side.SERVER, PROBE, self.clock.wall()) is None

    def book(self, spent: Usage) -> None:
        """Book a probe as a row of its own in the ledger, if it has cost anything."""
        attempt = self.spending.prices.booked(Attempt(Side.SERVER, self.model, 0.0, 0.0, True, spent))
        if attempt.bill_usd or spent.completion_tokens:
            now = self.clock.wall()
            self.spending.book(attempt, now)
            self.enter(LedgerEntry(EntryKind.PROBE, "probe", now, self.model, attempt, attempt.bill_usd, 0.0))


def make_sensors(config: Config) -> Sensors:
    """Return the power sensors of this machine, for the threads and layers that compute."""
    device = config.device
    return of_this_machine(device.watts, device.n_threads, on_gpu=n_gpu_layers(device) != 0)

"""Makes spending and sensors from the settings: the server's price, the caps with amounts spent, what a probe costs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from ..clock import Clock, since_boot
from ..conductor import Privacy
from ..config.pricelist import load
from ..config.schema import Config
from ..dispatch.mover import DECODE_TPS
from ..errors import DiscoError
from ..estimation.knowledge import DEVICE_TPS
from ..keys.named_key import NamedKey
from ..machines.device_settings import longest_answer, n_gpu_layers
from ..money.caps import SERVER_CONTEXT, CapLimits, Caps, Spent
from ..money.catalog import Catalog, Price
from ..money.prices import J_PER_WH
from ..money.spending import CostBound, Speeds, Spending
from ..plain import reason_of
from ..power.sensors import Sensors, of_this_machine
from ..store import History
from ..store.kept_sums import KeptSums
from ..store.migrations import DAMAGED
from ..types import Attempt, EntryKind, LedgerEntry, Side, Usage

log = logging.getLogger("disco.money")

LEDGER_DAYS = 62  # two months: the running one, and one in front of it for clocks that were wrong
PROBE = CostBound(200, max_tokens=200)  # what a probe may cost, tokens; it asks several times, in little pieces


def make_spending(
    config: Config, own: Path, clock: Clock, caps: Caps | None = None, catalog: Catalog | None = None
) -> Spending:
    """Return the prices in force and the caps: `caps` in use, with what is spent of them, or new ones (see `restore`).

    Caps in use keep their limits until somebody sets those of the new settings. `own` is the folder of the user's own
    price lists, `catalog` all of them if they are read already. Raises ConfigError.
    """
    catalog = catalog or load(own)
    price = price_of(config, catalog)
    if config.server.base_url and not price.known:
        log.warning("%s", catalog.advice(config.server.base_url, config.server.model, str(own / "mine.toml")))
    limits = limits_of(config)
    return Spending(
        price,
        caps or Caps(limits, None, clock.wall(), elapsed=since_boot),
        limits=limits,
        usd_per_kwh=config.device.usd_per_kwh,
        watts=config.device.watts,
        speeds=Speeds(DEVICE_TPS, DECODE_TPS[Side.DEVICE]),
        context=longest_answer(config.device) or SERVER_CONTEXT,
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
    """Count what was spent before, by the ledger and by the sums kept beside it, and keep them from now on.

    One of them is enough. Where neither can be read, or what is spent cannot be kept by either, caps are closed: a
    start would give all of a cap once more. Blocks on disk.
    """
    _restore(spending.caps, history, KeptSums(history.path), clock)


def make_key_caps(key: NamedKey, history: History, clock: Clock) -> Caps:
    """Return the caps of a key with a name, with what was spent under that name before. Blocks on disk."""
    caps = Caps(limits_of_key(key), None, clock.wall(), elapsed=since_boot, key=key.name)
    sums = KeptSums(history.path.with_name(f"{history.path.name}.key-{key.name}"))
    _restore(caps, history, sums, clock, since=key.created)
    return caps


def limits_of_key(key: NamedKey) -> CapLimits:
    """Return the caps that a key has."""
    return CapLimits(key.terms.usd_per_day, key.terms.usd_per_month)


def _restore(caps: Caps, history: History, sums: KeptSums, clock: Clock, since: float = 0.0) -> None:
    """Restore the caps of the whole, or those of a key that is there `since` then, Unix time, s."""
    wrong = list[str]()
    days: dict[date, Spent] | None = None
    kept: dict[str, Any] | None = None
    is_new = True  # neither of them has been there yet
    try:
        days = _days_of(history, caps.key)
        is_new = not _was_damaged(history.path, since)
    except DiscoError as e:
        wrong.append(str(e))
        is_new = not history.path.exists()
    try:
        kept = sums.load()
        caps.restore(days or {}, kept or {}, clock.wall())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        wrong.append(f"{sums.path} cannot be read ({reason_of(e)}); if nothing was spent, remove it")
        kept, is_new = None, False
        caps.restore(days or {}, {}, clock.wall())
    keeper = _SumsKeeper(caps, sums)
    is_known = kept is not None or bool(days) or is_new
    if is_known and (keeper.keep() or not history.error):
        caps.keep = keeper.keep
    else:
        wrong.append(history.error or "the history was damaged, and begins anew")
        away = f"disco keys change {caps.key} --usd-per-day none" if caps.key else "disco config set caps.NAME null"
        caps.close(
            f"what was spent before is not known, or cannot be kept: {'; '.join(wrong)}. Mend that and start again, or "
            f"take the cap away (`{away}`)"
        )
    if wrong:
        log.warning("what was spent before: %s", "; ".join(wrong))


def _was_damaged(history: Path, since: float) -> bool:
    """Whether a history was moved aside since then, so that this one does not know of all that was spent."""
    aside = history.parent.glob(f"{history.name}.{DAMAGED}-*") if history.parent.is_dir() else ()
    stamps = (path.name.rpartition("-")[2] for path in aside)
    return any(not stamp.isdecimal() or int(stamp) >= int(since) for stamp in stamps)


def _days_of(history: History, key: str) -> dict[date, Spent]:
    """Return the ledger's sums of the latest days, those of a key with that name or of all. Raises Unavailable."""
    found = {}
    for row in history.days(LEDGER_DAYS, key or None):
        with suppress(ValueError):  # a day that no calendar has
            usd, wh = row["server_usd"], row["energy_j"] / J_PER_WH
            found[date.fromisoformat(row["day"])] = Spent(max(0.0, usd), 0.0, max(0.0, wh))
    return found


class _SumsKeeper:
    """Keeps the sums of caps; one that fails is told of once."""

    def __init__(self, caps: Caps, sums: KeptSums) -> None:
        self._caps, self._sums = caps, sums
        self._failing = False

    def keep(self) -> bool:
        """Write the sums; return whether they are."""
        try:
            self._sums.save(self._caps.kept())
        except (OSError, ValueError) as e:
            if not self._failing:
                log.warning("the sums of the caps cannot be written to %s: %s", self._sums.path, e)
            self._failing = True
        else:
            self._failing = False
        return not self._failing


@dataclass(frozen=True, slots=True)
class ProbeAccount:
    """Admits probes of the server, and books their cost in the caps and, by `enter`, in the ledger.

    `model` is the server's, `server` the name of one of several.
    """

    spending: Spending
    model: str
    enter: Callable[[LedgerEntry], None]
    clock: Clock
    privacy: Privacy
    server: str | None = None

    def affordable(self) -> bool:
        """Whether the server may be probed now: nothing is private, and no cap closes it."""
        return not self.privacy.on and self.spending.check(Side.SERVER, PROBE, self.clock.wall()) is None

    def book(self, spent: Usage) -> None:
        """Book a probe as a row of its own in the ledger, if it has cost anything."""
        attempt = self.spending.prices.booked(
            Attempt(Side.SERVER, self.model, 0.0, 0.0, True, spent, server=self.server)
        )
        if attempt.bill_usd or spent.completion_tokens:
            now = self.clock.wall()
            self.spending.book(attempt, now)
            self.enter(LedgerEntry(EntryKind.PROBE, "probe", now, self.model, attempt, attempt.bill_usd, 0.0))


def make_sensors(config: Config) -> Sensors:
    """Return the power sensors of this machine, for the threads and layers that compute."""
    device = config.device
    return of_this_machine(device.watts, device.n_threads, on_gpu=n_gpu_layers(device) != 0)

"""Fetches a newer list of prices, looks at it, and writes it beside the user's own: `disco prices refresh`.

Nothing is asked for without that verb. What comes is foreign: it is bounded, read as data, and put through the very
checks of a list that a user writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

from ..config.layers import write_private
from ..config.pricelist import FETCHED, fetched, shipped_lists
from ..errors import ConfigError
from ..money.catalog import Catalog, Price, ServerProfile
from ..money.genai_prices import price_lists
from ..system.net import hostname, is_loopback, is_plain, without_credentials
from ..system.smallfile import open_regular
from .asking import fetch_document

# Of https://github.com/pydantic/genai-prices (MIT), without descriptions; it is made anew whenever a price changes.
URL = "https://raw.githubusercontent.com/pydantic/genai-prices/refs/heads/main/prices/new_data/v2/data_slim.json"
MAX_BYTES = 8 * 2**20  # of the list; it has 260 kB
LEAST_MODELS = 20  # with a price: a document with fewer is another one, or was cut


@dataclass(frozen=True, slots=True)
class NewPrices:
    """A list that was looked at: its servers with their prices, and the text that is to be kept of it."""

    source: str
    day: date
    servers: tuple[ServerProfile, ...]
    text: str

    @property
    def n_models(self) -> int:
        """Names with a price."""
        return sum(len(server.models) for server in self.servers)


@dataclass(frozen=True, slots=True)
class Change:
    """The price of one model at one server, before and now; None before where nobody knew it."""

    server: str
    model: str
    before: Price | None
    now: Price


def fetch(url: str) -> bytes:
    """Return the list at an address, bounded in size and time. Raises ConfigError."""
    if is_plain(url) and not is_loopback(hostname(url)):
        shown = without_credentials(url)
        raise ConfigError(f"{shown}: prices are fetched by https only, so that nobody on the way can change them")
    raw = fetch_document(url, MAX_BYTES)
    return _bounded(raw, without_credentials(url))


def read(path: Path) -> tuple[bytes, date]:
    """Return the list in a file, and the day of that file. Raises ConfigError."""
    try:
        with open_regular(path) as f:
            raw, day = f.read(MAX_BYTES + 1), datetime.fromtimestamp(path.stat().st_mtime, UTC).date()
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror or e}") from e
    return _bounded(raw, str(path)), day


def _bounded(raw: bytes, source: str) -> bytes:
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{source} is longer than {MAX_BYTES} bytes: a price list is not; nothing was changed")
    return raw


def looked_at(raw: bytes, source: str, day: date) -> NewPrices:
    """Return what a document has, after all checks. Raises ConfigError, and then nothing has changed."""
    addresses = {one.name: one.urls for one in shipped_lists() if one.urls and not one.reference}
    try:
        tables = price_lists(json.loads(raw), addresses, day)
    except (ValueError, RecursionError) as e:
        msg = f"{source} is no list of genai-prices: {e or 'it is nested too deeply'}; nothing was changed"
        raise ConfigError(msg) from e
    kept = {"source": source, "as_of": day.isoformat(), "servers": tables}
    found = NewPrices(source, day, fetched(kept, source), json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    if found.n_models < LEAST_MODELS:
        msg = f"{source} has prices of {found.n_models} models: such a list has hundreds; nothing was changed"
        raise ConfigError(msg)
    return found


def changes(before: Catalog, now: NewPrices) -> list[Change]:
    """Return what the new list says that was not known, or not so, before."""
    found = []
    for server in now.servers:
        for model, price in server.models.items():
            old = before.price(server.urls[0], model)
            if not old.known:
                found.append(Change(server.name, model, None, price))
            elif amounts(old) != amounts(price):
                found.append(Change(server.name, model, old, price))
    return found


def gone(before: Iterable[ServerProfile], now: NewPrices) -> list[str]:
    """Return the models of the list that was fetched before, and that the new one no longer has."""
    there = {(one.name, model) for one in now.servers for model in one.models}
    return [f"{one.name}: {model}" for one in before for model in one.models if (one.name, model) not in there]


def amounts(price: Price) -> Sequence[float]:
    """Return the three amounts of a price, $ per million tokens."""
    return (price.input, price.cached_input, price.output)


def keep(folder: Path, new: NewPrices) -> Path:
    """Write the list beside the user's own ones, in place of the one that was fetched before. Raises ConfigError."""
    path = folder / FETCHED
    try:
        write_private(path, new.text)
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror or e}") from e
    return path

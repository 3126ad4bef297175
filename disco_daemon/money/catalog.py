"""The prices of servers: price lists by address and model. Pure: mappings in, prices out; `pricelist` reads the files.

A price is found by the server's address and the model's name as the user wrote them. A name that ends in a snapshot's
whole date (`gpt-4o-mini-2024-07-18`) has the price of the name without it, unless it is listed itself. No other ending
is removed: `gpt-5-pro` costs twelve times what `gpt-5` does, and `mistral-large-2411` four times `-2512`.
A model that is not found counts as the dearest one known, and is marked so.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any
from urllib.parse import urlsplit

from ..continuations import CONTINUATIONS
from ..errors import ConfigError
from ..plain import which
from ..system.net import hostname, is_http_url, is_loopback, without_credentials
from ..types import UNKNOWN, Capabilities, Capability

ANY = "*"  # the entry for every model of a server that has no entry of its own
_SNAPSHOT = re.compile(r"[-@](\d{4})-?(0[1-9]|1[0-2])-?(0[1-9]|[12]\d|3[01])$")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_PORTS = {"http": 80, "https": 443}
# Names that public DNS does not have: RFC 6762, RFC 8375, and ICANN's reservation of .internal (2024).
_PRIVATE_ENDINGS = (".local", ".home.arpa", ".internal")

_SERVER_KEYS = {
    "title", "base_url", "other_urls", "key_url", "key_env", "private", "reference", "continuation",
    "closing_stops_billing", "closing_source",
    "as_of", "source", "notes", "models",
}  # fmt: skip
_MODEL_KEYS = {
    "input", "cached_input", "output", "as_of", "source", "aliases", "notes",
    "context_length", "max_output", "capabilities",
}  # fmt: skip
_CAPABILITIES = [capability.value for capability in Capability if capability is not Capability.CONTINUATION]


@dataclass(frozen=True, slots=True)
class Price:
    """Price of one model, $ per million tokens, with the day on which `source` said so.

    `cached_input` is for prompt tokens that the server found in its cache. `known` is False for a stand-in: the dearest
    price known of each kind. `entry` is where it was found: `openai: gpt-4o-mini`. `capabilities` is what the list says
    that the model can do. `is_extra`: only a list that was fetched has this model; what nobody knows is not as dear as
    the dearest of all the world's.
    """

    input: float
    cached_input: float
    output: float
    source: str = ""
    as_of: date | None = None
    known: bool = True
    entry: str = ""
    capabilities: Capabilities = UNKNOWN
    is_extra: bool = False

    def cost_usd(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """Cost of a request, $. `cached_tokens` are some of `prompt_tokens`, as OpenAI's `usage` counts them."""
        cached = min(cached_tokens, prompt_tokens)
        fresh = prompt_tokens - cached
        return (fresh * self.input + cached * self.cached_input + completion_tokens * self.output) / 1e6

    def to_json(self) -> dict[str, float] | None:
        """Return it for lists of models, $ per million tokens; None where nobody knows it."""
        return {"input_usd_per_mtok": self.input, "output_usd_per_mtok": self.output} if self.known else None


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """The profile of one server: prices by model (lower case), how it continues answers, whether closing ends the bill.

    `continuation` is a name of `endpoints.continuation`. `closing_stops_billing` is None where it is not known, which
    counts as no. A `private` profile stands for every loopback or private address without one of its own; a `reference`
    is looked up by its name only. `title` is the server's common name, `key_url` the page where a key is made,
    `key_env` the variable that mostly holds it.
    """

    name: str
    urls: tuple[str, ...] = ()
    models: Mapping[str, Price] = field(default_factory=dict)
    continuation: str = "auto"
    closing_stops_billing: bool | None = None
    closing_source: str = ""
    notes: str = ""
    private: bool = False
    reference: bool = False
    title: str = ""
    key_url: str = ""
    key_env: str = ""

    def find(self, model: str) -> Price | None:
        """Return the entry of a model: by its own name, then by the name without a date, then `*`."""
        return next((self.models[name] for name in _names(model) if name in self.models), None)

    def match(self, base_url: str) -> int:
        """Return how well an address fits: 0 for not at all, else more the more of its path this profile names."""
        if self.private:
            return 1 if is_private(hostname(base_url)) else 0
        return max((_covers(own, base_url) for own in self.urls), default=0)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Price lists; of two that know the same model at the same address, the later one counts (the user's own)."""

    profiles: tuple[ServerProfile, ...]

    def price(self, base_url: str, model: str) -> Price:
        """Return the price of a model at an address; the dearest known, with `known=False`, if no list has it."""
        for profile in self._fitting(base_url):
            if (found := profile.find(model)) is not None:
                return found
        return self.dearest

    def server(self, base_url: str) -> ServerProfile | None:
        """Return the profile that fits an address best, None if there is none."""
        return next(self._fitting(base_url), None)

    def stops_billing(self, base_url: str) -> bool:
        """Whether closing a stream is known to end a server's bill; elsewhere a loser is booked at full price."""
        known = (profile.closing_stops_billing for profile in self._fitting(base_url))
        return next((stops for stops in known if stops is not None), False)

    def named(self, name: str) -> ServerProfile | None:
        """Return a profile by its name, such as `paper`; the latest one of that name."""
        return next((p for p in reversed(self.profiles) if p.name == name), None)

    @property
    def dearest(self) -> Price:
        """The stand-in for an unknown model: the highest price of each kind in any list that charges anything."""
        lists = (profile for profile in self.profiles if not profile.reference)
        real = [p for profile in lists for p in profile.models.values() if not p.is_extra]
        top = max((p.input for p in real), default=0.0)
        out = max((p.output for p in real), default=0.0)
        return Price(top, top, out, "the dearest prices known, for want of this one", known=False)

    def advice(self, base_url: str, model: str, file: str) -> str | None:
        """Return the advice of `disco doctor` on an unknown price, None if it is known. `file` is where to put it."""
        price = self.price(base_url, model)
        if price.known:
            return None
        shown = without_credentials(base_url)
        return (
            f"the price of {model} at {shown} is not known: until you give it, it counts as "
            f"${price.input:g} per million input tokens and ${price.output:g} per million output tokens. "
            f"Put into {file}:\n"
            f'base_url = "{shown}"\n[models."{model}"]\ninput = …\noutput = …'
        )

    def _fitting(self, base_url: str) -> Iterator[ServerProfile]:
        """Yield fitting profiles, best first: named addresses before the private rule, later lists, longer paths."""
        scored = [(p.match(base_url), n, p) for n, p in enumerate(self.profiles) if not p.reference]
        fitting = [(not p.private, n, score, p) for score, n, p in scored if score]
        return (p for *_, p in sorted(fitting, key=lambda row: row[:3], reverse=True))


def is_private(host: str) -> bool:
    """Whether a host must be this machine or one of its network, by its address or its name."""
    host = host.casefold().rstrip(".")
    if not host or is_loopback(host):
        return bool(host)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # Public DNS has next to no names without a dot (RFC 7085 lists them); and a bare number is an address.
        return host.endswith(_PRIVATE_ENDINGS) or ("." not in host and not _NUMBER.fullmatch(host))
    mapped = getattr(address, "ipv4_mapped", None)  # older Pythons take every ::ffff:a.b.c.d for private
    return (mapped or address).is_private


def _names(model: str) -> Iterator[str]:
    name = model.casefold().removeprefix("models/")  # Google's API names its models so
    yield name
    if dated := _SNAPSHOT.search(name):
        yield name[: dated.start()]
    yield ANY


def _covers(own: str, asked: str) -> int:
    """Return 1 + the path segments of `own` if `asked` is that address or below it, else 0."""
    try:
        a, b = urlsplit(own), urlsplit(asked)
        same = (_host(a.hostname), a.port or _PORTS.get(a.scheme)) == (
            _host(b.hostname),
            b.port or _PORTS.get(b.scheme),
        )
    except ValueError:
        return 0
    path, other = _segments(a.path), _segments(b.path)
    return 1 + len(path) if same and other[: len(path)] == path else 0


def _host(name: str | None) -> str:
    return (name or "").rstrip(".")


def _segments(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


# --- reading a list -------------------------------------------------------------------------------------------------


def parse(name: str, table: Mapping[str, Any], file: str, *, own: bool = False) -> ServerProfile:
    """Return a profile from a TOML table. `own` lists need no date and no source.

    Raises ConfigError that names `file`, the key and the mend.
    """
    reader = _PriceListReader(file)
    reader.known(table, _SERVER_KEYS, "")
    private, reference = (reader.flag(table, key) for key in ("private", "reference"))
    urls = reader.urls(table, wanted=not (private or reference))
    models = reader.table(table, "models")
    prices = dict(reader.prices(name, models, table, own=own))
    return ServerProfile(
        name,
        urls,
        prices,
        continuation=reader.choice(table, "continuation", CONTINUATIONS, "auto"),
        closing_stops_billing=reader.closing(table),
        closing_source=reader.text(table, "closing_source"),
        notes=reader.text(table, "notes"),
        private=private,
        reference=reference,
        title=reader.text(table, "title"),
        key_url=reader.text(table, "key_url"),
        key_env=reader.text(table, "key_env"),
    )


@dataclass(frozen=True, slots=True)
class _PriceListReader:
    """Takes values from one file's tables; its errors name what is wrong and how to mend it."""

    file: str

    def error(self, key: str, what: str, where: str = "") -> ConfigError:
        msg = f"{self.file}: {where}{key} {what}"
        return ConfigError(msg)

    def known(self, table: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
        for key in table:
            if key not in keys:
                raise self.error(key, f"is not a key here: {which(key, sorted(keys))}", where)

    def table(self, table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        value = table.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f'must be a table such as [{key}."gpt-4o-mini"]')
        return value

    def flag(self, table: Mapping[str, Any], key: str) -> bool:
        value = table.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def text(self, table: Mapping[str, Any], key: str, where: str = "") -> str:
        value = table.get(key, "")
        if not isinstance(value, str):
            raise self.error(key, f"must be text in quotes, not {value!r}", where)
        return value.strip()

    def texts(self, table: Mapping[str, Any], key: str, where: str = "") -> tuple[str, ...]:
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self.error(key, f'must be a list of texts such as ["a", "b"], not {value!r}', where)
        return tuple(value)

    def choice(self, table: Mapping[str, Any], key: str, allowed: tuple[str, ...], default: str) -> str:
        value = table.get(key, default)
        if value not in allowed:
            raise self.error(key, f"= {value!r}: {which(str(value), allowed)}")
        return str(value)

    def closing(self, table: Mapping[str, Any]) -> bool | None:
        value = table.get("closing_stops_billing", "unknown")
        if value == "unknown":
            return None
        if not isinstance(value, bool):
            raise self.error("closing_stops_billing", f'must be true, false or "unknown", not {value!r}')
        return value

    def urls(self, table: Mapping[str, Any], *, wanted: bool) -> tuple[str, ...]:
        base = self.text(table, "base_url")
        urls = ((base,) if base else ()) + self.texts(table, "other_urls")
        for url in urls:
            if not is_http_url(url):
                raise self.error(
                    "base_url" if url == base else "other_urls", f"= {url!r} is not a URL such as https://…/v1"
                )
        if wanted and not base:
            raise self.error("base_url", "is missing: give the server's address, such as https://api.openai.com/v1")
        return urls

    def prices(
        self, server: str, models: Mapping[str, Any], defaults: Mapping[str, Any], *, own: bool
    ) -> Iterator[tuple[str, Price]]:
        taken: set[str] = set()
        for model in models:
            where = f'models."{model}".'
            entry = self.table(models, model)
            self.known(entry, _MODEL_KEYS, where)
            price = self.price(f"{server}: {model}", entry, defaults, where, own=own)
            for name in (model, *self.texts(entry, "aliases", where)):
                if name.casefold() in taken:
                    raise self.error(f"{where}aliases" if name != model else where[:-1], f"= {name!r} is listed twice")
                taken.add(name.casefold())
                yield name.casefold(), price

    def price(
        self, name: str, entry: Mapping[str, Any], defaults: Mapping[str, Any], where: str, *, own: bool
    ) -> Price:
        costs = {key: self.amount(entry, key, where) for key in ("input", "output")}
        cached = self.amount(entry, "cached_input", where) if "cached_input" in entry else costs["input"]
        if cached > costs["input"]:
            raise self.error("cached_input", f"= {cached:g} is more than input = {costs['input']:g}: lower it", where)
        source = self.text(entry, "source", where) or self.text(defaults, "source")
        as_of = self.day({**defaults, **entry}, where)
        if not own and not (source and as_of):
            raise self.error(where[:-1], "needs `as_of` and `source`, here or at the top of the file")
        capabilities = self.capabilities(entry, where)
        return Price(costs["input"], cached, costs["output"], source or self.file, as_of, True, name, capabilities)

    def capabilities(self, entry: Mapping[str, Any], where: str) -> Capabilities:
        found = entry.get("capabilities", {})
        if not isinstance(found, Mapping):
            raise self.error("capabilities", "must be a table such as {tools = true, images = false}", where)
        self.known(found, _CAPABILITIES, f"{where}capabilities.")
        for name, value in found.items():
            if not isinstance(value, bool):
                raise self.error(name, f"must be true or false, not {value!r}", f"{where}capabilities.")
        lengths = {name: self.length(entry, name, where) for name in ("context_length", "max_output")}
        return Capabilities.of(found, **lengths)

    def length(self, entry: Mapping[str, Any], key: str, where: str) -> int | None:
        value = entry.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self.error(key, f"= {value!r} is no number of tokens such as 128000", where)
        return value

    def amount(self, entry: Mapping[str, Any], key: str, where: str) -> float:
        value = entry.get(key)
        if value is None:
            raise self.error(key, "is missing: give $ per million tokens, such as 0.15", where)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < math.inf):
            raise self.error(key, f"= {value!r} is no price: give $ per million tokens, such as 0.15", where)
        return float(value)

    def day(self, table: Mapping[str, Any], where: str) -> date | None:
        value = table.get("as_of")
        if value is None:
            return None
        try:
            return date.fromisoformat(value) if isinstance(value, str) else date(value.year, value.month, value.day)
        except (AttributeError, ValueError):
            raise self.error("as_of", f"= {value!r} is no day: write it as 2026-11-21", where) from None

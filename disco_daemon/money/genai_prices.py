"""Reads the public list of genai-prices (https://github.com/pydantic/genai-prices, MIT) as price lists of ours. Pure.

Its document is a list of providers, each with the pattern of its addresses and its models. Of that is taken what is
certain: prices by a model's own name and by the other names that stand there whole. What it says by the beginnings of
names, by regular expressions, or for a time of the day is left out: there a price stays unknown. So does that of a
model with charges that we do not book, such as one for each request, and that of one that is said to cost nothing: no
cap would ever hold it. Where long prompts cost more, all count as such: a cap may be reached too soon, not passed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from datetime import date
from typing import Any

from ..system.net import hostname

MAX_NAME = 200  # characters of a model's name; the longest one known has 70
MOST_USD = 10_000.0  # per million tokens; the dearest known is 600, and a larger one is a mistake of some unit
# An address that is written out, with its dots escaped; what else stands in a pattern is no single address.
_ADDRESS = re.compile(r"https://([a-z0-9-]+(?:\\\.[a-z0-9-]+)+)((?:/[A-Za-z0-9._-]+)*)(?:\(\?:/\|\$\)|\(/\|\$\))?")

# What is booked, or costs nothing more than that in a request that asks for neither: cached beginnings and searches.
_BOOKED = {
    "input_mtok", "output_mtok", "cache_read_mtok", "cache_write_mtok", "cache_write_1h_mtok", "web_searches_kcount",
}  # fmt: skip
_MEDIA = ("audio", "image", "video")  # in the name of a charge for what is no text

Table = dict[str, Any]


def price_lists(document: object, shipped: Mapping[str, Collection[str]], day: date) -> dict[str, Table]:
    """Return tables as in profiles/servers, by the provider's name, with the prices of that day.

    `shipped` are the addresses of our own lists by name, the first one being the list's: they keep those. Raises
    ValueError for what is no such list.
    """
    if not isinstance(document, list):
        raise ValueError("it is no list of providers")  # noqa: TRY004  as for all that is no such list
    hosts = {hostname(url) for urls in shipped.values() for url in urls}
    found: dict[str, Table] = {}
    for provider in document:
        if not isinstance(provider, dict) or not isinstance(name := provider.get("id"), str):
            raise ValueError("a provider without a name stands in it")  # noqa: TRY004
        base_url = next(iter(shipped[name]), "") if name in shipped else _address(provider.get("api_pattern"))
        if not base_url or (name not in shipped and hostname(base_url) in hosts):
            continue
        if models := dict(_models(provider.get("models"), day)):
            found[name] = {"title": str(provider.get("name") or name), "base_url": base_url, "models": models}
    return found


def _address(pattern: object) -> str:
    """Return the address that a provider's pattern spells out; "" where it stands for several."""
    whole = _ADDRESS.fullmatch(pattern) if isinstance(pattern, str) else None
    return f"https://{whole[1]}{whole[2]}".replace("\\", "") if whole else ""


def _models(models: object, day: date) -> Iterator[tuple[str, Table]]:
    """Yield the models with a price, each name once: of two that claim one, the first has it."""
    taken: set[str] = set()
    for model in models if isinstance(models, list) else ():
        if not isinstance(model, dict):
            continue
        names: dict[str, str] = {}
        for name in filter(_is_name, (model.get("id"), *_equals(model.get("match")))):
            names.setdefault(name.casefold(), name)
        free = [name for folded, name in names.items() if folded not in taken]
        price = _price(model.get("prices"), day)
        if not free or price is None:
            continue
        taken |= names.keys()
        length = model.get("context_window")
        room = {"context_length": length} if type(length) is int and length > 0 else {}
        yield free[0], {**price, **room, "aliases": free[1:]}


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()


def _equals(match: object) -> Iterator[Any]:
    """Yield the names that a condition has whole."""
    if isinstance(match, dict):
        yield match.get("equals")
        either = match.get("or")
        for one in either if isinstance(either, list) else ():
            if isinstance(one, dict):
                yield one.get("equals")


def _price(prices: object, day: date) -> Table | None:
    """Return the price of a day, $ per million tokens; None where not all of it is known."""
    if isinstance(prices, list):
        prices = next((one.get("prices") for one in reversed(prices) if _is_in_force(one, day)), None)
    if not isinstance(prices, dict):
        return None
    told, written = _amount(prices.get("input_mtok")), _amount(prices.get("output_mtok"))
    if told is None or written is None or told == written == 0 or any(_is_further(key, prices[key]) for key in prices):
        return None
    cached = _amount(prices.get("cache_read_mtok"))
    return {"input": told, "output": written} | ({} if cached is None or cached > told else {"cached_input": cached})


def _is_in_force(price: object, day: date) -> bool:
    """Whether a price with a condition holds all of a day."""
    if not isinstance(price, dict):
        return False
    constraint = price.get("constraint")
    if constraint is None:
        return True
    try:
        return set(constraint) == {"start_date"} and date.fromisoformat(constraint["start_date"]) <= day
    except (TypeError, ValueError):
        return False


def _is_further(key: str, amount: object) -> bool:
    """Whether a charge comes on top of the tokens of a text."""
    return key not in _BOOKED and not any(kind in key for kind in _MEDIA) and bool(amount)


def _amount(amount: object) -> float | None:
    """Return an amount; of one with tiers by the prompt's length the highest, None where one is not known."""
    if isinstance(amount, dict):
        tiers = amount.get("tiers", [])
        each = [amount.get("base"), *(_tier(one) for one in tiers)] if isinstance(tiers, list) else [None]
        known = [found for one in each if not isinstance(one, dict) and (found := _amount(one)) is not None]
        return max(known) if len(known) == len(each) else None
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not (0 <= amount <= MOST_USD):
        return None
    return float(amount) if math.isfinite(amount) else None


def _tier(tier: object) -> object:
    return tier.get("price") if isinstance(tier, dict) else None

"""What a key with a name may and has spent, in words: for `disco keys`, `disco status` and the terminal UI. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..plain import count_of
from .amounts import dollars

Json = Mapping[str, Any]


def may_words(key: Json) -> str:
    """Say what a key may."""
    words = [", ".join(key["models"]) or "all models"]
    words += [f"{dollars(key[f'usd_per_{of}'])} a {of}" for of in ("day", "month") if key[f"usd_per_{of}"] is not None]
    if key["requests_per_minute"] is not None:
        words.append(f"{count_of(key['requests_per_minute'], 'request')} a minute")
    return "; ".join([*words, *(["nothing leaves this machine"] if key["private"] else [])])


def spent_words(key: Json) -> str:
    """Say what a key has spent; nothing where no daemon says it."""
    if key["usd_today"] is None:
        return ""
    return f"{dollars(key['usd_today'])} today, {dollars(key['usd_this_month'])} this month"


def reached_words(key: Json) -> str:
    """Say which of its caps a key has reached, so that no server answers it; else ""."""
    for of, spent in (("day", "usd_today"), ("month", "usd_this_month")):
        if key[spent] is not None and (cap := key[f"usd_per_{of}"]) is not None and key[spent] >= cap:
            return f"it has reached its {dollars(cap)} a {of}"
    return ""

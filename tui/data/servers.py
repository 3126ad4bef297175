"""Several servers, and keys with names, as lines for the screens: what each does, costs and has spent. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disco_daemon.client.amounts import dollars
from disco_daemon.client.key_words import may_words, reached_words
from disco_daemon.client.side_health import STATES, breaker_words, reason_words

from .scale import seconds

Json = Mapping[str, Any]
NAME, LEAST_NAME, MOST_NAME = "SERVER/MODEL", 12, 48  # characters of the widest column


def server_lines(state: Json, width: int) -> list[str]:
    """Return a table of several servers within `width` columns, with why and until when one is left alone.

    There is none where there is one server, of which all else on the screen speaks.
    """
    found = state.get("servers") or ()
    if len(found) < 2:
        return []
    table: list[tuple[str, ...]] = [("TTFT p50", "p99", "$/M in", "out", "asked", "today")]
    table += [(*_times(one), *price_cells(one.get("price")), *_shares(one)) for one in found]
    states = ["", *map(state_word, found)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    room = width - sum(widths) - 2 * len(widths) - max(map(len, states)) - 2
    names = [NAME, *(f"{one['name']}/{one['model']}" for one in found)]
    n = min(max(LEAST_NAME, room), MOST_NAME, max(map(len, names)))
    lines = []
    for i, (name, cells, word) in enumerate(zip(names, table, states, strict=True)):
        shown = "".join(f"  {cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
        lines.append(f"{shorter(name, n):<{n}}{shown}  {word}".rstrip())
        if i and (why := breaker_words(found[i - 1], "it")):
            lines.append(f"  {why}")
    return lines


def state_word(one: Json) -> str:
    """Return how a server is in a word or two."""
    match (one.get("breaker") or {}).get("state"):
        case "open":
            return reason_words((one.get("breaker") or {}).get("why"))
        case "half_open":
            return "on trial"
    return STATES.get(str(one.get("state")), (str(one.get("state")), True))[0]


def price_cells(price: Json | None) -> tuple[str, str]:
    """Return the price of a million tokens in and out, $; a question mark where nobody knows it."""
    if not price:
        return "?", "?"
    return dollars(price["input_usd_per_mtok"]), dollars(price["output_usd_per_mtok"])


def _times(one: Json) -> tuple[str, str]:
    times = (one.get("ttft_p50_s"), one.get("ttft_p99_s"))
    return "-" if times[0] is None else seconds(times[0]), "-" if times[1] is None else seconds(times[1])


def _shares(one: Json) -> tuple[str, str]:
    return f"{100 * one['share']:.0f} %", dollars(one["usd_today"])


def key_lines(keys: Sequence[Json]) -> list[str]:
    """Return a line for each key with a name: what it has spent today and this month, and what it may."""
    if not keys:
        return []
    table = [("key", "today", "month"), *((key["name"], *map(_spent, _sums(key))) for key in keys)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    words = ["may", *("; ".join(filter(None, (reached_words(key), may_words(key)))) for key in keys)]
    return [
        f"{name:<{widths[0]}}  {today:>{widths[1]}}  {month:>{widths[2]}}  {may}"
        for (name, today, month), may in zip(table, words, strict=True)
    ]


def _sums(key: Json) -> tuple[float | None, float | None]:
    return key["usd_today"], key["usd_this_month"]


def _spent(usd: float | None) -> str:
    return "?" if usd is None else dollars(usd)


def shorter(name: str, n: int) -> str:
    """Return a name within `n` characters: its end says more of a model than its beginning, after the server's."""
    return name if len(name) <= n else f"{name[: n // 2]}…{name[len(name) - (n - n // 2 - 1) :]}"

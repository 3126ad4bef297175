"""What was used, summed up by who asked, by what has answered, or by the day.

By key and by day: whole requests, with the tokens that clients were told, also of those that are not kept any more. By
model and by server: the starts of each, with the tokens that it has processed, losers' too, as far as rows are kept;
a request counts at each model that was started for it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any, Literal

By = Literal["key", "model", "server", "day"]

_OF_REQUESTS = """
SELECT {by} AS what, sum(requests) AS requests, sum(prompt_tokens) AS prompt_tokens,
  sum(completion_tokens) AS completion_tokens, total(picousd) / 1e12 AS usd, total(microj) / 1e6 AS joules
FROM key_days WHERE day >= ?{more} GROUP BY what ORDER BY {order}
"""
_OF_STARTS = """
SELECT {by} AS what, count(DISTINCT s.request) AS requests, sum(s.processed_tokens) AS prompt_tokens,
  sum(s.completion_tokens) AS completion_tokens, total(s.bill_usd) AS usd, total(s.energy_j) AS joules
FROM ttft_samples s JOIN requests r ON r.id = s.request
WHERE r.day >= ? GROUP BY what ORDER BY usd DESC, requests DESC, what
"""
# A server has its name of the settings, also in rows of when there was one; "" is this machine.
_SERVER = "coalesce(s.server, CASE s.side WHEN 'server' THEN 'server' ELSE '' END)"
SUMS: dict[By, str] = {
    "key": _OF_REQUESTS.format(by="key", more="", order="usd DESC, requests DESC, what"),
    "day": _OF_REQUESTS.format(by="day", more="", order="what DESC"),
    "model": _OF_STARTS.format(by="s.model"),
    "server": _OF_STARTS.format(by=_SERVER),
}
DAYS_OF_KEY = _OF_REQUESTS.format(by="day", more=" AND key = ?", order="what DESC")
# What each model of each server has cost on a day, as far as rows are kept; a model's name is as the server has it.
_OF_DAY = """
SELECT {server} || '/' || s.model AS what, total(s.bill_usd) AS usd
FROM ttft_samples s JOIN requests r ON r.id = s.request WHERE r.day = ? AND s.side = 'server' GROUP BY what
"""
USD_OF_SERVERS = _OF_DAY.format(server=_SERVER)
_J_PER_WH = 3600.0


def used(rows: Iterable[sqlite3.Row], by: By) -> list[dict[str, Any]]:
    """Return the rows of `SUMS` under the names that the API has for them."""
    return [
        {
            by: row["what"],
            "requests": row["requests"],
            "prompt_tokens": row["prompt_tokens"],
            "completion_tokens": row["completion_tokens"],
            "usd": row["usd"],
            "wh": row["joules"] / _J_PER_WH,
        }
        for row in rows
    ]

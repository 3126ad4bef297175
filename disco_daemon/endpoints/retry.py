"""When a server wants to be asked again. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

MAX_RETRY_S = 86_400.0  # the longest Retry-After that a client gets; a server that says more means "never", or nothing


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds after `now`, Unix time, from `Retry-After`, or the finer `retry-after-ms` of OpenAI and Azure.

    The header has a number of seconds or a date, by the server's clock: that one's `Date` counts, where it tells it,
    and ours may be wrong. None for what is neither; never below 0 or above MAX_RETRY_S.
    """
    if (ms := _number(headers.get("retry-after-ms"))) is not None:
        return _clamp(ms / 1000)
    told = headers.get("retry-after")
    if (seconds := _number(told)) is not None:
        return _clamp(seconds)
    until, there = _at(told), _at(headers.get("date"))
    return None if until is None else _clamp(until - (now if there is None else there))


def _at(date: str | None) -> float | None:
    """Return a date as Unix time, s; None for what is none."""
    try:
        at = parsedate_to_datetime(date or "")
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return None


def _number(text: str | None) -> float | None:
    """A number, also one without end; None for what is none."""
    try:
        n = float(text or "")
    except ValueError:
        return None
    return None if math.isnan(n) else n


def _clamp(seconds: float) -> float:
    return min(max(0.0, seconds), MAX_RETRY_S)

"""When a server wants to be asked again, by what its headers say. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MAX_RETRY_S = 86_400.0  # the longest Retry-After that a client gets; a server that says more means "never", or nothing
_UNIX_S, _UNIX_MS = 1e8, 1e11  # numbers from here on are times, not waits: 1e8 s are three years, 1e11 s three thousand
# OpenAI: 6m0s, 120ms; Groq: 2m59.56s
_SPAN = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m(?!s))?(?:(\d{1,9}(?:\.\d{1,9})?)s)?(?:(\d{1,9})ms)?")
_SPAN_S = (86_400.0, 3600.0, 60.0, 1.0, 0.001)


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


def exhausted_s(headers: Mapping[str, str], now: float) -> float | None:
    """Return the time until a server has room again, s, where its rate-limit headers say that nothing is left.

    They come with a good answer too: `x-ratelimit-remaining-requests` and `x-ratelimit-reset-requests` (OpenAI and
    those after it), `anthropic-ratelimit-tokens-remaining` and so on, `ratelimit-remaining` (the IETF's draft). None
    where something is left, where no reset is told, and where the limit itself is 0: that server counts nothing.
    """
    longest: float | None = None
    for name in headers:
        kind = name.lower()
        if "remaining" not in kind or "ratelimit" not in kind or (left := _number(headers[name])) is None or left > 0:
            continue
        if (limit := _number(headers.get(kind.replace("remaining", "limit")))) is not None and limit <= 0:
            continue
        reset_s = _until_s(headers.get(kind.replace("remaining", "reset")), headers.get("date"), now)
        if reset_s:
            longest = max(longest or 0.0, reset_s)
    return longest


def _until_s(told: str | None, date: str | None, now: float) -> float | None:
    """Return a reset as the time until then, s: a wait, a span such as 6m0s, or a time by the server's own clock."""
    text, there = (told or "").strip(), _at(date)
    here = now if there is None else there
    if (number := _number(text)) is not None:
        at = number / 1000 if number >= _UNIX_MS else number
        return _clamp(at - here if number >= _UNIX_S else number)
    if text and (span := _SPAN.fullmatch(text)):
        return _clamp(sum(float(n or 0) * s for n, s in zip(span.groups(), _SPAN_S, strict=True)))
    try:  # Anthropic: 2026-11-21T10:00:00Z
        until = datetime.fromisoformat(text)
        return _clamp((until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp() - here)
    except (ValueError, OverflowError):
        return None


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

"""How offered models, and the fetch of one, are shown to people: by `disco` and by the terminal UI alike. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
ABOUT = "Speeds are about right: they are scaled from what was measured here."


def stand_in_words(state: Json) -> str:
    """Return that a stand-in answers, from a daemon's state; "" where it does not."""
    size = state.get("stand_in")
    return f"Answers come from a {size} stand-in." if size else ""


def offer_lines(models: Sequence[Json], width: int | None = None) -> list[str]:
    """Return a line for each offered model, in columns: name, size, memory, speed, wait, licence.

    Where that is wider than `width` cells, memory and wait are left out: a licence is seen before it is agreed to.
    """
    rows = [_cells(model) for model in models]
    lines = _columns(rows)
    if width is not None and max(map(len, lines), default=0) > width:
        lines = _columns([(title, size, speed, licence, last) for title, size, _, speed, _, licence, last in rows])
    return lines


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cells(model: Json) -> tuple[str, ...]:
    tps, wait_s = model["tps"], model["ttft_s"]["100"]
    speed = "speed not known" if tps is None else f"about {_rounded(tps)} token/s"
    first = "" if wait_s is None else f"first after {_seconds(wait_s)}"
    last = "thinks first" if "thinks" in model["abilities"] else "recommended" if model["recommended"] else ""
    size, memory = f"{size_words(model['bytes'])}", f"{size_words(model['memory_bytes'])} memory"
    return str(model["title"]), size, memory, speed, first, str(model["licence"]), last


def size_words(n_bytes: float) -> str:
    """Return a size as people say it."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def _rounded(tps: float) -> str:
    return f"{tps:.0f}" if tps >= 10 else f"{tps:.1f}"


def _seconds(s: float) -> str:
    return f"{s:.1f} s" if s < 10 else f"{s:.0f} s"


def fetch_words(fetch: Json) -> str:
    """Return how far a fetch is, as a sentence."""
    title, state = fetch["title"], fetch["state"]
    if state == "loading":
        return f"{title} is fetched, and is being loaded."
    if state == "done":
        return f"{title} is in use. {fetch['message']}".strip()
    if state == "cancelled":
        return f"The fetch of {title} was cancelled. What came is kept: fetch it again to go on."
    if state == "failed":
        return f"{title} is not in use: {fetch['message']}"
    done, total, rate = fetch["done_bytes"], fetch["bytes"], fetch["bytes_per_s"]
    line = f"Fetching {title}: {100 * done / max(1, total):.0f} %, {size_words(done)} of {size_words(total)}"
    if not rate:
        return f"{line}."
    minutes, seconds = divmod(round(max(0, total - done) / rate), 60)
    left = f"{minutes} min" if minutes else f"{seconds} s"
    return f"{line}, {rate / 1e6:.1f} MB/s, {left} left."

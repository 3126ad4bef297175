"""How offered models, and the fetch of one, are shown to people: by `disco` and by the terminal UI alike. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
FIRST, SHORT, LEAST = range(7), (0, 1, 3, 5, 6), (0, 1, 3, 5)  # columns, where not all have room
SHORTER = ("about ", " first")  # words that are left out where there is less
NAMED = 3  # models with a name that are told of one by one: what can be chosen needs the rest of a small terminal
RUNNING = ("fetching", "loading")  # states of a fetch
ABOUT = "Speeds are predicted by what was measured here, mostly within 15 %, first tokens within 25 %."


def stand_in_words(state: Json) -> str:
    """Return that a stand-in answers, from a daemon's state; "" where it does not."""
    size = state.get("stand_in")
    return f"Answers come from a {size} stand-in." if size else ""


def offer_lines(models: Sequence[Json], width: int | None = None) -> list[str]:
    """Return a line for each offered model, in columns: what it takes, how fast and good it is, its licence.

    Where that is wider than `width` cells, the last columns are left out, then all but name, size, speed and licence:
    that is seen before it is agreed to.
    """
    rows = [_cells(model) for model in models]
    lines = columns(rows)
    for kept, words in ((FIRST, ()), (SHORT, ()), (SHORT, SHORTER), (LEAST, SHORTER)):
        if width is not None and max(map(len, lines), default=0) > width:
            lines = columns([tuple(_without(row[i], words) for i in kept) for row in rows])
    return lines


def _without(text: str, words: Sequence[str]) -> str:
    for word in words:
        text = text.replace(word, "")
    return text


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Put cells below each other; a column that is empty is none."""
    cells = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in cells]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*cells, strict=True)
    ]


def _cells(model: Json) -> tuple[str, ...]:
    tps, waits, quality, joules = model["tps"], model["ttft_s"], model.get("quality"), model.get("j_per_answer")
    abilities = [name for name in model["abilities"] if name != "thinks"]
    return (
        str(model["title"]),
        f"{'about ' * bool(model.get('bytes_are_reckoned'))}{size_words(model['bytes'])}",
        f"{size_words(model['memory_bytes'])} memory",
        "speed not known" if tps is None else f"about {_rounded(tps)} token/s",
        "" if waits["100"] is None else f"first after {_seconds(waits['100'])}",
        str(model["licence"]),
        "thinks first" if "thinks" in model["abilities"] else "recommended" if model["recommended"] else "",
        "" if quality is None else f"MMLU-Pro {quality:.1f}",
        "" if waits["2000"] is None else f"{_seconds(waits['2000'])} for 2,000 tokens",
        "" if joules is None else f"{joules:.0f} J an answer",
        ", ".join(abilities),
    )


def size_words(n_bytes: float) -> str:
    """Return a size as people say it."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def _rounded(tps: float) -> str:
    return f"{tps:.0f}" if tps >= 10 else f"{tps:.1f}"


def _seconds(s: float) -> str:
    return f"{s:.1f} s" if s < 10 else f"{s:.0f} s"


def running_words(state: Json) -> str:
    """Return how far all fetches are that run, from a daemon's state: a line each, the one to be used first."""
    first = state.get("fetch") or {}
    others = [one for one in state.get("fetches") or () if one["state"] in RUNNING and one["id"] != first.get("id")]
    return "\n".join(map(fetch_words, [*([first] if first.get("state") in RUNNING else []), *others]))


def named_words(state: Json) -> str:
    """Return how the models of `[[models]]` are, from a daemon's state: a line each, for NAMED at most.

    Those that are not only here come first.
    """
    found = sorted(state.get("models") or (), key=lambda one: one["state"] == "unloaded")
    lines = [f"disco/{one['name']}: {_named(one)}." for one in found[:NAMED]]
    more = len(found) - len(lines)
    return "\n".join([*lines, *([f"And {more} more: `disco status` shows all."] if more else [])])


def _named(one: Json) -> str:
    held = size_words(one["memory_bytes"])
    match one["state"]:
        case "ready":
            return f"loaded, {held} of memory"
        case "waiting":
            return "waits for a place in memory"
        case "loading":
            return "is being loaded"
        case "failed":
            return "cannot be loaded (`disco doctor` says why)"
        case _:
            return "here, loaded when a request names it"


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
    if state == "stopped":
        return f"The fetch of {title} stands still: {fetch['message']}"
    done, total, rate = fetch["done_bytes"], fetch["bytes"], fetch["bytes_per_s"]
    line = f"Fetching {title}: {100 * done / max(1, total):.0f} %, {size_words(done)} of {size_words(total)}"
    if not rate:
        return f"{line}."
    minutes, seconds = divmod(round(max(0, total - done) / rate), 60)
    left = f"{minutes} min" if minutes else f"{seconds} s"
    return f"{line}, {rate / 1e6:.1f} MB/s, {left} left."

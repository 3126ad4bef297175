"""Days of requests as three public traces have them, each an hour of many users' requests.

A trace's hour is cut into as many pieces as there are days, each stretched over a working day: the order, the gaps and
the lengths are recorded, which of them belong to one person is not known, and no day is like another. Two of the four
models get requests that are seldom: of long prompts, and of another service.
"""

from __future__ import annotations

import csv
from pathlib import Path

from disco_daemon.errors import ConfigError

from .days import DAY_S, HOUR_S, Request

# Each model's trace, the prompts of it that are the model's (tokens from, up to), and every how many requests are
# taken: in all some 2,000 a day.
LONG = 3000
SOURCES = {
    "chat": ("arrivals_azure2023_conv.csv", 0, LONG, 2),
    "coder": ("arrivals_azure2023_code.csv", 0, 1 << 30, 1),
    "vision": ("arrivals_mooncake_conv.csv", 0, 1 << 30, 2),
    "translator": ("arrivals_azure2023_conv.csv", LONG, 1 << 30, 4),
}
RECORD_S = 3430.0  # the part of the hour that all three have
OPENS_H, OPEN_H = 8, 12  # the hours of a day over which a piece is stretched
BEGINS_S, TOKEN_TPS, LONGEST_S = 0.5, 25.0, 60.0  # an answer's time by its recorded tokens: prompt, speed, and most


def recorded(folder: Path, n_days: int, seed: int) -> list[Request]:
    """Return the requests of `n_days` in order; the pieces of the record follow each other from the `seed`-th pair on.

    Raises ConfigError where a trace is not there.
    """
    piece_s, found = RECORD_S / n_days, list[Request]()
    for model, (name, least, most, every) in SOURCES.items():
        rows = [row for row in _rows(folder / "common" / name) if least <= row[1] < most]
        for at, _, n_out in rows[::every]:
            if at < RECORD_S:
                day, passed = divmod(at, piece_s)
                day = (day + 2 * seed) % n_days
                start = day * DAY_S + OPENS_H * HOUR_S + passed / piece_s * OPEN_H * HOUR_S
                found.append(Request(start, model, min(LONGEST_S, BEGINS_S + n_out / TOKEN_TPS)))
    return sorted(found, key=lambda r: r.at)


def _rows(path: Path) -> list[tuple[float, int, int]]:
    try:
        with path.open(encoding="utf-8", newline="") as f:
            return [(float(r["t_s"]), int(r["in_tok"]), int(r["out_tok"])) for r in csv.DictReader(f)]
    except (OSError, KeyError, ValueError) as e:
        msg = f"{path} has no recorded requests ({e}): --traces names the folder of traces"
        raise ConfigError(msg) from e

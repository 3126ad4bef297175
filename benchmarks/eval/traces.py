"""Recorded latencies and lengths, as CSV files."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from disco_daemon.arrays import FloatArray, IntArray
from disco_daemon.errors import ConfigError

TTFT_COLUMNS = ("ttft_s", "ttft_est_s", "latency_s")  # the first that a file has is taken
LENGTH_COLUMNS = (("prompt_tokens", "output_tokens"), ("in_tok", "out_tok"))  # the latter in files of arrivals
MIN_ROWS = 10  # a trace shorter than this is left out: nothing can be fitted on half of it
MAX_TOKENS = 1_000_000  # of a prompt or an answer: longer is a unit error
SORTED_BY = "category"  # a file with this column has its rows sorted by it: halves of a trace would be different tasks
BLOCK = 20  # rows; every other block of a sorted trace is tested, the others are fitted to
MIN_TTFT_S = 1e-3  # estimates (latency minus decode time) can come out at zero or below


@dataclass(frozen=True, slots=True, eq=False)
class LatencyTrace:
    """TTFTs of one service in time order; [n], s. `source` is the file's name without `ttft_`.

    `is_sorted`: by the kind of prompt, so that what its halves differ in is the task and not the time.
    """

    source: str
    name: str
    ttft_s: FloatArray
    is_sorted: bool = False

    @property
    def label(self) -> str:
        """The name that `--select` is matched against."""
        return f"{self.source}/{self.name}"

    def halves(self) -> tuple[FloatArray, FloatArray]:
        """The rows to fit on, and those to test on: the first and the second half, or every other block."""
        n = len(self.ttft_s)
        if self.is_sorted and n >= 2 * BLOCK:
            is_tested = np.arange(n) // BLOCK % 2 == 1
            return self.ttft_s[~is_tested], self.ttft_s[is_tested]
        return self.ttft_s[: n // 2], self.ttft_s[n // 2 :]


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Prompt and output lengths of real requests; [n], tokens."""

    prompt: IntArray
    output: IntArray

    def halves(self) -> tuple[Requests, Requests]:
        """The first half, to fit on, and the second, to test on. Raises ConfigError for a single request."""
        middle = len(self.prompt) // 2
        if middle == 0:
            raise ConfigError("at least two rows of prompt and output lengths are needed, to fit on half of them")
        return Requests(self.prompt[:middle], self.output[:middle]), Requests(
            self.prompt[middle:], self.output[middle:]
        )


def read_traces(folder: Path, select: Iterable[str] = ("*",)) -> list[LatencyTrace]:
    """Return the traces in the CSV files of `folder` whose label matches one of the patterns. Raises ConfigError."""
    patterns = tuple(select)
    traces = [trace for path in _files(folder) for trace in _traces(path)]
    if not traces:
        columns = ", ".join(TTFT_COLUMNS)
        msg = f"no CSV file in {folder} has the columns `trace` and one of {columns}, and {MIN_ROWS} rows of one trace"
        raise ConfigError(msg)
    chosen = [t for t in traces if any(fnmatch(t.label, p) for p in patterns)]
    if not chosen:
        msg = (
            f"no trace in {folder} matches {', '.join(patterns)}; there are {', '.join(t.label for t in traces[:5])} …"
        )
        raise ConfigError(msg)
    return chosen


def read_requests(folder: Path) -> Requests:
    """The first CSV file in `folder` or its `common` with prompt and output lengths. Raises ConfigError."""
    for path in [*_files(folder / "common"), *_files(folder)]:
        if (found := _lengths(path, LENGTH_COLUMNS[:1])) is not None:
            return found
    msg = f"no CSV file in {folder} or {folder / 'common'} has the columns prompt_tokens and output_tokens"
    raise ConfigError(msg)


def read_lengths(path: Path) -> Requests:
    """The prompt and output lengths in one CSV file, which may be one of arrivals. Raises ConfigError."""
    if (found := _lengths(path, LENGTH_COLUMNS)) is None:
        either = ", or ".join(" and ".join(pair) for pair in LENGTH_COLUMNS)
        msg = f"{path} has no columns {either}"
        raise ConfigError(msg)
    return found


def _lengths(path: Path, columns: Iterable[tuple[str, str]]) -> Requests | None:
    """Return the lengths in the first pair of these columns that a file has; None if it has none of them."""
    names, rows = _read(path)
    pair = next((pair for pair in columns if set(pair) <= names), None)
    if pair is None:
        return None
    if not rows:
        msg = f"{path} has no rows of lengths"
        raise ConfigError(msg)
    found = np.array([[_number(path, row, column) for column in pair] for row in rows])
    lengths = np.clip(found, 1, MAX_TOKENS).astype(np.int64)
    return Requests(lengths[:, 0], lengths[:, 1])


def _read(path: Path) -> tuple[set[str], list[dict[str, str]]]:
    """The columns and rows of a CSV file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            rows = csv.DictReader(file)
            return set(rows.fieldnames or ()), list(rows)
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        msg = f"{path} cannot be read as a CSV file in UTF-8: {e}"
        raise ConfigError(msg) from e


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.csv"))


def _traces(path: Path) -> list[LatencyTrace]:
    found: dict[str, list[float]] = {}
    names, rows = _read(path)
    column = next((c for c in TTFT_COLUMNS if c in names), None)
    if column is None or "trace" not in names:
        return []
    for row in rows:
        found.setdefault(row["trace"], []).append(_number(path, row, column))
    source = path.stem.removeprefix("ttft_")
    return [
        LatencyTrace(source, name, np.maximum(np.array(ttfts), MIN_TTFT_S), SORTED_BY in names)
        for name, ttfts in found.items()
        if len(ttfts) >= MIN_ROWS
    ]


def _number(path: Path, row: dict[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = float("nan")
    if not np.isfinite(value):
        msg = f"{path}: {row[column]!r} in column {column} is not a number (row {row})"
        raise ConfigError(msg)
    return value

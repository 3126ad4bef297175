"""Presets of the reading pace, from profiles/readers.toml, which names their sources; and where such a reader is."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

WHOLE_TOKEN = 16  # characters; a longer piece of a stream has several tokens in it
TOKEN_CHARACTERS = 4  # of such a piece


@dataclass(frozen=True, slots=True)
class PacePreset:
    """A named reading pace, in answer tokens a second."""

    name: str
    pace_tps: float


def presets() -> list[PacePreset]:
    """Return all presets in the file's order, with paces to two decimals."""
    text = (files("disco_daemon.profiles") / "readers.toml").read_text("utf-8")
    return [
        PacePreset(entry["name"], round(entry.get("pace_tps") or 1 / entry["seconds_per_token"], 2))
        for entry in tomllib.loads(text)["reader"]
    ]


def pace_options(readers: Sequence[PacePreset]) -> list[tuple[str, int]]:
    """Return the presets as choices, each with its place."""
    return [(f"{reader.name}: {reader.pace_tps:g} token/s", i) for i, reader in enumerate(readers)]


class ReadingPlace:
    """The place in a growing answer of a reader who reads `pace_tps` tokens/s, waits for words, and skips none."""

    def __init__(self, pace_tps: float, now: float) -> None:
        self._pace_tps, self._at = pace_tps, now
        self._read = 0.0  # tokens

    def advance(self, n_tokens: int, now: float) -> float:
        """Return the share of an answer of `n_tokens` that is read `now`, s."""
        self._read = min(float(n_tokens), self._read + self._pace_tps * (now - self._at))
        self._at = now
        return self._read / n_tokens if n_tokens else 0.0


def tokens_in(piece: str) -> int:
    """Estimate the tokens of one piece of a stream: one, unless it is long."""
    return 1 if len(piece) <= WHOLE_TOKEN else -(-len(piece) // TOKEN_CHARACTERS)

"""Presets of the reading pace, from profiles/readers.toml, which names their sources."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files


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

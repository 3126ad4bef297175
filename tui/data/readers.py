"""How fast people read and listen: the presets of profiles/readers.toml, which also says where they are from."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Reader:
    """One preset; `pace_tps` in answer tokens a second."""

    name: str
    pace_tps: float


def presets() -> list[Reader]:
    """All presets, as the file has them; paces with two digits after the point."""
    text = (files("disco_daemon.profiles") / "readers.toml").read_text("utf-8")
    return [
        Reader(entry["name"], round(entry.get("pace_tps") or 1 / entry["seconds_per_token"], 2))
        for entry in tomllib.loads(text)["reader"]
    ]

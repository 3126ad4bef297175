"""A finding of `disco doctor`: what one check found, how bad it is, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do next ("" for nothing; may have several lines)."""

    name: str
    level: Level
    found: str
    mend: str = ""


def ok(name: str, found: str, mend: str = "") -> Finding:
    """Nothing has to be done."""
    return Finding(name, Level.OK, found, mend)


def warn(name: str, found: str, mend: str) -> Finding:
    """It works, and might work better."""
    return Finding(name, Level.WARN, found, mend)


def wrong(name: str, found: str, mend: str) -> Finding:
    """Something cannot work."""
    return Finding(name, Level.WRONG, found, mend)

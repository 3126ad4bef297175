"""A finding of `disco doctor`: what one check found, how bad it is, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and what to do next ("" for nothing; may have several lines)."""

    name: str
    level: Level
    found: str
    mend: str = ""


def ok(name: str, found: str, mend: str = "") -> Finding:
    """Return a finding that needs nothing."""
    return Finding(name, Level.OK, found, mend)


def warn(name: str, found: str, mend: str) -> Finding:
    """Return a finding of something that works, and might work better."""
    return Finding(name, Level.WARN, found, mend)


def wrong(name: str, found: str, mend: str) -> Finding:
    """Return a finding of something that cannot work."""
    return Finding(name, Level.WRONG, found, mend)

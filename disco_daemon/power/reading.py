"""What a sensor says. Values only: no I/O here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Covers(StrEnum):
    """Whose draw a figure is."""

    MACHINE = "machine"  # everything behind the plug or the battery, screen included
    CPU = "cpu"  # the processor packages, with their memory where that is counted
    GPU = "gpu"  # the graphics boards
    PARTS = "cpu and gpu"
    COMPUTING = "computing"  # assumed, not measured: what computing adds, with nothing idle in it


@dataclass(frozen=True, slots=True)
class PowerReading:
    """One figure of one source: power now, or energy since some moment. Exactly one of `watts` and `joules` is set.

    `joules` never falls while the source is open; only differences mean anything. `uncertainty` is relative, one
    standard deviation. `lag_s` is how old the figure may be: shorter intervals than a few of these say nothing.
    """

    source: str
    covers: Covers
    uncertainty: float
    watts: float | None = None
    joules: float | None = None
    lag_s: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError on a reading with no figure, with two, or with a negative uncertainty."""
        if (self.watts is None) == (self.joules is None) or self.uncertainty < 0:
            msg = f"a reading has watts or joules, and an uncertainty of 0 or more: {self}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A source that cannot be used now, and why, in words for `disco doctor`."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Charge:
    """How full the batteries are together, in [0, 1]; `seconds_left` only while they are being emptied."""

    fraction: float
    on_mains: bool
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class Thermal:
    """Whether heat slows the processor down, and how many kelvin are left until it would, where that can be read."""

    throttled: bool
    headroom_k: float | None = None
    note: str = ""


class Total:
    """Counters that wrap, added up since the first look, J.

    Each counter counts from 0 up to its range, both in J, and starts again; a look at least once per turn is needed (a
    64-bit RAPL zone turns over after 262 kJ: 43 min at 100 W). A counter that joins later counts from then on. One that
    went back by less than half its range was reset, not turned over, and adds what it shows since.
    """

    def __init__(self) -> None:
        self.joules = 0.0
        self._last: dict[str, float] = {}

    def look(self, counters: dict[str, tuple[float, float]]) -> float:
        """The sum so far, J, after a look at `{name: (value, range)}`."""
        for name, (value, full) in counters.items():
            self.joules += _step(self._last.get(name, value), value, full)
            self._last[name] = value
        return self.joules


def _step(before: float, now: float, full: float) -> float:
    if now >= before:
        return now - before
    return now - before + full if before - now > full / 2 else now


class Integral:
    """The energy of a power that is looked at now and then, by the trapezoidal rule."""

    def __init__(self, longest_s: float = 10.0) -> None:
        self.joules = 0.0
        self._longest_s = longest_s
        self._last: tuple[float, float] | None = None

    def look(self, now: float, watts: float) -> float:
        """The sum so far, J; `now` in s. After a gap of more than `longest_s` nothing is added for it."""
        if self._last is not None and 0 < now - self._last[0] <= self._longest_s:
            self.joules += (now - self._last[0]) * (watts + self._last[1]) / 2
        self._last = (now, watts)
        return self.joules


Read = Callable[[float], PowerReading | Skipped]  # now, s -> the figure; blocks for some milliseconds

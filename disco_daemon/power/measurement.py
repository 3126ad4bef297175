"""The values of sensors, without I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Covers(StrEnum):
    """The part of the machine whose power a figure is."""

    MACHINE = "machine"  # all that the plug or the battery feeds, screen included
    CPU = "cpu"  # the processor packages, with their memory if it is counted
    GPU = "gpu"  # the graphics boards
    PARTS = "cpu and gpu"
    COMPUTING = "computing"  # assumed, not measured: the power that computing adds, without the idle part


@dataclass(frozen=True, slots=True)
class PowerReading:
    """One figure of one source: power now, or energy since some moment. Exactly one of `watts` and `joules` is set.

    `joules` never falls while the source is open; only differences have a meaning. `uncertainty` is relative, one
    standard deviation. `lag_s` is how old the figure may be: use intervals of a few of these at least.
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
            raise ValueError(f"a reading has watts or joules, and an uncertainty of 0 or more: {self}")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A source that cannot be used now, and why, in words for `disco doctor`."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Charge:
    """The charge of all batteries together, in [0, 1]; `seconds_left` only while they discharge."""

    fraction: float
    on_mains: bool
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class Thermal:
    """Whether heat slows the processor down, and the kelvin left until it would, if that is readable."""

    throttled: bool
    headroom_k: float | None = None
    note: str = ""


class Total:
    """The sum of wrapping counters since the first reading, J.

    Each counter counts from 0 up to its range, both in J, and starts again; read it at least once per turn (a
    64-bit RAPL zone wraps after 262 kJ: 43 min at 100 W). A counter that joins later counts from then on. One that went
    back by less than half its range was reset and did not wrap; it adds its value since.
    """

    def __init__(self) -> None:
        self.joules = 0.0
        self._last: dict[str, float] = {}

    def look(self, counters: dict[str, tuple[float, float]]) -> float:
        """Add the counters `{name: (value, range)}`; return the sum so far, J."""
        for name, (value, full) in counters.items():
            self.joules += _step(self._last.get(name, value), value, full)
            self._last[name] = value
        return self.joules


def _step(before: float, now: float, full: float) -> float:
    if now >= before:
        return now - before
    return now - before + full if before - now > full / 2 else now


class Integral:
    """The energy of a sampled power, by the trapezoidal rule."""

    def __init__(self, longest_s: float = 10.0) -> None:
        self.joules = 0.0
        self._longest_s = longest_s
        self._last: tuple[float, float] | None = None

    def look(self, now: float, watts: float) -> float:
        """Add a sample; return the sum so far, J; `now` in s. A gap of more than `longest_s` adds nothing."""
        if self._last is not None and 0 < now - self._last[0] <= self._longest_s:
            self.joules += (now - self._last[0]) * (watts + self._last[1]) / 2
        self._last = (now, watts)
        return self.joules


Read = Callable[[float], PowerReading | Skipped]  # now, s -> the figure; blocks for some milliseconds

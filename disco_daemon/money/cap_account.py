"""What is booked of one cap, by its periods, whichever way the clock is set. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from ..types import Side

MOST_PERIODS = 40  # of a cap: a month of days, and those to which clocks were set
LATEST_S = 32 * 86_400.0  # for which the age of what was booked is known: a month
STEP_OF_AGE_S = 60.0  # to which it is known; what may be younger is
MOST_STEPS = 8  # of a clock that nobody can make out; an honest one is set back and right again


@dataclass(frozen=True, slots=True)
class SetBack:
    """One time that the clock was set back: from the period `before` `into` another, in which `had` was booked.

    What was booked in later ones was `moved` there.
    """

    before: date
    into: date
    had: float
    moved: dict[date, float]

    def kept(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "before": self.before.isoformat(),
            "into": self.into.isoformat(),
            "had": self.had,
            "moved": _json(self.moved),
        }

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> SetBack:
        """Read what was kept. Raises KeyError, TypeError and ValueError."""
        require_amount(had := float(told["had"]))
        return cls(date.fromisoformat(told["before"]), date.fromisoformat(told["into"]), had, _amounts(told["moved"]))


@dataclass(slots=True)
class CapAccount:
    """One cap of one side: the amounts booked in its periods, of which `since` runs, and those reserved by requests."""

    name: str
    side: Side
    unit: str
    monthly: bool
    limit: float | None
    since: date
    booked: dict[date, float]
    reserved: dict[int, tuple[date, float]] = field(default_factory=dict)
    latest: dict[int, dict[date, float]] = field(default_factory=dict)  # booked by this process, by the minute of `at`
    steps: list[SetBack] = field(default_factory=list)
    gone: dict[date, float] = field(default_factory=dict)  # booked in a period, and moved from there for good

    def period(self, day: date) -> date:
        """Return the begin of the period of a day."""
        return day.replace(day=1) if self.monthly else day

    def roll(self, today: date, *, stepped: bool, began: float | None = None) -> bool:
        """Go on in the period of a day; return whether that is another one. `stepped`: the clock was set.

        `began` is when that period did, by the clock that nobody sets: what was booked since counts in it, for the
        other clock was behind. None where there is no such clock.
        """
        period = self.period(today)
        if period == self.since:
            return stepped and began is not None and self._catch_up(period, began)
        if period < self.since:
            self._set_back(self.since, period)
        elif stepped:
            steps = [step for step in self.steps if step.into < period]
            self.steps = self.steps[: -len(steps)] if steps else self.steps
            for step in reversed(steps):
                self._set_right(step, period)
            if began is not None:
                self._catch_up(period, began)
            if steps and (before := max(step.before for step in steps)) > period:
                self._set_back(before, period)
        else:  # the time has come to which the clock was ahead
            for step in self.steps:
                for later, amount in step.moved.items() if step.before <= period else ():
                    self.gone[later] = self.gone.get(later, 0.0) + amount
                    for booked in self.latest.values():
                        if later in booked:
                            booked[step.into] = booked.get(step.into, 0.0) + booked.pop(later)
            waiting = [step for step in self.steps if step.before > period]
            if began is not None and len(waiting) < len(self.steps):  # or the time has not come: it is behind
                self._catch_up(period, began)
            self.steps = waiting
        self.since = period
        for old in sorted(self.booked)[:-MOST_PERIODS]:
            if old != period:
                del self.booked[old]
        for old in sorted(self.gone)[:-MOST_PERIODS]:
            del self.gone[old]
        return True

    def doubt(self, today: date) -> None:
        """Let what was moved from periods that have come meanwhile count there, too.

        Nobody knows by now which was wrong: the clock that had shown them, or that which was set back.
        """
        period = self.period(today)
        for step in self.steps:
            for later, amount in step.moved.items() if self.since < step.before <= period else ():
                self._add(later, amount)
        self.steps = [step for step in self.steps if not self.since < step.before <= period]

    def learn(self, period: date, ledger: float) -> None:
        """Take what the ledger has of a period, if that is more; not what counts elsewhere, which it cannot know."""
        elsewhere = math.fsum((self.gone.get(period, 0.0), *(step.moved.get(period, 0.0) for step in self.steps)))
        self.booked[period] = max(ledger - elsewhere, self.booked.get(period, 0.0))

    def book(self, period: date, amount: float, at: float | None) -> None:
        """Book an amount in a period; in the running one, if that period is not yet. `at`: by the clock nobody sets."""
        if period > self.since and self.steps and self.steps[-1].into == self.since:
            moved = self.steps[-1].moved
            moved[period] = moved.get(period, 0.0) + amount
        self._add(min(period, self.since), amount)
        if at is not None:
            while self.latest and (oldest := next(iter(self.latest))) * STEP_OF_AGE_S < at - LATEST_S:
                del self.latest[oldest]
            booked = self.latest.setdefault(int(at // STEP_OF_AGE_S), {})
            booked[min(period, self.since)] = booked.get(min(period, self.since), 0.0) + amount

    def _catch_up(self, period: date, began: float) -> bool:
        """Let what was booked since `began` count in a period that the clock should have shown; return if any was."""
        found = False
        for minute, booked in self.latest.items():
            if (minute + 1) * STEP_OF_AGE_S > began:
                for earlier in [day for day in booked if day < period]:
                    amount, found = booked.pop(earlier), True
                    self._add(earlier, -amount)
                    self._add(period, amount)
                    booked[period] = booked.get(period, 0.0) + amount
        self.reserved = {n: (max(begun, period), bound) for n, (begun, bound) in self.reserved.items()}
        return found

    def _set_back(self, before: date, period: date) -> None:
        """Let all that is booked in periods which are not yet count in this one."""
        moved = {later: self.booked.pop(later) for later in list(self.booked) if later > period}
        step = SetBack(before, period, self.booked.get(period, 0.0), moved)
        self.steps = [*self.steps[1 - MOST_STEPS :], step]
        self._add(period, math.fsum(moved.values()))

    def _set_right(self, step: SetBack, period: date) -> None:
        """Let all count where it was booked, for it was wrong to set the clock back; what was spent since, now."""
        self._add(step.into, -math.fsum(step.moved.values()))
        for later, amount in step.moved.items():
            self._add(later, amount)
        own = math.fsum(booked.get(step.into, 0.0) for booked in self.latest.values())  # whose age is known
        since = max(0.0, self.booked.get(step.into, 0.0) - step.had - own)
        self._add(step.into, -since)
        self._add(period, since)

    def _add(self, period: date, amount: float) -> None:
        self.booked[period] = max(0.0, self.booked.get(period, 0.0) + amount)

    def kept(self) -> dict[str, Any]:
        """Return what is booked as JSON, to go on from."""
        steps = [step.kept() for step in self.steps]
        return {"since": self.since.isoformat(), "booked": _json(self.booked), "steps": steps, "gone": _json(self.gone)}

    @property
    def spent(self) -> float:
        """What was spent in the running period."""
        return self.booked.get(self.since, 0.0)

    @property
    def reserved_now(self) -> float:
        """What is reserved in the running period, or in one that is not yet; requests of an earlier one count there."""
        return math.fsum(bound for period, bound in self.reserved.values() if period >= self.since)

    @property
    def planned(self) -> float:
        """What was spent or is reserved in the running period."""
        return math.fsum((self.spent, self.reserved_now))

    def closed(self, bound: float) -> bool:
        """Whether this cap is reached, for a start that costs up to `bound`."""
        return self.limit is not None and bound > 0 and self.planned >= self.limit


class KeptAccount:
    """What was kept of one cap. Raises KeyError, TypeError and ValueError."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.since = date.fromisoformat(told["since"])
        self.booked, self.steps = _amounts(told["booked"]), [SetBack.of(step) for step in told["steps"]]
        self.gone = _amounts(told["gone"])


def _json(amounts: Mapping[date, float]) -> dict[str, float]:
    return {period.isoformat(): amount for period, amount in amounts.items()}


def _amounts(told: Mapping[str, Any]) -> dict[date, float]:
    found = {date.fromisoformat(day): float(amount) for day, amount in dict(told).items()}
    for amount in found.values():
        require_amount(amount)
    return found


def require_amount(x: float) -> None:
    """Raise ValueError for what is no amount."""
    if not 0 <= x < math.inf:
        raise ValueError(f"no amount: {x}")

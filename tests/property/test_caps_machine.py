"""The promise of the caps, whatever twenty clients do at once, in any order, across midnights and crashes.

The meter is the provider's: it counts what a request really cost, in the day and the month in which it was started.
The ledger is ours: it gets a request when it ends; or, if `booked_at_start`, its bound when it begins.
"""

from __future__ import annotations

import math
from collections import defaultdict
from datetime import UTC, date, datetime
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disco_daemon.money.caps import CapLimits, CapRefusal, Caps, Reservation, Spent
from disco_daemon.types import Side

CLIENTS = 20
DAY_CAP, MONTH_CAP, WH_CAP = 1.0, 5.0, 2.0
LIMITS = CapLimits(usd_per_day=DAY_CAP, usd_per_month=MONTH_CAP, wh_per_day=WH_CAP)
MOST = 0.7  # no request costs more
START = datetime(2026, 11, 28, 20, tzinfo=UTC).timestamp()
SMALL = 1e-9  # of float sums


class Machine(RuleBasedStateMachine):
    """One daemon, its ledger and the provider's meter."""

    booked_at_start: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.caps = Caps(LIMITS, UTC, self.now)
        self.running: dict[int, Reservation] = {}
        self.days: dict[int, int] = {}
        self.meter: defaultdict[tuple[Side, int], float] = defaultdict(float)
        self.ledger: defaultdict[tuple[Side, int], float] = defaultdict(float)
        self.lost: defaultdict[tuple[Side, int], float] = defaultdict(float)  # bounds of what ran at a crash, unbooked

    @staticmethod
    def _day(now: float) -> int:
        return datetime.fromtimestamp(now, UTC).toordinal()

    @staticmethod
    def _month(day: int) -> tuple[int, int]:
        on = datetime.fromordinal(day)
        return on.year, on.month

    @rule(
        client=st.integers(0, CLIENTS - 1),
        side=st.sampled_from(Side),
        bound=st.floats(0, MOST) | st.just(0.0) | st.just(MOST),
    )
    def reserve(self, client: int, side: Side, bound: float) -> None:
        if client in self.running:
            return
        answer = self.caps.reserve(side, bound, self.now)
        if isinstance(answer, CapRefusal):
            assert bound > 0
            assert answer.reset_at > self.now
            assert 0 <= answer.retry_after_s <= answer.reset_at - self.now + SMALL
            return
        self.running[client] = answer
        self.days[client] = self._day(self.now)
        if self.booked_at_start:
            self.ledger[side, self._day(self.now)] += bound

    @precondition(lambda self: self.running)
    @rule(data=st.data(), part=st.floats(0, 1))
    def settle(self, data: st.DataObject, part: float) -> None:
        client = data.draw(st.sampled_from(sorted(self.running)))
        reservation, key = self._end(client)
        real = reservation.bound * part
        self.caps.settle(reservation, real)
        self.meter[key] += real
        self.ledger[key] += real - (reservation.bound if self.booked_at_start else 0.0)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(sorted(self.running)))
        reservation, key = self._end(client)
        self.caps.release(reservation)
        self.caps.release(reservation)
        if self.booked_at_start:
            self.ledger[key] -= reservation.bound

    @rule(hours=st.floats(0, 30))
    def wait(self, hours: float) -> None:
        self.now += hours * 3600

    @rule(part=st.floats(0, 1))
    def crash(self, part: float) -> None:
        """`kill -9`: what ran is billed by the provider; the caps begin anew from the ledger's sums."""
        for client in sorted(self.running):
            reservation, key = self._end(client)
            self.meter[key] += reservation.bound * part
            if not self.booked_at_start:
                self.lost[key] += reservation.bound
        self.caps = Caps(LIMITS, UTC, self.now, self._sums())

    def _end(self, client: int) -> tuple[Reservation, tuple[Side, int]]:
        reservation = self.running.pop(client)
        return reservation, (reservation.side, self.days.pop(client))

    def _sums(self) -> Spent:
        today = self._day(self.now)
        month = [v for (side, day), v in self.ledger.items() if side is Side.SERVER and self._same_month(day, today)]
        return Spent(
            max(0.0, self.ledger[Side.SERVER, today]),
            max(0.0, math.fsum(month)),
            max(0.0, self.ledger[Side.DEVICE, today]),
        )

    def _same_month(self, a: int, b: int) -> bool:
        return self._month(a) == self._month(b)

    def _monthly(self, sums: defaultdict[tuple[Side, int], float]) -> dict[tuple[int, int], float]:
        months: defaultdict[tuple[int, int], float] = defaultdict(float)
        for (side, day), value in sums.items():
            if side is Side.SERVER:
                months[self._month(day)] += value
        return months

    @invariant()
    def no_cap_is_passed_by_more_than_one_request(self) -> None:
        for (side, day), metered in self.meter.items():
            cap = DAY_CAP if side is Side.SERVER else WH_CAP
            assert metered <= cap + MOST + self.lost[side, day] + SMALL
        lost = self._monthly(self.lost)
        for month, metered in self._monthly(self.meter).items():
            assert metered <= MONTH_CAP + MOST + lost.get(month, 0.0) + SMALL

    @invariant()
    def what_is_reserved_and_spent_keeps_the_promise_too(self) -> None:
        for name, account in self.caps.state(self.now).items():
            spent, reserved, limit = account["spent"], account["reserved"], account["limit"]
            assert isinstance(spent, float)
            assert isinstance(reserved, float)
            assert isinstance(limit, float)
            assert spent + reserved <= limit + MOST + SMALL, name

    @invariant()
    def the_caps_say_what_the_ledger_says(self) -> None:
        state, sums = self.caps.state(self.now), self._sums()
        if self.booked_at_start:
            return  # there the running ones are in the ledger, and in the caps as reserved
        for name, value in (
            ("usd_per_day", sums.usd_today),
            ("usd_per_month", sums.usd_this_month),
            ("wh_per_day", sums.wh_today),
        ):
            spent = state[name]["spent"]
            assert isinstance(spent, float)
            assert math.isclose(spent, value, abs_tol=1e-6)

    @invariant()
    def nothing_is_left_over(self) -> None:
        assert f", {len(self.running)} open>" in repr(self.caps)
        if not self.running:
            assert all(account["reserved"] == 0.0 for account in self.caps.state(self.now).values())


class Unbooked(Machine):
    """The ledger hears of a request only when it ends: after a crash the meter is ahead by what ran, and no more."""

    booked_at_start = False


DAY = 86_400.0
HOUR = 3600.0
WRONG = [n * DAY for n in (0, 1, -1, 3, -3, 40, -40, 400, -20_000)] + [n * HOUR for n in (-2, -5, -9, 5)]


class ClockMachine(RuleBasedStateMachine):
    """A wall clock that is set to whatever, and right again: what a true day may cost stays what it is.

    Requests begin and end at once here, so that all is known at any time. The ledger has them by the wall clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.true, self.wrong_by, self.elapsed = START, 0.0, 0.0
        self.right_since = self.true
        self.spent: defaultdict[int, float] = defaultdict(float)  # by true day, but for what a clock behind hides
        self.hidden: defaultdict[int, float] = defaultdict(float)  # … from the next process
        self.shown: set[int] = set()  # days that a clock ahead has shown
        self.doubted: set[int] = set()  # … of which no later process knows that it was wrong: they may count twice
        self.behind: defaultdict[int, float] = defaultdict(float)  # of this one, while its clock is
        self.ledger: defaultdict[int, float] = defaultdict(float)
        self.caps = self._made()

    def _made(self) -> Caps:
        begun = self.elapsed
        return Caps(CapLimits(usd_per_day=DAY_CAP), UTC, self.wall, elapsed=lambda: self.elapsed - begun)

    @property
    def wall(self) -> float:
        return self.true + self.wrong_by

    @property
    def today(self) -> int:
        return Machine._day(self.true)

    @rule(usd=st.sampled_from([0.1, 0.3, MOST]))
    def spend(self, usd: float) -> None:
        answer = self.caps.reserve(Side.SERVER, usd, self.wall)
        if isinstance(answer, Reservation):
            if not self.wrong_by:
                assert self.spent[self.today] < DAY_CAP, "open"
            self.caps.settle(answer, usd)
            self.spent[self.today] += usd if self.wrong_by >= 0 else 0.0
            self.behind[self.today] += usd if self.wrong_by < 0 else 0.0
            self.ledger[Machine._day(self.wall)] += usd
            return
        assert 0 <= answer.retry_after_s <= DAY
        if not self.wrong_by and Machine._day(self.right_since) < self.today and self.today not in self.doubted:
            assert self.spent[self.today] + self.hidden[self.today] >= DAY_CAP - SMALL, (
                "closed for longer than the day in which it was wrong"
            )

    @rule(hours=st.floats(0, 30))
    def wait(self, hours: float) -> None:
        self.true += hours * 3600
        self.elapsed += hours * 3600
        self._look()

    def _look(self) -> None:
        if self.wrong_by > 0:
            self.shown.add(Machine._day(self.wall))

    @rule(wrong_by=st.sampled_from(WRONG))
    def set_the_clock(self, wrong_by: float) -> None:
        if self.wrong_by and not wrong_by:
            self.right_since = self.true
        self.wrong_by = wrong_by
        if not wrong_by:
            self._keep_behind(self.spent)
        self._look()
        self.caps.check(Side.SERVER, MOST, self.wall)  # somebody looks before the day is over

    def _keep_behind(self, sums: defaultdict[int, float]) -> None:
        for day, usd in self.behind.items():
            sums[day] += usd
        self.behind.clear()

    @rule()
    def set_it_right(self) -> None:
        self.set_the_clock(0.0)

    @rule(hours=st.floats(0, 30), ledger=st.booleans())
    def restart(self, hours: float, *, ledger: bool) -> None:
        kept = self.caps.kept()
        self._keep_behind(self.hidden)
        self.doubted |= self.shown
        self.true += hours * 3600
        self._look()
        self.caps = self._made()
        days = {date.fromordinal(day): Spent(usd_today=usd) for day, usd in self.ledger.items()} if ledger else {}
        self.caps.restore(days, kept, self.wall)


TestClocks = ClockMachine.TestCase
TestClocks.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestBooked = Machine.TestCase
TestBooked.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestUnbooked = Unbooked.TestCase
TestUnbooked.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)

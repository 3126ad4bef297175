"""The promise of the caps, whatever twenty clients do at once, in any order, across midnights and crashes.

The meter is the provider's: it counts what a request really cost, in the day and the month in which it was started.
The ledger is ours: it gets a request when it ends; or, if `booked_at_start`, its bound when it begins.
"""

from __future__ import annotations

import math
from collections import defaultdict
from datetime import UTC, datetime
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
        assert set(self.caps.outstanding) == set(self.running.values())
        if not self.running:
            assert all(account["reserved"] == 0.0 for account in self.caps.state(self.now).values())


class Unbooked(Machine):
    """The ledger hears of a request only when it ends: after a crash the meter is ahead by what ran, and no more."""

    booked_at_start = False


TestBooked = Machine.TestCase
TestBooked.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestUnbooked = Unbooked.TestCase
TestUnbooked.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)

"""Caps: who may start, what a period is, and what a request can cost at most."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.money import caps
from disco_daemon.money.caps import (
    CapLimits,
    CapRefusal,
    Caps,
    Reservation,
    Spent,
    device_bound,
    server_bound,
    sooner,
)
from disco_daemon.money.catalog import Price
from disco_daemon.types import Side

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()
MIDNIGHT = datetime(2026, 11, 22, tzinfo=UTC).timestamp()
DECEMBER = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
DAY = 86_400.0


def make(limits: CapLimits, spent: Spent | None = None, now: float = NOON) -> Caps:
    return Caps(limits, UTC, now, spent or Spent())


def admitted(answer: Reservation | CapRefusal) -> Reservation:
    assert isinstance(answer, Reservation), answer
    return answer


def refused(answer: Reservation | CapRefusal | None) -> CapRefusal:
    assert isinstance(answer, CapRefusal), answer
    return answer


def test_without_caps_everything_is_admitted() -> None:
    free = make(CapLimits())
    for side in Side:
        admitted(free.reserve(side, 1e9, NOON, charge=0.0))
    assert free.state(NOON) == {}


def test_sums_are_kept_whenever_something_is_booked_and_what_costs_nothing_writes_nothing() -> None:
    one, kept = make(CapLimits()), []
    one.keep = lambda: kept.append(one.kept())
    one.settle(admitted(one.reserve(Side.SERVER, 0.5, NOON)), 0.0)
    one.book(Side.SERVER, 0.0, NOON)
    assert not kept
    one.settle(admitted(one.reserve(Side.SERVER, 0.5, NOON)), 0.25)
    one.book(Side.DEVICE, 3.0, NOON)
    assert [sums["usd_per_day"]["booked"] for sums in kept] == [{"2026-11-21": 0.25}] * 2
    assert kept[-1]["wh_per_day"]["booked"] == {"2026-11-21": 3.0}


def test_a_reservation_that_reaches_the_cap_closes_it_for_the_others() -> None:
    one = make(CapLimits(usd_per_day=1.0))
    first = admitted(one.reserve(Side.SERVER, 0.6, NOON))
    second = admitted(one.reserve(Side.SERVER, 0.6, NOON))
    no = refused(one.reserve(Side.SERVER, 0.6, NOON))
    assert no.retry_after_s == caps.BUSY_RETRY_S, "some request will end long before the day does"
    assert no.reset_at == MIDNIGHT
    one.settle(first, 0.1)
    one.release(second)
    assert one.state(NOON)["usd_per_day"] == {
        "unit": "$", "limit": 1.0, "spent": 0.1, "reserved": 0.0, "reset_at": MIDNIGHT,
    }  # fmt: skip
    admitted(one.reserve(Side.SERVER, 0.6, NOON))


def test_a_cap_that_is_spent_opens_at_midnight() -> None:
    one = make(CapLimits(usd_per_day=1.0), Spent(usd_today=1.0))
    no = refused(one.reserve(Side.SERVER, 0.01, NOON))
    assert (no.side, no.reset_at, no.retry_after_s) == (Side.SERVER, MIDNIGHT, DAY / 2)
    assert "the limit usd_per_day = 1 $ is reached" in no.reason
    refused(one.check(Side.SERVER, 0.01, MIDNIGHT - 0.001))
    assert one.check(Side.SERVER, 0.01, MIDNIGHT) is None


def test_the_month_closes_what_the_day_would_open() -> None:
    one = make(CapLimits(usd_per_day=1.0, usd_per_month=5.0), Spent(usd_today=1.0, usd_this_month=5.0))
    no = refused(one.reserve(Side.SERVER, 0.01, NOON))
    assert (no.reset_at, no.retry_after_s) == (DECEMBER, DECEMBER - NOON)
    assert "usd_per_day" in no.reason
    assert "usd_per_month" in no.reason
    refused(one.check(Side.SERVER, 0.01, MIDNIGHT))
    assert one.check(Side.SERVER, 0.01, DECEMBER) is None


def test_each_cap_binds_the_side_that_bills() -> None:
    one = make(CapLimits(usd_per_day=1.0), Spent(usd_today=1.0))
    refused(one.check(Side.SERVER, 0.1, NOON))
    assert one.check(Side.DEVICE, 10.0, NOON, charge=0.01) is None
    other = make(CapLimits(wh_per_day=20.0), Spent(wh_today=20.0))
    refused(other.check(Side.DEVICE, 0.1, NOON))
    assert other.check(Side.SERVER, 10.0, NOON) is None


def test_what_costs_nothing_is_admitted_all_the_same() -> None:
    none = make(CapLimits(usd_per_day=0.0))
    admitted(none.reserve(Side.SERVER, 0.0, NOON))
    refused(none.reserve(Side.SERVER, 1e-9, NOON))


def test_the_battery_floor_closes_the_device_on_battery_only() -> None:
    one = make(CapLimits(battery_floor=0.3))
    no = refused(one.reserve(Side.DEVICE, 0.0, NOON, charge=0.29))
    assert "29%" in no.reason
    assert (no.reset_at, no.retry_after_s) == (math.inf, caps.BATTERY_RETRY_S)
    admitted(one.reserve(Side.DEVICE, 0.1, NOON, charge=0.3))
    admitted(one.reserve(Side.DEVICE, 0.1, NOON, charge=None))
    admitted(one.reserve(Side.SERVER, 0.1, NOON, charge=0.0))


def test_of_two_refusals_the_one_that_ends_first_counts() -> None:
    both = make(CapLimits(usd_per_day=1.0, battery_floor=0.3), Spent(usd_today=1.0))
    server = refused(both.check(Side.SERVER, 0.1, NOON))
    device = refused(both.check(Side.DEVICE, 0.1, NOON, charge=0.1))
    assert sooner(server, device) is sooner(device, server) is device


def test_money_is_booked_once() -> None:
    one = make(CapLimits(usd_per_day=1.0))
    reservation = admitted(one.reserve(Side.SERVER, 0.5, NOON))
    one.settle(reservation, 0.2)
    one.release(reservation)  # what a `finally` does
    with pytest.raises(ValueError, match="already settled"):
        one.settle(reservation, 0.2)
    assert one.state(NOON)["usd_per_day"]["spent"] == 0.2
    given_back = admitted(one.reserve(Side.SERVER, 0.5, NOON))
    one.release(given_back)
    one.release(given_back)
    with pytest.raises(ValueError, match="already settled"):
        one.settle(given_back, 0.2)


def test_a_cost_above_its_bound_is_booked_whole() -> None:
    one = make(CapLimits(usd_per_day=1.0))
    one.settle(admitted(one.reserve(Side.SERVER, 0.1, NOON)), 3.0)
    assert one.state(NOON)["usd_per_day"]["spent"] == 3.0
    refused(one.check(Side.SERVER, 0.1, NOON))


def test_a_request_counts_in_the_day_in_which_it_began() -> None:
    one = make(CapLimits(usd_per_day=1.0, usd_per_month=5.0), now=MIDNIGHT - 60)
    old = admitted(one.reserve(Side.SERVER, 0.9, MIDNIGHT - 60))
    new = admitted(one.reserve(Side.SERVER, 0.9, MIDNIGHT + 60))
    assert one.state(MIDNIGHT + 60)["usd_per_day"]["reserved"] == 0.9
    assert one.state(MIDNIGHT + 60)["usd_per_month"]["reserved"] == 1.8
    one.settle(old, 0.8)
    state = one.state(MIDNIGHT + 120)
    assert (state["usd_per_day"]["spent"], state["usd_per_day"]["reserved"]) == (0.0, 0.9)
    assert (state["usd_per_month"]["spent"], state["usd_per_month"]["reserved"]) == (0.8, 0.9)
    one.settle(new, 0.3)
    assert one.state(MIDNIGHT + 180)["usd_per_day"]["spent"] == 0.3
    assert one.state(MIDNIGHT + 180)["usd_per_month"]["spent"] == pytest.approx(1.1)


def test_a_request_of_last_month_counts_there() -> None:
    one = make(CapLimits(usd_per_month=5.0), now=DECEMBER - 60)
    old = admitted(one.reserve(Side.SERVER, 0.9, DECEMBER - 60))
    one.settle(old, 0.8)
    assert one.state(DECEMBER + 60)["usd_per_month"]["spent"] == 0.0


def test_a_clock_set_back_opens_no_cap_again() -> None:
    one = make(CapLimits(usd_per_day=1.0), now=MIDNIGHT + 60)
    one.settle(admitted(one.reserve(Side.SERVER, 0.9, MIDNIGHT + 60)), 1.0)
    refused(one.check(Side.SERVER, 0.1, MIDNIGHT - 3600))
    assert one.state(MIDNIGHT - 3600)["usd_per_day"]["spent"] == 1.0
    assert one.check(Side.SERVER, 0.1, MIDNIGHT + DAY) is None


YEAR = 365 * DAY


def spend(one: Caps, usd: float, now: float) -> None:
    one.settle(admitted(one.reserve(Side.SERVER, usd, now)), usd)


class Clocks:
    """A wall clock that may be set, and one that nobody sets."""

    def __init__(self, wall: float) -> None:
        self.wall, self.elapsed = wall, 0.0

    def wait(self, seconds: float) -> float:
        self.wall, self.elapsed = self.wall + seconds, self.elapsed + seconds
        return self.wall

    def set(self, wall: float) -> float:
        self.wall = wall
        return wall

    def caps(self, limits: CapLimits, **days: float) -> Caps:
        """Caps at a start, with the ledger's sums of days (`d20261121`), $."""
        one = Caps(limits, UTC, self.wall, elapsed=lambda: self.elapsed)
        ledger = {date.fromisoformat(day[1:]): Spent(usd_today=usd) for day, usd in days.items()}
        one.restore(ledger, {}, self.wall)
        return one


def test_a_start_with_a_clock_a_day_ahead_forgets_nothing_once_that_is_mended() -> None:
    clocks = Clocks(NOON + DAY)
    one = clocks.caps(CapLimits(usd_per_day=1.0), d20261121=0.9)
    spend(one, 0.4, clocks.wall)
    assert refused(one.check(Side.SERVER, 0.1, clocks.set(NOON))).retry_after_s == DAY / 2
    assert one.spent(clocks.wall).usd_today == pytest.approx(1.3)
    assert one.check(Side.SERVER, 0.1, clocks.wait(DAY)) is None, "what was the next day's is not counted twice"


@pytest.mark.parametrize("ahead", [DAY, 40 * DAY, YEAR, 30 * YEAR])
def test_one_request_with_a_clock_far_ahead_closes_a_cap_until_the_next_period_only(ahead: float) -> None:
    clocks = Clocks(NOON)
    one = clocks.caps(CapLimits(usd_per_day=1.0, usd_per_month=1.0))
    spend(one, 1.5, clocks.set(NOON + ahead))
    no = refused(one.check(Side.SERVER, 0.1, clocks.set(NOON)))
    assert (no.reset_at, no.retry_after_s) == (DECEMBER, DECEMBER - NOON)
    assert one.check(Side.SERVER, 0.1, clocks.wait(10 * DAY)) is None


@pytest.mark.parametrize("back", [2 * DAY, 40 * DAY, YEAR, 50 * YEAR])
def test_a_clock_that_is_set_back_and_right_again_opens_nothing(back: float) -> None:
    clocks = Clocks(NOON)
    one = clocks.caps(CapLimits(usd_per_day=1.0), d20261121=0.3)
    spend(one, 0.3, clocks.wait(60))
    clocks.set(NOON - back)
    spend(one, 0.3, clocks.wait(60))
    again = Clocks(clocks.wall)  # a restart while it is wrong
    two = Caps(CapLimits(usd_per_day=1.0), UTC, again.wall, elapsed=lambda: again.elapsed)
    two.restore({}, one.kept(), again.wall)
    spend(two, 0.2, again.wait(60))
    refused(two.check(Side.SERVER, 0.1, again.set(NOON + 180)))
    assert two.spent(again.wall).usd_today == pytest.approx(1.1)


@pytest.mark.parametrize("behind_s", [0.5 * DAY + 3600, 0.5 * DAY + 120, 3 * DAY, 400 * DAY])
def test_a_clock_that_was_behind_midnight_opens_nothing_when_it_is_set_right(behind_s: float) -> None:
    """A machine that starts at noon, and believes that it is still yesterday; also where a request runs meanwhile."""
    clocks = Clocks(NOON - behind_s)
    one = clocks.caps(CapLimits(usd_per_day=1.0))
    spend(one, 0.6, clocks.wait(300))
    running = admitted(one.reserve(Side.SERVER, 0.3, clocks.wait(60)))
    one.settle(admitted(one.reserve(Side.SERVER, 0.3, clocks.wall)), 0.3)
    assert one.check(Side.SERVER, 0.1, clocks.set(NOON + 360)) is not None
    one.settle(running, 0.2)
    assert one.spent(clocks.wall).usd_today == pytest.approx(1.1)
    assert one.check(Side.SERVER, 0.1, clocks.wait(DAY)) is None


def test_a_machine_that_slept_over_midnight_begins_a_new_day() -> None:
    clocks = Clocks(NOON)
    one = clocks.caps(CapLimits(usd_per_day=1.0))
    spend(one, 1.0, clocks.wait(60))
    assert one.check(Side.SERVER, 0.1, clocks.wait(60)) is not None
    assert one.check(Side.SERVER, 0.1, clocks.wait(DAY)) is None, "both clocks have gone on"


def test_a_request_that_runs_while_the_clock_is_set_counts_once_and_now() -> None:
    clocks = Clocks(NOON + YEAR)
    one = clocks.caps(CapLimits(usd_per_day=1.0))
    running = admitted(one.reserve(Side.SERVER, 0.6, clocks.wall))
    assert one.state(clocks.set(NOON))["usd_per_day"]["reserved"] == 0.6
    one.settle(running, 0.5)
    assert one.spent(clocks.wall).usd_today == 0.5


def test_sums_go_on_from_what_was_kept_where_the_ledger_knows_less() -> None:
    clocks = Clocks(NOON)
    one = clocks.caps(CapLimits(usd_per_day=1.0, usd_per_month=3.0))
    spend(one, 0.75, NOON)
    for ledger in ({}, {date(2026, 11, 21): Spent(usd_today=0.5)}):
        again = Caps(CapLimits(usd_per_day=1.0), UTC, NOON)
        again.restore(ledger, one.kept(), NOON)
        assert again.spent(NOON) == Spent(0.75, 0.75, 0.0)
    more = Caps(CapLimits(), UTC, NOON)
    more.restore({date(2026, 11, 21): Spent(0.9), date(2026, 11, 3): Spent(1.0)}, one.kept(), NOON)
    assert more.spent(NOON).usd_today == 0.9
    assert more.spent(NOON).usd_this_month == pytest.approx(1.9)


@pytest.mark.parametrize("bad", [{"usd_per_day": {}}, {"usd_per_day": []}, {"usd_per_day": {"since": 1}}, {"x": 1}])
def test_what_nobody_kept_changes_nothing(bad: dict[str, object]) -> None:
    one = make(CapLimits(usd_per_day=1.0), Spent(usd_today=0.5))
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        one.restore({}, bad, NOON)
    assert one.spent(NOON).usd_today == 0.5


def test_where_nobody_knows_what_was_spent_only_what_has_a_cap_is_closed() -> None:
    one = make(CapLimits(usd_per_day=1.0))
    one.close("the disk is full")
    no = refused(one.reserve(Side.SERVER, 0.1, NOON))
    assert no.reason == "usd_per_day = 1 $ is closed: the disk is full"
    assert one.check(Side.SERVER, 0.0, NOON) is None
    assert one.check(Side.DEVICE, 0.1, NOON) is None
    one.set_limits(CapLimits(wh_per_day=1.0))
    assert one.check(Side.SERVER, 0.1, NOON) is None


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_what_is_no_amount_is_refused(bad: float) -> None:
    one = make(CapLimits(usd_per_day=1.0))
    with pytest.raises(ValueError, match="no amount"):
        one.reserve(Side.SERVER, bad, NOON)
    reservation = admitted(one.reserve(Side.SERVER, 0.1, NOON))
    with pytest.raises(ValueError, match="no amount"):
        one.settle(reservation, bad)
    assert one.state(NOON)["usd_per_day"]["reserved"] == 0.1
    with pytest.raises(ValueError, match="wh_per_day"):
        CapLimits(wh_per_day=bad)


def test_its_picture_shows_the_accounts() -> None:
    one = make(CapLimits(usd_per_day=1.0), Spent(usd_today=0.25))
    one.reserve(Side.SERVER, 0.5, NOON)
    assert repr(one) == "<Caps usd_per_day 0.75/1.0, usd_per_month 0.5/None, wh_per_day 0/None, 1 open>"


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_the_most_a_request_can_cost_by_hand() -> None:
    mini = Price(0.15, 0.075, 0.60)
    assert server_bound(mini, 1000, 100) == pytest.approx((1500 * 0.15 + 100 * 0.60) / 1e6)
    assert server_bound(mini, 1000, None, context=4000) == pytest.approx((1500 * 0.15 + 3000 * 0.60) / 1e6)
    assert server_bound(mini, 5000, None, context=4000) == pytest.approx(7500 * 0.15 / 1e6)
    assert server_bound(mini, 1000, 100, choices=3) == pytest.approx((1500 * 0.15 + 300 * 0.60) / 1e6)
    assert device_bound(0.03, 0.36, 1000, 100, 4096) == pytest.approx((30 + 36) / 3600)
    assert device_bound(0.03, 0.36, 4000, 1000, 4096) == pytest.approx((120 + 0.36 * 96) / 3600)
    assert device_bound(0.03, 0.36, 1000, 100, 4096, choices=3) == pytest.approx((30 + 3 * 36) / 3600)
    assert device_bound(0.03, 0.36, 4000, None, 4096) == pytest.approx((120 + 0.36 * 96) / 3600)


@given(
    st.integers(0, 10**5),
    st.none() | st.integers(0, 10**4),
    st.integers(1, 200_000),
    st.floats(0, 1),
    st.floats(0, 1.5),
    st.floats(0, 1),
)
def test_no_request_within_its_limits_costs_more_than_its_bound(
    prompt: int, max_tokens: int | None, context: int, used: float, tokenizer: float, cached: float
) -> None:
    price = Price(2.5, 1.25, 10.0)
    limit = max(0, context - prompt) if max_tokens is None else max_tokens
    real_prompt = int(prompt * tokenizer)
    real = price.cost_usd(real_prompt, int(limit * used), int(real_prompt * cached))
    assert real <= server_bound(price, prompt, max_tokens, context) * (1 + 1e-12)


# --- days and months ------------------------------------------------------------------------------------------------

# Summer time at 1 and 2 o'clock, at midnight (Havana, Santiago, Beirut), half an hour (Lord Howe), at 0:01 (St. John's
# until 2011), a date that does not exist (Apia, 2011-12-30), none at all.
ZONES = [
    "UTC", "Europe/Berlin", "America/New_York", "America/Havana", "America/Santiago", "Asia/Beirut", "Asia/Kolkata",
    "Australia/Lord_Howe", "America/St_Johns", "Pacific/Apia", "Asia/Tehran", "Africa/Cairo",
]  # fmt: skip
moments = st.datetimes(datetime(2005, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC)).map(  # noqa: DTZ001 - bounds
    lambda moment: moment.timestamp()
)


def zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except Exception:  # pragma: no cover - a system without tzdata
        pytest.skip(f"no time zone data for {name}")


def day_of(now: float, tz: ZoneInfo) -> date:
    return datetime.fromtimestamp(now, tz).date()


@pytest.mark.parametrize("name", ZONES)
@given(now=moments)
def test_a_day_ends_when_the_next_one_begins_there(name: str, now: float) -> None:
    tz = zone(name)
    one = Caps(CapLimits(usd_per_day=1.0), tz, now, Spent(usd_today=1.0))
    reset = refused(one.check(Side.SERVER, 0.1, now)).reset_at
    assert now < reset <= now + 25.5 * 3600
    assert day_of(reset, tz) > day_of(now, tz)
    assert day_of(reset - 1, tz) == day_of(now, tz) or name == "America/St_Johns", "23:01 comes twice there"
    refused(one.check(Side.SERVER, 0.1, reset - 1))
    assert one.check(Side.SERVER, 0.1, reset) is None


@pytest.mark.parametrize("name", ZONES)
@given(now=moments)
def test_a_month_ends_when_the_next_one_begins_there(name: str, now: float) -> None:
    tz = zone(name)
    one = Caps(CapLimits(usd_per_month=1.0), tz, now, Spent(usd_this_month=1.0))
    reset = refused(one.check(Side.SERVER, 0.1, now)).reset_at
    first = day_of(reset, tz)
    assert first.day == 1
    assert first == (day_of(now, tz).replace(day=1) + timedelta(days=31)).replace(day=1)
    refused(one.check(Side.SERVER, 0.1, reset - 1))
    assert one.check(Side.SERVER, 0.1, reset) is None

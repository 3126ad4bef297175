"""Hard caps: dollars a day and a month for the server, watt-hours a day and a battery floor for the device. Pure.

A cap binds the side that really bills: the server's dollars never close the device, nor its energy the server. Before a
side is started, the most that it can cost is reserved; when it is over, the real cost takes the reservation's place.
A start is admitted while spent + reserved is below the cap. So, as long as no request costs more than was reserved for
it, what is spent never passes a cap by more than one request's cost, however many run at once: the first reservation
that reaches the cap closes it for all others. A start that costs nothing is always admitted, but for the battery floor.

To require that a request's bound fits into the rest of a cap would never overshoot, and never admit anything either:
the bound of a prompt without `max_tokens` is a whole context of output, a thousand times its real cost.

A day and a month begin at midnight in the user's time zone. A request counts in the period in which it was reserved,
as the ledger counts it by its creation. What is spent is the sum over the period that it is now, whichever way clocks
go: where one is set back, what was booked in a period that is not yet counts in the one that it is, and no longer; if
that was the error and the clock is set right again, it counts where it was booked.
One that was behind and is set right books nothing on the day before: what this process booked has an age by a clock
that nobody sets, and counts in the period in which that lies.
A key with a name has caps of its own, `Caps` as these, which stand in `keys`: a start at a server that it asks for is
admitted by both, and booked in both.

State lives in memory, and goes to `keep` at each change: after a restart it comes from there and from the ledger's
sums, whichever is more. Where neither can be read, a cap is closed. Requests that ran at a crash are in no sum.
One owner, one thread: `reserve` decides and writes in one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, tzinfo
from typing import Any

from ..types import Side
from .cap_account import CapAccount, KeptAccount, require_amount
from .catalog import Price
from .prices import J_PER_WH

# Context of a server's model where it is not known, tokens: that of the commonest ones (gpt-4o, Llama 3.1).
SERVER_CONTEXT = 131_072
LONG_ANSWER = 65_536  # tokens: of a model whose prompt is so long that its context is surely longer than that one
# The server's tokenizer is not the one that counted the prompt, and its template adds tokens.
PROMPT_MARGIN = 1.5
BUSY_RETRY_S = 5.0  # closed by reservations only: one of the requests will end, and leave most of its reservation
BATTERY_RETRY_S = 300.0  # it is not known when the machine is plugged in
UNKNOWN_RETRY_S = 300.0  # somebody has to mend a disk, or take a cap away
LONG = timedelta(days=90)  # a daemon that is used is not off for longer; a clock that lost its battery is
STEP_S = 60.0  # a wall clock that gains more than this on the other one was set; time servers slew by seconds


@dataclass(frozen=True, slots=True)
class CapLimits:
    """The caps; None is no cap, with 0 only free requests start. `battery_floor` is a share of a full battery.

    Raises ValueError for a value that is no amount.
    """

    usd_per_day: float | None = None
    usd_per_month: float | None = None
    wh_per_day: float | None = None
    battery_floor: float | None = None

    def __post_init__(self) -> None:
        for name in ("usd_per_day", "usd_per_month", "wh_per_day", "battery_floor"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} = {value} is no cap: give an amount >= 0, or leave it out")


@dataclass(frozen=True, slots=True)
class Spent:
    """Sums from the ledger for the running day and month, see `since`: the server's $, the device's Wh."""

    usd_today: float = 0.0
    usd_this_month: float = 0.0
    wh_today: float = 0.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A right to start one side once. `bound` is the most it may cost, $ (server) or Wh (device).

    `own` is the same in the caps of the key that asked, with these.
    """

    number: int
    side: Side
    bound: float
    periods: tuple[date, ...]
    own: tuple[Caps, Reservation] | None = None


@dataclass(frozen=True, slots=True)
class CapRefusal:
    """Why a side may not start. `reset_at` is when its caps begin anew, Unix time, s; inf for a battery.

    `retry_after_s` may be sooner, where only running requests are in the way. `key` is the name of the key whose cap it
    is, "" for those of the whole.
    """

    side: Side
    reason: str
    reset_at: float
    retry_after_s: float
    key: str = ""


def sooner(*refusals: CapRefusal) -> CapRefusal:
    """Return the refusal that ends first; a 429's Retry-After is about it."""
    return min(refusals, key=lambda refused: refused.retry_after_s)


class Caps:
    """Admits starts under the caps, and keeps their accounts."""

    def __init__(
        self,
        limits: CapLimits,
        tz: tzinfo | None,
        now: float,
        spent: Spent = Spent(),
        *,
        elapsed: Callable[[], float] | None = None,
        key: str = "",
    ) -> None:
        """`now` is Unix time, s; `spent` are the ledger's sums for the day and the month that `now` is in.

        Without `tz` days are those of the C library, whose zone may change while this runs. `elapsed` is a clock that
        nobody sets and that goes on while the machine sleeps, s, to tell that the other one was. `key` is the name of
        the key that these are of.
        """
        self.limits = limits
        self.key = key
        self.keys: dict[str, Caps] = {}  # of keys with names, by these
        self.keep: Callable[[], object] = _nobody
        self._tz = tz
        self._elapsed = elapsed
        self._closed = ""
        day = _today(now, tz)
        month = day.replace(day=1)
        self._caps = (
            CapAccount("usd_per_day", Side.SERVER, "$", False, limits.usd_per_day, day, {day: spent.usd_today}),
            CapAccount(
                "usd_per_month", Side.SERVER, "$", True, limits.usd_per_month, month, {month: spent.usd_this_month}
            ),
            CapAccount("wh_per_day", Side.DEVICE, "Wh", False, limits.wh_per_day, day, {day: spent.wh_today}),
        )
        self._seen = now, self._now() or 0.0  # when `_roll` looked last …
        self._rolled = day  # … and the day to which all caps have gone on
        self._open: dict[int, Reservation] = {}
        self._made = 0

    def __repr__(self) -> str:
        sums = ", ".join(f"{c.name} {c.planned:.4g}/{c.limit}" for c in self._caps)
        return f"<Caps {sums}, {len(self._open)} open>"

    def restore(self, days: Mapping[date, Spent], kept: Mapping[str, Any], now: float) -> None:
        """Go on from the ledger's sums of days and from what was `kept`; where both know a period, from what is more.

        Of `days` those of the day count, $ and Wh; reservations stay. Raises KeyError, TypeError and ValueError where
        that was never kept; then nothing is changed.
        """
        found = {name: KeptAccount(told) for name, told in kept.items()} if kept else {}
        for cap in self._caps:
            sums: dict[date, float] = {}
            for day, spent in days.items():
                amount = spent.usd_today if cap.side is Side.SERVER else spent.wh_today
                sums[cap.period(day)] = sums.get(cap.period(day), 0.0) + amount
            until = max([cap.since, *sums])
            if (told := found.get(cap.name)) is not None:
                until = max(cap.since, told.since)  # what the ledger has behind that is moved already
                cap.since, cap.booked, cap.steps, cap.gone = told.since, told.booked, told.steps, told.gone
            else:
                cap.since = until  # of a clock that was wrong, if that is not yet
            for period, amount in sums.items():
                if period <= until:
                    cap.learn(period, amount)
            # Nobody knows how long this process did not run: for months it is rather the clock that was wrong.
            today = _today(now, self._tz)
            stepped = today > cap.since + LONG
            if not stepped:
                cap.doubt(today)
            cap.roll(today, stepped=stepped)
            self._rolled = today
        self._seen = now, self._now() or 0.0
        self.keep()

    def kept(self) -> dict[str, Any]:
        """Return the sums as JSON, to go on from."""
        return {cap.name: cap.kept() for cap in self._caps}

    def close(self, reason: str) -> None:
        """Admit nothing that a cap is set for: what was spent is not known, for that reason."""
        self._closed = reason

    def set_limits(self, limits: CapLimits) -> None:
        """Set other caps; amounts spent and reserved count against them."""
        self.limits = limits
        for cap in self._caps:
            cap.limit = getattr(limits, cap.name)

    def check(
        self, side: Side, bound: float, now: float, charge: float | None = None, key: str = ""
    ) -> CapRefusal | None:
        """Return why a side may not start, None if it may, and reserve nothing; for a plan. See `reserve`."""
        own = self._of_key(side, key)
        return self._check(side, bound, now, charge) or (None if own is None else own.check(side, bound, now))

    def _of_key(self, side: Side, key: str) -> Caps | None:
        """Return the caps of the key that asks for a start; at the device it has none."""
        return self.keys.get(key) if key and side is Side.SERVER else None

    def _check(self, side: Side, bound: float, now: float, charge: float | None) -> CapRefusal | None:
        require_amount(bound)
        self._roll(now)
        if self._closed and bound > 0 and (capped := [cap for cap in self._of(side) if cap.limit is not None]):
            names = ", ".join(f"{cap.name} = {cap.limit:g} {cap.unit}" for cap in capped)
            reason = f"{names}{self._whose} is closed: {self._closed}"
            return CapRefusal(side, reason, math.inf, UNKNOWN_RETRY_S, self.key)
        closed = [cap for cap in self._of(side) if cap.closed(bound)]
        floor = self.limits.battery_floor
        if side is Side.DEVICE and floor is not None and charge is not None and charge < floor:
            reason = f"the battery is at {charge:.0%}, below battery_floor = {floor:.0%}"
            return CapRefusal(side, reason, math.inf, BATTERY_RETRY_S)
        return self._refusal(side, closed, now) if closed else None

    def reserve(
        self, side: Side, bound: float, now: float, charge: float | None = None, key: str = ""
    ) -> Reservation | CapRefusal:
        """Admit a start that costs at most `bound`, $ for the server and Wh for the device, or return why not.

        `charge` is the share left in a battery that the device runs on, None on mains; `key` the name of the key that
        asks. The caller settles or releases the reservation, whatever happens. Raises ValueError for a bound that is no
        amount.
        """
        if refused := self._check(side, bound, now, charge):
            return refused
        held: tuple[Caps, Reservation] | None = None
        if (own := self._of_key(side, key)) is not None:
            if isinstance(found := own.reserve(side, bound, now), CapRefusal):
                return found
            held = own, found
        self._made += 1
        caps = self._of(side)
        reservation = Reservation(self._made, side, bound, tuple(cap.since for cap in caps), held)
        for cap in caps:
            cap.reserved[reservation.number] = cap.since, bound
        self._open[reservation.number] = reservation
        return reservation

    def settle(self, reservation: Reservation, real: float) -> None:
        """Replace the reserved cost by the real one, which is booked whole, even above the bound.

        Raises ValueError if that reservation was settled or released before: money is booked once.
        """
        require_amount(real)
        if reservation.number not in self._open:
            raise ValueError(f"already settled or released: {reservation}")
        periods = [cap.reserved[reservation.number][0] for cap in self._of(reservation.side)]
        self._close(reservation)
        if reservation.own is not None:
            own, held = reservation.own
            own.settle(held, real)
        if not real:
            return
        for cap, period in zip(self._of(reservation.side), periods, strict=True):
            cap.book(period, real, self._now())
        self.keep()

    def book(self, side: Side, real: float, now: float) -> None:
        """Count a cost without a reservation: that of the daemon's own requests."""
        require_amount(real)
        self._roll(now)
        if not real:
            return
        for cap in self._of(side):
            cap.book(cap.since, real, self._now())
        self.keep()

    def release(self, reservation: Reservation) -> None:
        """Give back a reservation that nothing was started with. After `settle` this does nothing."""
        if reservation.number in self._open:
            self._close(reservation)
            if reservation.own is not None:
                own, held = reservation.own
                own.release(held)

    def spent(self, now: float) -> Spent:
        """Return what was spent in the day and the month that `now` is in, capped or not."""
        self._roll(now)
        return Spent(*(cap.spent for cap in self._caps))

    def state(self, now: float) -> dict[str, dict[str, float | str | None]]:
        """Return each cap that is set: amounts spent and reserved in its unit, and its next begin, Unix time."""
        self._roll(now)
        return {
            cap.name: {
                "unit": cap.unit,
                "limit": cap.limit,
                "spent": cap.spent,
                "reserved": cap.reserved_now,
                "reset_at": self._reset(cap),
            }
            for cap in self._caps
            if cap.limit is not None
        }

    def _refusal(self, side: Side, closed: list[CapAccount], now: float) -> CapRefusal:
        spent = [cap for cap in closed if cap.limit is not None and cap.spent >= cap.limit]
        reset_at = max(self._reset(cap) for cap in closed)
        wait = max((self._reset(cap) - now for cap in spent), default=min(BUSY_RETRY_S, reset_at - now))
        reason = "; ".join(
            f"the limit {cap.name} = {cap.limit:g} {cap.unit}{self._whose} is reached: "
            f"{cap.spent:.4g} {cap.unit} spent"
            + (f", {cap.reserved_now:.4g} held for answers that run" if cap.reserved_now else "")
            for cap in closed
        )
        return CapRefusal(side, reason, reset_at, max(0.0, wait), self.key)

    @property
    def _whose(self) -> str:
        return f" of the key '{self.key}'" if self.key else ""

    def _of(self, side: Side) -> tuple[CapAccount, ...]:
        return tuple(cap for cap in self._caps if cap.side is side)

    def _close(self, reservation: Reservation) -> None:
        del self._open[reservation.number]
        for cap in self._caps:
            cap.reserved.pop(reservation.number, None)

    def _reset(self, cap: CapAccount) -> float:
        return _midnight(_next_month(cap.since) if cap.monthly else cap.since + timedelta(days=1), self._tz)

    def _roll(self, now: float) -> None:
        (then, at), today = self._seen, _today(now, self._tz)
        elapsed = self._now() or 0.0
        self._seen = now, elapsed
        stepped = now - then > elapsed - at + STEP_S  # or nobody knows: then it counts twice rather than never
        if today == self._rolled and not stepped:  # several times a request
            return
        self._rolled = today
        changed = False
        for cap in self._caps:
            began = elapsed - (now - _midnight(cap.period(today), self._tz))
            changed |= cap.roll(today, stepped=stepped, began=None if self._elapsed is None else began)
        if changed:
            self.keep()

    def _now(self) -> float | None:
        """Return what the clock that nobody sets says, s; None without one."""
        return None if self._elapsed is None else self._elapsed()


# --- bounds ---------------------------------------------------------------------------------------------------------


def server_bound(
    price: Price,
    prompt_tokens: int,
    max_tokens: int | None,
    context: int | None = None,
    choices: int = 1,
    beside: tuple[int, int] = (0, 0),
) -> float:
    """Return the most a request can cost at a server, $, if that counts at most PROMPT_MARGIN times our prompt tokens.

    Without `max_tokens` an answer is as long as the model can say at a time, or ends with its context: by the price
    list, where that knows them. `choices` is OpenAI's `n`, `beside` what is read and written besides, tokens.
    """
    prompt, able = math.ceil(prompt_tokens * PROMPT_MARGIN) + beside[0], price.capabilities
    answer = max_tokens
    if answer is None:
        context = able.context_length if context is None else context
        room = max(SERVER_CONTEXT - prompt_tokens, LONG_ANSWER) if context is None else max(0, context - prompt_tokens)
        answer = room if able.max_output is None else min(room, able.max_output)
    return price.cost_usd(prompt, answer * max(1, choices) + beside[1])


def device_bound(
    prefill_j: float, decode_j: float, prompt_tokens: int, max_tokens: int | None, context: int, choices: int = 1
) -> float:
    """Return the most energy a request can take on the device, Wh, at these J per token; no token counts as cached."""
    room = max(0, context - prompt_tokens)
    answer = room if max_tokens is None else min(max_tokens, room)
    return (prefill_j * prompt_tokens + decode_j * answer * choices) / J_PER_WH


def _nobody() -> None:
    """Nobody keeps the sums yet."""


def _today(now: float, tz: tzinfo | None) -> date:
    return datetime.fromtimestamp(now, tz).date()


def _midnight(day: date, tz: tzinfo | None) -> float:
    """Return the first moment of a day, Unix time, s. A midnight that a clock change skips is the change (PEP 495)."""
    return datetime.combine(day, time.min, tz).timestamp()


def _next_month(first: date) -> date:
    return (first + timedelta(days=31)).replace(day=1)

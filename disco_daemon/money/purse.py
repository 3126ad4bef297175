"""What money says now: the prices of the next request, which side is scarce, and which may still spend. Pure.

The prices follow the exchange rate that the user sets and what the energy comes from (battery, heat: `exchange`), and
what a token was measured to take. The caps are asked before an endpoint is planned with and again when it is started,
where the most it may cost is reserved until its real cost is known (`caps`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..types import Attempt, Side, finite
from .caps import J_PER_WH, Caps, Limits, Refused, Reservation, device_bound, server_bound
from .catalog import Price
from .exchange import DEFAULT_FLOOR, Power, Regime, effective, regime
from .prices import Prices

__all__ = ["Asked", "Purse", "Refused", "Reservation"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a start may cost, by what is known before: `choices` is OpenAI's `n`, `max_tokens` None has no limit."""

    prompt_tokens: int
    max_tokens: int | None = None
    choices: int = 1


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of the device, token/s."""

    prefill_tps: float
    decode_tps: float


class Purse:
    """Owns the prices in force and the caps. `prices` changes between requests only by its methods.

    `watts` is what computing is taken to draw until a token's energy is measured, W. `stops_billing`: closing a stream
    at the server ends its bill. `context` is the device's, in tokens.
    """

    def __init__(
        self,
        price: Price,
        caps: Caps,
        *,
        usd_per_kwh: float,
        watts: float,
        speeds: Speeds,
        context: int,
        stops_billing: bool = False,
    ) -> None:
        self.price = price
        self.caps = caps
        self.usd_per_kwh = usd_per_kwh
        self.stops_billing = stops_billing
        self.speeds = speeds
        self._context = context
        self._power = Power()
        self._base = Prices(price.input, price.output, watts, usd_per_kwh, price.cached_input)
        self.prices = self._base
        self._reprice()

    # --- what changes ------------------------------------------------------------------------------------------------

    def set_rate(self, usd_per_kwh: float) -> None:
        """The user's exchange rate, $/kWh, from the next request on."""
        self.usd_per_kwh = usd_per_kwh
        self._reprice()

    def set_limits(self, limits: Limits) -> None:
        """The user's caps; what is spent and reserved stays."""
        self.caps.set_limits(limits)
        self._reprice()

    def feel(self, power: Power, speeds: Speeds, watts: float, token_j: tuple[float, float] | None) -> None:
        """What the machine runs on now, its speeds, and its energy: `token_j` if it is measured, else `watts`."""
        self._power, self.speeds = power, speeds
        self._base = replace(self._base, device_watts=watts, token_j=token_j)
        self._reprice()

    def _reprice(self) -> None:
        floor = self.caps.limits.battery_floor
        rate = effective(self.usd_per_kwh, self._power, DEFAULT_FLOOR if floor is None else floor)
        self.prices = replace(self._base, usd_per_kwh=rate)

    # --- what is asked of it -----------------------------------------------------------------------------------------

    @property
    def regime(self) -> Regime:
        """Which side is scarce at the rate in force, and where that would change."""
        return regime(self.prices, self.speeds.prefill_tps, self.speeds.decode_tps)

    def check(self, side: Side, asked: Asked, now: float) -> Refused | None:
        """Whether a side may start such a request, for a plan; `now` is Unix time, s."""
        return self.caps.check(side, self._bound(side, asked), now, self._charge)

    def reserve(self, side: Side, asked: Asked, now: float) -> Reservation | Refused:
        """Admit a start and hold the most it may cost. The reservation has to be settled."""
        return self.caps.reserve(side, self._bound(side, asked), now, self._charge)

    def settle(self, reservation: Reservation, attempt: Attempt) -> None:
        """Put what an attempt really cost in place of its reservation."""
        self.caps.settle(reservation, spent_by(attempt))

    def book(self, attempt: Attempt, now: float) -> None:
        """Count an attempt that nobody reserved anything for; it is booked already, see `Prices.booked`."""
        self.caps.book(attempt.side, spent_by(attempt), now)

    def state(self, now: float) -> dict[str, Any]:
        """All of it, JSON for people and programs; `now` is Unix time, s."""
        found, per_token = self.regime, self.prices.per_token(self.speeds.prefill_tps, self.speeds.decode_tps)
        return {
            "usd_per_kwh": self.usd_per_kwh,
            "effective_usd_per_kwh": self.prices.usd_per_kwh,
            "power": asdict(self._power),
            "scarcer": found.scarcer.value,
            "threshold_usd_per_kwh": finite(found.threshold_usd_per_kwh),
            "usd_per_token": per_token,
            "server_price": {
                "input_usd_per_mtok": self.price.input,
                "cached_input_usd_per_mtok": self.price.cached_input,
                "output_usd_per_mtok": self.price.output,
                "known": self.price.known,
                "source": self.price.source,
                "as_of": None if self.price.as_of is None else self.price.as_of.isoformat(),
                "closing_stops_billing": self.stops_billing,
            },
            "spent": asdict(self.caps.spent(now)),
            "caps": self.caps.state(now),
        }

    @property
    def _charge(self) -> float | None:
        """The share left in the battery that the device runs on; None on mains."""
        return None if self._power.on_mains else self._power.charge

    def _bound(self, side: Side, asked: Asked) -> float:
        if side is Side.SERVER:
            return server_bound(self.price, asked.prompt_tokens, asked.max_tokens, choices=asked.choices)
        joules = self.prices.joules(self.speeds.prefill_tps, self.speeds.decode_tps)
        return device_bound(*joules, asked.prompt_tokens, asked.max_tokens, self._context)


def spent_by(attempt: Attempt) -> float:
    """What an attempt counts against the caps of its side: $ at the server, Wh on the device."""
    return attempt.bill_usd if attempt.side is Side.SERVER else attempt.energy_j / J_PER_WH


def retry_after_s(refused: Refused) -> int:
    """Whole seconds for a Retry-After: never so short that one comes back too early."""
    return max(1, math.ceil(refused.retry_after_s))

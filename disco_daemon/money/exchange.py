"""The exchange rate λ: the worth of a kWh of this machine's energy now, and which side is scarce at it. Pure.

On mains a kWh costs the price of electricity. On battery it is worth more, the more so the less charge is left, and
much more below the floor that the user wants to keep. A hot machine makes the device dearer too: it is slow, loud, and
takes longer for the same tokens. Nothing here is measured: the curve is a choice, made of three properties (nothing
jumps but at the plug, more charge never costs more, there is a bound) and two figures, BATTERY and FLOOR.

    λ_eff = clamp(λ) · battery(s, φ) · thermal(h)

    battery(s, φ) = BATTERY^((1 - s)²) · FLOOR^(max(0, 1 - s/φ)²)     on battery;  1 on mains
    thermal(h)    = HOT^(3u² - 2u³), u = clip(1 - h/WARM_K, 0, 1)      h: kelvins below the throttling point

with the charge s and the floor φ as shares of a full battery. A full battery is worth what the mains is, so pulling the
plug then changes nothing. The first factor alone reaches BATTERY at 0; the second begins at φ with slope 0, so the
curve has no corner, and below φ its logarithm falls faster at every s than it would without a floor. Where throttling
has begun u is 1; where the headroom is not known it is 0 or 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..types import Side
from .prices import J_PER_KWH, Prices

MIN_USD_PER_KWH, MAX_USD_PER_KWH = 0.01, 1000.0  # the useful range of λ; values beyond it are clamped
BATTERY = 10.0  # how much dearer the last of a battery is than its first
FLOOR = 10.0  # how much dearer still below the floor that the user wants to keep
HOT = 3.0  # how much dearer a throttled machine is
WARM_K = 10.0  # headroom from which on heat begins to count, K
MAX_FACTOR = BATTERY * FLOOR * HOT
DEFAULT_FLOOR = 0.2  # below a fifth laptops warn; the user's setting replaces it


@dataclass(frozen=True, slots=True)
class Power:
    """The source of the energy. `charge` is the share of a full battery, None if there is none or it is not known.

    `headroom_k` is how far the hottest part is below throttling, K, None if not known.
    """

    charge: float | None = None
    on_mains: bool = True
    throttled: bool = False
    headroom_k: float | None = None


@dataclass(frozen=True, slots=True)
class Regime:
    """The side that a budget limits at `usd_per_kwh`: above `threshold_usd_per_kwh` it is the device."""

    scarcer: Side
    usd_per_kwh: float
    threshold_usd_per_kwh: float


def effective(usd_per_kwh: float, power: Power, floor: float = DEFAULT_FLOOR) -> float:
    """Return λ now, $/kWh, between MIN_USD_PER_KWH and MAX_USD_PER_KWH · MAX_FACTOR; `floor` is a share of a battery.

    Raises ValueError for a rate or a floor that is no number, or a rate below 0.
    """
    if not usd_per_kwh >= 0 or math.isnan(floor):
        raise ValueError(f"an exchange rate is >= 0 $/kWh, and a floor a share of the charge: {usd_per_kwh}, {floor}")
    base = min(max(usd_per_kwh, MIN_USD_PER_KWH), MAX_USD_PER_KWH)
    battery = 1.0 if power.on_mains or power.charge is None else battery_factor(power.charge, floor)
    return base * battery * thermal_factor(power.headroom_k, throttled=power.throttled)


def battery_factor(charge: float, floor: float) -> float:
    """Return how much more a kWh is worth at this charge than on mains: 1 (full) to BATTERY · FLOOR (empty)."""
    charge, floor = _share(charge), _share(floor)
    below = max(0.0, 1.0 - charge / floor) if floor > 0 else 0.0
    return float(BATTERY ** ((1.0 - charge) ** 2) * FLOOR ** (below**2))


def thermal_factor(headroom_k: float | None, *, throttled: bool) -> float:
    """Return how much more a kWh is worth near the throttling point, or beyond it: 1 to HOT."""
    if throttled:
        return HOT
    u = 0.0 if headroom_k is None else _share(1.0 - headroom_k / WARM_K)
    return float(HOT ** (u * u * (3.0 - 2.0 * u)))


def threshold(prices: Prices, prefill_tps: float, decode_tps: float) -> float:
    """Return the λ at which the costs cross, $/kWh: above it the device is the scarcer side, up to it the server.

    The rule is in docs/explain/design.md#policies.

    The device's cheapest token, min(J_p, J_d) · λ / 3.6e6 $, is to be dearer than the server's dearest one:

        λ* = max(c_s^p, c_s^d) · 3.6e6 / min(J_p, J_d)

    Infinite for a device that draws nothing.
    """
    server = prices.server_input_usd_per_mtok / 1e6, prices.server_output_usd_per_mtok / 1e6
    return threshold_of(*prices.joules(prefill_tps, decode_tps), *server)


def threshold_of(prefill_j: float, decode_j: float, server_input_usd: float, server_output_usd: float) -> float:
    """Return the threshold for energies in J per token and server prices in $ per token."""
    joules = min(prefill_j, decode_j)
    return math.inf if joules == 0 else max(server_input_usd, server_output_usd) * J_PER_KWH / joules


def regime(prices: Prices, prefill_tps: float, decode_tps: float) -> Regime:
    """Return which side is scarcer at the λ in `prices`, and the λ at which that changes."""
    scarcer = prices.scarcer(prefill_tps, decode_tps)
    return Regime(scarcer, prices.usd_per_kwh, threshold(prices, prefill_tps, decode_tps))


def _share(x: float) -> float:
    """Return `x` clamped to 0 to 1. A sensor's nonsense (NaN) counts as 0: nothing left."""
    return 0.0 if math.isnan(x) else min(1.0, max(0.0, x))

"""What a kWh is worth by charge, floor and heat, and at which rate the scarcer side changes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from disco_daemon.money import exchange
from disco_daemon.money.exchange import Power, battery_factor, effective, regime, thermal_factor, threshold
from disco_daemon.money.prices import J_PER_KWH, Prices
from disco_daemon.types import Side

shares = st.floats(0, 1)
rates = st.floats(exchange.MIN_USD_PER_KWH, exchange.MAX_USD_PER_KWH)
headrooms = st.none() | st.floats(-20, 100)
powers = st.builds(Power, st.none() | shares, st.booleans(), st.booleans(), headrooms)


def on_battery(charge: float, **more: float) -> Power:
    return Power(charge, on_mains=False, headroom_k=more.get("headroom_k"))


# Worked out by hand from the formula in the module.
@pytest.mark.parametrize(
    ("charge", "floor", "factor"),
    [
        (1.0, 0.2, 1.0),
        (0.5, 0.2, 10**0.25),
        (0.2, 0.2, 10**0.64),
        (0.1, 0.2, 10 ** (0.81 + 0.25)),
        (0.0, 0.2, 100.0),
        (0.0, 0.0, 10.0),
        (0.5, 1.0, 10**0.5),
    ],
)
def test_the_curve_at_some_points(charge: float, floor: float, factor: float) -> None:
    assert battery_factor(charge, floor) == pytest.approx(factor)
    assert effective(0.3, on_battery(charge), floor) == pytest.approx(0.3 * factor)


def test_on_mains_a_kwh_costs_what_electricity_costs() -> None:
    assert effective(0.3, Power(0.05, on_mains=True)) == 0.3
    assert effective(0.3, Power(None, on_mains=False)) == 0.3, "no battery, or none that can be read"


@given(rates, shares, shares, shares)
def test_less_charge_never_costs_less(rate: float, a: float, b: float, floor: float) -> None:
    low, high = sorted((a, b))
    assert effective(rate, on_battery(low), floor) >= effective(rate, on_battery(high), floor)


@given(shares, shares, shares)
def test_a_higher_floor_never_costs_less(charge: float, a: float, b: float) -> None:
    assert battery_factor(charge, max(a, b)) >= battery_factor(charge, min(a, b))


@given(rates, rates, powers, shares)
def test_a_higher_price_costs_more_whatever_the_machine_does(a: float, b: float, power: Power, floor: float) -> None:
    low, high = sorted((a, b))
    assert effective(low, power, floor) <= effective(high, power, floor)


@given(st.floats(0, 1e9), powers, st.floats(-1, 2))
def test_there_is_a_bound_whatever_comes(rate: float, power: Power, floor: float) -> None:
    top = exchange.MAX_USD_PER_KWH * exchange.MAX_FACTOR
    assert exchange.MIN_USD_PER_KWH <= effective(rate, power, floor) <= top * (1 + 1e-12)


@given(shares, st.floats(0.05, 1), st.floats(-1e-6, 1e-6))
def test_nothing_jumps_as_the_charge_falls(charge: float, floor: float, step: float) -> None:
    before, after = battery_factor(charge, floor), battery_factor(min(1.0, max(0.0, charge + step)), floor)
    # d ln f / ds is at most 2 ln BATTERY + 2 ln FLOOR / floor.
    slope = 2 * math.log(exchange.BATTERY) + 2 * math.log(exchange.FLOOR) / floor
    assert abs(math.log(after / before)) <= slope * abs(step) + 1e-12


@given(st.floats(0.05, 1), shares, shares)
def test_below_the_floor_it_rises_faster_than_it_would_without(floor: float, a: float, b: float) -> None:
    low, high = sorted((a * floor, b * floor))
    assume(high - low > 1e-3)
    rise = battery_factor(low, floor) / battery_factor(high, floor)
    assert rise > battery_factor(low, 0) / battery_factor(high, 0)


@given(st.floats(0.05, 0.95), shares)
def test_above_the_floor_the_floor_does_not_count(floor: float, a: float) -> None:
    charge = floor + a * (1 - floor)
    assert battery_factor(charge, floor) == pytest.approx(battery_factor(charge, 0), rel=1e-12)


@given(st.floats(-20, 100), st.floats(-20, 100))
def test_less_headroom_never_costs_less(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert exchange.HOT >= thermal_factor(low, throttled=False) >= thermal_factor(high, throttled=False) >= 1


@given(st.floats(-5, 15), st.floats(-1e-6, 1e-6))
def test_nothing_jumps_as_it_warms(headroom: float, step: float) -> None:
    ratio = thermal_factor(headroom + step, throttled=False) / thermal_factor(headroom, throttled=False)
    assert abs(ratio - 1) < 1e-5


def test_throttling_counts_in_full_and_coolness_not_at_all() -> None:
    assert thermal_factor(50.0, throttled=True) == exchange.HOT
    assert thermal_factor(0.0, throttled=False) == pytest.approx(exchange.HOT)
    assert thermal_factor(exchange.WARM_K, throttled=False) == 1
    assert thermal_factor(0.75 * exchange.WARM_K, throttled=False) == pytest.approx(exchange.HOT**0.15625)
    assert thermal_factor(None, throttled=False) == 1
    hot = Power(0.5, on_mains=False, throttled=True)
    assert effective(0.3, hot) == pytest.approx(effective(0.3, on_battery(0.5)) * exchange.HOT)


def test_a_sensors_nonsense_is_an_empty_battery() -> None:
    assert battery_factor(math.nan, 0.2) == battery_factor(0.0, 0.2)
    assert battery_factor(-3.0, 0.2) == battery_factor(0.0, 0.2)
    assert battery_factor(7.0, 0.2) == 1


@pytest.mark.parametrize(("rate", "floor"), [(-0.1, 0.2), (math.nan, 0.2), (0.3, math.nan)])
def test_what_is_no_rate_is_refused(rate: float, floor: float) -> None:
    with pytest.raises(ValueError, match="exchange rate"):
        effective(rate, Power(), floor)


# --- the regime -----------------------------------------------------------------------------------------------------


def test_the_threshold_by_hand() -> None:
    # 15 W at 500 token/s of prefill is 0.03 J a token; the server's dearest token costs 0.6e-6 $.
    prices = Prices(0.15, 0.60, 15.0, 0.30)
    assert threshold(prices, 500, 40) == pytest.approx(0.6e-6 * 3.6e6 / 0.03)
    assert regime(prices, 500, 40) == exchange.Regime(Side.SERVER, 0.30, threshold(prices, 500, 40))
    assert exchange.threshold_of(0.03, 0.375, 0.15e-6, 0.6e-6) == pytest.approx(threshold(prices, 500, 40))


speeds = st.floats(0.1, 1e5)
tariffs = st.floats(0.001, 1000)


@given(tariffs, tariffs, st.floats(0.1, 1000), speeds, speeds)
def test_the_regime_changes_at_the_threshold_and_nowhere_else(
    input_usd: float, output_usd: float, watts: float, prefill_tps: float, decode_tps: float
) -> None:
    def scarcer(rate: float) -> Side:
        return Prices(input_usd, output_usd, watts, rate).scarcer(prefill_tps, decode_tps)

    rate = threshold(Prices(input_usd, output_usd, watts), prefill_tps, decode_tps)
    assert scarcer(rate * (1 - 1e-9)) is Side.SERVER
    assert scarcer(rate * (1 + 1e-9)) is Side.DEVICE
    assume(all(abs(rate / end - 1) > 1e-9 for end in (0.01, 1000.0)))
    swept = [scarcer(0.01 * 1e5 ** (n / 50)) for n in range(51)]
    flips = sum(a is not b for a, b in pairwise(swept))
    assert flips == (0.01 <= rate < 1000), "one change at most, and only if the crossing is in the range"


@given(speeds, speeds, st.floats(0.1, 1000))
def test_the_threshold_is_where_the_costs_are_equal(prefill_tps: float, decode_tps: float, watts: float) -> None:
    prices = Prices(0.15, 0.60, watts)
    rate = threshold(prices, prefill_tps, decode_tps)
    assert watts / J_PER_KWH * rate / max(prefill_tps, decode_tps) == pytest.approx(0.60e-6)


def test_a_device_that_draws_nothing_is_never_scarce_and_a_free_server_always_is_not() -> None:
    assert threshold(Prices(0.15, 0.60, 0.0, 1000.0), 500, 40) == math.inf
    assert exchange.threshold_of(0.0, 1.0, 1e-6, 1e-6) == math.inf
    assert regime(Prices(0.15, 0.60, 0.0, 1000.0), 500, 40).scarcer is Side.SERVER
    assert regime(Prices(0.0, 0.0, 15.0, 0.01), 500, 40).scarcer is Side.DEVICE

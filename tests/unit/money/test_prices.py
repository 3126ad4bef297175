from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.money.prices import Prices
from disco_daemon.types import Attempt, Side, Usage

PRICES = Prices(server_input_usd_per_mtok=0.15, server_output_usd_per_mtok=0.60, device_watts=15.0, usd_per_kwh=0.30)
counts = st.integers(0, 10**6)
amounts = st.floats(0, 1e4)
prices = st.builds(Prices, amounts, amounts, amounts, amounts)


def attempt(
    side: Side, prompt: int = 0, completion: int = 0, busy_s: float = 0.0, *, censored: bool = False
) -> Attempt:
    return Attempt(side, "m", 0.0, 0.2, censored, Usage(prompt, completion, busy_s))


def test_a_million_server_tokens_cost_their_price() -> None:
    assert PRICES.cost_usd(attempt(Side.SERVER, prompt=10**6)) == pytest.approx(0.15)
    assert PRICES.cost_usd(attempt(Side.SERVER, completion=10**6)) == pytest.approx(0.60)
    assert PRICES.cost_usd(attempt(Side.SERVER, prompt=1000, completion=100)) == pytest.approx(0.00021)


def test_an_hour_of_computing_costs_its_energy() -> None:
    hour = attempt(Side.DEVICE, prompt=10**6, completion=10**6, busy_s=3600.0)
    assert PRICES.energy_j(hour) == pytest.approx(54_000)
    assert PRICES.cost_usd(hour) == pytest.approx(0.0045)


def test_a_device_of_two_machines_spends_what_both_spend() -> None:
    whole = attempt(Side.DEVICE, prompt=100, completion=10, busy_s=2.0)
    split = replace(whole, usage=replace(whole.usage, partner_j=6.0, split={"partner_j": 6.0, "partner_usd": None}))
    for p in (PRICES, replace(PRICES, token_j=(0.1, 0.5))):
        assert p.energy_j(split) == pytest.approx(p.energy_j(whole) + 6.0)
        booked = p.booked(split)
        assert booked.usage.split == {"partner_j": 6.0, "partner_usd": pytest.approx(6.0 / 3.6e6 * 0.30)}
        assert booked.energy_j == p.energy_j(split)
        assert replace(p, partner_token_j=(1.0, 2.0)).joules(100.0, 10.0) == pytest.approx(
            tuple(a + b for a, b in zip(p.joules(100.0, 10.0), (1.0, 2.0), strict=True))
        )
    unknown = replace(whole, usage=replace(whole.usage, split={"partner_j": None, "partner_usd": None}))
    assert PRICES.booked(unknown).usage.split == {"partner_j": None, "partner_usd": None}


@given(prices, counts, counts, amounts)
def test_a_server_draws_no_power_here(p: Prices, prompt: int, completion: int, busy_s: float) -> None:
    assert p.energy_j(attempt(Side.SERVER, prompt, completion, busy_s)) == 0


@given(prices, counts, counts, amounts)
def test_device_tokens_cost_time_and_nothing_else(p: Prices, prompt: int, completion: int, busy_s: float) -> None:
    idle = attempt(Side.DEVICE, prompt, completion, busy_s)
    assert p.cost_usd(idle) == p.cost_usd(attempt(Side.DEVICE, busy_s=busy_s))


@given(prices, st.sampled_from(Side), counts, counts, amounts)
def test_a_loser_costs_what_it_processed(p: Prices, side: Side, prompt: int, completion: int, busy_s: float) -> None:
    won = attempt(side, prompt, completion, busy_s)
    lost = attempt(side, prompt, completion, busy_s, censored=True)
    assert p.cost_usd(lost) == p.cost_usd(won) >= 0


@given(st.sampled_from(Side), counts, counts, amounts)
def test_without_prices_nothing_costs(side: Side, prompt: int, completion: int, busy_s: float) -> None:
    one = attempt(side, prompt, completion, busy_s)
    assert Prices().cost_usd(one) == Prices().energy_j(one) == 0


@given(prices, counts, counts, counts, counts)
def test_two_attempts_cost_what_one_that_does_both_costs(p: Prices, a: int, b: int, c: int, d: int) -> None:
    apart = p.cost_usd(attempt(Side.SERVER, a, b)) + p.cost_usd(attempt(Side.SERVER, c, d))
    assert p.cost_usd(attempt(Side.SERVER, a + c, b + d)) == pytest.approx(apart)

"""The spending: prices follow rate, battery and measured energy; caps are asked and settled at what really bills."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC
from typing import Any

import pytest

from disco_daemon.money.caps import LONG_ANSWER, CapLimits, Caps, server_bound
from disco_daemon.money.catalog import Price
from disco_daemon.money.exchange import Power
from disco_daemon.money.spending import (
    FILE_TOKENS,
    IMAGE_TOKENS,
    CapRefusal,
    CostBound,
    Reservation,
    Speeds,
    Spending,
    capped,
    retry_after_s,
)
from disco_daemon.types import Attempt, Capabilities, GenerationRequest, Sampling, Side, Usage

NOW = 1_770_000_000.0
PRICE = Price(1.0, 0.5, 10.0)
SPEEDS = Speeds(100.0, 20.0)
ASKED = CostBound(1000, max_tokens=100)


def spending(rate: float = 0.3, watts: float = 20.0, price: Price = PRICE, **caps: float) -> Spending:
    return Spending(
        price, Caps(CapLimits(**caps), UTC, NOW), usd_per_kwh=rate, watts=watts, speeds=SPEEDS, context=4096
    )


def server(prompt: int, answer: int, *, cached: int = 0, unseen: int = 0) -> Attempt:
    usage = Usage(prompt, answer, cached_tokens=cached)
    return Attempt(Side.SERVER, "m", 0.0, 0.1, censored=False, usage=usage, unseen_tokens=unseen)


def device(prompt: int, answer: int, busy_s: float) -> Attempt:
    return Attempt(Side.DEVICE, "d", 0.0, 0.1, censored=False, usage=Usage(prompt, answer, busy_s))


def test_a_new_rate_is_in_the_prices_at_once() -> None:
    owned = spending()
    assert owned.prices.usd_per_kwh == 0.3
    owned.set_rate(50.0)
    assert owned.prices.usd_per_kwh == 50.0


def test_on_battery_energy_is_dearer_and_the_regime_follows() -> None:
    owned, scarcer = spending(rate=100.0, watts=5.0), []
    for power in (Power(), Power(charge=0.1, on_mains=False), Power(charge=0.1, on_mains=True)):
        owned.update_power(power, SPEEDS, 5.0, None)
        scarcer.append(owned.regime.scarcer)
        assert (owned.prices.usd_per_kwh > 500.0) is not power.on_mains
    assert scarcer == [Side.SERVER, Side.DEVICE, Side.SERVER]


@pytest.mark.parametrize("token_j", [None, (0.05, 0.4)])
def test_the_regime_flips_where_the_costs_cross(token_j: tuple[float, float] | None) -> None:
    owned = spending()
    owned.update_power(Power(), SPEEDS, 20.0, token_j)
    limit = owned.regime.threshold_usd_per_kwh
    for rate, scarcer in ((limit * (1 - 1e-9), Side.SERVER), (limit * (1 + 1e-9), Side.DEVICE)):
        owned.set_rate(rate)
        assert owned.regime.scarcer is scarcer


def test_a_measured_token_takes_what_was_measured_and_an_unmeasured_one_the_power_times_the_time() -> None:
    owned = spending(rate=1.0)
    assert owned.prices.energy_j(device(100, 10, 2.0)) == 40.0
    owned.update_power(Power(), SPEEDS, 20.0, (0.1, 2.0))
    assert owned.prices.energy_j(device(100, 10, 2.0)) == 30.0
    assert owned.prices.cost_usd(device(100, 10, 2.0)) == pytest.approx(30.0 / 3.6e6)


def test_a_bill_counts_the_servers_cache_at_its_price_and_what_a_closed_stream_goes_on_to_make() -> None:
    prices = spending().prices
    assert prices.bill_usd(server(1000, 100, cached=400)) == pytest.approx((1000 * 1 + 400 * 0.5 + 100 * 10) / 1e6)
    assert prices.bill_usd(server(1000, 100, unseen=50)) == pytest.approx((1000 + 150 * 10) / 1e6)
    booked = prices.booked(device(100, 10, 2.0))
    assert (booked.bill_usd, booked.energy_j) == (0.0, 40.0)


def test_a_cap_closes_the_side_that_bills_and_only_that() -> None:
    owned = spending(usd_per_day=0.001)
    grant = owned.reserve(Side.SERVER, ASKED, NOW)
    assert not isinstance(grant, CapRefusal)
    assert isinstance(owned.reserve(Side.SERVER, ASKED, NOW), CapRefusal), "the first one may use it up"
    assert owned.check(Side.DEVICE, ASKED, NOW) is None
    owned.settle(grant, owned.prices.booked(server(100, 1)))
    assert owned.check(Side.SERVER, ASKED, NOW) is None, "it cost less than it might have"
    owned.settle(_granted(owned.reserve(Side.SERVER, ASKED, NOW)), owned.prices.booked(server(1000, 100)))
    assert isinstance(owned.check(Side.SERVER, ASKED, NOW), CapRefusal)
    owned.set_limits(CapLimits(usd_per_day=1.0))
    assert owned.check(Side.SERVER, ASKED, NOW) is None, "a higher cap opens it again"
    assert owned.state(NOW)["caps"]["usd_per_day"]["spent"] == pytest.approx(110e-6 + 2000e-6)


def test_where_a_keys_cap_and_one_of_the_whole_are_in_the_way_both_are_said_how_to_change() -> None:
    owned = spending(usd_per_day=0.0, wh_per_day=0.0)
    owned.caps.keys["anna"] = Caps(CapLimits(usd_per_day=0.0), UTC, NOW, key="anna")
    whole = owned.check(Side.DEVICE, ASKED, NOW)
    own = owned.caps.keys["anna"].check(Side.SERVER, 1.0, NOW)
    assert whole is not None
    assert own is not None
    for refusals in ((whole, own), (own, whole)):
        said = str(capped(*refusals))
        assert "`disco keys change anna`" in said
        assert "`disco config set caps.NAME VALUE`" in said
    assert "disco keys" not in str(capped(whole))
    assert "disco config" not in str(capped(own))


def test_the_devices_cap_is_in_watt_hours() -> None:
    owned = spending(wh_per_day=1.0)
    grant = _granted(owned.reserve(Side.DEVICE, ASKED, NOW))
    owned.settle(grant, owned.prices.booked(device(10, 10, 180.0)))  # 20 W for 3 minutes
    assert owned.state(NOW)["caps"]["wh_per_day"]["spent"] == pytest.approx(1.0)
    refused = owned.check(Side.DEVICE, ASKED, NOW)
    assert isinstance(refused, CapRefusal)
    assert 0 < refused.retry_after_s <= 86_400
    assert retry_after_s(refused) == math.ceil(refused.retry_after_s)
    assert owned.check(Side.SERVER, ASKED, NOW) is None


def test_below_the_battery_floor_the_device_rests_until_it_is_plugged_in() -> None:
    owned = spending(battery_floor=0.3)
    owned.update_power(Power(charge=0.2, on_mains=False), SPEEDS, 20.0, None)
    assert isinstance(owned.reserve(Side.DEVICE, ASKED, NOW), CapRefusal)
    owned.update_power(Power(charge=0.2, on_mains=True), SPEEDS, 20.0, None)
    assert not isinstance(owned.reserve(Side.DEVICE, ASKED, NOW), CapRefusal)


def held(
    text: Any = "hello",
    counted: bool = True,
    max_tokens: int | None = 100,
    price: Price = PRICE,
    said: dict[str, Any] | None = None,
    **extra: Any,
) -> float:
    """What is held for a start at a server, millionths of a $; `said` stands in the message beside its content."""
    asked = GenerationRequest(
        "r", ({"role": "user", "content": text, **(said or {})},), sampling=Sampling(max_tokens=max_tokens), extra=extra
    )  # fmt: skip
    owned = spending(price=price, usd_per_day=100.0)
    grant = _granted(owned.reserve(Side.SERVER, CostBound.of(asked, 10, counted=counted), NOW))
    return round(grant.bound * 1e6, 6)


def test_what_is_read_and_written_beside_text_and_answer_is_held() -> None:
    plain = held()
    assert plain == 15 * 1.0 + 100 * 10.0
    assert held([{"type": "text", "text": "hello"}]) == plain
    assert held([{"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}]) == plain + IMAGE_TOKENS
    assert held([{"type": "file", "file": {}}]) == plain + FILE_TOKENS
    said = {"type": "content", "content": "word " * 1000}
    assert held(prediction=said) >= plain + 1000 * 10.0  # none of it may be what is said
    assert held(tools=[{"type": "function", "function": {"name": "f", "description": "word " * 1000}}]) >= plain + 1000
    assert held(n=3) >= plain + 200 * 10.0
    assert held(best_of=3) >= plain + 200 * 10.0


def test_a_prompt_that_nobody_counted_is_held_by_its_bytes() -> None:
    """A sign of Chinese is a token or more; by four characters a token a sixth of it would be held."""
    assert held("字" * 10_000, counted=False) >= 10_000 + 100 * 10.0
    assert held("字" * 10_000) == held()


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    "said",
    [
        {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "write", "arguments": "word " * 9000}}]},
        {"function_call": {"name": "write", "arguments": "word " * 9000}},
        {"reasoning_content": "word " * 9000},
    ],
    ids=("tool_calls", "function_call", "reasoning_content"),
)
def test_calls_and_thoughts_of_earlier_turns_are_held(said: dict[str, Any], counted: bool) -> None:
    """A server reads them all; a template of the device may not show them, and nobody counts them without one."""
    assert held(counted=counted, said=said) >= 9000 + 100 * 10.0


def test_an_answer_that_was_refused_is_held_as_the_words_that_it_is() -> None:
    refused = held([{"type": "refusal", "refusal": "word " * 1000}])
    assert held() + 1000 <= refused <= held() + 5000


def test_without_a_limit_as_much_is_held_as_the_model_can_say() -> None:
    able = replace(PRICE, capabilities=Capabilities(context_length=400_000, max_output=128_000))
    assert held(max_tokens=None, price=able) == 15 + 128_000 * 10.0
    wide = replace(PRICE, capabilities=Capabilities(context_length=1_000_000))
    assert held(max_tokens=None, price=wide) == 15 + 999_990 * 10.0
    long = round(server_bound(PRICE, 200_000, None) * 1e6, 6)
    assert long == 300_000 + LONG_ANSWER * 10.0  # its context is longer than the commonest ones


def test_several_choices_may_cost_several_answers() -> None:
    one, three = (spending(usd_per_day=1.0) for _ in range(2))
    one.reserve(Side.SERVER, CostBound(0, 1000), NOW)
    three.reserve(Side.SERVER, CostBound(0, 1000, choices=3), NOW)
    reserved = [p.state(NOW)["caps"]["usd_per_day"]["reserved"] for p in (one, three)]
    assert reserved == pytest.approx([0.01, 0.03])


def _granted(grant: Reservation | CapRefusal) -> Reservation:
    assert isinstance(grant, Reservation)
    return grant

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.eval.evaluate import (
    SERVER_USD,
    USD_PER_KWH,
    Cell,
    EvaluationSetup,
    Scene,
    as_json,
    make,
    measure,
    play_policy,
    prices,
    request_usd,
)
from benchmarks.eval.handoff import (
    NONE,
    NOT_RUN,
    VARIANTS,
    HandoffTerms,
    dear_usd_per_kwh,
    evaluate_handoffs,
    move,
    savings,
)
from benchmarks.eval.player import Played
from benchmarks.eval.traces import LatencyTrace, Requests
from disco_daemon.dispatch.migrate import Costs
from disco_daemon.errors import ConfigError
from disco_daemon.simulate.recorded import Phone
from disco_daemon.simulate.whatif import READER_TPS
from disco_daemon.types import Side

DEVICE, SERVER = Side.DEVICE, Side.SERVER
PHONE = Phone("phone", prefill_tps=80.0, decode_tps=20.0, start_s=0.05)
SETUP = EvaluationSetup(("paper",), phones=(PHONE,), budgets=(0.3, 0.8), n_seeds=2, n_requests=150)


def requests() -> Requests:
    random = np.random.default_rng(3)
    return Requests(random.integers(1, 120, 400), random.integers(1, 400, 400))


TRACE = LatencyTrace("x", "a", np.random.default_rng(4).lognormal(-0.3, 0.8, 200))
SCENE = Scene.of(TRACE, requests(), SETUP)


def costs_of(constrained: Side) -> Costs:
    return prices(PHONE, USD_PER_KWH if constrained is SERVER else dear_usd_per_kwh((PHONE,), 2.0))


def played_by(constrained: Side, name: str = "paper") -> Played:
    return play_policy(SCENE, PHONE, constrained, make(name, SETUP), name, SETUP)


def terms(variant: str, constrained: Side, server_tps: float = 60.0) -> HandoffTerms:
    return HandoffTerms(SCENE, PHONE, costs_of(constrained), variant, constrained.other, server_tps)


# --- one request at a time ------------------------------------------------------------------------------------------


def told(
    t: HandoffTerms, prompt: int, output: int, source_won: bool, ran: dict[Side, bool], lead_s: float, server_s: float
) -> tuple[float, bool, int]:
    """$, whether it moved, and how many tokens came too late for the reader: token by token, in plain words."""
    usd = sum(prompt * t.costs.prefill(side) for side in Side if ran[side])
    source, target = t.target.other, t.target
    if not source_won:
        return usd + output * t.costs.decode(target), False, 0
    kept = t.variant != "handoff" and target is DEVICE and ran[DEVICE]
    done_before = min(max((lead_s - PHONE.start_s) * PHONE.prefill_tps, 0.0), float(prompt))
    at, wait_s = t.decide(prompt, math.ceil(prompt - done_before) if kept else NOT_RUN)
    wait_s = server_s if target is SERVER else wait_s
    if at == 0 or at >= output:
        return usd + output * t.costs.decode(source), False, 0
    source_tps, target_tps = t.tps
    arrivals = [i / source_tps for i in range(at)]
    begun_s = arrivals[-1]
    # The source goes on at once, when the reader would run out, or never.
    rests_s = {"handoff": 0.0, "kept": 0.0, "paper": math.inf}.get(t.variant, math.inf if target is DEVICE else None)
    if rests_s is None:
        rests_s = at / READER_TPS - at / source_tps
    while len(arrivals) < output and (len(arrivals) - at) / source_tps < wait_s - rests_s - 1e-9:
        arrivals.append(begun_s + rests_s + (len(arrivals) - at + 1) / source_tps)
    made = len(arrivals)
    price = 0.0 if t.variant == "paper" else t.costs.prefill(target)
    if made == output:  # the source was through first
        to_prefill: float = prompt + at
        if target is DEVICE:
            spent_s = (output - at) / source_tps
            to_prefill = min((0 if kept else prompt) + made, spent_s * PHONE.prefill_tps)
        return usd + output * t.costs.decode(source) + to_prefill * price, False, 0
    usd += made * t.costs.decode(source)
    if target is DEVICE:
        usd += ((0 if kept else prompt) + made) * price + (output - made) * t.costs.decode(target)
    else:
        usd += (prompt + at) * price + (output - at) * t.costs.decode(target)
    arrivals += [
        begun_s + wait_s + i / target_tps for i in range(output - made)
    ]  # the reader may have the source's if need be
    late = sum(arrival > i / READER_TPS + 1e-9 for i, arrival in enumerate(arrivals))
    return usd, True, late


@pytest.mark.parametrize("server_tps", [15.0, 60.0, 150.0])
@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("variant", VARIANTS)
def test_moving_all_at_once_is_moving_one_by_one(variant: str, constrained: Side, server_tps: float) -> None:
    t, played, stream = terms(variant, constrained, server_tps), played_by(constrained), SCENE.stream
    moved = move(t, stream, played)
    assert played.lead_s is not None
    for index in np.ndindex(*played.ttft_s.shape):
        i, _, lane = index
        won = bool(played.device_won[index])
        ran = {DEVICE: bool(played.device_ran[index]), SERVER: bool(played.server_ran[index])}
        usd, done, late = told(
            t, int(stream.prompt[i, lane]), int(stream.output[i, lane]), won is (t.target is SERVER), ran,
            float(played.lead_s[index]), float(stream.server_s[(i + 1) % len(stream.server_s), lane]),
        )  # fmt: skip
        assert moved.cost_usd[index] == pytest.approx(usd, rel=1e-9)
        assert moved.done[index] == done
        assert moved.delayed[index] == late
        assert (moved.gap_s[index] > 1 / READER_TPS + 1e-9) == (late > 0)


@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("variant", ["handoff", "kept", "paused"])
def test_an_insured_handoff_never_makes_the_reader_wait(variant: str, constrained: Side) -> None:
    """Also where the server stalls: one TTFT in ten is 24 s."""
    stalling = np.where(np.arange(200) % 10 == 7, 24.0, TRACE.ttft_s)
    scene = Scene.of(replace(TRACE, ttft_s=stalling), requests(), SETUP)
    moved = move(replace(terms(variant, constrained, 15.0), scene=scene), scene.stream, played_by(constrained))
    assert moved.done.any()
    assert not moved.delayed.any()
    assert moved.gap_s.max() == pytest.approx(1 / READER_TPS)


def test_without_insurance_a_stall_is_felt() -> None:
    stalling = np.where(np.arange(200) % 10 == 7, 24.0, TRACE.ttft_s)
    scene = Scene.of(replace(TRACE, ttft_s=stalling), requests(), SETUP)
    moved = move(replace(terms("paper", DEVICE), scene=scene), scene.stream, played_by(DEVICE))
    assert moved.delayed.max() > 10
    assert moved.gap_s.max() > 10


# --- the decision in it ---------------------------------------------------------------------------------------------


def test_a_device_slower_than_the_server_never_catches_up_but_a_closed_server_waits() -> None:
    assert terms("handoff", SERVER, 100.0).decide(20, NOT_RUN) == (0, 0.0)
    at, wait_s = terms("paused", SERVER, 100.0).decide(20, NOT_RUN)
    assert at > 0
    assert wait_s == pytest.approx((20 + at) / 80 + 0.05)
    assert wait_s <= at / READER_TPS


def test_a_kept_prefill_moves_sooner_and_a_finished_one_at_once() -> None:
    t = terms("kept", SERVER, 40.0)
    waits = [t.decide(100, left)[1] for left in (0.0, 50.0, 100.0, NOT_RUN)]
    assert waits == sorted(waits)
    at, wait_s = t.decide(100, 0.0)
    assert at == 1
    assert wait_s == pytest.approx(1 / 40)  # one token to prefill, and what comes meanwhile


def test_a_move_is_decided_by_what_the_prompt_foretells_of_the_answer_unless_it_is_blind() -> None:
    prompts = np.random.default_rng(5).integers(1, 120, 800)
    scene = Scene.of(TRACE, Requests(prompts, np.where(prompts < 60, 30, 390)), SETUP)
    costs = replace(costs_of(SERVER), device_prefill=1.2e-6)  # dear, so that only a long rest is worth it
    sighted, blind = (HandoffTerms(scene, PHONE, costs, "paused", DEVICE, blind=is_blind) for is_blind in (False, True))
    short, long = 20, 100
    assert blind.looks(short) == blind.looks(long)
    assert sighted.looks(short)[0][1] < blind.looks(short)[0][1] < sighted.looks(long)[0][1]
    assert blind.decide(short, NOT_RUN)[0] < 30 <= sighted.decide(short, NOT_RUN)[0], "by then the answer has ended"
    assert 0 < sighted.decide(long, NOT_RUN)[0] < blind.decide(long, NOT_RUN)[0]


@pytest.mark.parametrize("constrained", Side)
def test_the_server_of_the_decision_is_that_of_the_past_half(constrained: Side) -> None:
    """What comes in the second half must not be known."""
    other = replace(TRACE, ttft_s=np.concatenate([TRACE.ttft_s[:100], np.full(100, 50.0)]))
    again = replace(terms("handoff", constrained), scene=Scene.of(other, requests(), SETUP))
    assert again.decide(30, NOT_RUN) == terms("handoff", constrained).decide(30, NOT_RUN)


@pytest.mark.parametrize(("times", "constrained"), [(1.01, True), (0.9, False)])
def test_above_one_the_dear_rate_makes_every_phone_device_constrained(times: float, constrained: bool) -> None:
    phones = (PHONE, Phone("quick", 300.0, 40.0), Phone("odd", 30.0, 60.0))
    rate = dear_usd_per_kwh(phones, times)
    cheapest = [min(c.device_prefill, c.device_decode) for c in (prices(p, rate) for p in phones)]
    assert (min(cheapest) > max(SERVER_USD)) is constrained


# --- whole evaluations ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return list(evaluate_handoffs([TRACE], requests(), replace(SETUP, policies=("paper", "optimal")), server_tps=30.0))


def test_every_place_has_a_cell_without_and_one_with_each_variant(cells: list[Cell]) -> None:
    assert len(cells) == 2 * 2 * 2 * (1 + len(VARIANTS))
    assert {c.handoff for c in cells} == {NONE, *VARIANTS}
    assert all(c.handoffs == 0 and c.largest_gap_s == 1 / READER_TPS for c in cells if c.handoff == NONE)
    assert len(savings(cells)) == 2 * 2 * 2 * len(VARIANTS)
    assert as_json(cells[1])["handoff"] == NONE


def test_what_is_kept_or_spared_saves_more_in_all(cells: list[Cell]) -> None:
    """Not of each request: another wait may decide otherwise."""
    by_variant = {v: math.fsum(c.cost_usd for c in cells if c.handoff == v) for v in (NONE, *VARIANTS)}
    assert by_variant[NONE] > by_variant["handoff"] > by_variant["kept"] > by_variant["paused"]
    assert all(share > -0.01 for _, share in savings(cells))
    assert max(share for _, share in savings(cells)) > 0.3


def test_only_cost_and_what_a_handoff_does_differ_from_the_cell_without(cells: list[Cell]) -> None:
    own = ("handoff", "cost_usd", "handoffs", "largest_gap_s", "delayed_mean", "delayed_p99")
    plain = {(c.constraint, c.policy, c.budget): c for c in cells if c.handoff == NONE}
    for cell in cells:
        base = plain[cell.constraint, cell.policy, cell.budget]
        assert replace(cell, **{f: getattr(base, f) for f in own}) == base


def test_the_cost_without_handoffs_is_the_evaluations_at_household_prices(cells: list[Cell]) -> None:
    played = played_by(SERVER)
    evaluated = measure(
        SCENE.stream, TRACE.name, PHONE, SERVER, "paper", 0.3, played, 0, n_tested=SCENE.n_tested
    ).cost_usd
    (cell,) = (c for c in cells if (c.constraint, c.policy, c.budget, c.handoff) == ("server", "paper", 0.3, NONE))
    assert cell.cost_usd == pytest.approx(evaluated)
    assert request_usd(SCENE.stream, played, costs_of(SERVER))[:, 0].mean() == pytest.approx(evaluated)


def test_a_limit_has_no_answers_to_move() -> None:
    with pytest.raises(ConfigError, match="clairvoyant is a limit"):
        list(evaluate_handoffs([TRACE], requests(), replace(SETUP, policies=("clairvoyant",))))

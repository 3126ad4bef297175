from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.arrays import FloatArray
from disco_daemon.dispatch.optimal import KAPPA, Optimal, _WaitRevision
from disco_daemon.dispatch.paper import Paper
from disco_daemon.dispatch.policy import PolicyInput
from disco_daemon.dispatch.table import RequestContext, Table
from disco_daemon.estimation.survival import Survival, heavy_tail, mixture
from disco_daemon.estimation.ttft_context import Contexts
from disco_daemon.types import Side
from tests.fixtures.scheduling import estimated, first_token, lognormal, objective, observed, policy_input, rungs, spend

DEVICE, SERVER = Side.DEVICE, Side.SERVER
PROMPTS = [5, 8, 8, 12, 12, 12, 20, 20, 40, 150]
seeds = st.integers(0, 2**32 - 1)
shares = st.floats(0, 1)
draws = st.floats(0, 1, exclude_max=True)
budgets = st.floats(0.03, 0.97)


@st.composite
def policy_inputs(draw: st.DrawFn) -> PolicyInput:
    """Up to 24 lengths, each its own bucket, a device that is worth starting, and sometimes contexts."""
    medians = draw(st.lists(st.floats(0.3, 1.2), min_size=1, max_size=7))
    random = np.random.default_rng(draw(seeds))
    curves = tuple(estimated(draw(seeds), median, random.uniform(0.1, 0.8), 100) for median in medians)
    chances = random.dirichlet(np.full(len(curves), 5.0))
    contexts = Contexts(np.sort(random.normal(size=len(curves) - 1)), chances, curves)
    return policy_input(
        mixture(list(zip(chances.tolist(), curves, strict=True))),
        draw(st.lists(st.integers(1, 300), min_size=1, max_size=24)),
        draw(budgets),
        draw(st.sampled_from(Side)),
        k=draw(st.floats(0.0005, 0.004)),
        c=draw(st.floats(0, 1)),
        contexts=contexts if draw(st.booleans()) else None,
    )


# --- the budget -----------------------------------------------------------------------------------------------------


@given(policy_inputs())
def test_it_spends_the_budget_exactly_in_expectation(ahead: PolicyInput) -> None:
    assert spend(Optimal().fit(ahead), ahead) == pytest.approx(ahead.budget, abs=1e-6)


@given(policy_inputs(), budgets)
def test_it_spends_any_other_budget_that_the_pacer_hands_out(ahead: PolicyInput, handed_out: float) -> None:
    assert spend(Optimal().fit(ahead), ahead, handed_out) == pytest.approx(handed_out, abs=1e-6)


@pytest.mark.parametrize("constrained", [DEVICE, SERVER])
def test_lengths_that_share_a_bucket_spend_almost_the_budget(constrained: Side) -> None:
    sigma = 0.54  # of Alpaca's logarithms
    lengths = np.rint(16 * np.random.default_rng(0).lognormal(0.0, sigma, 5000)).astype(int) + 1
    assert len(set(lengths.tolist())) > 60
    for budget in (0.05, 0.1, 0.3, 0.5):
        ahead = policy_input(estimated(1), lengths, budget, constrained, k=1 / 80)
        assert spend(Optimal().fit(ahead), ahead) == pytest.approx(budget, abs=0.006)


@given(policy_inputs())
def test_with_more_to_spend_nobody_is_started_later(ahead: PolicyInput) -> None:
    table = Optimal().fit(ahead)
    assert np.all(np.diff(table.budgets) >= 0)
    for delays in (table.device_s, table.server_s):
        assert np.all(delays[1:] <= delays[:-1])
    assert not (table.server_s if ahead.constrained is DEVICE else table.device_s).any(), "the other one never waits"


def test_where_the_device_is_of_no_use_the_budget_is_left() -> None:
    ahead = policy_input(observed([0.3, 0.4, 0.5, 0.6]), [100], 0.5, k=1.0)
    assert spend(Optimal().fit(ahead), ahead) == pytest.approx(0, abs=1e-6)


# --- the trade ------------------------------------------------------------------------------------------------------


def server(kind: str, seed: int) -> Survival:
    random = np.random.default_rng(seed)
    match kind:
        case "lognormal":
            times = random.lognormal(-0.5, 0.5, 300)
        case "heavy":
            times = random.lognormal(-0.5, 1.0, 300)
        case "uniform":
            times = random.uniform(0.1, 2.0, 300)
        case _:
            times = np.where(random.random(300) < 0.08, random.normal(4.5, 0.1, 300), random.normal(0.35, 0.02, 300))
    return mixture([(300, observed(times)), (3.0, heavy_tail(float(np.median(times))))])


def compared(kind: str, constrained: Side, budget: float, seed: int, k: float, c: float) -> float:
    """Our mean + kappa CVaR over the paper's, at the budget that the paper really spends (steps being steps)."""
    ahead = policy_input(server(kind, seed), PROMPTS, budget, constrained, k=k, c=c)
    paper = Paper().fit(ahead)
    ahead = replace(ahead, budget=min(1.0, spend(paper, ahead)))
    return objective(Optimal().fit(ahead), ahead, KAPPA) / objective(paper, ahead, KAPPA)


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("kind", ["lognormal", "heavy", "uniform", "stalling"])
def test_its_mean_and_cvar_are_never_worse_than_the_papers(kind: str, constrained: Side, budget: float) -> None:
    devices = [(1 / 30, 0.0), (1 / 80, 0.0), (0.002, 0.3), (1 / 80, 1.0)]
    assert max(compared(kind, constrained, budget, seed, k, c) for seed in range(3) for k, c in devices) <= 1.01


def test_nor_with_a_fast_device_and_a_large_budget() -> None:
    assert max(compared("heavy", DEVICE, budget, 0, 1 / 150, 0.0) for budget in (0.7, 0.9)) <= 1.01


def test_on_a_server_that_stalls_it_is_far_better_than_the_paper() -> None:
    ahead = policy_input(server("stalling", 0), PROMPTS, 0.2, k=1 / 80)
    assert objective(Optimal().fit(ahead), ahead, KAPPA) < 0.7 * objective(Paper().fit(ahead), ahead, KAPPA)


@pytest.mark.parametrize("budget", [0.12, 0.2, 0.3])
def test_the_wait_ends_where_the_stall_begins_and_not_inside_it(budget: float) -> None:
    stalling = observed(np.concatenate([np.linspace(0.30, 0.40, 920), np.linspace(4.4, 4.6, 80)]))
    ahead = policy_input(stalling, PROMPTS, budget, k=1 / 80)
    assert Paper(alpha=0.05).fit(ahead).device_s.max() > 4
    table, common = Optimal().fit(ahead), ahead.lengths.shares > 0.15
    for _, rung in rungs(table, budget):
        assert table.device_s[rung, 0, common].max() < 1


@pytest.mark.parametrize(
    ("constrained", "budget", "better"),
    [(DEVICE, 0.1, 0.9), (DEVICE, 0.3, 0.98), (SERVER, 0.1, 1.0), (SERVER, 0.3, 0.99)],
)
def test_to_heed_how_slow_the_server_was_lately_pays(constrained: Side, budget: float, better: float) -> None:
    curves = estimated(1, 0.3, 0.3), estimated(2, 1.5, 0.3)
    known = Contexts(np.zeros(1), np.array([0.9, 0.1]), curves)
    server = mixture([(0.9, curves[0]), (0.1, curves[1])])
    ahead = policy_input(server, PROMPTS, budget, constrained, k=1 / 80, contexts=known)
    heeding, not_heeding = (Optimal().fit(a) for a in (ahead, replace(ahead, contexts=None)))
    spent = spend(not_heeding, ahead)
    assert spent == pytest.approx(budget, abs=1e-6)
    assert objective(heeding, ahead, KAPPA) < better * objective(not_heeding, ahead, KAPPA)


@given(seeds, budgets)
def test_cvar_counts_only_as_much_as_kappa_says(seed: int, budget: float) -> None:
    ahead = policy_input(estimated(seed, sigma=0.8), PROMPTS, budget, k=1 / 80)
    careless, careful = (objective(Optimal(kappa).fit(ahead), ahead, 0.0) for kappa in (0.0, 1.0))
    assert careless <= 1.01 * careful, "the mean alone"


# --- server-constrained ---------------------------------------------------------------------------------------------


def served(table: Table, lengths: list[int], budget: float) -> list[bool]:
    return [math.isfinite(table.plan(length, RequestContext(budget, draw=0.999)).server_s) for length in lengths]


@pytest.mark.parametrize(
    ("c", "wanted"),
    [
        pytest.param(1.0, [True, True, True, True, False], id="a slow start weighs most on short prompts"),
        pytest.param(0.0, [False, False, False, False, True], id="without one the long prompts gain most per token"),
    ],
)
def test_the_server_is_asked_for_the_prompts_that_gain_most_per_token(c: float, wanted: list[bool]) -> None:
    lengths = [10, 20, 30, 40, 100]
    ahead = policy_input(lognormal(3, 500, median=0.3, sigma=0.2), lengths, 0.5, SERVER, k=0.005, c=c)
    assert served(Optimal(kappa=0.0).fit(ahead), lengths, 0.5) == wanted


@given(seeds, budgets, st.floats(0, 1))
def test_a_prompt_that_gains_more_per_token_is_not_passed_over(seed: int, budget: float, c: float) -> None:
    curve, lengths = estimated(seed), sorted(set(PROMPTS))
    ahead = policy_input(curve, PROMPTS, budget, SERVER, k=1 / 80, c=c)
    asked = served(Optimal(kappa=0.0).fit(ahead), lengths, budget)
    gains = [(c + n / 80 - float(curve.mean_below(c + n / 80))) / n for n in lengths]
    least = min((gain for gain, yes in zip(gains, asked, strict=True) if yes), default=math.inf)
    assert all(gain <= least + 1e-12 for gain, yes in zip(gains, asked, strict=True) if not yes)


@given(seeds, st.lists(st.integers(1, 300), min_size=2, max_size=24), budgets, st.floats(0, 2))
def test_with_a_scarce_server_the_tail_rises_by_no_more_than_the_mean_falls(
    seed: int, lengths: list[int], budget: float, c: float
) -> None:
    ahead = policy_input(estimated(seed), lengths, budget, SERVER, k=1 / 80, c=c)
    own, longest = Optimal().fit(ahead), Paper(paced=True).fit(ahead)
    means = [objective(table, ahead, 0.0) for table in (own, longest)]
    tails = [objective(table, ahead, 1.0) - mean for table, mean in zip((own, longest), means, strict=True)]
    gain = 1 - means[0] / means[1]
    assert gain >= -1e-6
    assert tails[0] / tails[1] - 1 <= 0.5 * gain + 0.005, "to within the grid of tau"


# --- unusual moments ------------------------------------------------------------------------------------------------


@cache
def fitted(seed: int, kappa: float = KAPPA, constrained: Side = DEVICE) -> Table:
    return Optimal(kappa).fit(policy_input(estimated(seed), PROMPTS, 0.3, constrained, k=1 / 80))


@given(st.integers(0, 9), st.sampled_from(PROMPTS), shares, draws, st.floats(0, 12))
def test_while_the_server_is_silent_the_plan_stands(
    seed: int, length: int, budget: float, draw: float, waited_s: float
) -> None:
    table = fitted(seed)
    wait = table.plan(length, RequestContext(budget, draw=draw)).device_s
    plan = table.plan(length, RequestContext(budget, draw=draw, waited_s=waited_s))
    assert plan.device_s >= 0
    assert plan.server_s == 0
    if waited_s <= wait:
        assert plan.device_s == pytest.approx(wait - waited_s, abs=1e-9)


@given(st.integers(0, 9), st.sampled_from(PROMPTS), shares, draws, st.floats(0, 9), st.floats(0, 9), st.floats(0, 20))
def test_the_later_the_device_could_answer_the_later_it_is_started(
    seed: int, length: int, budget: float, draw: float, waited_s: float, load_s: float, more_s: float
) -> None:
    table = fitted(seed, kappa=0.0)  # for the mean alone: to rescue the worst 1 % a slow device may start sooner
    sooner, later = (
        table.plan(length, RequestContext(budget, draw=draw, waited_s=waited_s, load_s=s))
        for s in (load_s, load_s + more_s)
    )
    assert later.device_s >= sooner.device_s


@given(st.integers(0, 9), st.sampled_from(PROMPTS), shares, draws, st.floats(1, 9), st.floats(0, 9))
def test_a_busy_device_waits_no_less(
    seed: int, length: int, budget: float, draw: float, slowdown: float, more: float
) -> None:
    table = fitted(seed, kappa=0.0)
    idle, busy = (
        table.plan(length, RequestContext(budget, draw=draw, slowdown=s, load_s=1e-9))
        for s in (slowdown, slowdown + more)
    )
    assert busy.device_s >= idle.device_s


@st.composite
def coarse_servers(draw: st.DrawFn) -> Survival:
    """So few steps that each of them is among the waits that are tried."""
    return observed([t / 10 for t in draw(st.lists(st.integers(1, 60), min_size=1, max_size=8, unique=True))])


requests = st.builds(
    RequestContext,
    budget=shares,
    draw=draws,
    load_s=st.floats(0, 5),
    slowdown=st.floats(1, 5),
    waited_s=st.floats(0.001, 7),
)


def cost(revision: _WaitRevision, curve: Survival, price: float, wait: float, device_s: float) -> float:
    """E[X] + weight * E[(X - tau)+] + price * P(T > wait), from the values of X = min(T, wait + T_d)."""
    values, chances = first_token(curve, wait + device_s)
    late: FloatArray = np.maximum(values - revision.tau, 0.0)
    return float(chances @ (values + revision.problem.weight * late) + price * curve.at(wait))


@given(coarse_servers(), budgets, st.sampled_from(PROMPTS), requests)
def test_the_revised_wait_is_the_best_one_that_is_left(
    server: Survival, fitted_to: float, length: int, request: RequestContext
) -> None:
    table = Optimal().fit(policy_input(server, PROMPTS, fitted_to, k=1 / 80))
    revision, rung = table.revision, table.rung(request.budget, request.draw)
    assert isinstance(revision, _WaitRevision)
    plan = table.plan(length, request)
    if server.at(request.waited_s) == 0:
        assert plan.device_s == 0, "it was never silent for so long: nothing to wait for"
        return
    beyond = server.given_beyond(request.waited_s)
    price = float(revision.prices[rung]) * length / float(np.mean(PROMPTS))
    device_s = request.load_s + request.slowdown * length / 80
    fine = np.union1d(np.linspace(request.waited_s, 7.5, 50), server.times[server.times >= request.waited_s])
    best = min(cost(revision, beyond, price, wait, device_s) for wait in fine.tolist())
    wait = request.waited_s + plan.device_s + 1e-9  # what was taken off and put on again may lie just before its step
    ours = cost(revision, beyond, price, wait, device_s)
    assert ours == pytest.approx(best, rel=1e-6)


def test_a_revised_plan_asks_the_server_for_the_same_prompts_while_nothing_has_changed() -> None:
    table = fitted(0, constrained=SERVER)
    for budget in table.budgets.tolist():
        for length in PROMPTS:
            usual, revised = (table.plan(length, RequestContext(budget, load_s=load_s)) for load_s in (0.0, 1e-12))
            assert revised == usual, (budget, length)


def test_a_prompt_longer_than_any_before_is_not_thought_quick_by_a_device_that_is_loading() -> None:
    table = fitted(0, constrained=SERVER)  # c = 0: the longer, the more is gained per token
    usual, loading = (table.plan(10_000, RequestContext(0.55, draw=0.999, load_s=load_s)) for load_s in (0.0, 0.5))
    assert usual.server_s == 0
    assert loading.server_s == 0


@given(st.integers(0, 9), st.sampled_from(PROMPTS), shares, draws, st.floats(0, 5), st.floats(0, 5))
def test_the_later_the_device_could_answer_the_rather_the_server_is_asked(
    seed: int, length: int, budget: float, draw: float, load_s: float, more_s: float
) -> None:
    table = fitted(seed, constrained=SERVER)
    sooner, later = (table.plan(length, RequestContext(budget, draw=draw, load_s=s)) for s in (load_s, load_s + more_s))
    assert sooner.device_s == later.device_s == 0
    assert load_s == 0 or later.server_s <= sooner.server_s

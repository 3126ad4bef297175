"""The paper's policy with the best of its tail shares, and as its text has it instead of its pseudocode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.eval.paper_variants import ALPHAS, PaperText, PaperTuned, objective, proportional_waits
from disco_daemon.dispatch.optimal import CVAR_SHARE, KAPPA, TAIL_SHARE
from disco_daemon.dispatch.paper import device_waits
from disco_daemon.dispatch.policy import PolicyInput
from disco_daemon.estimation.lengths import LengthDistribution
from disco_daemon.estimation.survival import kaplan_meier
from disco_daemon.types import Side

samples = st.lists(st.floats(0.05, 20.0), min_size=5, max_size=60)
prompts = st.lists(st.integers(1, 200), min_size=3, max_size=40)


def inputs_of(ttft_s: list[float], tokens: list[int], budget: float, side: Side = Side.DEVICE) -> PolicyInput:
    lengths = LengthDistribution.of(np.array(tokens))
    server = kaplan_meier(np.array(ttft_s), np.ones(len(ttft_s), dtype=np.bool_))
    return PolicyInput(server, lengths, lengths.values / 50.0, side, budget)


@given(samples, prompts, st.floats(0.0, 1.0), st.floats(0.0, 0.3), st.integers(0, 3))
@settings(max_examples=60)
def test_waits_in_proportion_to_the_prompt_spend_no_more_than_the_budget(
    ttft_s: list[float], tokens: list[int], budget: float, alpha: float, n_short: int
) -> None:
    inputs = inputs_of(ttft_s, tokens, budget)
    waits = proportional_waits(inputs, budget, alpha, n_short)
    if waits is None:
        assert n_short > 0
        return
    assert not waits[:n_short].any()
    assert np.all(np.diff(waits) >= 0), "longer prompts wait longer, up to w_tail"
    chance = inputs.server.at(waits)
    assert float(inputs.lengths.token_shares @ chance) <= budget + 1e-9


@given(samples, prompts, st.floats(0.0, 1.0))
@settings(max_examples=40)
def test_the_tuned_paper_is_by_our_objective_as_good_as_any_of_its_tail_shares(
    ttft_s: list[float], tokens: list[int], budget: float
) -> None:
    rung = round(budget * 40) / 40
    inputs = inputs_of(ttft_s, tokens, rung)
    table = PaperTuned().fit(inputs)
    waits = table.device_s[int(np.argmin(abs(table.budgets - rung))), 0]
    own = objective(inputs, waits, KAPPA)
    assert own == pytest.approx(min(objective(inputs, device_waits(inputs, rung, a), KAPPA) for a in ALPHAS))


def test_the_objective_is_the_mean_and_what_the_worst_percent_is_worth() -> None:
    rng = np.random.default_rng(3)
    inputs = inputs_of(rng.lognormal(0, 0.8, 4000).tolist(), [40], 0.5)
    waits = np.array([1.2])
    first = np.minimum(inputs.server.times.repeat(1), waits[0] + inputs.device_s[0])
    worst = np.sort(first)[-round(TAIL_SHARE * len(first)) :]
    expected = first.mean() + KAPPA / CVAR_SHARE * TAIL_SHARE * worst.mean()
    assert objective(inputs, waits, KAPPA) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("policy", [PaperTuned(), PaperText()])
def test_with_a_scarce_server_both_are_the_papers_third_algorithm(policy: PaperTuned | PaperText) -> None:
    inputs = inputs_of([0.2, 0.5, 0.9, 2.0], [5, 20, 80], 0.4, Side.SERVER)
    table = policy.fit(inputs)
    assert np.all(table.device_s == 0.0)
    assert policy.name in {"paper-tuned", "paper-eq1"}
    assert table.budgets[0] == 0.0
    assert table.budgets[-1] == pytest.approx(1.0)

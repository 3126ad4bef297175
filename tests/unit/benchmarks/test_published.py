"""The paper's own prices and arithmetic, which stand beside ours and decide nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.command import run_script
from benchmarks.eval.__main__ import main
from benchmarks.eval.evaluate import PHONES, EvaluationSetup
from benchmarks.eval.handoff import NONE, evaluate_handoffs, savings
from benchmarks.eval.published import (
    COLD_STARTS,
    GFLOP,
    MAX_TOKENS,
    REDUCTIONS,
    SERVICES,
    SHAPES,
    published_flops,
    token_usd,
)
from benchmarks.eval.traces import LatencyTrace, Requests
from benchmarks.relay import cold_start
from disco_daemon.dispatch.migrate import Costs
from disco_daemon.types import Side


@pytest.mark.parametrize("phone", ["pixel7pro-bloom1.1b", "xiaomi14-qwen0.5b"])
def test_its_equations_give_its_table_of_flops(phone: str) -> None:
    """Not for Bloom-560M: the parts that the paper prints for it sum to 80 %."""
    prefill, decode = GFLOP[phone]
    assert published_flops(SHAPES[phone], 32, prefill=False) / 1e9 == pytest.approx(decode, abs=0.005)
    assert published_flops(SHAPES[phone], 32, prefill=True) / 1e9 == pytest.approx(prefill, abs=0.01)


def test_each_cell_of_its_table_of_reductions_is_there() -> None:
    assert len(REDUCTIONS) == len(SERVICES) * 2 * len(PHONES) == 24
    assert np.mean(list(REDUCTIONS.values())) == pytest.approx(27.56, abs=0.01)


def test_at_its_prices_the_device_is_dear_where_it_is_constrained_but_for_one() -> None:
    for trace in SERVICES.values():
        for phone in PHONES:
            dear, cheap = (Costs(*token_usd(trace, phone.name, side)) for side in (Side.DEVICE, Side.SERVER))
            assert cheap.cheaper is Side.DEVICE
            is_odd = (trace, phone.name) == (SERVICES["Command"], "xiaomi14-qwen0.5b")
            assert dear.cheaper is (Side.DEVICE if is_odd else Side.SERVER), "1.85 $ a million against 2.00"


def test_costs_at_its_prices_are_those_of_answers_that_are_cut_off() -> None:
    rng = np.random.default_rng(1)
    trace = LatencyTrace("x", SERVICES["GPT"], rng.lognormal(0, 0.3, 200))
    requests = Requests(rng.integers(5, 50, 100), np.full(100, 10 * MAX_TOKENS))
    setup = EvaluationSetup(("paper",), PHONES[:1], (Side.SERVER,), (0.5,), n_seeds=1, n_requests=200)
    cells = list(evaluate_handoffs([trace], requests, setup, published_prices=True))
    stay = next(cell.cost_usd for cell in cells if cell.handoff == NONE)
    dearest = max(token_usd(trace.name, PHONES[0].name, Side.SERVER))
    assert 0 < stay < dearest * (MAX_TOKENS + 2 * 50)
    assert all(saved < 1 for _, saved in savings(cells))


def test_what_has_no_published_price_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ttft_own.csv").write_text("trace,ttft_s\n" + "mine,0.5\n" * 40, "utf-8")
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n" + "9,9\n" * 10, "utf-8")
    line = ["--traces", str(tmp_path), "--select", "*", "--handoff", "--published-prices"]
    assert run_script(lambda: main(line)) != 0
    assert "the paper states no price for mine" in capsys.readouterr().err


def test_a_load_is_shown_beside_the_first_token_and_the_papers() -> None:
    lines = cold_start.table({"n_runs": 10, "models": {"ours": {"load_s": 0.5, "ttft_s": 0.05}}}).splitlines()
    assert lines[1].split() == ["ours", "0.50", "0.050", "10"]
    assert len(lines) == 2 + len(COLD_STARTS)
    assert lines[2].split() == ["0.5B,", "RTX", "3060,", "Table", "4", "1.29", "0.051", "25"]

"""What /metrics says: parsed with the reference parser, and bounded whatever a server calls its endings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from disco_daemon.api.metrics import MAX_WORDS, Metrics
from disco_daemon.types import Attempt, Handoff, Outcome, Plan, Reading, Side, Usage

WON = Attempt(Side.DEVICE, "tiny", 0.0, 0.125, censored=False, usage=Usage(12, 30, 0.75))
LOST = Attempt(Side.SERVER, "gpt", 0.25, 1.5, censored=True, usage=Usage(12, 1), error="timeout")
OUTCOME = Outcome(
    request_id="r-1",
    created=1_700_000_000.5,
    model="disco",
    policy="paper",
    plan=Plan(0.0, 0.25),
    prompt_tokens=12,
    winner=Side.DEVICE,
    finish_reason="stop",
    error=None,
    ttft_s=0.125,
    duration_s=2.5,
    handoffs=1,
    tokens={Side.DEVICE: 30, Side.SERVER: 7},
    attempts=(WON, LOST),
    cost_usd=0.002,
    energy_j=4.5,
    moves=(
        Handoff(8, Side.SERVER, Side.DEVICE, "cost", 0.5, overlap=3),
        Handoff(20, Side.DEVICE, Side.SERVER, "stall", 0.0, dropped="diverged"),
    ),
    reading=Reading(0.985, 7.5, 0.22, 2, 0.2, 0.21),
)


def shown(metrics: Metrics, in_flight: int = 0) -> dict[tuple[str, ...], float]:
    """Every sample by its name and its labels' values, in the order of the labels' names."""
    text = metrics.render(in_flight).decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def observed(*outcomes: Outcome) -> dict[tuple[str, ...], float]:
    metrics = Metrics()
    for outcome in outcomes:
        metrics.observe(outcome)
    return shown(metrics)


def test_an_answer_counts_once_everywhere() -> None:
    found = observed(OUTCOME)
    expected: dict[tuple[str, ...], float] = {
        ("disco_answers_total", "none", "stop", "device"): 1,  # error, finish, winner
        ("disco_ttft_seconds_sum", "device"): 0.125,
        ("disco_ttft_seconds_bucket", "0.1", "device"): 0,
        ("disco_ttft_seconds_bucket", "0.2", "device"): 1,
        ("disco_largest_gap_seconds_bucket", "0.21", "device"): 0,
        ("disco_largest_gap_seconds_bucket", "0.23", "device"): 1,
        ("disco_tbt_p99_seconds_bucket", "0.21", "device"): 1,
        ("disco_qoe_ratio_count", "device"): 1,
        ("disco_stalled_tokens_total",): 2,
        ("disco_handoffs_total", "to_device", "cost", "done"): 1,
        ("disco_handoffs_total", "to_server", "stall", "diverged"): 1,
        ("disco_handoff_seconds_count", "to_device"): 1,
        ("disco_tokens_total", "delivered", "device"): 30,
        ("disco_tokens_total", "delivered", "server"): 7,
        ("disco_tokens_total", "prompt", "server"): 12,
        ("disco_tokens_total", "completion", "server"): 1,
        ("disco_cost_usd_total",): 0.002,
        ("disco_energy_joules_total",): 4.5,
    }
    assert {key: found[key] for key in expected} == expected
    assert ("disco_handoff_seconds_count", "to_server") not in found, "a dropped handoff took no time"


def test_counters_add_up_and_in_flight_is_a_gauge() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.observe(OUTCOME)
    assert shown(metrics, 4)[("disco_answers_in_flight",)] == 4
    found = shown(metrics, 1)
    assert found[("disco_answers_in_flight",)] == 1
    assert found[("disco_tokens_total", "delivered", "device")] == 90


@pytest.mark.parametrize(
    "changes",
    [
        {"winner": None, "finish_reason": None, "error": "timeout", "ttft_s": None, "reading": None, "moves": ()},
        {"finish_reason": "cancelled", "reading": None, "tokens": {}, "attempts": ()},
    ],
)
def test_an_answer_that_failed_or_was_left_counts_as_that(changes: dict[str, Any]) -> None:
    outcome = replace(OUTCOME, **changes)
    found = observed(outcome)
    winner = outcome.winner.value if outcome.winner else "none"
    key = ("disco_answers_total", outcome.error or "none", outcome.finish_reason or "none", winner)
    assert found[key] == 1
    assert not any(name.startswith("disco_qoe") for name, *_ in found)
    assert any(name.startswith("disco_ttft") for name, *_ in found) is (outcome.ttft_s is not None)


def test_a_server_that_invents_reasons_cannot_fill_the_memory() -> None:
    found = observed(*(replace(OUTCOME, finish_reason=f"because-{n}") for n in range(MAX_WORDS + 50)))
    answers = {key: value for key, value in found.items() if key[0] == "disco_answers_total"}
    assert len(answers) == MAX_WORDS + 1
    assert answers[("disco_answers_total", "none", "other", "device")] == 50


def test_two_daemons_in_one_process_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.observe(OUTCOME)
    assert shown(other)[("disco_cost_usd_total",)] == 0

"""What /metrics says: parsed with the reference parsers, as documented, and bounded whatever a server invents."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from disco_daemon.api.control.health import Budget, CapUse, HealthSnapshot
from disco_daemon.api.control.metrics import MAX_WORDS, Metrics, gaps_by_maker
from disco_daemon.types import (
    Attempt,
    DeviceHealth,
    EngineHealth,
    FleetHealth,
    HandoffRecord,
    LinkHealth,
    Outcome,
    Plan,
    Reading,
    Side,
    Usage,
)

DOCUMENT = Path(__file__).parent.parent.parent.parent / "docs/reference/metrics.md"
SPLIT = {"n_rows": 42, "round_trips": 15, "drafted": 20, "accepted": 14, "bytes": {"up": 96768, "down": 900}}
WON = Attempt(Side.DEVICE, "tiny", 0.0, 0.125, censored=False, usage=Usage(12, 30, 0.75, split=SPLIT))
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
        HandoffRecord(3, Side.DEVICE, Side.SERVER, "cost", 0.5, overlap=3),
        HandoffRecord(4, Side.SERVER, Side.DEVICE, "stall", 0.0, dropped="diverged"),
    ),
    reading=Reading(0.985, 7.5, 0.22, 2, 0.2, 0.21),
    arrivals_s=array("d", (100.0, 100.015, 100.03, 100.25, 100.45, 100.45)),
)
HEALTH = HealthSnapshot(
    version="1.2.3",
    in_flight=4,
    may_serve={Side.DEVICE: True, Side.SERVER: False},
    breakers={"server": 0.5},
    budget=Budget(Side.SERVER, 0.5, 0.45, 0.25),
    caps={"usd_per_day": CapUse(0.75, 0.125)},
    usd_per_kwh=0.3,
    rows_dropped=5,
    device=DeviceHealth(
        EngineHealth(True, 2, {"running": 3, "waiting": 1}, 100, 4096), LinkHealth(True, 0.0205), FleetHealth(1, 22, 3)
    ),
)


def parsed(metrics: Metrics) -> list[Metric]:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=0.0.4")
    return list(text_string_to_metric_families(body.decode()))


def shown(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample by its name and its labels' values, in the order of the labels' names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in parsed(metrics)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def observed(*outcomes: Outcome) -> dict[tuple[str, ...], float]:
    metrics = Metrics()
    for outcome in outcomes:
        metrics.observe(outcome)
    return shown(metrics)


def everything() -> Metrics:
    """Metrics in which every one of them has a value."""
    metrics = Metrics(lambda: HEALTH)
    asked_twice = (*OUTCOME.attempts, replace(LOST, hedge="lost", server="box"))
    metrics.observe(replace(OUTCOME, attempts=asked_twice, key="anna"))
    metrics.observe_lag(0.003)
    metrics.count_request("/v1/chat/completions", 200)
    return metrics


def test_an_answer_counts_once_everywhere() -> None:
    found = observed(OUTCOME)
    expected: dict[tuple[str, ...], float] = {
        ("disco_answers_total", "device", "none", "stop"): 1,  # endpoint, error, finish
        ("disco_ttft_seconds_sum", "device"): 0.125,
        ("disco_ttft_seconds_bucket", "device", "0.1"): 0,
        ("disco_ttft_seconds_bucket", "device", "0.2"): 1,
        ("disco_largest_gap_seconds_bucket", "device", "0.21"): 0,
        ("disco_largest_gap_seconds_bucket", "device", "0.23"): 1,
        ("disco_qoe_ratio_count", "device"): 1,
        ("disco_stalled_tokens_total",): 2,
        ("disco_handoffs_total", "to_server", "cost", "done"): 1,
        ("disco_handoffs_total", "to_device", "stall", "diverged"): 1,
        ("disco_handoff_seconds_count", "to_server"): 1,
        ("disco_tokens_total", "device", "delivered"): 30,
        ("disco_tokens_total", "server", "delivered"): 7,
        ("disco_tokens_total", "server", "prompt"): 12,
        ("disco_tokens_total", "server", "completion"): 1,
        ("disco_attempts_total", "device", "none"): 1,
        ("disco_attempts_total", "server", "timeout"): 1,
        ("disco_attempts_censored_total", "server"): 1,
        ("disco_attempt_ttft_seconds_sum", "device"): 0.125,
        ("disco_split_round_trips_total",): 15,
        ("disco_split_drafted_total",): 20,
        ("disco_split_accepted_total",): 14,
        ("disco_split_rows_total",): 42,
        ("disco_split_bytes_total", "up"): 96768,
        ("disco_split_bytes_total", "down"): 900,
        ("disco_cost_usd_total",): 0.002,
        ("disco_energy_joules_total",): 4.5,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert ("disco_handoff_seconds_count", "to_device") not in found, "a dropped handoff took no time"
    assert ("disco_attempt_ttft_seconds_count", "server") not in found, "its first token was not seen"


def test_each_gap_is_of_the_side_that_made_the_later_token() -> None:
    """Three tokens of the device, then three of the server, two of which came together."""
    found = {side: np.round(gaps, 6).tolist() for side, gaps in gaps_by_maker(OUTCOME)}
    assert found == {Side.DEVICE: [0.015, 0.015], Side.SERVER: [0.22, 0.2, 0.0]}
    shares = observed(OUTCOME)
    assert shares[("disco_tbt_seconds_bucket", "device", "0.01")] == 0
    assert shares[("disco_tbt_seconds_bucket", "device", "0.02")] == 2
    assert shares[("disco_tbt_seconds_bucket", "server", "0.001")] == 1
    assert shares[("disco_tbt_seconds_bucket", "server", "+Inf")] == 3
    assert shares[("disco_tbt_seconds_count", "server")] == 3
    assert shares[("disco_tbt_seconds_sum", "server")] == pytest.approx(0.42)


@pytest.mark.parametrize(
    "changes",
    [
        {"arrivals_s": ()},
        {"arrivals_s": (1.0,)},
        {"winner": None},
        {"moves": (HandoffRecord(9, Side.DEVICE, Side.SERVER, "cost", 0.5),)},  # it moved after the last token
        {"moves": (HandoffRecord(0, Side.DEVICE, Side.SERVER, "failure", 0.5),)},
        {"moves": tuple(HandoffRecord(at, s, s.other, "cost", 0.5) for at, s in ((5, Side.DEVICE), (2, Side.SERVER)))},
    ],
)
def test_no_gap_is_counted_twice_or_lost(changes: dict[str, Any]) -> None:
    outcome = replace(OUTCOME, **changes)
    n = 0 if outcome.winner is None else max(0, len(outcome.arrivals_s) - 1)
    assert sum(len(gaps) for _, gaps in gaps_by_maker(outcome)) == n
    found = observed(outcome)
    assert sum(value for key, value in found.items() if key[0] == "disco_tbt_seconds_count") == n


def test_a_gap_on_a_bucket_s_bound_belongs_to_it() -> None:
    found = observed(replace(OUTCOME, arrivals_s=(0.0, 0.5), moves=()))
    assert found[("disco_tbt_seconds_bucket", "device", "0.5")] == 1
    assert found[("disco_tbt_seconds_bucket", "device", "0.3")] == 0


def test_counters_add_up() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.observe(OUTCOME)
    found = shown(metrics)
    assert found[("disco_tokens_total", "device", "delivered")] == 90
    assert found[("disco_tbt_seconds_count", "device")] == 6


def test_how_things_are_is_looked_up_at_each_scrape() -> None:
    now = HEALTH
    metrics = Metrics(lambda: now)
    found = shown(metrics)
    expected: dict[tuple[str, ...], float] = {
        ("disco_build_info", "1.2.3"): 1,
        ("disco_answers_in_flight",): 4,
        ("disco_endpoint_up", "device"): 1,
        ("disco_endpoint_up", "server"): 0,
        ("disco_breaker_open", "server"): 0.5,
        ("disco_budget_allowed_ratio", "server"): 0.5,
        ("disco_budget_used_ratio", "server"): 0.25,
        ("disco_cap_spent_ratio", "usd_per_day"): 0.75,
        ("disco_history_rows_dropped_total",): 5,
        ("disco_engine_up",): 1,
        ("disco_engine_restarts_total",): 2,
        ("disco_engine_answers", "waiting"): 1,
        ("disco_engine_cells_used",): 100,
        ("disco_fleet_hosts",): 1,
        ("disco_fleet_layers_away",): 22,
        ("disco_fleet_moves_total",): 3,
        ("disco_split_up",): 1,
        ("disco_split_rtt_seconds",): 0.0205,
    }
    assert {key: found.get(key) for key in expected} == expected
    now = replace(
        HEALTH,
        in_flight=0,
        device=DeviceHealth(None, LinkHealth(False), HEALTH.device.fleet),
        budget=Budget(Side.DEVICE, 0.5, 0.5, None),
    )
    found = shown(metrics)
    assert found[("disco_answers_in_flight",)] == 0
    assert found[("disco_split_up",)] == 0
    assert ("disco_split_rtt_seconds",) not in found
    unknown = ("disco_engine", "disco_budget_used")
    assert not any(key[0].startswith(unknown) for key in found), "what is not known is not told as 0"


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
    key = ("disco_answers_total", winner, outcome.error or "none", outcome.finish_reason or "none")
    assert found[key] == 1
    assert not any(name.startswith("disco_qoe") for name, *_ in found)
    assert any(name.startswith("disco_ttft") for name, *_ in found) is (outcome.ttft_s is not None)


def test_a_server_that_invents_reasons_cannot_fill_the_memory() -> None:
    found = observed(*(replace(OUTCOME, finish_reason=f"because-{n}") for n in range(MAX_WORDS + 50)))
    answers = {key: value for key, value in found.items() if key[0] == "disco_answers_total"}
    assert len(answers) == MAX_WORDS + 1
    assert answers[("disco_answers_total", "device", "none", "other")] == 50


def test_two_daemons_in_one_process_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.observe(OUTCOME)
    assert shown(other)[("disco_cost_usd_total",)] == 0


def test_who_asks_for_openmetrics_gets_it_by_the_letter() -> None:
    """The parser refuses buckets out of order, counts that do not agree, names that clash, and a missing end."""
    body, content_type = everything().render("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in openmetrics(body.decode())}  # type: ignore[no-untyped-call]
    assert {"disco_answers", "disco_tbt_seconds", "disco_engine_restarts", "disco_loop_lag_seconds"} <= set(families)


# --- the document -----------------------------------------------------------------------------------------------------


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels of each metric in the tables of docs/reference/metrics.md."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|([^|]+)\|([^|]+)\|$", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    assert all(unit.strip() and meaning.strip() for *_, unit, meaning in rows)
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels, *_ in rows}


def told(families: Iterable[Metric]) -> dict[str, tuple[str, frozenset[str]]]:
    """The same of what is shown."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: (
            family.type,
            frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
        )
        for family in families
        if not family.name.endswith("_created")
    }


def test_every_metric_is_documented_with_its_type_and_labels_and_no_other() -> None:
    found = told(parsed(everything()))
    assert {name: found[name] for name in found if not name.startswith("process_")} == documented()


def test_the_units_are_prometheus_base_units() -> None:
    allowed = ("_seconds", "_ratio", "_total", "_joules_total", "_usd_total", "_info", "_usd_per_kwh")
    counts = {"disco_answers_in_flight", "disco_endpoint_up", "disco_engine_up", "disco_engine_answers",
              "disco_breaker_open",
              "disco_engine_cells", "disco_engine_cells_used", "disco_split_up",
                  "disco_fleet_hosts", "disco_fleet_layers_away"}  # fmt: skip
    assert [name for name in documented() if not name.endswith(allowed) and name not in counts] == []

"""When `benchmarks.engine.tiny_models` says that a run is right: by the events that a kind of model can have."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engine.tiny_models import is_right
from tests.fixtures.tiny_models import MODELS


def run_of(kind: str, **other: Any) -> dict[str, Any]:
    """What is measured where answers were cancelled, paused and preempted, as far as this kind can have that."""
    preempted = 20 if MODELS[kind].takes_cells else 0
    most = {"running": 8, "paused": 6, "swapped": 3, "waiting": 15}
    found = {"requests": 500, "same": 400, "differ": 0, "failed": 0, "cancelled": 100, "preempted": preempted}
    return {"models": {kind: {**found, "most": most, **other}}}


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_with_all_events_of_its_kind_is_right(kind: str) -> None:
    assert is_right(run_of(kind))
    assert not is_right(run_of(kind, differ=1))
    assert not is_right(run_of(kind, failed=1))


@pytest.mark.parametrize("kind", MODELS)
def test_a_long_run_in_which_nothing_happened_says_too_little_and_a_short_one_need_not(kind: str) -> None:
    nothing = {"cancelled": 0, "preempted": 0, "most": {"running": 8}}
    assert not is_right(run_of(kind, **nothing))
    assert is_right(run_of(kind, requests=20, **nothing))


def test_one_state_a_text_is_never_preempted_for_want_of_cells_and_is_paused_instead() -> None:
    assert [kind for kind, model in MODELS.items() if not model.takes_cells] == ["recurrent"]
    assert not is_right(run_of("recurrent", most={"running": 8, "paused": 0}))
    assert not is_right(run_of("moe", preempted=19))

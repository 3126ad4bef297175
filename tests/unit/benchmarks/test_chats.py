from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.command import run_script
from benchmarks.eval.__main__ import main
from benchmarks.eval.chats import (
    KINDS,
    LAPTOP,
    Chats,
    Kind,
    Row,
    WholePrompts,
    evaluate_chats,
    play_chats,
    summary,
)
from disco_daemon.dispatch.planner import Planner

LONG, SHORT = KINDS


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_each_prompt_of_a_chat_has_all_that_was_said_before(kind: Kind) -> None:
    chats = Chats.draw(kind, 300, 1)
    again = Chats.draw(kind, 300, 1)
    np.testing.assert_array_equal(chats.prompt, again.prompt)
    assert chats.begins[0]
    for before, now in pairwise(range(300)):
        if not chats.begins[now]:
            assert chats.prompt[now] > chats.prompt[before] + chats.answer[before]
    assert np.median(Chats.draw(kind, 5000, 2).server_s) == pytest.approx(0.9, rel=0.05)


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str, float], Row]:
    """Three seeds with the 200-request window, as docs/lab/evaluation.md has them."""
    found = [*evaluate_chats([LONG], [0.1, 0.3]), *evaluate_chats([SHORT], [0.3])]
    return {(row.chats, row.booked, row.budget): row for row in found}


@pytest.mark.parametrize(("chats", "budget"), [("long", 0.1), ("short", 0.3)])
def test_where_the_budget_binds_the_device_computes_that_share_of_the_prompt_tokens(
    rows: dict[tuple[str, str, float], Row], chats: str, budget: float
) -> None:
    assert rows[chats, "computed", budget].device_share == pytest.approx(budget, abs=0.01)


@pytest.mark.parametrize(("chats", "budget", "most"), [("long", 0.1, 0.4), ("long", 0.3, 0.5), ("short", 0.3, 0.5)])
def test_booking_what_is_computed_more_than_halves_the_time_to_the_first_token(
    rows: dict[tuple[str, str, float], Row], chats: str, budget: float, most: float
) -> None:
    now, before = rows[chats, "computed", budget], rows[chats, "whole prompt", budget]
    assert now.mean_ttft_s <= most * before.mean_ttft_s
    assert now.p99_ttft_s < before.p99_ttft_s
    assert now.device_share <= budget + 0.01


def test_any_200_requests_of_a_chat_keep_the_promise() -> None:
    chats = Chats.draw(SHORT, 800, 5)
    computed = np.array([tokens for _, tokens, _ in played(chats, 0.2)], np.float64).cumsum()
    offered = chats.prompt.cumsum()
    assert ((computed[200:] - computed[:-200]) / (offered[200:] - offered[:-200])).max() <= 0.22


def test_the_peer_books_a_cached_prompt_in_full() -> None:
    chats = Chats.draw(LONG, 200, 0)
    whole, computed = (list(played(chats, 0.1, kind)) for kind in (WholePrompts, Planner))
    assert sum(tokens for _, tokens, _ in whole) < sum(tokens for _, tokens, _ in computed)
    assert sum(won for *_, won in whole) < sum(won for *_, won in computed)


def played(chats: Chats, budget: float, kind: type[Planner] = Planner) -> list[tuple[float, int, bool]]:
    return [(one.ttft_s, one.computed, one.device_won) for one in play_chats(chats, kind, budget, 0)]


def test_the_command_prints_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--chats", "--budgets", "0.2", "--seeds", "1", "--requests", "60"]
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["chats"]
    assert [(row["chats"], row["booked"]) for row in found] == [
        (kind, booked) for kind in ("long", "short") for booked in ("whole prompt", "computed")
    ]
    assert main(line) == 0
    assert capsys.readouterr().out.strip() == summary([Row(**row) for row in found])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--online"], "--online goes with --traces only"),
        (["--policies", "paper"], "--policies goes with --traces only"),
        (["--budgets", "few"], "--budgets takes numbers"),
        (["--budgets", "2"], "--budgets takes shares from 0 to 1, not 2"),
    ],
)
def test_what_chats_do_not_take_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(lambda: main(["--chats", *words])) == 1
    assert said in capsys.readouterr().err


def test_the_laptop_is_the_one_of_the_documents() -> None:
    assert LAPTOP.prefill_tps == 400

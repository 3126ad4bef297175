"""What an edge learns of its exit from a partner's verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from disco_daemon.engine.serve.drafting import ExitDrafter
from disco_daemon.engine.serve.rows_at_partner import Away, ExitGuess
from disco_daemon.engine.wire import ExitCalibration
from disco_daemon.exits.calibrate import EVERY, LEAST
from disco_daemon.link.rows.edge_rows import EdgeAnswer

UNSAID, OTHER = 7, 8  # tokens


def asked_behind(n_drafts: int) -> Away:
    """Return an answer for which the partner was asked behind some drafts, where the exit would have said UNSAID."""
    away = Away(EdgeAnswer("1", [1, 2, 3], n_ctx=64, n_vocab=100, codec="f32"))
    away.chances = [0.9] * n_drafts
    away.signals = [np.full(3, float(i)) for i in range(n_drafts)]
    away.guess = ExitGuess(UNSAID, 0.1, np.full(3, float(n_drafts)))
    return away


@pytest.mark.parametrize(("n_right", "drawn", "n_told"), [(2, UNSAID, 3), (2, OTHER, 2), (1, UNSAID, 1), (0, OTHER, 0)])
def test_the_partners_own_token_judges_what_the_exit_would_have_said_if_all_drafts_are_right(
    n_right: int, drawn: int, n_told: int
) -> None:
    away = asked_behind(2)
    found, told = away.labels(2, n_right, drawn)
    assert ([float(row[0]) for row in found], told) == ([0.0, 1.0, 2.0], n_told)


def test_what_was_drafted_on_in_the_place_of_the_partners_token_is_judged_by_it_and_nothing_behind_it() -> None:
    away = asked_behind(4)  # of which two are judged
    for n_right in (1, 2, 3):
        found, told = away.labels(2, n_right, UNSAID)
        assert ([float(row[0]) for row in found], told) == ([0.0, 1.0, 2.0], n_right)


def test_an_exit_that_drafts_nothing_still_learns_how_sure_it_may_be() -> None:
    exit_ = ExitDrafter(ExitCalibration(coefficients=(1.0, 0, 0, 0), scores=(-1.0, 1.0), shares=(0.1, 0.2), coverage=0))
    logits = np.array([[3.0, 1.0, 0.5, 0.1]], np.float32)
    token, before, found = exit_.guess(logits[0])
    random = np.random.default_rng(22)
    for _ in range(2 * LEAST + EVERY):
        away = asked_behind(0)
        away.guess = ExitGuess(token, before, found + random.normal(0, 0.1, 3))
        exit_.learn(*away.labels(0, 0, token))
    assert before < 0.3
    assert exit_.guess(logits[0]).chance > 0.9

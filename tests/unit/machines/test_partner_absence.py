"""When an edge's answer goes on without its partner, and when it is the partner's again."""

from __future__ import annotations

import numpy as np
import pytest

from disco_daemon.engine.serve.partner_absence import (
    ALONE_AFTER_S,
    CATCH_UP_S,
    CAUGHT_UP,
    LOOK_S,
    SHORT_LOOK_S,
    UNANSWERED_S,
    PartnerAbsence,
)
from disco_daemon.engine.serve.rows_at_partner import Away
from disco_daemon.link.protocol import AnswerOpened
from disco_daemon.link.rows.credits import LinkCredits
from disco_daemon.link.rows.edge_rows import EdgeAnswer


@pytest.fixture
def away() -> Away:
    return Away(EdgeAnswer("1", [1, 2, 3], n_ctx=64, n_vocab=100), wanted_at=10.0)


def test_an_answer_waits_for_a_partner_that_has_gone_a_while_but_no_reader_for_longer(away: Away) -> None:
    absence = PartnerAbsence()
    absence.begin(10.5)
    absence.begin(11.0)  # the first moment counts
    assert not absence.goes_alone(away, 10.5 + ALONE_AFTER_S - 0.31, waits=True)
    assert absence.goes_alone(away, 10.01 + UNANSWERED_S, waits=True)
    assert not absence.goes_alone(away, 10.01 + UNANSWERED_S, waits=False)
    assert absence.goes_alone(away, 10.51 + ALONE_AFTER_S, waits=False)
    away.is_alone = True
    assert not absence.goes_alone(away, 99.0, waits=False)


def test_a_partner_that_is_there_may_take_its_time_unless_it_was_lost_in_mid_answer(away: Away) -> None:
    absence = PartnerAbsence()
    assert not absence.goes_alone(away, 99.0, waits=True)
    away.is_back = True
    assert absence.goes_alone(away, 10.01 + UNANSWERED_S, waits=True)
    assert not absence.goes_alone(away, 10.0 + UNANSWERED_S - 0.01, waits=True)
    assert not absence.goes_alone(away, 99.0, waits=False)


def test_an_answer_is_the_partners_again_once_that_has_caught_up_or_has_had_its_time(away: Away) -> None:
    absence, link = PartnerAbsence(), LinkCredits(100)
    absence.begin(10.0)
    absence.end(20.0)
    answer = away.answer
    answer.add(0, [1, 2, 3], np.ones((3, 4), np.float32))
    answer.open()
    away.is_alone = True
    assert not absence.comes_back(away, link, 1, 20.0)  # it is not known what the partner has
    answer.opened(AnswerOpened(id="1", n_past=0))
    absence.heard_at = 20.0
    assert not absence.comes_back(away, link, 1, 20.0)  # rows are due
    answer.send_due(link)
    assert absence.comes_back(away, link, 1, 20.0)
    link.spend(2 * CAUGHT_UP - 2)
    assert not absence.comes_back(away, link, 1, 20.0)
    assert absence.comes_back(away, link, 2, 20.0)
    assert absence.comes_back(away, link, 1, 20.01 + CATCH_UP_S)
    assert not absence.comes_back(away, None, 2, 99.0)  # it has gone again
    away.alone_at = 20.5  # since it was too slow
    assert not absence.comes_back(away, link, 2, 20.6)
    absence.heard_at = 20.7
    assert absence.comes_back(away, link, 2, 20.8)


def test_answers_that_may_be_due_are_looked_at_more_often(away: Away) -> None:
    absence = PartnerAbsence(patience_s=5.0)
    assert absence.look_s([]) is None
    assert absence.look_s([away]) == LOOK_S
    away.is_back = True
    assert absence.look_s([away]) == SHORT_LOOK_S
    away.is_back = False
    absence.begin(1.0)
    assert absence.look_s([away]) == SHORT_LOOK_S
    assert not absence.is_given_up(5.9)
    assert absence.is_given_up(6.0)

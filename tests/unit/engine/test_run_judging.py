"""Rows of drafts are judged together or one after the other, whichever was measured to be quicker."""

from __future__ import annotations

import pytest

from disco_daemon.engine.serve.run_judging import FAR, OTHER_EVERY, TRIES, RunJudging


def learned(row_s: float, together_s: float, n: int = 4, right: int = 2) -> RunJudging:
    """What is known after some runs of `n` rows by each way, of which `right` drafts are right."""
    judging = RunJudging()
    for _ in range(TRIES):
        assert not judging.in_steps([n])  # first it has to be known what that takes
        judging.observe(n, together_s, together=True)
    for _ in range(TRIES):
        assert judging.in_steps([n])
        judging.observe(1, row_s, together=False)
    for _ in range(100):
        judging.observe_verdict(right + 1, n)
    return judging


@pytest.mark.parametrize(
    ("row_s", "together_s", "in_steps"),
    [
        (4.75e-3, 19.75e-3, True),  # bound by arithmetic: three rows of four are enough
        (4e-3, 5e-3, False),  # bound by reading the weights
        (4e-3, 12.5e-3, True),
        (4e-3, 11.5e-3, False),
    ],
)
def test_the_quicker_way_is_taken(row_s: float, together_s: float, in_steps: bool) -> None:
    assert learned(row_s, together_s).in_steps([4]) is in_steps


def test_the_more_drafts_are_wrong_the_more_steps_are_worth() -> None:
    assert not learned(4e-3, 10e-3, right=3).in_steps([4])
    assert learned(4e-3, 10e-3, right=0).in_steps([4])


def test_the_other_way_is_tried_now_and_then_unless_it_is_far_slower() -> None:
    near, far = learned(4e-3, 14e-3), learned(4e-3, FAR * 14e-3 * 1.3)
    assert sum(not near.in_steps([4]) for _ in range(10 * OTHER_EVERY)) == 10
    assert all(far.in_steps([4]) for _ in range(10 * OTHER_EVERY))


def test_runs_without_a_draft_have_nothing_to_be_put_together() -> None:
    assert RunJudging().in_steps([1, 1, 1])


def test_the_runs_of_several_answers_count_together() -> None:
    judging = learned(4e-3, 10e-3, n=6, right=2)
    assert judging.in_steps([2, 2, 2]) is (4e-3 * (3 + 3 * 0.4) < 10e-3)

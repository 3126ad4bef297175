"""The judge of `benchmarks.handoff` sees what it is there for."""

from __future__ import annotations

import pytest

from benchmarks.handoff.seams import Compared, compare

WHOLE = "Once upon a time there was a fox who found a lantern by the old mill and took it home."
AT = 40
BEFORE, REST = WHOLE[:AT], WHOLE[AT:]


def test_an_unbroken_text_is_identical() -> None:
    assert compare(WHOLE, AT, WHOLE, "whatever") == Compared(identical=True)


def test_the_targets_own_continuation_is_a_difference_that_is_explained() -> None:
    other = " near the sea, which was very cold that year."
    found = compare(BEFORE + other, AT, WHOLE, other)
    assert (found.identical, found.explained, found.lost, found.doubled) == (False, True, 0, 0)
    assert "seam at 40" in found.note
    assert compare(BEFORE + other[:20], AT, WHOLE, other).explained, "it may have ended earlier, at its limit"


@pytest.mark.parametrize("n", [3, 8, 20])
def test_doubled_text_is_counted(n: int) -> None:
    found = compare(BEFORE + BEFORE[-n:] + REST, AT, WHOLE, REST)
    assert (found.explained, found.doubled, found.lost) == (False, n, 0)


@pytest.mark.parametrize("n", [1, 5, 12])
def test_lost_text_is_counted(n: int) -> None:
    found = compare(BEFORE + REST[n:], AT, WHOLE, REST)
    assert (found.explained, found.lost, found.doubled) == (False, n, 0)


def test_a_beginning_that_the_source_never_said_is_not_explained() -> None:
    changed = "Twice" + WHOLE[4:AT]
    assert not compare(changed + " and so on", len(changed), WHOLE, " and so on").explained


def test_a_target_that_repeats_itself_doubles_nothing() -> None:
    joined, at = "She ran and she ran and she ran and she sang.", len("She ran and she ran")
    judged = compare(joined, at, "She ran and she ran away.", joined[at:])
    assert (judged.lost, judged.doubled, judged.explained) == (0, 0, True)
    judged = compare(joined, at, "Another time it said something else.", joined[at:])
    assert (judged.lost, judged.doubled, judged.explained) == (0, 0, False)

"""What an exit is worth on kinds of text, from its tokens beside the whole model's. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disco_daemon.exits.calibrate import Calibration, Doubles, VerdictLearner, calibration_error
from disco_daemon.exits.quality import DRAFT_ON, LONGEST_DRAFT, Ints

Truths = NDArray[np.bool_]
HELD_OUT = 3  # one of so many answers of the other kind is kept to judge by
EVERY = 250  # verdicts between two looks
MOST = 2000  # verdicts after which an exit is to know again how sure it may be
SLACK = 0.02  # by which more tokens than 1 - theta may differ
ASKED_ERROR = 0.03  # of a calibration


@dataclass(frozen=True, slots=True)
class JudgedTokens:
    """Of n tokens: an exit's signals, n x 3, whether the whole model says the same, whether the exit decided it.

    `answers` has for each token the number of its answer.
    """

    found: Doubles
    agrees: Truths
    left: Truths
    answers: Ints

    def where(self, chosen: Truths) -> JudgedTokens:
        """Return some of them."""
        return JudgedTokens(self.found[chosen], self.agrees[chosen], self.left[chosen], self.answers[chosen])


def share_that_differs(tokens: JudgedTokens) -> float | None:
    """Return the share of tokens that left which the whole model would not have said; None if none left."""
    return None if not tokens.left.any() else float(1 - tokens.agrees[tokens.left].mean())


def replay_verdicts(learner: VerdictLearner, tokens: JudgedTokens) -> Iterator[int]:
    """Let an exit draft these answers and learn from the verdicts; yield after each how many tokens were judged so far.

    Drafts go on while all of them are right with a chance of DRAFT_ON; a verdict tells of each up to the first wrong
    one, and of what the exit would have said next where all are right, as in an engine.
    """
    n = 0
    for own in np.split(np.arange(len(tokens.agrees)), np.flatnonzero(np.diff(tokens.answers)) + 1):
        at = 0
        while at < len(own):
            run = own[at : at + LONGEST_DRAFT]
            chances = np.cumprod(learner.confidence(tokens.found[run]))
            drafted = run[: int(np.sum(chances >= DRAFT_ON))]
            n_right = int(np.sum(np.cumprod(tokens.agrees[drafted])))
            told = run[: n_right + 1]  # behind drafts that are all right comes the partner's own token
            learner.learn(tokens.found[told], tokens.agrees[told])
            n += len(told)
            at += n_right + 1
            yield n


def errors_after_change(base: Calibration, first: JudgedTokens, then: JudgedTokens) -> list[tuple[int, float]]:
    """Return the calibration error on one kind of text after so many verdicts on it, which come after another kind.

    The first is that of an exit that has had verdicts on `first` only. All are computed from answers of which no
    verdict is learned from.
    """
    learner = VerdictLearner(base)
    deque(replay_verdicts(learner, first), maxlen=0)
    is_held = then.answers % HELD_OUT == HELD_OUT - 1
    held, due = then.where(is_held), EVERY
    errors = [(0, error_of(learner, held))]
    for n in replay_verdicts(learner, then.where(~is_held)):
        if n >= due:
            errors.append((n, error_of(learner, held)))
            due += EVERY
        if n >= MOST:
            break
    return errors


def error_of(learner: VerdictLearner | Calibration, tokens: JudgedTokens) -> float:
    """Return the calibration error on tokens."""
    return calibration_error(learner.confidence(tokens.found), tokens.agrees)

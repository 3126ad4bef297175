"""When an edge's answers go on without the partner, and when they are its again. Pure, the clock is passed in.

When the partner has gone, answers wait for it a while; then the exit goes on alone. When it is back it may have nothing
of them: it computes all of their rows once more, and meanwhile the exit draws on. It is asked again when it has caught
up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...link.rows.credits import LinkCredits
from .rows_at_partner import Away

ALONE_AFTER_S = 1.0  # that an answer waits for a partner that has gone, before the exit goes on with it
UNANSWERED_S = 1.2  # since it was asked; silence is noticed late, and no reader is to wait for longer than 1.5 s
CAUGHT_UP = 8  # rows of an answer that the partner has yet to compute, at most, when it is asked again: some 50 ms
CATCH_UP_S = 3.0  # that a partner which is back has for it; then it is asked, whatever it computes for others
LOOK_S = 0.25  # between two looks at how long the partner has been gone, and signs of life
SHORT_LOOK_S = 0.05  # while an answer may be due to go on alone: what is late by that is not noticed


@dataclass(slots=True)
class PartnerAbsence:
    """Since when the partner has been gone, since when it is back, and when it was last heard of, s.

    Without it an answer that cannot go on alone waits for `patience_s`, s.
    """

    patience_s: float = 0.0
    since: float | None = None
    back_at: float = 0.0
    heard_at: float = 0.0

    def begin(self, now: float) -> None:
        """Take note that the partner has gone."""
        if self.since is None:
            self.since = now

    def end(self, now: float) -> None:
        """Take note that it is back."""
        self.since, self.back_at = None, now

    def is_given_up(self, now: float) -> bool:
        """Say whether the partner has been gone for longer than answers wait."""
        return self.since is not None and now - self.since >= self.patience_s

    def goes_alone(self, away: Away, now: float, *, waits: bool) -> bool:
        """Say whether the exit goes on with an answer from now on, which `waits` for a verdict or is computed.

        While the partner is there it does so only for those that were asked of it before it had gone.
        """
        is_late = waits and now - away.wanted_at >= UNANSWERED_S
        if self.since is None:
            return is_late and away.is_back and not away.is_alone
        return (is_late or now - self.since >= ALONE_AFTER_S) and not away.is_alone

    def comes_back(self, away: Away, credits: LinkCredits | None, n_answers: int, now: float) -> bool:
        """Say whether the partner, which has `n_answers`, is asked for an answer again with which the exit went on."""
        if credits is None or not away.is_alone or not away.answer.is_open:
            return False
        has_caught_up = not away.answer.n_due and credits.total - credits.left <= CAUGHT_UP * n_answers
        has_spoken = self.heard_at > away.alone_at  # one that was too slow has to say something first
        return (has_caught_up and has_spoken) or now - max(self.back_at, away.alone_at) >= CATCH_UP_S

    def look_s(self, answers: Iterable[Away]) -> float | None:
        """Return how long to wait until the next look at the answers, s; None if there are none."""
        may_be_due = [self.since is not None or away.is_back for away in answers]
        return (SHORT_LOOK_S if any(may_be_due) else LOOK_S) if may_be_due else None

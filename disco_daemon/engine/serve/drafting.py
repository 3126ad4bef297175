"""What an edge guesses ahead of its partner, by the text itself or by its exit, and how far that pays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from ...exits.calibrate import Calibration, Doubles, VerdictLearner, signals
from ...scheduler.draft_length import DraftLength, RunTimes, expected_run
from .. import wire
from ..llama.hidden import FloatRows
from ..llama.model import Llama
from ..speculation.speculate import lookup_of
from .away import Away
from .iteration import Batch, DecodedRows
from .sequence import Sequence

FIRST_TIMES = RunTimes(0.01, 0.02, 0.005)  # of a run of drafts, before any was measured
ROW_SHARE = 0.1  # what a row beside others takes at the edge, in times of a row alone
PROBE_EVERY = 32  # sure tokens; one of them is judged all the same, so that it stays known how sure the exit may be
SURE = 0.6  # chance from which on the guesses of prompt lookup are taken, and not the exit's


class NextStep(Enum):
    """What becomes of the token behind the last computed one."""

    LEAVE = auto()  # the exit decides it
    DRAFT = auto()  # the exit has guessed it, and its row is computed next
    ASK = auto()  # the partner is asked for it


class ExitDrafter:
    """Drafts by the exit of a range of layers, and learns from verdicts how sure it may be (`exits.calibrate`)."""

    def __init__(self, calibration: wire.ExitCalibration) -> None:
        coefficients, scores, shares = map(np.array, (calibration.coefficients, calibration.scores, calibration.shares))
        self._learner = VerdictLearner(Calibration(coefficients, scores, shares))

    def draft(self, logits: FloatRows) -> tuple[int, float, Doubles]:
        """Return the exit's token for a row of logits, its chance to be right, and the signals it was told from."""
        found = signals(logits[np.newaxis])
        return int(logits.argmax()), float(self._learner.confidence(found)[0]), found[0]

    def learn(self, found: list[Doubles], n_right: int) -> None:
        """Learn from a verdict on drafts with these signals: the first `n_right` were right, the next one was not."""
        n = min(n_right + 1, len(found))
        if n:
            self._learner.learn(np.stack(found[:n]), np.arange(n) < n_right)


@dataclass(slots=True)
class EdgeDrafting:
    """Decides what to guess, and what needs no verdict.

    All mutable state: what is known of the `exit`, if there is one, what runs take, and how many tokens were sure.
    """

    llama: Llama
    exit: ExitDrafter | None = None
    lengths: DraftLength = field(default_factory=lambda: DraftLength(FIRST_TIMES))
    n_sure: int = 0

    def look_up(self, s: Sequence) -> list[int]:
        """Guess from the text itself, as many tokens as pay; none where the exit guesses better."""
        chance = lookup_of(s).chance
        if self.exit is not None and chance < SURE:
            return []
        times = self.lengths.times
        beside = RunTimes(ROW_SHARE * times.edge_s, times.round_trip_s, times.partner_s)
        return lookup_of(s).guess(min(self._n_useful(s), expected_run(beside, chance).n_drafts))

    def decide(self, s: Sequence, away: Away, rows: DecodedRows, *, is_up: bool) -> NextStep:
        """Say what becomes of the next token, whose logits are those of the last of the decoded `rows`.

        Without a partner it leaves. Where the answer's mode lets it, it does so if the exit is sure of it, but for a
        few, which are judged as drafts all the same. Else the exit guesses it if that pays, and if `is_up` the link:
        the guess is then `ahead`.
        """
        if away.is_alone:
            return NextStep.LEAVE
        if self.exit is None or rows.draft or s.draw.candidates or away.answer.judged is not None:
            return NextStep.ASK
        token, chance, found = self.exit.draft(self.llama.logits(rows.last))
        is_sure = away.theta is not None and not s.ahead and chance >= away.theta
        self.n_sure += is_sure
        if is_sure and (self.n_sure % PROBE_EVERY or not is_up):
            return NextStep.LEAVE
        is_end = bool(s.ahead) and self.llama.vocabulary.ends(s.ahead[-1])
        pays = is_sure or self.lengths.wants_draft(away.chances, chance, ends_text=is_end)
        if not (is_up and pays) or len(s.ahead) >= self._n_useful(s):
            away.unsaid = (token, found)  # the partner's own token tells whether it would have been right
            return NextStep.ASK
        s.ahead.append(token)
        away.chances.append(chance)
        away.signals.append(found)
        return NextStep.DRAFT

    def _n_useful(self, s: Sequence) -> int:
        """Count how many guessed tokens may be of use; the token that is drawn in any case is not among them."""
        room = self.llama.n_ctx - len(s.tokens) - 1
        return max(0, room if s.n_left is None else min(room, s.n_left - 1))

    def learn_step(self, batch: Batch) -> None:
        """Learn how long a row takes at the edge."""
        if batch.is_decoded and not (batch.load.n_prefill or batch.drafts) and batch.took_s > 0:
            self.lengths.observe_step(batch.took_s)

    def learn_verdict(
        self, s: Sequence, away: Away, n_judged: int, tokens: tuple[int, ...], times_s: tuple[float, float]
    ) -> None:
        """Learn from a verdict, and forget its drafts; `times_s` are those of its round trip and of the partner.

        `tokens` are the drafts that were right, and the partner's own token behind them.
        """
        took_s, busy_s = times_s
        if away.counts.round_trips > 1 and took_s > 0 and 0 < busy_s < math.inf:  # the first one computed the prompt
            self.lengths.observe_round_trip(n_judged, took_s, busy_s)
        told = away.take_verdict(len(tokens) - 1, tokens[-1])
        if self.exit is not None:
            self.exit.learn(*told)
        s.ahead = []

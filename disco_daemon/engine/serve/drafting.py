"""What an edge guesses ahead of its partner, by the text itself or by its exit, and how far that pays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from ...exits.calibrate import Calibration, Doubles, VerdictLearner, signals
from ...link.rows.pending import MAX_JUDGED
from ...scheduler.draft_length import DraftLength, RunTimes, expected_run
from .. import wire
from ..llama.hidden import FloatRows
from ..llama.model import Llama
from ..speculation.speculate import lookup_of
from .iteration import Batch, DecodedRows
from .rows_at_partner import Away, ExitGuess, JudgedDrafts
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

    def guess(self, logits: FloatRows) -> ExitGuess:
        """Return the exit's guess for a row of logits."""
        found = signals(logits[np.newaxis])
        return ExitGuess(int(logits.argmax()), float(self._learner.confidence(found)[0]), found[0])

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
        away.guess = None
        if away.is_alone:
            return NextStep.LEAVE
        if self.exit is None or rows.draft or s.draw.candidates or away.answer.judged is not None:
            return NextStep.ASK
        if away.answer.n_drafts > len(s.ahead):  # there are drafts already, whose cells were lost
            return NextStep.ASK
        away.guess = guess = self.exit.guess(self.llama.logits(rows.last))
        is_sure = away.theta is not None and not s.ahead and guess.chance >= away.theta
        self.n_sure += is_sure
        if is_sure and (self.n_sure % PROBE_EVERY or not is_up):
            away.guess = None
            return NextStep.LEAVE
        return self.go_on(s, away, is_up=is_up, is_sure=is_sure)

    def go_on(self, s: Sequence, away: Away, *, is_up: bool, is_sure: bool = False) -> NextStep:
        """Draft the guess behind the rows that are there, if it pays or `is_sure`; else let the partner be asked."""
        guess = away.guess
        if guess is None or not is_up or len(s.ahead) >= self._n_useful(s):
            return NextStep.ASK
        chances, n_ready, ends_text = away.chances, away.n_ready, self._ends_text(s)
        pays = is_sure or self.lengths.wants_draft(chances, guess.chance, n_ready=n_ready, ends_text=ends_text)
        if pays:
            away.draft(s)
        return NextStep.DRAFT if pays else NextStep.ASK

    def guess_ahead(self, away: Away, row: int) -> None:
        """Guess what follows a row that was computed while a verdict is awaited."""
        assert self.exit is not None
        away.guess = self.exit.guess(self.llama.logits(row))

    def draft_ahead(self, s: Sequence, away: Away, now: float) -> bool:
        """Draft on while a verdict is awaited, if that is of use; whether there is a row to compute.

        Only exact answers do: of others, what is sure leaves without a verdict.
        """
        guess, judged = away.guess, away.answer.judged
        if guess is None or judged is None or away.theta is not None:
            return False
        if len(s.ahead) >= min(self._n_useful(s), MAX_JUDGED - 1):  # a new link would be asked for all of them
            return False
        chances, n_judged = (*away.chances, guess.chance), judged[1] - judged[0]
        if not self.lengths.wants_ahead(chances, n_judged, now - away.asked_at, ends_text=self._ends_text(s)):
            return False
        away.draft(s)
        return True

    def _ends_text(self, s: Sequence) -> bool:
        """Whether nothing follows the latest draft."""
        return bool(s.ahead) and self.llama.vocabulary.ends(s.ahead[-1])

    def _n_useful(self, s: Sequence) -> int:
        """Count how many guessed tokens may be of use; the token that is drawn in any case is not among them."""
        room = self.llama.n_ctx - len(s.tokens) - 1
        return max(0, room if s.n_left is None else min(room, s.n_left - 1))

    def learn_step(self, batch: Batch) -> None:
        """Learn how long a row takes at the edge."""
        if batch.is_decoded and not (batch.load.n_prefill or batch.drafts) and batch.took_s > 0:
            self.lengths.observe_step(batch.took_s)

    def learn_verdict(self, away: Away, judged: JudgedDrafts, times_s: tuple[float, float]) -> None:
        """Learn from a verdict; `times_s` are those of its round trip and of the partner."""
        took_s, busy_s = times_s
        if away.counts.round_trips > 1 and took_s > 0 and 0 < busy_s < math.inf:  # the first one computed the prompt
            self.lengths.observe_round_trip(judged.n_judged + 1, took_s, busy_s)
        self.lengths.observe_waste(len(judged.taken.tokens), judged.n_wasted)
        if self.exit is not None:
            self.exit.learn(*judged.labels)

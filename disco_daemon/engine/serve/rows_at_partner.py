"""What an edge knows of an answer whose upper layers are at a partner: rows, drafts, and what was done for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct, structs

from ...exits.calibrate import Doubles
from ...link.protocol import DraftVerdict, DrawRules
from ...link.rows.edge_rows import EdgeAnswer, VerdictTaken
from .. import wire
from ..llama.model import Llama
from .sequence import Sequence

GONE = "partner_gone"  # the reason of an answer that fails with its partner
ALONE = "alone"  # the mode of an answer that the exit makes, without the partner


class SplitCounts(Struct):
    """What both machines did, for one answer or for all: see `wire.SplitUsage`."""

    edge_rows: int = 0
    partner_rows: int = 0
    round_trips: int = 0
    drafted: int = 0
    accepted: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    partner_s: float = 0.0
    prompt_rows: int = 0
    partner_prompt_s: float = 0.0
    n_left: int = 0
    n_alone: int = 0

    def usage(self, alone_from: int | None = None) -> wire.SplitUsage:
        """Return it as a message's part."""
        return wire.SplitUsage(**structs.asdict(self), alone_from=alone_from)

    def take(self, verdict: DraftVerdict, n_judged: int, n_right: int) -> None:
        """Count a verdict on `n_judged` rows, of whose drafts `n_right` were right."""
        self.drafted += n_judged - 1
        self.accepted += n_right
        self.partner_rows += verdict.n_rows
        self.partner_s += verdict.busy_s
        if (n_plain := verdict.n_rows - verdict.n_judged) > 0:
            self.prompt_rows += n_plain
            self.partner_prompt_s += verdict.busy_s * n_plain / verdict.n_rows

    def add(self, other: SplitCounts) -> None:
        """Add what was done for another answer."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class ExitGuess(NamedTuple):
    """The exit's token behind a row, its chance to be right, and the signals (3) that this was told from."""

    token: int
    chance: float
    signals: Doubles


class JudgedDrafts(NamedTuple):
    """What a verdict says of drafts: how many it judged, how many were in vain, and the `labels` for the exit.

    `stands`: rows that were made while it was awaited are those of the text.
    """

    taken: VerdictTaken
    n_judged: int
    n_wasted: int
    labels: tuple[list[Doubles], int]
    stands: bool


@dataclass(slots=True)
class Away:
    """One answer: what the partner has of it, what was done for it, and when a verdict was last asked for, s.

    `wanted_at` is when the answer began to wait for one, which may have been over another link. While it `is_back`, the
    partner has not answered since that link was lost.

    Of the drafts that an exit made, `chances` are those to be right, and `signals` (n x 3) what they were told from:
    those to be judged, and those made since they were asked for. `guess` is what would come next, if that is known.
    Of the present run the first `n_ready` rows were made while the last verdict was awaited. Tokens of which the exit
    is as sure as `theta` leave without a verdict, None of them without. While `is_alone`, the exit draws them all:
    since the partner has gone, last at `alone_at`, s, first at number `alone_from` of the answer.
    The edge's own sampler knows the first `n_followed` tokens of the answer.
    """

    answer: EdgeAnswer
    theta: float | None = None
    is_alone: bool = False
    alone_at: float = 0.0
    alone_from: int | None = None
    n_followed: int = 0
    counts: SplitCounts = field(default_factory=SplitCounts)
    asked_at: float = 0.0
    wanted_at: float = 0.0
    is_back: bool = False
    chances: list[float] = field(default_factory=list)
    signals: list[Doubles] = field(default_factory=list)
    guess: ExitGuess | None = None
    n_ready: int = 0

    def draft(self, s: Sequence) -> None:
        """Make the guess a draft, whose row is computed next."""
        assert self.guess is not None
        s.ahead.append(self.guess.token)
        self.chances.append(self.guess.chance)
        self.signals.append(self.guess.signals)
        self.guess = None

    def take(self, s: Sequence, message: DraftVerdict) -> JudgedDrafts | None:
        """Take a verdict, and keep drafts that stand; None if it came too late. Raises BadFrameError.

        If the token drawn is the one that was guessed, all that was drafted on stands, else nothing of it.
        """
        start, end = self.answer.judged or (0, 0)
        n_ahead = self.answer.n_rows - end
        if (taken := self.answer.verdict(message)) is None:
            return None
        n_judged, n_right = end - start - 1, len(taken.tokens) - 1
        n_dropped = max(0, n_ahead - taken.n_standing)
        self.counts.take(message, n_judged + 1, n_right)
        self.counts.drafted += n_dropped
        labels = self.labels(n_judged, taken.n_right, taken.tokens[-1])
        stands = s.is_away and 0 < n_ahead == taken.n_standing
        at = len(self.chances) - (taken.n_drafts if taken.n_standing else 0)
        s.ahead, self.chances, self.signals = s.ahead[at:], self.chances[at:], self.signals[at:]
        self.guess, self.n_ready = (self.guess, n_ahead) if stands else (None, 0)
        return JudgedDrafts(taken, n_judged, n_judged - n_right + n_dropped, labels, stands)

    def labels(self, n_judged: int, n_right: int, drawn: int) -> tuple[list[Doubles], int]:
        """Return the signals of what the exit said, and would have said of the token drawn, and how many were right.

        Of its drafts `n_judged` were judged, `n_right` are right, and `drawn` is the partner's own token behind them.
        """
        said = [*self.signals, *(() if self.guess is None else (self.guess.signals,))]
        is_next = n_right == n_judged == len(self.signals) and self.guess is not None and self.guess.token == drawn
        return said[: n_judged + 1], n_right + is_next

    def forget_drafts(self, s: Sequence) -> None:
        """Forget what was drafted; drafts that were computed and not judged count as such."""
        self.counts.drafted += self.answer.n_drafts
        s.ahead, self.chances, self.signals, self.guess, self.n_ready = [], [], [], None, 0

    def lose_cells(self, s: Sequence) -> None:
        """Take note that the cells of all drafts are gone: those that have rows are computed again all at once."""
        n = self.answer.n_drafts
        del self.chances[n:], self.signals[n:]
        s.ahead, self.guess, self.n_ready = [], None, 0

    def drop_uncomputed(self, s: Sequence) -> None:
        """Forget drafts whose rows are not there: their computation did not go through."""
        n = max(0, s.n_past - len(s.tokens))
        del s.ahead[n:], self.chances[n:], self.signals[n:]


def away_for(name: str, s: Sequence, llama: Llama, codec: str) -> Away:
    """Return what is known of an answer at its beginning; the partner is to know it by this name."""
    is_confident = s.request.mode == "confident"
    answer = EdgeAnswer(
        name,
        s.given.prompt + s.given.tokens,
        n_ctx=llama.n_ctx,
        n_vocab=llama.vocabulary.n_tokens,
        codec=codec,
        is_private=s.request.private,
        is_eager=not is_confident,
    )
    return Away(answer, theta=s.request.theta if is_confident else None)


def follow_draws(llama: Llama, s: Sequence, away: Away) -> None:
    """Let the edge's own sampler know the answer so far, before it draws. Raises FormatError for what cannot be of it.

    The draw is counted.
    """
    answer = s.tokens[len(s.given.prompt) :]
    if s.draw.sampler is None:
        s.draw.sampler = s.new_sampler(llama)
    else:
        s.draw.sampler.follow(answer[away.n_followed :])
    away.n_followed = len(answer)
    s.unsent.is_alone = away.is_alone
    if away.is_alone:
        away.counts.n_alone += 1
        away.alone_from = len(answer) if away.alone_from is None else away.alone_from
    else:
        away.counts.n_left += 1


def rules_of(s: Sequence, llama: Llama) -> DrawRules:
    """Return how the partner is to draw the tokens of an answer."""
    request = s.rules
    return DrawRules(
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        grammar=s.grammar,
        drawing=request.drawing,
        prompt=tuple(s.given.prompt) if request.drawing.repeats else (),
        thought=llama.vocabulary.thought_limit(request, s.given.prompt),
    )


def refusal_of(request: wire.Generate, *, has_exit: bool, can_wait: bool) -> wire.Failed | None:
    """Return why an answer cannot begin; None if it can. The daemon knows before; here is where it would be sent.

    `can_wait`: the partner is there, or it is not needed while it is gone.
    """
    if request.private and request.mode != ALONE:
        message = "A private answer is not sent to a partner"
        return wire.Failed(id=request.id, reason="private", message=message, your_fault=False)
    if request.mode != "exact" and not has_exit:
        message = f"The mode {request.mode} needs an early exit, and the layers here came without one"
        return wire.Failed(id=request.id, reason="no_exit", message=message, your_fault=True)
    return None if can_wait or request.mode == ALONE else gone(request.id)


def gone(answer_id: str) -> wire.Failed:
    """Return the failure of an answer whose partner has gone."""
    message = "The partner, which has the upper layers of the model, cannot be reached"
    return wire.Failed(id=answer_id, reason=GONE, message=message, your_fault=False)

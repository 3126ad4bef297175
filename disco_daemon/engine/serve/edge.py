"""The edge's batcher: it computes the lower layers, and its partner draws the tokens.

To the daemon it is a batcher like any other. Rows go to the partner as they are computed; when the last token of a
text, and the tokens guessed behind it, are computed, the partner is asked, and the answer is *away* until the verdict
is there. Where the answer's mode lets it, the exit decides tokens of which it is sure. When the partner has gone,
answers wait for it a while; then the exit goes on alone until it is back, or they fail: the daemon may go on with a
server. An answer that is alone from the start is none of the link's: nothing here that sends knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...link.protocol import (
    AnswerClosed,
    AnswerFailed,
    AnswerOpened,
    BadFrameError,
    CloseAnswer,
    Credit,
    DraftVerdict,
    NeedRows,
    PeerFrame,
    PeerJoined,
    PeerLeft,
    Refused,
)
from ...link.rows.credits import LinkCredits
from ...link.rows.edge_rows import send_all_due
from ...link.trust.refusals import failure_told
from .. import wire
from ..kv.row_texts import RowTexts
from ..llama.refusals import FormatError
from .absence import PartnerAbsence
from .away import ALONE, Away, SplitCounts, away_for, follow_draws, gone, refusal_of, rules_of
from .batch import Batcher
from .drafting import EdgeDrafting, NextStep
from .iteration import Batch, DecodedRows, Share
from .partner import SendFrame
from .prepare import Prepared
from .sequence import Sequence


@dataclass(slots=True)
class EdgeBatcher(Batcher):
    """A batcher over the first layers, with one partner for the rest.

    Mutable state: besides the batcher's, what the partner has of each answer and did for it (`_away`) and for those
    that have ended (`totals`, and their rows, `_texts`), what was done for those that are `_alone` from the start, the
    `credits` of the link (None while it is down), the partner's `absence`, and what `drafting` has learned.
    """

    send_frame: SendFrame = field(kw_only=True)
    drafting: EdgeDrafting = field(kw_only=True)
    absence: PartnerAbsence = field(kw_only=True, default_factory=PartnerAbsence)
    codec: str = "f32"
    credits: LinkCredits | None = None
    peer: int = 0
    totals: SplitCounts = field(default_factory=SplitCounts)
    _texts: RowTexts = field(init=False)
    _away: dict[Sequence, Away] = field(default_factory=dict)
    _alone: dict[Sequence, SplitCounts] = field(default_factory=dict)
    _n_opened: int = 0

    def __post_init__(self) -> None:
        self.absence.begin(self.clock())
        self._texts = RowTexts(self.llama.n_cells)

    @property
    def is_up(self) -> bool:
        """Whether the partner can be asked."""
        return self.credits is not None

    # --- an answer's life ----------------------------------------------------------------------------------------

    def queue(self, ready: Prepared) -> None:
        """Queue an answer, or refuse it: none that needs the partner begins while that has been gone for too long."""
        can_wait = not self.absence.is_given_up(self.clock()) or self._goes_on(ready.request)
        refusal = refusal_of(ready.request, has_exit=self.drafting.exit is not None, can_wait=can_wait)
        if refusal is None:
            Batcher.queue(self, ready)
        else:
            self.send(refusal)

    def _goes_on(self, request: wire.Generate) -> bool:
        """Whether the exit goes on with an answer without the partner."""
        return request.goes_on and self.drafting.exit is not None

    def _announce(self, s: Sequence) -> None:
        """Open the answer at the partner, unless it is to be alone."""
        if s.request.mode == ALONE:
            self._alone[s] = SplitCounts()
            s.unsent.is_alone = True
            return
        self._n_opened += 1
        away = self._away[s] = away_for(f"{self._n_opened}", s, self.llama, self.codec)  # the daemon's ids stay here
        if self.is_up:
            self._tell(away.answer.open())

    def _rewind(self, s: Sequence, n_same: int) -> None:
        if s in self._away:
            self._away[s].forget_drafts(s)
        Batcher._rewind(self, s, n_same)
        if s in self._away and not s.has_ended:
            self._follow(s)

    def _follow(self, s: Sequence) -> None:
        """Let the partner forget the tokens that are no longer the text's, and add those that are new."""
        if (cut := self._away[s].answer.follow(s.tokens)) is not None:
            self._tell(cut)

    def _begin_drawing(self, s: Sequence) -> None:
        """Let the partner draw behind the tokens that the answer has."""
        if s in self._alone:
            Batcher._begin_drawing(self, s)
            return
        self._follow(s)  # the last given token may have been taken away, to be drawn again
        if self.is_up:
            self._tell_rules(s)

    def _tell_rules(self, s: Sequence) -> None:
        answer = s.tokens[len(s.given.prompt) :]
        self._tell(self._away[s].answer.begin_drawing(rules_of(s), answer, s.draw.candidates))

    def _remove(self, s: Sequence, *, is_whole: bool = False) -> None:
        if (counts := self._alone.pop(s, None)) is None:
            counts = (away := self._away.pop(s)).counts
            self._texts.put(away.answer)
            self._tell(CloseAnswer(id=away.answer.name))
            if s.slot >= 0 and s.n_past > len(s.tokens):  # guesses are no text that anybody comes back to
                self.admission.cells.cut(s, len(s.tokens))
        self.totals.add(counts)
        Batcher._remove(self, s, is_whole=is_whole)

    def _done(self, s: Sequence, reason: str) -> wire.Done:
        if (counts := self._alone.get(s)) is not None:
            return s.done_message(reason, counts.usage(0))
        (away := self._away[s]).forget_drafts(s)
        return s.done_message(reason, away.counts.usage(away.alone_from))

    @property
    def n_drafted(self) -> tuple[int, int]:
        """How many guesses the partner has judged for the answers that have ended, and how many were right."""
        return self.totals.drafted, self.totals.accepted

    @property
    def split_usage(self) -> wire.SplitUsage | None:
        """What the partner did for the answers that have ended."""
        return self.totals.usage()

    # --- rows go up ----------------------------------------------------------------------------------------------

    def _build(self) -> Batch:
        """Choose the rows; of cached prefixes those are computed again that the partner has not."""
        self._look_at_gone()
        for s, away in self._away.items():
            if away.answer.is_open and s.slot >= 0:
                self._compute_uncovered(s)
            if s.ahead and s.n_past < len(s.tokens):  # their cells are gone; they are computed again all at once
                away.lose_cells(s)
        return Batcher._build(self)

    def _ahead(self) -> list[Sequence]:
        """Return the answer that drafts on while its verdict is awaited: the only one, for others' time is theirs."""
        here = [s for s in self.admission.sequences.values() if not s.is_held]
        can = self.is_up and len(here) == 1 and here[0].is_away and self.admission.cells.make_room(2)
        return here if can and self.drafting.draft_ahead(here[0], self._away[here[0]], self.clock()) else []

    def _recover(self, rc: int, shares: list[Share]) -> None:
        """Bring all back in step after a decode that did not go through; of drafts made on the chance none is owed."""
        if (s := shares[0][0]).is_away:
            self.admission.cells.cut(s, s.n_past)
            self._away[s].drop_uncomputed(s)
        else:
            Batcher._recover(self, rc, shares)

    def _drafts(self, decoding: list[Sequence], prefilling: list[Sequence]) -> dict[Sequence, list[int]]:
        """Return the guesses to compute: those that have gone up already, or else those of prompt lookup."""
        del prefilling
        found: dict[Sequence, list[int]] = {}
        for s in decoding:
            away = self._away.get(s)
            if away is None or s.ahead:
                continue  # each is computed by itself
            if away.answer.n_drafts:  # their cells were lost
                draft = away.answer.tokens[away.answer.n_text :]
            elif away.is_alone or away.theta is not None or s.draw.candidates or self.speculator is None:
                continue
            else:
                draft = self.drafting.look_up(s)
            if draft and self.admission.cells.make_room(len(draft) + 2 * len(decoding)):
                found[s] = draft
        return found

    def _use(self, s: Sequence, rows: DecodedRows) -> None:
        """Send the rows; behind the last token and its guesses draw, or draft on, or ask the partner and wait."""
        if (counts := self._alone.get(s)) is not None:
            counts.edge_rows += rows.n
            counts.n_alone += rows.last >= 0
            Batcher._use(self, s, rows)
            return
        away, pos = self._away[s], s.n_past - rows.n
        tokens = [*(s.tokens + s.ahead if s.ahead else s.tokens)[pos : s.n_past], *rows.draft]
        away.answer.fill(pos, tokens, self.llama.hidden_out[rows.at : rows.at + rows.n])
        away.counts.edge_rows += rows.n
        if rows.last < 0:
            s.send_progress(self.send, idle=s.is_held and not s.is_prefilling)
        elif s.is_away:
            self.drafting.guess_ahead(away, rows.last)
        elif (step := self.drafting.decide(s, away, rows, is_up=self.is_up)) is NextStep.LEAVE:
            self._draw_here(s, away, rows)
        elif step is NextStep.ASK:
            self._wait(s)
        self._send_due()

    def _wait(self, s: Sequence) -> None:
        """Ask the partner, and wait for its verdict."""
        self.admission.send_away(s)
        self._away[s].wanted_at = self._away[s].asked_at = self.clock()
        self._ask(s)

    def _draw_here(self, s: Sequence, away: Away, rows: DecodedRows) -> None:
        """Draw the next token from the exit's logits, as the partner would from its own."""
        try:
            follow_draws(self.llama, s, away)
        except FormatError as e:  # the partner has drawn what it should not
            self._fail(s, str(e))
            return
        Batcher._use(self, s, rows)
        if not s.has_ended:
            away.n_followed += 1
            away.answer.leave(s.tokens[-1])

    def _ask(self, s: Sequence) -> None:
        """Ask for the verdict on what is computed, unless that is asked already or nobody can be."""
        if self.is_up and (away := self._away[s]).answer.judged is None:
            self._tell(away.answer.judge())
            away.asked_at = self.clock()
            away.counts.round_trips += 1

    def _learn(self, batch: Batch) -> None:
        Batcher._learn(self, batch)
        self.drafting.learn_step(batch)

    def _send_due(self) -> None:
        """Send all rows that are due and for which there are credits."""
        if self.credits is None:
            return
        by_name = {away.answer.name: away for away in self._away.values()}
        for message, payload in send_all_due((away.answer for away in self._away.values()), self.credits):
            by_name[message.id].counts.bytes_up += len(payload)
            self.send_frame(self.peer, message, payload)

    def _tell(self, message: PeerFrame) -> None:
        if self.is_up:
            self.send_frame(self.peer, message)

    # --- verdicts come down --------------------------------------------------------------------------------------

    def receive(self, peer: int, message: PeerFrame, payload: bytes) -> None:
        """Carry out what the relay or the partner says; what cannot be true ends the link."""
        del payload
        self.absence.heard_at = self.clock()
        try:
            self._receive(peer, message)
            self._send_due()
        except BadFrameError as e:
            self.send_frame(peer, Refused(reason="bad_frame", message=str(e)))
            self._leave()

    def _receive(self, peer: int, message: PeerFrame) -> None:
        match message:
            case PeerJoined(credits=n, n_ctx=n_ctx) if n_ctx > 0:
                self.llama.bound_texts(n_ctx)
                self._join(peer, n)
            case PeerLeft() | Refused():
                self._leave()
            case _ if not self.is_up or peer != self.peer:
                pass  # it was on its way when the link went down
            case Credit() if self.credits is not None:
                self.credits.give_back(message)
            case AnswerOpened() | DraftVerdict() | NeedRows() | AnswerFailed():
                self._receive_for(message)
            case _ if not isinstance(message, AnswerClosed):  # of that one the daemon was told when it ended
                msg = f"{type(message).__name__} is not for an edge"
                raise BadFrameError(msg)

    def _join(self, peer: int, credits: int) -> None:
        """Open all answers at the partner, which may have what was computed before the link was lost."""
        self.peer, self.credits = peer, LinkCredits(credits)
        self.absence.end(self.clock())
        for s, away in self._away.items():
            away.is_back = True
            self._tell(away.answer.open())
            if not (s.is_held or away.is_alone):
                self._tell_rules(s)
            if s.is_away:
                self._ask(s)

    def _leave(self) -> None:
        self.credits = None
        self.absence.begin(self.clock())
        self._look_at_gone()

    def _receive_for(self, message: AnswerOpened | DraftVerdict | NeedRows | AnswerFailed) -> None:
        s = next((s for s, away in self._away.items() if away.answer.name == message.id), None)
        if s is None:
            return  # it has ended here
        answer = self._away[s].answer
        match message:
            case AnswerOpened():
                answer.opened(message)
                self._compute_uncovered(s)
            case NeedRows():
                for again in answer.need(message):
                    self._tell(again)
                self._compute_uncovered(s)
            case DraftVerdict():
                self._take_verdict(s, message)
            case AnswerFailed(your_fault=your_fault):
                self._fail_away(s, *failure_told(message), your_fault=your_fault)

    def _compute_uncovered(self, s: Sequence) -> None:
        """Compute tokens again whose rows are wanted, but were never computed here, or are not kept."""
        if s.n_past > (answer := self._away[s].answer).n_covered:  # the KV cache has them from other texts
            self._texts.fill(answer, s.tokens[: s.n_past], [away.answer for away in self._away.values()])
        if s.n_past > (n := answer.n_covered):
            if s.is_away:
                self.admission.bring_back(s)
            self.admission.cut(s, n)

    def _take_verdict(self, s: Sequence, message: DraftVerdict) -> None:
        """Add the tokens that the partner has drawn; what was guessed wrong is cut from the KV cache."""
        away, now = self._away[s], self.clock()
        if (judged := away.take(s, message)) is None:
            return
        away.is_back = False
        self.drafting.learn_verdict(away, judged, (now - away.asked_at, message.busy_s))
        if s.n_past > judged.taken.n_rows:
            self.admission.cells.cut(s, judged.taken.n_rows)
        if s.is_away:
            self.admission.bring_back(s)
        self._take_all(s, judged.taken.tokens, now)
        if judged.stands and not s.has_ended and self.drafting.go_on(s, away, is_up=self.is_up) is NextStep.ASK:
            self._wait(s)

    def _fail_away(self, s: Sequence, reason: str, message: str, *, your_fault: bool) -> None:
        self._remove(s)
        text = f"The partner cannot go on with the answer: {message}"
        self.send(wire.Failed(id=s.request.id, reason=reason, message=text, your_fault=your_fault))

    # --- without a partner ---------------------------------------------------------------------------------------

    @property
    def wait_s(self) -> float | None:
        """How long to wait for a message at most before `look` is due, s; None while nothing is."""
        return self.absence.look_s(self._away.values())

    def look(self) -> bool:
        """Go on without a partner that has been gone for too long; give a sign of life for answers that wait."""
        can_compute = self._look_at_gone()
        self.send(wire.Alive())  # it is due while there are answers only
        return can_compute

    def _look_at_gone(self) -> bool:
        """Let answers go on alone, be the partner's again, or fail; whether one goes on alone from now on."""
        now, n_alone = self.clock(), 0
        for s, away in list(self._away.items()):
            if self._goes_on(s.request):
                if self.absence.goes_alone(away, now, waits=s.is_away):
                    self._go_alone(s, away)
                    n_alone += 1
                elif self.absence.comes_back(away, self.credits, len(self._away), now):
                    self._come_back(s, away)
            elif self.absence.is_given_up(now):
                self._remove(s)
                self.send(gone(s.request.id))
        return n_alone > 0

    def _go_alone(self, s: Sequence, away: Away) -> None:
        """Forget what was drafted; the last token is computed again, and what follows it is drawn here."""
        away.is_alone, away.alone_at = True, self.clock()
        away.forget_drafts(s)
        if self.is_up:
            self._tell(away.answer.cut(len(s.tokens)))
        else:
            away.answer.lose_link()
            away.answer.drop_drafts()
        if s.is_away:
            self.admission.bring_back(s)
        if s.n_past >= len(s.tokens):
            n_counted = s.prefill.n_counted
            self.admission.cut(s, len(s.tokens) - 1)
            s.prefill.n_counted = n_counted

    def _come_back(self, s: Sequence, away: Away) -> None:
        """Let the partner draw again what follows the text, which it has computed by now."""
        away.is_alone = away.is_back = s.unsent.is_alone = False
        if not s.is_held:
            self._tell_rules(s)

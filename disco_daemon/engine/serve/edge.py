"""The edge's side of a split model: it computes the lower layers, and its partner draws the tokens.

To the daemon it is an engine like any other. Rows go to the partner as they are computed; when the last token of a
text, and the tokens guessed behind it, are computed, the partner is asked, and the answer is *at the partner* until the
verdict is there. Where the answer's mode lets it, the exit decides tokens of which it is sure. When the partner has
gone, answers wait for it a while; then the exit goes on alone until it is back, or they fail: the daemon may go on with
a server. An answer that is alone from the start is none of the link's: nothing here that sends knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from .drafting import EdgeDrafting, NextStep
from .iteration import Batch, DecodedRows
from .partner import SendFrame
from .partner_absence import PartnerAbsence
from .remote_layers import RemoteLayers, RemoteUsage
from .rows_at_partner import ALONE, Away, SplitCounts, away_for, follow_draws, gone, refusal_of, rules_of
from .sequence import AT_PARTNER, Sequence

if TYPE_CHECKING:
    from .batch import Batcher


@dataclass(slots=True)
class SplitEdge(RemoteLayers):
    """The last layers are at one partner.

    Mutable state: what the partner has of each answer and did for it (`_away`) and for those that have ended (`totals`,
    and their rows, `_texts`), what was done for those that are `_alone` from the start, the `credits` of the link (None
    while it is down), the partner's `absence`, and what `drafting` has learned.
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

    def attach(self, batcher: Batcher) -> None:
        """Answer this batcher from now on."""
        RemoteLayers.attach(self, batcher)
        self.absence.begin(batcher.clock())
        self._texts = RowTexts(batcher.llama.n_cells)

    @property
    def peers(self) -> tuple[int, ...]:
        """The numbers of the links: there is one, up or down."""
        return (self.peer,)

    @property
    def is_up(self) -> bool:
        """Whether the partner can be asked."""
        return self.credits is not None

    # --- an answer's life ----------------------------------------------------------------------------------------

    def refusal(self, request: wire.Generate) -> wire.Failed | None:
        """Return why an answer cannot begin: none that needs the partner does while that has been gone for too long."""
        can_wait = not self.absence.is_given_up(self.batcher.clock()) or self._goes_on(request)
        return refusal_of(request, has_exit=self.drafting.exit is not None, can_wait=can_wait)

    def _goes_on(self, request: wire.Generate) -> bool:
        """Whether the exit goes on with an answer without the partner."""
        return request.goes_on and self.drafting.exit is not None

    def opened(self, s: Sequence) -> None:
        """Open the answer at the partner, unless it is to be alone."""
        if s.request.mode == ALONE:
            self._alone[s] = SplitCounts()
            s.unsent.is_alone = True
            return
        self._n_opened += 1  # the daemon's ids stay here
        away = self._away[s] = away_for(f"{self._n_opened}", s, self.batcher.llama, self.codec)
        if self.is_up:
            self._tell(away.answer.open())

    def rewound(self, s: Sequence) -> None:
        """Forget what was drafted, and let the partner follow."""
        if s in self._away:
            self._away[s].forget_drafts(s)
            self._follow(s)

    def _follow(self, s: Sequence) -> None:
        """Let the partner forget the tokens that are no longer the text's, and add those that are new."""
        if (cut := self._away[s].answer.follow(s.tokens)) is not None:
            self._tell(cut)

    def begin_drawing(self, s: Sequence) -> None:
        """Let the partner draw behind the tokens that the answer has."""
        if s in self._alone:
            RemoteLayers.begin_drawing(self, s)
            return
        self._follow(s)  # the last given token may have been taken away, to be drawn again
        if self.is_up:
            self._tell_rules(s)

    def _tell_rules(self, s: Sequence) -> None:
        answer = s.tokens[len(s.given.prompt) :]
        self._tell(self._away[s].answer.begin_drawing(rules_of(s, self.batcher.llama), answer, s.draw.candidates))

    def ended(self, s: Sequence, *, failed: bool) -> wire.SplitUsage:
        """Close an answer at the partner; return what that did for it."""
        if (counts := self._alone.pop(s, None)) is not None:
            self.totals.add(counts)
            return counts.usage(0)
        away = self._away.pop(s)
        if not failed:
            away.forget_drafts(s)
        self._texts.put(away.answer)
        self._tell(CloseAnswer(id=away.answer.name))
        if s.slot >= 0 and s.n_past > len(s.tokens):  # guesses are no text that anybody comes back to
            self.batcher.admission.cells.cut(s, len(s.tokens))
        self.totals.add(away.counts)
        return away.counts.usage(away.alone_from)

    def usage(self) -> RemoteUsage:
        """Return what the partner did for the answers that have ended; it judges the guesses."""
        return RemoteUsage(self.totals.drafted, self.totals.accepted, self.totals.usage())

    # --- rows go up ----------------------------------------------------------------------------------------------

    def candidates(self) -> list[Sequence]:
        """Return the sequences with cells; of cached prefixes those rows are wanted again that the partner has not."""
        self._look_at_gone()
        for s, away in self._away.items():
            if away.answer.is_open and s.slot >= 0:
                self._compute_uncovered(s)
            if s.ahead and s.n_past < len(s.tokens):  # their cells are gone; they are computed again all at once
                away.lose_cells(s)
        return self.batcher.admission.resident

    def compute(self, batch: Batch) -> bool:
        """Compute a batch; without any rows, those of a draft made while its verdict is awaited."""
        ahead = None if batch.rows else self._draft_ahead()
        if ahead is not None:
            batch.is_extra = True
            batch.add_last_tokens([ahead])
        self.batcher.run(batch)
        if ahead is not None and not batch.is_decoded:
            self._away[ahead].drop_uncomputed(ahead)
        self.drafting.learn_step(batch)
        return bool(batch.rows)

    def _draft_ahead(self) -> Sequence | None:
        """Return the answer that drafts on while its verdict is awaited: the only one, for others' time is theirs."""
        admission = self.batcher.admission
        match [s for s in admission.sequences.values() if not s.is_held]:
            case [s] if self.is_up and s.is_away and admission.cells.make_room(2):
                return s if self.drafting.draft_ahead(s, self._away[s], self.batcher.clock()) else None
        return None

    def drafts(self, decoding: list[Sequence], prefilling: list[Sequence]) -> dict[Sequence, list[int]]:
        """Return the guesses to compute: those that have gone up already, or else those of prompt lookup."""
        del prefilling
        found: dict[Sequence, list[int]] = {}
        for s in decoding:
            away = self._away.get(s)
            if away is None or s.ahead:
                continue  # each is computed by itself
            if away.answer.n_drafts:  # their cells were lost
                draft = away.answer.tokens[away.answer.n_text :]
            elif away.is_alone or away.theta is not None or s.draw.candidates or self.batcher.speculator is None:
                continue
            else:
                draft = self.drafting.look_up(s)
            if draft and self.batcher.admission.cells.make_room(len(draft) + 2 * len(decoding)):
                found[s] = draft
        return found

    def use(self, s: Sequence, rows: DecodedRows) -> None:
        """Send the rows; behind the last token and its guesses draw, or draft on, or ask the partner and wait."""
        if (counts := self._alone.get(s)) is not None:
            counts.edge_rows += rows.n
            counts.n_alone += rows.last >= 0
            self.batcher.draw_next(s, rows)
            return
        away, pos = self._away[s], s.n_past - rows.n
        tokens = [*(s.tokens + s.ahead if s.ahead else s.tokens)[pos : s.n_past], *rows.draft]
        away.answer.fill(pos, tokens, self.batcher.llama.hidden_out[rows.at : rows.at + rows.n])
        away.counts.edge_rows += rows.n
        if rows.last < 0:
            s.send_progress(self.batcher.send, idle=s.is_held and not s.is_prefilling)
        elif s.is_away:
            self.drafting.guess_ahead(away, rows.last)
        elif (step := self.drafting.decide(s, away, rows, is_up=self.is_up)) is NextStep.LEAVE:
            self._draw_here(s, away, rows)
        elif step is NextStep.ASK:
            self._wait(s)
        self._send_due()

    def _wait(self, s: Sequence) -> None:
        """Ask the partner, and wait for its verdict."""
        self.batcher.admission.send_away(s, AT_PARTNER)
        self._away[s].wanted_at = self._away[s].asked_at = self.batcher.clock()
        self._ask(s)

    def _draw_here(self, s: Sequence, away: Away, rows: DecodedRows) -> None:
        """Draw the next token from the exit's logits, as the partner would from its own."""
        try:
            follow_draws(self.batcher.llama, s, away)
        except FormatError as e:  # the partner has drawn what it should not
            self.batcher.fail(s, str(e))
            return
        self.batcher.draw_next(s, rows)
        if not s.has_ended:
            away.n_followed += 1
            away.answer.leave(s.tokens[-1])

    def _ask(self, s: Sequence) -> None:
        """Ask for the verdict on what is computed, unless that is asked already or nobody can be."""
        if self.is_up and (away := self._away[s]).answer.judged is None:
            self._tell(away.answer.judge())
            away.asked_at = self.batcher.clock()
            away.counts.round_trips += 1

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
        self.absence.heard_at = self.batcher.clock()
        try:
            self._receive(peer, message)
            self._send_due()
        except BadFrameError as e:
            self.send_frame(peer, Refused(reason="bad_frame", message=str(e)))
            self._leave()

    def _receive(self, peer: int, message: PeerFrame) -> None:
        match message:
            case PeerJoined(credits=n, n_ctx=n_ctx) if n_ctx > 0:
                self.batcher.llama.bound_texts(n_ctx)
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
                raise BadFrameError(f"{type(message).__name__} is not for an edge")

    def _join(self, peer: int, credits: int) -> None:
        """Open all answers at the partner, which may have what was computed before the link was lost."""
        self.peer, self.credits = peer, LinkCredits(credits)
        self.absence.end(self.batcher.clock())
        for s, away in self._away.items():
            away.is_back = True
            self._tell(away.answer.open())
            if not (s.is_held or away.is_alone):
                self._tell_rules(s)
            if s.is_away:
                self._ask(s)

    def _leave(self) -> None:
        self.credits = None
        self.absence.begin(self.batcher.clock())
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
                self.batcher.admission.bring_back(s)
            self.batcher.admission.cut(s, n)

    def _take_verdict(self, s: Sequence, message: DraftVerdict) -> None:
        """Add the tokens that the partner has drawn; what was guessed wrong is cut from the KV cache."""
        away, now = self._away[s], self.batcher.clock()
        if (judged := away.take(s, message)) is None:
            return
        away.is_back = False
        self.drafting.learn_verdict(away, judged, (now - away.asked_at, message.busy_s))
        if s.n_past > judged.taken.n_rows:
            self.batcher.admission.cells.cut(s, judged.taken.n_rows)
        if s.is_away:
            self.batcher.admission.bring_back(s)
        self.batcher.take_all(s, judged.taken.tokens, now)
        if judged.stands and not s.has_ended and self.drafting.go_on(s, away, is_up=self.is_up) is NextStep.ASK:
            self._wait(s)

    def _fail_away(self, s: Sequence, reason: str, message: str, *, your_fault: bool) -> None:
        self.batcher.remove(s)
        text = f"The partner cannot go on with the answer: {message}"
        self.batcher.send(wire.Failed(id=s.request.id, reason=reason, message=text, your_fault=your_fault))

    # --- without a partner ---------------------------------------------------------------------------------------

    @property
    def wait_s(self) -> float | None:
        """How long to wait for a message at most before `look` is due, s; None while nothing is."""
        return self.absence.look_s(self._away.values())

    def look(self) -> bool:
        """Go on without a partner that has been gone for too long; give a sign of life for answers that wait."""
        can_compute = self._look_at_gone()
        self.batcher.send(wire.Alive())  # it is due while there are answers only
        return can_compute

    def _look_at_gone(self) -> bool:
        """Let answers go on alone, be the partner's again, or fail; whether one goes on alone from now on."""
        now, n_alone = self.batcher.clock(), 0
        for s, away in list(self._away.items()):
            if self._goes_on(s.request):
                if self.absence.goes_alone(away, now, waits=s.is_away):
                    self._go_alone(s, away)
                    n_alone += 1
                elif self.absence.comes_back(away, self.credits, len(self._away), now):
                    self._come_back(s, away)
            elif self.absence.is_given_up(now):
                self.batcher.remove(s)
                self.batcher.send(gone(s.request.id))
        return n_alone > 0

    def _go_alone(self, s: Sequence, away: Away) -> None:
        """Forget what was drafted; the last token is computed again, and what follows it is drawn here."""
        away.is_alone, away.alone_at = True, self.batcher.clock()
        away.forget_drafts(s)
        if self.is_up:
            self._tell(away.answer.cut(len(s.tokens)))
        else:
            away.answer.lose_link()
            away.answer.drop_drafts()
        if s.is_away:
            self.batcher.admission.bring_back(s)
        if s.n_past >= len(s.tokens):
            n_counted = s.prefill.n_counted
            self.batcher.admission.cut(s, len(s.tokens) - 1)
            s.prefill.n_counted = n_counted

    def _come_back(self, s: Sequence, away: Away) -> None:
        """Let the partner draw again what follows the text, which it has computed by now."""
        away.is_alone = away.is_back = s.unsent.is_alone = False
        if not s.is_held:
            self._tell_rules(s)

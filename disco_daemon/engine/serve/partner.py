"""The partner's side of a split model: rows come from other machines, and verdicts on their drafts go back.

An answer is a sequence like any other. It is held while there is nothing to judge, and its plain rows are computed
meanwhile; it competes for the device as soon as a run of drafts is there, and is held again behind the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...link.protocol import (
    BadFrameError,
    BeginDrawing,
    CloseAnswer,
    CutAnswer,
    JudgeDrafts,
    OpenAnswer,
    PeerFrame,
    PeerJoined,
    PeerLeft,
    Refused,
    SendRows,
)
from ...link.rows.content import ContentChange, ContentManager
from ...link.rows.pending import Content, ContentKey
from .. import wire
from ..json_schema.reading import GrammarError
from ..llama.grammar import grammar_of_others
from ..llama.hidden import FloatRows
from ..llama.refusals import FormatError
from ..speculation.speculate import draw_run
from .iteration import Batch, DecodedRows, Share
from .remote_layers import RemoteLayers
from .run_judging import RunJudging
from .sequence import Given, Sequence


class SendFrame(Protocol):
    """Sends a frame to a peer."""

    def __call__(self, peer: int, message: PeerFrame, payload: bytes = b"") -> None:
        """Queue it; does not block."""


@dataclass(slots=True)
class SplitPartner(RemoteLayers):
    """The first layers are at other machines, and all answers are theirs.

    All mutable state: the `contents`, what was learned on `judging`, the salt of each peer, the number of each machine
    that was ever connected, and the sequence of each open answer.
    """

    contents: ContentManager = field(kw_only=True)
    send_frame: SendFrame = field(kw_only=True)
    judging: RunJudging = field(default_factory=RunJudging)
    _salts: dict[int, int] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    _sequences: dict[ContentKey, Sequence] = field(default_factory=dict)
    _keys: dict[Sequence, ContentKey] = field(default_factory=dict)

    @property
    def peers(self) -> tuple[int, ...]:
        """The numbers of the links that stand."""
        return tuple(self._salts)

    # --- what peers say ------------------------------------------------------------------------------------------

    def receive(self, peer: int, message: PeerFrame, payload: bytes) -> None:
        """Carry out what a peer says; one that says what cannot be is refused, and its answers end."""
        try:
            self._receive(peer, message, payload)
        except BadFrameError as e:
            self.send_frame(peer, Refused(reason="bad_frame", message=str(e)))
            self._forget(peer)

    def _receive(self, peer: int, message: PeerFrame, payload: bytes) -> None:
        match message:
            case PeerJoined(salt=salt):  # a number for each machine, as adapters have: keys are of 32 bits
                number = self._numbers.setdefault(salt, len(self._numbers) + 1)
                self._salts[peer] = number * self.batcher.llama.vocabulary.n_tokens
            case PeerLeft():
                self._forget(peer)
            case _ if peer not in self._salts:
                pass  # it was refused, and this was on its way
            case OpenAnswer():
                self._open(peer, message)
            case SendRows():
                self._change(peer, message.id, self.contents.rows(peer, message, payload))
            case BeginDrawing():
                self._begin(peer, message)
            case JudgeDrafts():
                self._change(peer, message.id, self.contents.judge(peer, message))
            case CutAnswer():
                self._change(peer, message.id, self.contents.cut(peer, message))
            case CloseAnswer():
                self._change(peer, message.id, self.contents.close(peer, message))
            case _:
                raise BadFrameError(f"{type(message).__name__} is not for a partner")

    def _forget(self, peer: int) -> None:
        self._salts.pop(peer, None)
        self.contents.peer_left(peer)
        for key in [key for key in self._sequences if key[0] == peer]:
            self._end(key)

    def _open(self, peer: int, message: OpenAnswer) -> None:
        """Take up an answer, with cells if there is room for them: then it is known which rows are there already."""
        key = (peer, message.id)
        if key in self._sequences:
            raise BadFrameError(f"the answer {message.id!r} is open already")
        if (refused := self.contents.refused(peer, message)) is not None:
            self._change(peer, message.id, refused)
            return
        request = wire.Generate(id=f"{peer}/{message.id}", messages=[], private=message.private)
        now = self.batcher.clock()
        s = Sequence(
            request=request,
            given=Given(prompt=[], text="", tokens=[], exact=True, n_first=0),
            timeline=self.batcher.timeline(request, now),
            waiting_since=now,
            salt=self._salts[peer],
        )
        s.tokens = list(message.tokens) or [0]
        self.batcher.admission.add(s)
        self.batcher.admission.hold(s, now)
        self.batcher.admission.decide(now)
        self._sequences[key], self._keys[s] = s, key
        self._change(peer, message.id, self.contents.open(peer, message, s.n_past))

    def _begin(self, peer: int, message: BeginDrawing) -> None:
        change = self.contents.begin(peer, message)
        self._change(peer, message.id, change)
        s = self._sequences.get((peer, message.id))
        if s is None:
            return
        rules = message.sampling
        request = wire.Generate(
            id=s.request.id,
            messages=[],
            temperature=rules.temperature,
            top_p=rules.top_p,
            seed=rules.seed,
            frequency_penalty=rules.frequency_penalty,
            presence_penalty=rules.presence_penalty,
            drawing=rules.drawing,
        )
        s.draw.close()
        try:
            grammar = grammar_of_others(rules.grammar)
            s.draw.sampler = self.batcher.llama.sampler(request, message.answer, grammar, rules.prompt, rules.thought)
        except (FormatError, GrammarError) as e:
            self._fail_content(s, "bad_grammar", str(e), your_fault=True)
            return
        s.draw.candidates = list(message.candidates)

    # --- what follows --------------------------------------------------------------------------------------------

    def _change(self, peer: int, name: str, change: ContentChange) -> None:
        """Send what is to be sent, and bring the sequence in step with its content."""
        for message in change.send:
            self.send_frame(peer, message)
        key = (peer, name)
        if change.ended:
            self._end(key)
            return
        s, content = self._sequences.get(key), self.contents.get(key)
        if s is not None and content is not None:
            self._follow(s, content, change.keep)

    def _follow(self, s: Sequence, content: Content, keep: int | None) -> None:
        """Bring tokens, cells and status of a sequence in step with its content."""
        n, n_plain = content.n_computed, content.n_plain
        next_token = content.tokens[n_plain] if len(content.tokens) > n_plain else 0  # not computed before it is known
        s.tokens = [*s.tokens[:n], *content.tokens[:n_plain], next_token]
        if keep is not None:
            self.batcher.admission.cut(s, keep)
        can_draw = not n_plain and content.n_run > 0
        if can_draw == s.is_held:
            now = self.batcher.clock()
            if can_draw:
                s.timeline = self.batcher.timeline(s.request, now)
                self.batcher.admission.release(s, now)
            else:
                self.batcher.admission.hold(s, now)

    def _end(self, key: ContentKey) -> None:
        s = self._sequences.pop(key, None)
        if s is not None:
            del self._keys[s]
            self.batcher.remove(s)

    def _fail_content(self, s: Sequence, reason: str, message: str, *, your_fault: bool = False) -> None:
        peer, name = key = self._keys[s]
        if self.contents.get(key) is not None:
            self._change(peer, name, self.contents.fail(key, reason, message, your_fault=your_fault))

    # --- one iteration -------------------------------------------------------------------------------------------

    def candidates(self) -> list[Sequence]:
        """Return the sequences with cells; before that ask for the rows of answers whose cells are gone."""
        for s in self.batcher.admission.resident:
            key = self._keys[s]
            content = self.contents.get(key)
            assert content is not None
            if s.n_past < content.n_computed:
                self._change(*key, self.contents.evicted(key, s.n_past))
            elif s.n_past > content.n_computed:  # another answer's cells have more of the text than was sent yet
                self.batcher.admission.cut(s, content.n_computed)
        return self.batcher.admission.resident

    def drafts(self, decoding: list[Sequence], prefilling: list[Sequence]) -> dict[Sequence, list[int]]:
        """Return the drafts to judge in this iteration: all, or none where they are judged one after the other."""
        del prefilling
        runs = {s: content.tokens[: content.n_run] for s in decoding if (content := self.contents.get(self._keys[s]))}
        if self.judging.in_steps([len(run) for run in runs.values()]):
            return {}
        return {s: run[1:] for s, run in runs.items() if len(run) > 1}

    def compute(self, batch: Batch) -> bool:
        """Compute the rows that came; learn what they take, together and by themselves."""
        self.batcher.run(batch, lambda rows: self.batcher.llama.decode(rows, self._rows_of(batch.part)))
        if batch.is_decoded and not batch.load.n_prefill:
            self.judging.observe(len(batch.rows), batch.took_s, together=bool(batch.drafts))
        return bool(batch.rows)

    def _rows_of(self, part: list[Share]) -> FloatRows:
        """Take the rows that came for a part of a batch."""
        found = []
        for s, n, _ in part:
            ready = self.contents.take(self._keys[s], n)
            assert ready is not None
            assert len(ready.tokens) == n
            found.append(ready.rows)
        return np.concatenate(found)

    def use(self, s: Sequence, rows: DecodedRows) -> None:
        """Give back the credits of computed rows; draw behind those with logits, and send a verdict once it is due."""
        peer, name = key = self._keys[s]
        content = self.contents.get(key)
        assert content is not None
        busy_s, s.busy_s = s.busy_s, 0.0
        change = self.contents.computed(key, rows.n, busy_s)
        if rows.last < 0:
            self._change(peer, name, change)
            return
        for message in change.send:
            self.send_frame(peer, message)
        assert s.draw.sampler is not None
        began = self.batcher.clock()
        try:
            if not content.drawn:
                s.draw.sampler.follow(content.left)
        except FormatError as e:
            self._fail_content(s, "bad_grammar", str(e), your_fault=True)
            return
        tokens = draw_run(self.batcher.llama, self.batcher.admission.cells, s, rows.draft, rows.last)
        self.batcher.counters.sample_s += self.batcher.clock() - began
        if (meter := s.draw.sampler.meter) is not None and meter.over:
            self._fail_content(s, "bad_grammar", str(meter.error()), your_fault=True)
            return
        s.draw.candidates = []
        s.tokens += rows.draft
        n_asked, n_drawn = len(content.run) + content.n_run, len(content.drawn) + len(tokens)
        change = self.contents.draw(key, tokens, ends=self.batcher.llama.vocabulary.ends(tokens[-1]))
        if not content.run:
            self.judging.observe_verdict(n_drawn, n_asked)
        self._change(peer, name, change)

    def give_up(self, s: Sequence, error: str = "") -> None:
        """End an answer for which there is no room left, or of which nothing can be computed."""
        no_room = f"the partner has no room left for it ({wire.FULL})"
        self._fail_content(s, "engine_error" if error else "overloaded", error or no_room)

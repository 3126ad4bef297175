"""Which tokens go into the next llama_decode, and what comes of it. Knows sequences, not sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ...scheduler.latency import Load
from ...scheduler.policy import SIDE_BY_SIDE
from ...scheduler.timeline import Timeline
from .. import wire
from ..llama.model import Llama
from ..llama.refusals import TooLong
from ..llama.rows import ABORTED, NO_KV_SLOT, Row
from ..llama.vocabulary import PromptError
from ..speculation.speculate import Speculator
from .adapter_round_robin import Turns
from .admission import Admission
from .counters import Totals
from .prepare import Prepared, prepared
from .row_grouping import Grouping
from .sequence import Sequence

MIN_CHUNK = 16  # tokens of a prompt beside running answers whose readers have nothing in hand
PATIENCE_S = 0.25  # what a client who does not read at a pace is kept waiting for a chunk of somebody's prompt
LEARN_EVERY = 8  # iterations that only decode; one is like the next, and learning takes 0.25 ms
MAX_WAITING = 256  # answers; beyond it a request is refused, never silently dropped
EXPECTED_TTFT_S = 1.0  # of a reader who does not say


Share = tuple[Sequence, int, int]  # a sequence, the number of its rows, and the row to sample from or -1


class Send(Protocol):
    """Where messages to the daemon go."""

    def __call__(self, message: wire.Message) -> None:
        """Send one message."""


@dataclass(slots=True)
class Batcher:
    """Continuous batching over one context: chosen answers get a token each, the shortest prompts a chunk.

    All mutable state: `totals`, whether a `lone` prompt's large chunk is being computed, which adapter's of the `turns`
    it is, the latest `drafts` of tokens to come, what was learned on `grouping` rows, and what `admission` and the KV
    cache behind `llama` have.
    """

    llama: Llama
    send: Send
    admission: Admission
    clock: Callable[[], float] = time.perf_counter
    totals: Totals = field(default_factory=Totals)
    lone: bool = False
    turns: Turns = field(default_factory=Turns)
    speculator: Speculator | None = None
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    grouping: Grouping = field(default_factory=Grouping)

    # --- commands ------------------------------------------------------------------------------------------------

    def add(self, request: wire.Generate) -> None:
        """Prepare a request here and now, and queue its answer. Raises TemplateError, PromptError."""
        self.queue(prepared(self.llama, request))

    def queue(self, ready: Prepared) -> None:
        """Queue an answer, or refuse it with a Failed that says why. Raises PromptError where it has no adapter."""
        request, prompt, given = ready.request, ready.prompt, ready.given
        if len(self.admission.waiting) >= MAX_WAITING:
            self.send(wire.Failed(request.id, "overloaded", "the device's queue is full; try again later", False))
            return
        salt = self.llama.salt(request.adapter)
        if len(prompt) >= self.llama.n_ctx:
            self.send(wire.refused(request.id, TooLong(self.llama.n_ctx, len(prompt), exact=True)))
            return
        now, exact = self.clock(), bool(request.answer_ids)
        timeline = self._timeline(request, now)
        sequence = Sequence(
            request, prompt, request.answer_so_far, given, exact, request.hold, now, len(given), timeline, now,
            ready.grammar, salt,
        )  # fmt: skip
        self.admission.sequences[request.id] = sequence
        self.admission.changed()
        self._rewind(sequence, 0)
        if not sequence.held:
            self._go(sequence)

    def _timeline(self, request: wire.Generate, now: float) -> Timeline:
        """A new one. Who names no pace gets what there is, and is content with what SIDE_BY_SIDE get."""
        pace_tps = request.pace_tps or 1.0 / self.admission.latency.predict(SIDE_BY_SIDE)
        return Timeline(now, EXPECTED_TTFT_S if request.ttft_s is None else request.ttft_s, pace_tps)

    def hold(self, request_id: str) -> None:
        """Cut a sequence back to what it was given, and let it wait; an unknown id has ended by itself."""
        sequence = self.admission.sequences.get(request_id)
        if sequence is None:
            return
        sequence.n_orders += 1
        if not sequence.held:
            sequence.held, sequence.held_at, sequence.chosen = True, self.clock(), False
            self.admission.changed()
            self._rewind(sequence, sequence.n_prompt)
        self._progress(sequence)

    def pace(self, request_id: str, pace_tps: float | None) -> None:
        """A reader reads faster or slower from now on; what is in hand stays, and what was late is past."""
        sequence = self.admission.sequences.get(request_id)
        if sequence is None:
            return
        now, before = self.clock(), sequence.timeline
        in_hand = round(before.stock_s(now) * before.pace_tps)
        sequence.request = msgspec.structs.replace(sequence.request, pace_tps=pace_tps, ttft_s=0.0)
        sequence.timeline = self._timeline(sequence.request, now)
        sequence.timeline.token(now, in_hand)
        self.admission.changed()

    def append(self, message: wire.Append) -> None:
        """Grow a held sequence by text from elsewhere; `go` lets it generate. An unknown id has ended by itself."""
        sequence = self.admission.sequences.get(message.id)
        if sequence is None:
            return
        if not sequence.held:
            self._fail(sequence, "append to an answer that is not held", "not_held")
            return
        sequence.n_orders += 1
        try:
            self._give(sequence, message)
        except PromptError as e:
            self._fail(sequence, str(e))
            return
        if message.go:
            self._go(sequence)

    def _give(self, s: Sequence, message: wire.Append) -> None:
        """Take over text from elsewhere; without ids the whole answer is tokenized anew, as one text."""
        if not s.answer:
            s.prompt = self.llama.vocabulary.closed(s.prompt, message.text)
        s.answer += message.text
        before = s.given
        if message.ids:
            s.given = before + self.llama.vocabulary.checked(message.ids)
        elif message.text:
            s.given = self.llama.vocabulary.answer_tokens(s.answer)
        s.exact = bool(message.ids) or (s.exact and not message.text)
        same = next((i for i, (a, b) in enumerate(zip(before, s.given, strict=False)) if a != b), len(before))
        self._rewind(s, len(s.prompt) + min(same, len(s.given)))

    def _rewind(self, s: Sequence, n_same: int) -> None:
        """Begin again after the given answer; the first `n_same` tokens are as before, and stay computed."""
        self._close_sampler(s)
        s.dropped, s.candidates = b"", []
        s.tokens = s.prompt + s.given
        s.text, s.has_ids, s.told = self.llama.vocabulary.stream(s.request, s.prompt, s.answer), True, False
        s.n_prompt = len(s.tokens)
        s.n_drawn = s.n_unsent = 0
        s.unsent_ids, s.lookup = [], None
        self._keep(s, n_same)
        if len(s.tokens) >= self.llama.n_ctx:
            self._finish(s, wire.FULL)

    def _go(self, s: Sequence) -> None:
        """Let a sequence generate; if the end of its text may be the middle of a token, that token is drawn again."""
        if s.request.id not in self.admission.sequences:
            return
        if s.held:
            s.held, s.waiting_since, s.timeline = False, self.clock(), self._timeline(s.request, self.clock())
        self.admission.changed()
        if s.given and not s.exact:
            s.candidates = self.llama.vocabulary.extensions(s.given[-1])
            if s.candidates:
                s.dropped = self.llama.vocabulary.piece(s.tokens.pop())
        s.n_prompt = len(s.tokens)
        self._keep(s, s.n_prompt)
        s.sampler = self.llama.sampler(s.request, s.tokens[len(s.prompt) :], s.grammar)
        if s.full:
            self._finish(s, "length")

    def _keep(self, s: Sequence, n: int) -> None:
        """Forget what is computed beyond `n` tokens, and the last token: its logits are wanted again."""
        s.n_counted = min(s.n_counted, n)
        n = min(n, len(s.tokens) - 1)
        if s.saved is not None and s.saved.n_past > n:
            self.admission.cells.forget(s.saved)
            s.saved, s.n_past = None, 0
        if s.n_past > n:
            s.n_past = n
            self.admission.cells.cut(s.slot, n)

    def cancel(self, request_id: str) -> None:
        """End a sequence; unknown ids are ignored, they have ended by themselves."""
        sequence = self.admission.sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, "cancelled")

    # --- one iteration -------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Choose, build one batch, decode it, hand out what it gave. False if there was nothing to compute."""
        if self.admission.decide(self.clock()):
            self._tell_pauses()
        rows, shares = self._build()
        for s in (*self.admission.running, *(() if rows else self.admission.waiting)):
            if s.held and not s.told and (s.slot < 0 or not s.prefilling):
                self._progress(s, idle=True)
        if not rows:
            return False
        for s, n, _ in shares:
            # Cached prefixes give way to what runs; should that not be enough, llama_decode will say.
            self.admission.cells.promise(s.slot, max(s.n_past + n, len(s.tokens)))
        self.admission.cells.advance(len(rows))
        load, took_s = _load(shares), 0.0
        alike = not (load.n_prefill or self.drafts or self.turns.adapter)  # rows of answers, of each its last
        apart = alike and self.grouping.apart(len(rows))
        for part, whose in _one_by_one(rows, shares) if apart else ((rows, shares),):
            started = self.clock()
            rc = self.llama.decode(part)
            now = self.clock()
            took_s += now - started
            self.totals.busy_s += now - started
            for sequence, n, _ in whose:
                sequence.busy_s += (now - started) * n / len(part)
            if rc != 0:  # some may have to go now whose rows are not computed yet
                self._recover(rc, whose)
                return True
            self._collect(whose, now)
        if alike:
            self.grouping.saw(len(rows), took_s, apart=apart)
        self._learn(load, took_s)
        return True

    def _tell_pauses(self) -> None:
        """Say of whose answers have begun which wait for the others', so that nobody takes their silence for a hang."""
        for s in self.admission.sequences.values():
            paused = not (s.chosen or s.held)
            if paused != s.paused and (s.n_drawn or s.paused):
                s.paused = paused
                self.send(wire.Paused(s.request.id, paused))

    def _learn(self, load: Load, took_s: float) -> None:
        """An iteration of this load has gone through."""
        self.totals.iteration(load, took_s)
        if self.drafts and self.speculator:
            self.speculator.saw(load, map(len, self.drafts.values()), took_s)
        elif load.n_prefill or self.totals.iterations % LEARN_EVERY == 0:
            self.admission.latency.saw(load, took_s)

    def _build(self) -> tuple[list[Row], list[Share]]:
        """Rows for llama_decode, and whose they are."""
        rows: list[Row] = []
        shares: list[Share] = []
        self.lone = False
        running = self.admission.running
        if self.llama.adapters:
            running = self.turns.among(running, self.clock())
            self.llama.adapt(self.turns.adapter)
        decoding = [s for s in running if s.chosen and not s.prefilling]
        prefilling = [s for s in running if s.prefilling and (s.chosen or s.held)]
        self.drafts = {}
        if self.speculator is not None and not prefilling:
            self.drafts = self.speculator.drafts(decoding, self.totals.iterations)
            self.totals.busy_s += self.speculator.took_s
        for s in decoding:
            tokens = (s.tokens[s.n_past], *self.drafts.get(s, ()))
            rows += [(token, i, s.slot, True) for i, token in enumerate(tokens, s.n_past)]
            shares.append((s, len(tokens), len(rows) - 1))
        if not prefilling:
            return rows, shares
        room = self._chunk([s for s in self.admission.running if s.chosen and not s.prefilling])
        # The shortest remaining prompt first: it delays a long one a little and is itself helped a lot.
        for s in sorted(prefilling, key=lambda s: len(s.tokens) - s.n_past):
            if room > 0:
                # The last token of a held sequence stays out: its logits are wanted when it may generate.
                end = min(len(s.tokens) - (1 if s.held else 0), s.n_past + room)
                sample = end == len(s.tokens)
                rows += [(s.tokens[i], i, s.slot, sample and i == end - 1) for i in range(s.n_past, end)]
                shares.append((s, end - s.n_past, len(rows) - 1 if sample else -1))
                room -= end - s.n_past
        return rows, shares

    def spare(self) -> int:
        """How many rows of other work fit between two iterations."""
        return self._chunk([s for s in self.admission.running if s.chosen and not s.prefilling])

    def _chunk(self, decoding: list[Sequence]) -> int:
        """How many prompt tokens go beside the running answers: as many as their readers do not notice."""
        self.lone = len(self.admission.sequences) == 1 and not self.llama.exact
        if not decoding:
            return wire.LONE_CHUNK if self.lone else wire.PREFILL_CHUNK
        now, latency = self.clock(), self.admission.latency
        stock_s = min(s.timeline.stock_s(now) if s.request.pace_tps else PATIENCE_S for s in decoding)
        n_context = sum(s.n_past for s in decoding)
        size = wire.PREFILL_CHUNK
        while size > MIN_CHUNK and latency.predict(len(decoding), size, n_context) > stock_s:
            size //= 2
        return size

    def _collect(self, shares: list[Share], now: float) -> None:
        for s, n, row in shares:
            draft = self.drafts.get(s, [])
            self.admission.cells.grow(s.slot, s.key(s.n_past, s.n_past + n) + draft)
            s.n_past += n
            new_prompt = max(0, min(s.n_past, s.n_prompt) - s.n_counted)
            s.n_counted += new_prompt
            s.n_prefilled += new_prompt
            self.totals.prompt_tokens += new_prompt
            if row >= 0:
                assert s.sampler is not None
                began = self.clock()
                if draft and self.speculator:
                    drawn = self.speculator.drawn(s, draft, row)
                else:
                    drawn = [self.llama.sample(s.sampler, row, s.candidates)]
                self.totals.sample_s += self.clock() - began
                if (meter := s.sampler.meter) is not None and meter.over:
                    self._refuse(s, meter.error())
                    continue
                for token in drawn:
                    if s.sampler is not None:  # else its text ended at the token before
                        self._take(s, token, now)
            else:
                self._progress(s, idle=s.held and not s.prefilling)

    def _progress(self, s: Sequence, *, idle: bool = False) -> None:
        s.told = idle
        counts = (s.n_past, s.n_prompt, idle, s.n_orders, s.n_prefilled, s.n_cached)
        self.send(wire.Progress(s.request.id, *counts))

    def _take(self, s: Sequence, token: int, now: float) -> None:
        """Add a drawn token to its answer; end the answer where it ends."""
        if self.llama.vocabulary.ends(token):
            self._finish(s, "stop")
            return
        s.tokens.append(token)
        piece = self.llama.vocabulary.piece(token)
        if s.candidates:
            healed, s.dropped, s.candidates = s.dropped, b"", []
            piece = piece[len(healed) :]
            if not piece:  # the very token that was there before
                s.n_prompt += 1
                return
            s.has_ids = False  # from here on no text is exactly that of some tokens
        s.n_drawn += 1
        s.n_completion += 1
        s.n_unsent += 1
        s.unsent_ids.append(token)
        s.timeline.token(now)
        self.totals.completion_tokens += 1
        self._emit(s, s.text.feed(piece))
        if s.text.stopped:
            self._finish(s, "stop")
        elif s.full:
            self._finish(s, "length")
        elif len(s.tokens) >= self.llama.n_ctx:
            self._finish(s, wire.FULL)

    def _emit(self, s: Sequence, text: str) -> None:
        if thought := s.text.thought():
            self.send(wire.Piece(s.request.id, thought, s.n_unsent, thought=True))
            s.n_unsent = 0
        if not text:
            return
        ids: tuple[int, ...] = ()
        if s.has_ids and s.text.whole:
            ids, s.unsent_ids = tuple(s.unsent_ids), []
        self.send(wire.Piece(s.request.id, text, s.n_unsent, ids))
        s.n_unsent = 0

    def _recover(self, rc: int, shares: list[Share]) -> None:
        """Bring KV cache and sequences back in step after a decode that did not go through."""
        for s, _, _ in shares:
            self.admission.cells.cut(s.slot, s.n_past)
        if rc == ABORTED:
            return  # the next iteration has read the Cancel that asked for it, and computes the rest again
        if rc == NO_KV_SLOT and self.admission.cells.n_garbage:
            self.admission.cells.move()
            return
        if rc == NO_KV_SLOT and len(self.admission.running) > 1:
            self.admission.give_way()
            return
        for s, _, _ in shares:
            if rc == NO_KV_SLOT:
                self._finish(s, wire.FULL)
            else:
                self._fail(s, f"llama_decode returned {rc}")

    def _finish(self, s: Sequence, reason: str) -> None:
        if reason != "cancelled":
            self._emit(s, s.text.flush())
        self._release(s)
        self.send(wire.Done(s.request.id, reason, s.n_prefilled, s.n_completion, s.busy_s, s.n_cached))

    def _fail(self, s: Sequence, message: str, reason: str = "engine_error") -> None:
        self._release(s)
        self.send(wire.Failed(s.request.id, reason, message, False))

    def _refuse(self, s: Sequence, error: PromptError) -> None:
        self._release(s)
        self.send(wire.refused(s.request.id, error))

    def _release(self, s: Sequence) -> None:
        self.admission.remove(s)
        self._close_sampler(s)

    def _close_sampler(self, s: Sequence) -> None:
        if s.sampler is not None:
            s.sampler.close()
            s.sampler = None


def _one_by_one(rows: list[Row], shares: list[Share]) -> Iterable[tuple[list[Row], list[Share]]]:
    return (([row], [(s, 1, 0)]) for row, (s, _, _) in zip(rows, shares, strict=True))


def _load(shares: list[Share]) -> Load:
    decoding = [s for s, _, _ in shares if not s.prefilling]
    n_prefill = sum(n for s, n, _ in shares if s.prefilling)
    return Load(len(decoding), n_prefill, sum(s.n_past for s in decoding))

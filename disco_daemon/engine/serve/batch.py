"""Continuous batching: which tokens go into the next llama_decode, and what becomes of them. Knows no sockets.

Where a part of the model is elsewhere, `Batcher.remote` says what is different.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from ...scheduler.andes import SIDE_BY_SIDE
from ...scheduler.prompt_rows import prompt_rows, rests
from ...scheduler.timeline import Timeline
from .. import wire
from ..llama.memory import N_BATCH
from ..llama.model import Llama
from ..llama.refusals import PromptError, PromptTooLong
from ..llama.rows import ABORTED, NO_KV_SLOT, Row
from ..speculation.speculate import Speculator
from .adapter_round_robin import AdapterRoundRobin
from .admission import Admission
from .counters import Counters
from .iteration import Batch, DecodedRows, Share
from .prepare import Prepared, prepare
from .remote_layers import RemoteLayers
from .row_grouping import RowGrouping
from .sequence import Given, Send, Sequence

LEARN_EVERY = 8  # iterations that only decode; one is like the next, and learning takes 0.25 ms
MAX_WAITING = 256  # answers; beyond it a request is refused, never silently dropped
EXPECTED_TTFT_S = 1.0  # of a reader who expects nothing in particular

Decode = Callable[[list[Row]], int]  # of the rows of a part; returns llama_decode's return value


@dataclass(slots=True)
class Batcher:
    """Iterations over one context: chosen answers get a token each, the shortest prompts a chunk.

    All mutable state: `counters`, whether the large chunk of a `single_prompt` is being computed, whose turn it is of
    the `adapters`, what was learned on `grouping` rows, and what `admission`, `remote` and the KV cache behind `llama`
    have.
    """

    llama: Llama
    send: Send
    admission: Admission
    clock: Callable[[], float] = time.perf_counter
    counters: Counters = field(default_factory=Counters)
    single_prompt: bool = False
    adapters: AdapterRoundRobin = field(default_factory=AdapterRoundRobin)
    speculator: Speculator | None = None
    grouping: RowGrouping = field(default_factory=RowGrouping)
    remote: RemoteLayers = field(default_factory=RemoteLayers)

    def __post_init__(self) -> None:
        self.remote.attach(self)

    # --- orders --------------------------------------------------------------------------------------------------

    def add(self, request: wire.Generate) -> None:
        """Prepare a request here and now, and queue its answer. Raises TemplateError, PromptError."""
        self.queue(prepare(self.llama, request))

    def queue(self, ready: Prepared) -> None:
        """Queue an answer, or refuse it with a Failed that says why."""
        request = ready.request
        if (refusal := self.remote.refusal(request)) is not None:
            self.send(refusal)
            return
        if len(self.admission.without_cells) >= MAX_WAITING:
            message = "the device's queue is full; try again later"
            self.send(wire.Failed(id=request.id, reason="overloaded", message=message, your_fault=False))
            return
        if len(ready.prompt) >= self.llama.n_ctx:
            self.send(wire.refusal(request.id, PromptTooLong(self.llama.n_ctx, len(ready.prompt), exact=True)))
            return
        now = self.clock()
        given = Given(
            prompt=ready.prompt, text=request.answer_so_far, tokens=ready.given, exact=bool(request.answer_ids),
            n_first=len(ready.given),
        )  # fmt: skip
        s = Sequence(
            request=request, given=given, timeline=self.timeline(request, now), waiting_since=now,
            grammar=ready.grammar, salt=ready.salt, rearranged=ready.rearranged,
        )  # fmt: skip
        self.admission.add(s)
        self.remote.opened(s)
        if request.hold:
            self.admission.hold(s, now)
        self._rewind(s, 0)
        if not s.is_held:
            self._release(s)

    def hold(self, request_id: str) -> None:
        """Cut a sequence back to what it was given, and let it wait; an unknown id has ended by itself."""
        s = self._settled(request_id)
        if s is None:
            return
        s.n_orders += 1
        if not s.is_held:
            self.admission.hold(s, self.clock())
            self._rewind(s, s.prefill.n_prompt)
        s.send_progress(self.send)

    def pace(self, request_id: str, pace_tps: float | None) -> None:
        """Go on for a reader who reads faster or slower from now on; an unknown id has ended by itself."""
        s = self.admission.sequences.get(request_id)
        if s is None:
            return
        now = self.clock()
        request = msgspec.structs.replace(s.request, pace_tps=pace_tps, ttft_s=0.0)
        s.read_on(request, self.timeline(request, now), now)
        self.admission.reconsider()

    def append(self, order: wire.AppendText) -> None:
        """Grow a held sequence by text from elsewhere; `go` lets it generate. An unknown id has ended by itself."""
        s = self._settled(order.id)
        if s is None:
            return
        if not s.is_held:
            self.fail(s, "append to an answer that is not held", "not_held")
            return
        s.n_orders += 1
        try:
            n_same = s.given.extend(order, self.llama.vocabulary)
        except PromptError as e:
            self.fail(s, str(e))
            return
        self._rewind(s, n_same)
        if order.go:
            self._release(s)

    def cancel(self, request_id: str) -> None:
        """End a sequence; an unknown id has ended by itself."""
        s = self._settled(request_id)
        if s is not None:
            self.finish(s, "cancelled")

    def _settled(self, request_id: str) -> Sequence | None:
        """Return the sequence that an order is about, with nothing of it under way; None if it has ended by itself."""
        if request_id in self.admission.sequences:
            self.remote.settle()
        return self.admission.sequences.get(request_id)

    def timeline(self, request: wire.Generate, now: float) -> Timeline:
        """Make a reader's timeline. One without a pace is content with what each of SIDE_BY_SIDE answers gets."""
        pace_tps = request.pace_tps or 1.0 / self.admission.latency.predict(SIDE_BY_SIDE)
        return Timeline(now, EXPECTED_TTFT_S if request.ttft_s is None else request.ttft_s, pace_tps)

    def _rewind(self, s: Sequence, n_same: int) -> None:
        """Begin again behind what was given; the first `n_same` tokens are as before, and stay computed."""
        s.rewind(self.llama.vocabulary)
        self.admission.cut(s, n_same)
        if len(s.tokens) >= self.llama.n_ctx:
            self.finish(s, wire.FULL)
        else:
            self.remote.rewound(s)

    def _release(self, s: Sequence) -> None:
        """Let a sequence generate, unless it has ended."""
        if s.has_ended:
            return
        s.heal(self.llama.vocabulary)
        self.admission.cut(s, s.prefill.n_prompt)
        if s.is_held:
            now = self.clock()
            s.timeline = self.timeline(s.request, now)
            self.admission.release(s, now)
        self.remote.begin_drawing(s)
        if s.is_full:
            self.finish(s, "length")

    # --- one iteration -------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Compute one iteration; False if there was nothing to compute."""
        self.remote.begin()
        if self.admission.decide(self.clock()):
            self._send_pauses()
        return self.remote.compute(self._build())

    def _send_pauses(self) -> None:
        """Say which begun answers wait since the latest decision: their silence would look like a hang."""
        for s in self.admission.sequences.values():
            waits = not (s.is_running or s.is_away or s.is_held)
            if waits != s.pause_sent and (s.draw.n_drawn or s.pause_sent):
                s.pause_sent = waits
                self.send(wire.PauseChange(id=s.request.id, paused=waits))

    def _build(self) -> Batch:
        """Choose the rows."""
        batch = Batch()
        self.single_prompt = False
        sequences = self.remote.candidates()
        if self.llama.adapters:
            sequences = self.adapters.select(sequences, self.clock())
            self.llama.adapt(self.adapters.adapter)
        decoding = [s for s in sequences if s.is_running and not s.is_prefilling]
        prefilling = [s for s in sequences if s.is_prefilling and (s.is_running or s.is_held)]
        if prefilling:
            decoding = self._awaited(decoding)
        batch.drafts = self.remote.drafts(decoding, prefilling)
        batch.add_last_tokens(decoding)
        if prefilling:
            ends = None if self.llama.divisible else self.admission.cells.checkpoints.chunk_end
            batch.add_chunks(prefilling, min(self.spare(), N_BATCH - len(batch.rows)), ends)
        for s in (*self.admission.resident, *(() if batch.rows else self.admission.without_cells)):
            if s.is_held and not s.idle_sent and (s.slot < 0 or not s.is_prefilling):
                s.send_progress(self.send, idle=True)
        return batch

    def place(self, batch: Batch) -> None:
        """Make room for the rows, and say how they are computed."""
        # Cached prefixes give way to what runs; should that not be enough, llama_decode will say.
        self.admission.cells.promise((s.slot, max(s.n_past + n, len(s.tokens))) for s, n, _ in batch.shares)
        if batch.rows:
            self.admission.cells.advance(len(batch.rows))
            batch.weigh()
            batch.alike = not (batch.load.n_prefill or batch.drafts or self.adapters.adapter)
            batch.apart = batch.alike and self.grouping.apart(len(batch.rows))

    def _awaited(self, decoding: list[Sequence]) -> list[Sequence]:
        """Return the answers whose readers would miss a token while a chunk of a prompt is read."""
        now, prompt_s = self.clock(), self.admission.latency.predict(0, wire.PREFILL_CHUNK)
        return [s for s in decoding if not (s.request.pace_tps and rests(s.timeline.stock_s(now), prompt_s))]

    def spare(self) -> int:
        """How many rows of a prompt, or of other work, go beside the running answers by what readers have in hand."""
        self.single_prompt = len(self.admission.sequences) == 1 and not self.llama.exact and self.llama.retracts
        decoding = self._awaited([s for s in self.admission.resident if s.is_running and not s.is_prefilling])
        if not decoding:
            return wire.SINGLE_PROMPT_CHUNK if self.single_prompt else wire.PREFILL_CHUNK
        now, n_context = self.clock(), sum(s.n_past for s in decoding)
        stocks = [s.timeline.stock_s(now) if s.request.pace_tps else None for s in decoding]
        most = wire.PREFILL_CHUNK if self.llama.exact else wire.SINGLE_PROMPT_CHUNK
        return prompt_rows(self.admission.latency, stocks, n_context, usual=wire.PREFILL_CHUNK, most=most)

    def run(self, batch: Batch, decode: Decode | None = None) -> bool:
        """Compute a batch here, by llama.cpp if not by `decode`, and use what it comes to; False if it is empty."""
        self.place(batch)
        while self._decode(batch, decode or self.llama.decode):
            self.collect(batch)
        self.learn(batch)
        return bool(batch.rows)

    def _decode(self, batch: Batch, decode: Decode) -> bool:
        """Decode the next part of the batch; False if there is none, or llama_decode does not do it."""
        rows = batch.next_rows()
        if not rows:
            return False
        started = self.clock()
        rc = decode(rows)
        batch.ended_at = self.clock()
        took_s = batch.ended_at - started
        batch.took_s += took_s
        self.counters.busy_s += took_s
        for s, n, _ in batch.part:
            s.busy_s += took_s * n / len(rows)
        if rc != 0:  # some may have to go now whose rows are not computed yet
            self.recover(rc, batch.part, is_extra=batch.is_extra)
            return False
        batch.n_decoded += len(batch.part)
        return True

    def collect(self, batch: Batch) -> None:
        """Give each sequence of the part just decoded what its rows have come to."""
        at = 0
        for s, n, row in batch.part:
            draft = batch.drafts.get(s, [])
            self.admission.cells.grow(s.slot, s.key(s.n_past, s.n_past + n) + draft)
            s.n_past += n
            self.admission.cells.pass_by(s.slot, len(s.tokens) - s.n_past)
            self.counters.prompt_tokens += s.prefill.count_computed(s.n_past)
            self.remote.use(s, DecodedRows(draft, row, at, n, batch.ended_at))
            at += n

    def draw_next(self, s: Sequence, rows: DecodedRows) -> None:
        """Draw the next tokens of a sequence from its rows, or tell how far its prompt is."""
        if rows.last < 0:
            s.send_progress(self.send, idle=s.is_held and not s.is_prefilling)
            return
        tokens = self._draw(s, rows.draft, rows.last)
        assert s.draw.sampler is not None
        if (meter := s.draw.sampler.meter) is not None and meter.over:
            self._refuse(s, meter.error())
            return
        self.take_all(s, tokens, rows.ended_at)

    def take_all(self, s: Sequence, tokens: Iterable[int], now: float) -> None:
        """Add drawn tokens to an answer, up to its end."""
        for token in tokens:
            if not s.has_ended:  # its text may have ended at the token before
                self._take(s, token, now)

    def _draw(self, s: Sequence, draft: list[int], row: int) -> list[int]:
        """Draw the next token of a sequence, or several where its draft was right."""
        assert s.draw.sampler is not None
        began = self.clock()
        if draft and self.speculator:
            tokens = self.speculator.draw(s, draft, row)
        else:
            tokens = [self.llama.sample(s.draw.sampler, row, s.draw.candidates)]
        if s.request.top_logprobs is not None:
            s.draw.weigh(self.llama, tokens, row - len(draft), s.request.top_logprobs)
        self.counters.sample_s += self.clock() - began
        return tokens

    def _take(self, s: Sequence, token: int, now: float) -> None:
        """Add a drawn token to its answer; end the answer where it ends."""
        vocabulary = self.llama.vocabulary
        if vocabulary.ends(token) or token in s.request.drawing.stop_token_ids:
            self.finish(s, "stop")
        elif s.take_token(token, vocabulary.shown_piece(s.request, token), now, self.send):
            self.counters.completion_tokens += 1
            if reason := s.end_reason(self.llama.n_ctx):
                self.finish(s, reason)

    def learn(self, batch: Batch) -> None:
        """Learn from an iteration that has gone through how long one takes."""
        if not batch.is_decoded:
            return
        load = batch.load
        if batch.alike:
            self.grouping.observe(len(batch.rows), batch.took_s, apart=batch.apart)
        self.counters.count_iteration(load, batch.took_s)
        if batch.drafts and self.speculator:
            self.speculator.observe(load, map(len, batch.drafts.values()), batch.took_s)
        elif load.n_prefill or self.counters.iterations % LEARN_EVERY == 0:
            self.admission.latency.observe(load, batch.took_s)

    # --- ends ----------------------------------------------------------------------------------------------------

    def recover(self, rc: int, shares: list[Share], *, is_extra: bool = False) -> None:
        """Bring KV cache and sequences back in step after a decode that did not go through; of extra rows no more."""
        self.admission.undo([s for s, _, _ in shares], has_begun=rc != NO_KV_SLOT)
        if is_extra or rc == ABORTED:
            return  # the next iteration has read the Cancel that asked for it, and computes the rest again
        if rc == NO_KV_SLOT and self.admission.cells.n_garbage:
            self.admission.cells.move()
            return
        if rc == NO_KV_SLOT and self.admission.n_movable > 1:
            self.admission.give_way()
            return
        for s, _, _ in shares:
            self.remote.give_up(s, "" if rc == NO_KV_SLOT else f"llama_decode returned {rc}")

    def finish(self, s: Sequence, reason: str) -> None:
        """End an answer, and say so."""
        if reason != "cancelled":
            s.emit(s.unsent.text.flush(), self.send)
        split = self.remove(s, reason)
        self.send(s.done_message(reason, split))

    def fail(self, s: Sequence, message: str, reason: str = "engine_error") -> None:
        """End an answer that has failed, and say so."""
        self.remove(s)
        self.send(wire.Failed(id=s.request.id, reason=reason, message=message, your_fault=False))

    def _refuse(self, s: Sequence, error: PromptError) -> None:
        self.remove(s)
        self.send(wire.refusal(s.request.id, error))

    def remove(self, s: Sequence, reason: str = "") -> wire.SplitUsage | None:
        """End an answer, which has failed if there is no `reason`; return what a partner did for it."""
        split = self.remote.ended(s, failed=not reason)
        self.admission.remove(s, is_whole=reason not in ("", "cancelled"))
        s.draw.close()
        return split

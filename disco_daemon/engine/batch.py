"""Which tokens go into the next llama_decode, and what comes of it. Knows sequences, not sockets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from . import wire
from .llama import ABORTED, N_SEQ_MAX, NO_KV_SLOT, Llama, Sampler
from .text import TextStream

PREFILL_BESIDE_DECODE = 64  # tokens; bounds how long running answers wait behind a long prompt
MAX_WAITING = 256  # answers; beyond it a request is refused, never silently dropped


class Send(Protocol):
    """Where messages to the daemon go."""

    def __call__(self, message: wire.Message) -> None:
        """Send one message."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the engine. `tokens` are prompt and answer; the first `n_past` of them are in the KV cache."""

    request: wire.Generate
    tokens: list[int]
    n_prompt: int
    sampler: Sampler
    text: TextStream
    held: bool
    slot: int = -1
    n_past: int = 0
    n_prefilled: int = 0
    n_completion: int = 0
    n_unsent: int = 0
    busy_s: float = 0.0

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token is still to be computed."""
        return self.n_past < len(self.tokens) - 1

    @property
    def may_generate(self) -> bool:
        """Whether the next token may be drawn once the prefill is through."""
        return not self.held


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class Batcher:
    """Continuous batching over one context: running answers get a token each, one prompt gets a chunk.

    All mutable state: `waiting`, `running`, `totals` and the KV cache behind `llama`.
    """

    llama: Llama
    send: Send
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    clock: Callable[[], float] = time.perf_counter

    # --- commands ------------------------------------------------------------------------------------------------

    def add(self, request: wire.Generate) -> None:
        """Queue an answer, or refuse it with a Failed that says why."""
        if len(self.waiting) >= MAX_WAITING:
            self.send(wire.Failed(request.id, "overloaded", "the device's queue is full; try again later", False))
            return
        prompt = self.llama.prompt_tokens(request)
        if len(prompt) >= self.llama.n_ctx:
            message = (
                f"This model's maximum context length is {self.llama.n_ctx} tokens, but the prompt has {len(prompt)}. "
                "Shorten the messages, or raise device.n_ctx."
            )
            self.send(wire.Failed(request.id, "context_length_exceeded", message, True))
            return
        tokens = prompt + self.llama.tokenize(request.answer_so_far)
        sequence = Sequence(
            request, tokens, len(tokens), self.llama.sampler(request), TextStream(request.stop), request.hold
        )
        if len(tokens) >= self.llama.n_ctx:
            self._finish(sequence, "length")
        else:
            self.waiting.append(sequence)

    def append(self, message: wire.Append) -> None:
        """Grow a held sequence by text from elsewhere; `go` lets it generate."""
        sequence = self._find(message.id)
        if sequence is None or not sequence.held:
            self.send(wire.Failed(message.id, "not_held", "append to an answer that is not held", False))
            return
        sequence.tokens += self.llama.tokenize(message.text)
        sequence.n_prompt = len(sequence.tokens)
        sequence.held = not message.go
        if len(sequence.tokens) >= self.llama.n_ctx:
            self._finish(sequence, "length")

    def cancel(self, request_id: str) -> None:
        """End a sequence; unknown ids are ignored, they have ended by themselves."""
        sequence = self._find(request_id)
        if sequence is not None:
            self._finish(sequence, "cancelled")

    # --- one iteration -------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit, build one batch, decode it, hand out what it gave. False if there was nothing to compute."""
        self._admit()
        rows, shares = self._build()
        if not rows:
            return False
        started = self.clock()
        rc = self.llama.decode(rows)
        elapsed = self.clock() - started
        self.totals.busy_s += elapsed
        for sequence, n, _ in shares:
            sequence.busy_s += elapsed * n / len(rows)
        if rc == 0:
            self._collect(shares)
        else:
            self._recover(rc, shares)
        return True

    def _admit(self) -> None:
        free = set(range(N_SEQ_MAX)) - {s.slot for s in self.running}
        used = sum(len(s.tokens) for s in self.running)
        while self.waiting and free and (not self.running or used + len(self.waiting[0].tokens) < self.llama.n_ctx):
            sequence = self.waiting.popleft()
            sequence.slot = free.pop()
            used += len(sequence.tokens)
            self.running.append(sequence)

    def _build(self) -> tuple[list[tuple[int, int, int, bool]], list[tuple[Sequence, int, int]]]:
        """Rows for llama_decode, and (sequence, number of its rows, row to sample from or -1)."""
        rows: list[tuple[int, int, int, bool]] = []
        shares: list[tuple[Sequence, int, int]] = []
        for s in self.running:
            if not s.prefilling and s.may_generate:
                rows.append((s.tokens[s.n_past], s.n_past, s.slot, True))
                shares.append((s, 1, len(rows) - 1))
        room = PREFILL_BESIDE_DECODE if rows else wire.PREFILL_CHUNK
        # The shortest remaining prompt first: it delays a long one a little and is itself helped a lot.
        for s in sorted(self.running, key=lambda s: len(s.tokens) - s.n_past):
            if room > 0 and s.prefilling:
                # The last token of a held sequence stays out: its logits are wanted when it may generate.
                end = min(len(s.tokens) - (1 if s.held else 0), s.n_past + room)
                sample = end == len(s.tokens)
                rows += [(s.tokens[i], i, s.slot, sample and i == end - 1) for i in range(s.n_past, end)]
                shares.append((s, end - s.n_past, len(rows) - 1 if sample else -1))
                room -= end - s.n_past
        return rows, shares

    def _collect(self, shares: list[tuple[Sequence, int, int]]) -> None:
        for s, n, row in shares:
            s.n_past += n
            new_prompt = max(0, min(s.n_past, s.n_prompt) - s.n_prefilled)
            s.n_prefilled += new_prompt
            self.totals.prompt_tokens += new_prompt
            if row >= 0:
                self._take(s, self.llama.sample(s.sampler, row))
            else:
                self.send(wire.Progress(s.request.id, s.n_past, s.n_prompt))

    def _take(self, s: Sequence, token: int) -> None:
        """Add a drawn token to its answer; end the answer where it ends."""
        if self.llama.ends(token):
            self._finish(s, "stop")
            return
        s.tokens.append(token)
        s.n_completion += 1
        s.n_unsent += 1
        self.totals.completion_tokens += 1
        self._emit(s, s.text.feed(self.llama.piece(token)))
        limit = s.request.max_tokens
        if s.text.stopped:
            self._finish(s, "stop")
        elif (limit is not None and s.n_completion >= limit) or len(s.tokens) >= self.llama.n_ctx:
            self._finish(s, "length")

    def _emit(self, s: Sequence, text: str) -> None:
        if text:
            self.send(wire.Piece(s.request.id, text, s.n_unsent))
            s.n_unsent = 0

    def _recover(self, rc: int, shares: list[tuple[Sequence, int, int]]) -> None:
        """Bring KV cache and sequences back in step after a decode that did not go through."""
        for s, _, _ in shares:
            self.llama.forget(s.slot, s.n_past)
        if rc == ABORTED:
            return  # the next iteration has read the Cancel that asked for it, and computes the rest again
        if rc == NO_KV_SLOT and len(self.running) > 1:
            self._preempt(self.running[-1])
            return
        for s, _, _ in shares:
            if rc == NO_KV_SLOT:
                self._finish(s, "length")
            else:
                self._fail(s, f"llama_decode returned {rc}")

    def _preempt(self, s: Sequence) -> None:
        """Put the youngest answer back in the queue; it is computed again, token for token, when there is room."""
        self.running.remove(s)
        self.llama.forget(s.slot)
        s.slot, s.n_past = -1, 0
        self.waiting.appendleft(s)

    def _finish(self, s: Sequence, reason: str) -> None:
        if reason != "cancelled":
            self._emit(s, s.text.flush())
        self._release(s)
        self.send(wire.Done(s.request.id, reason, s.n_prefilled, s.n_completion, s.busy_s))

    def _fail(self, s: Sequence, message: str) -> None:
        self._release(s)
        self.send(wire.Failed(s.request.id, "engine_error", message, False))

    def _release(self, s: Sequence) -> None:
        if s in self.running:
            self.running.remove(s)
            self.llama.forget(s.slot)
        elif s in self.waiting:
            self.waiting.remove(s)
        s.sampler.close()

    def _find(self, request_id: str) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.request.id == request_id), None)

"""Which tokens go into the next llama_decode, and what comes of it. Knows sequences, not sockets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from . import wire
from .llama import ABORTED, N_SEQ_MAX, NO_KV_SLOT, Llama, PromptError, Sampler
from .text import TextStream

PREFILL_BESIDE_DECODE = 64  # tokens; bounds how long running answers wait behind a long prompt
MAX_WAITING = 256  # answers; beyond it a request is refused, never silently dropped


class Send(Protocol):
    """Where messages to the daemon go."""

    def __call__(self, message: wire.Message) -> None:
        """Send one message."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the engine. `tokens` are prompt and answer; the first `n_past` of them are in the KV cache.

    Given were `prompt`, and of the answer the text `answer` with the tokens `given`; `exact` says that its end is the
    end of a token. `n_first` of these tokens were there at the start; `n_prompt` tokens are prefilled, not drawn, and
    those below `n_counted` are in `n_prefilled`. While the last token is being healed, `dropped` are its bytes, and
    `candidates` may stand in its place. `n_drawn` tokens were drawn since the last order, `n_completion` in all.
    """

    request: wire.Generate
    prompt: list[int]
    answer: str
    given: list[int]
    exact: bool
    held: bool
    held_at: float
    n_first: int
    tokens: list[int] = field(default_factory=list)
    n_prompt: int = 0
    text: TextStream = field(default_factory=TextStream)
    sampler: Sampler | None = None
    dropped: bytes = b""
    candidates: list[int] = field(default_factory=list)
    slot: int = -1
    n_past: int = 0
    n_counted: int = 0
    n_prefilled: int = 0
    n_drawn: int = 0
    n_completion: int = 0
    n_unsent: int = 0
    unsent_ids: list[int] = field(default_factory=list)
    has_ids: bool = True
    n_orders: int = 0
    told: bool = False
    busy_s: float = 0.0

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token is still to be computed."""
        return self.n_past < len(self.tokens) - 1

    @property
    def full(self) -> bool:
        """Whether the answer has all the tokens that were asked for, appended ones included."""
        limit = self.request.max_tokens
        return limit is not None and self.n_drawn + len(self.given) - self.n_first >= limit


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
        given = self.llama.answer_tokens(request.answer_so_far, request.answer_ids)
        if len(prompt) >= self.llama.n_ctx:
            message = (
                f"This model's maximum context length is {self.llama.n_ctx} tokens, but the prompt has {len(prompt)}. "
                "Shorten the prompt, or raise device.n_ctx."
            )
            self.send(wire.Failed(request.id, "context_length_exceeded", message, True))
            return
        exact = bool(request.answer_ids)
        sequence = Sequence(
            request, prompt, request.answer_so_far, given, exact, request.hold, self.clock(), len(given)
        )  # fmt: skip
        self.waiting.append(sequence)
        self._rewind(sequence, 0)
        if not sequence.held:
            self._go(sequence)

    def hold(self, request_id: str) -> None:
        """Cut a sequence back to what it was given, and let it wait; an unknown id has ended by itself."""
        sequence = self._find(request_id)
        if sequence is None:
            return
        sequence.n_orders += 1
        if not sequence.held:
            sequence.held, sequence.held_at = True, self.clock()
            self._rewind(sequence, sequence.n_prompt)
        self._progress(sequence)

    def append(self, message: wire.Append) -> None:
        """Grow a held sequence by text from elsewhere; `go` lets it generate. An unknown id has ended by itself."""
        sequence = self._find(message.id)
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
        s.answer += message.text
        before = s.given
        if message.ids:
            s.given = before + self.llama.checked(message.ids)
        elif message.text:
            s.given = self.llama.answer_tokens(s.answer)
        s.exact = bool(message.ids) or (s.exact and not message.text)
        same = next((i for i, (a, b) in enumerate(zip(before, s.given, strict=False)) if a != b), len(before))
        self._rewind(s, len(s.prompt) + min(same, len(s.given)))

    def _rewind(self, s: Sequence, n_same: int) -> None:
        """Begin again after the given answer; the first `n_same` tokens are as before, and stay computed."""
        self._close_sampler(s)
        s.dropped, s.candidates = b"", []
        s.tokens = s.prompt + s.given
        s.text, s.has_ids, s.told = TextStream(s.request.stop), True, False
        s.n_prompt = len(s.tokens)
        s.n_drawn = s.n_unsent = 0
        s.unsent_ids = []
        self._keep(s, n_same)
        if len(s.tokens) >= self.llama.n_ctx:
            self._finish(s, "length")

    def _go(self, s: Sequence) -> None:
        """Let a sequence generate; if the end of its text may be the middle of a token, that token is drawn again."""
        if s not in (*self.running, *self.waiting):
            return
        s.held = False
        if s.given and not s.exact:
            s.candidates = self.llama.extensions(s.given[-1])
            if s.candidates:
                s.dropped = self.llama.piece(s.tokens.pop())
        s.n_prompt = len(s.tokens)
        self._keep(s, s.n_prompt)
        s.sampler = self.llama.sampler(s.request, s.tokens[len(s.prompt) :])
        if s.full:
            self._finish(s, "length")

    def _keep(self, s: Sequence, n: int) -> None:
        """Forget what is computed beyond `n` tokens, and the last token: its logits are wanted again."""
        s.n_counted = min(s.n_counted, n)
        n = min(n, len(s.tokens) - 1)
        if s.n_past > n:
            s.n_past = n
            self.llama.forget(s.slot, n)

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
        for s in (*self.running, *(() if rows else self.waiting)):
            if s.held and not s.told and (s.slot < 0 or not s.prefilling):
                self._progress(s, idle=True)
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
        """Give slots to waiting sequences. Held ones come last, and make room for one that wants to generate."""
        while self.waiting:
            s = next((s for s in self.waiting if not s.held), self.waiting[0])
            if not self._fits(s, self.running):
                held = [r for r in self.running if r.held]
                if s.held or not held or not self._fits(s, [r for r in self.running if not r.held]):
                    return
                self._preempt(min(held, key=lambda r: r.held_at))
                continue
            self.waiting.remove(s)
            s.slot = min(set(range(N_SEQ_MAX)) - {r.slot for r in self.running})
            self.running.append(s)

    def _fits(self, s: Sequence, beside: list[Sequence]) -> bool:
        n_tokens = sum(len(r.tokens) for r in beside) + len(s.tokens)
        return not beside or (len(beside) < N_SEQ_MAX and n_tokens < self.llama.n_ctx)

    def _build(self) -> tuple[list[tuple[int, int, int, bool]], list[tuple[Sequence, int, int]]]:
        """Rows for llama_decode, and (sequence, number of its rows, row to sample from or -1)."""
        rows: list[tuple[int, int, int, bool]] = []
        shares: list[tuple[Sequence, int, int]] = []
        for s in self.running:
            if not s.prefilling and not s.held:
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
            new_prompt = max(0, min(s.n_past, s.n_prompt) - s.n_counted)
            s.n_counted += new_prompt
            s.n_prefilled += new_prompt
            self.totals.prompt_tokens += new_prompt
            if row >= 0:
                assert s.sampler is not None
                self._take(s, self.llama.sample(s.sampler, row, s.candidates))
            else:
                self._progress(s, idle=s.held and not s.prefilling)

    def _progress(self, s: Sequence, *, idle: bool = False) -> None:
        s.told = idle
        self.send(wire.Progress(s.request.id, s.n_past, s.n_prompt, idle, s.n_orders))

    def _take(self, s: Sequence, token: int) -> None:
        """Add a drawn token to its answer; end the answer where it ends."""
        if self.llama.ends(token):
            self._finish(s, "stop")
            return
        s.tokens.append(token)
        piece = self.llama.piece(token)
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
        self.totals.completion_tokens += 1
        self._emit(s, s.text.feed(piece))
        if s.text.stopped:
            self._finish(s, "stop")
        elif s.full or len(s.tokens) >= self.llama.n_ctx:
            self._finish(s, "length")

    def _emit(self, s: Sequence, text: str) -> None:
        if not text:
            return
        ids: tuple[int, ...] = ()
        if s.has_ids and s.text.whole:
            ids, s.unsent_ids = tuple(s.unsent_ids), []
        self.send(wire.Piece(s.request.id, text, s.n_unsent, ids))
        s.n_unsent = 0

    def _recover(self, rc: int, shares: list[tuple[Sequence, int, int]]) -> None:
        """Bring KV cache and sequences back in step after a decode that did not go through."""
        for s, _, _ in shares:
            self.llama.forget(s.slot, s.n_past)
        if rc == ABORTED:
            return  # the next iteration has read the Cancel that asked for it, and computes the rest again
        if rc == NO_KV_SLOT and len(self.running) > 1:
            held = [s for s in self.running if s.held]
            self._preempt(min(held, key=lambda s: s.held_at) if held else self.running[-1])
            return
        for s, _, _ in shares:
            if rc == NO_KV_SLOT:
                self._finish(s, "length")
            else:
                self._fail(s, f"llama_decode returned {rc}")

    def _preempt(self, s: Sequence) -> None:
        """Put an answer back in the queue; it is computed again, token for token, when there is room."""
        self.running.remove(s)
        self.llama.forget(s.slot)
        s.slot, s.n_past, s.told = -1, 0, False
        self.waiting.appendleft(s)

    def _finish(self, s: Sequence, reason: str) -> None:
        if reason != "cancelled":
            self._emit(s, s.text.flush())
        self._release(s)
        self.send(wire.Done(s.request.id, reason, s.n_prefilled, s.n_completion, s.busy_s))

    def _fail(self, s: Sequence, message: str, reason: str = "engine_error") -> None:
        self._release(s)
        self.send(wire.Failed(s.request.id, reason, message, False))

    def _release(self, s: Sequence) -> None:
        if s in self.running:
            self.running.remove(s)
            self.llama.forget(s.slot)
        elif s in self.waiting:
            self.waiting.remove(s)
        self._close_sampler(s)

    def _close_sampler(self, s: Sequence) -> None:
        if s.sampler is not None:
            s.sampler.close()
            s.sampler = None

    def _find(self, request_id: str) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.request.id == request_id), None)

"""One answer in the engine: where it is in its life, its tokens, and the messages that say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec

from ...scheduler.jobs import Job
from ...scheduler.timeline import Timeline
from ...types import Likelihood, rest_at
from .. import wire
from ..kv.host_cache import Saved
from ..llama.adapters import prefix_key
from ..llama.sampler import Sampler
from ..llama.vocabulary import Vocabulary
from ..speculation.prompt_lookup import MODEL_PRIOR, Chance, PromptLookup
from .unsent_tokens import Unsent

if TYPE_CHECKING:
    from ..llama.model import Llama

Send = Callable[[wire.Message], None]  # to the daemon


class SequenceStatus(Enum):
    """Where a sequence is in its life. Only `Admission` sets it, along MOVES."""

    WAITING = auto()  # it may generate, but has no cells in the KV cache, and nothing is saved
    RUNNING = auto()  # it has cells, and the scheduler has chosen it
    PAUSED = auto()  # it keeps its cells, but the scheduler has chosen others
    SWAPPED = auto()  # its cells' content is in main memory
    AT_PARTNER = auto()  # it has cells, and a partner has its rows: it goes on with the verdict on them
    IN_FLIGHT = auto()  # it has cells, and its rows are on their way through the hosts that have the inner layers
    HELD = auto()  # it waits for an order; meanwhile it may have cells, or be swapped out, or neither
    ENDED = auto()  # it has left, for whatever reason


WAITING, RUNNING, PAUSED, SWAPPED, AT_PARTNER, IN_FLIGHT, HELD, ENDED = SequenceStatus

MOVES = {
    WAITING: {RUNNING, HELD, ENDED},
    RUNNING: {PAUSED, WAITING, SWAPPED, AT_PARTNER, IN_FLIGHT, HELD, ENDED},
    PAUSED: {RUNNING, WAITING, SWAPPED, HELD, ENDED},
    SWAPPED: {RUNNING, HELD, ENDED},
    AT_PARTNER: {RUNNING, HELD, ENDED},
    IN_FLIGHT: {RUNNING, ENDED},  # an order waits until it has landed
    HELD: {WAITING, PAUSED, SWAPPED, ENDED},
    ENDED: set[SequenceStatus](),
}


@dataclass(slots=True, kw_only=True)
class Given:
    """What the answer goes on from: the tokens of its prompt, and the answer so far as `text` and `tokens`.

    `exact`: the end of the text is the end of a token. The first `n_first` tokens came with the request, and do not
    count against its `max_tokens`.
    """

    prompt: list[int]
    text: str
    tokens: list[int]
    exact: bool
    n_first: int

    def extend(self, order: wire.AppendText, vocabulary: Vocabulary) -> int:
        """Add text from elsewhere; return how many tokens, the prompt's included, are as before. Raises PromptError.

        Without ids the whole answer is tokenized anew, as one text.
        """
        if not self.text:
            self.prompt = vocabulary.close_thought(self.prompt, order.text)
        self.text += order.text
        before = self.tokens
        if order.ids:
            self.tokens = before + vocabulary.check_ids(order.ids)
        elif order.text:
            self.tokens = vocabulary.answer_tokens(self.text)
        self.exact = bool(order.ids) or (self.exact and not order.text)
        pairs = enumerate(zip(before, self.tokens, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), len(before))
        return len(self.prompt) + min(same, len(self.tokens))


@dataclass(slots=True)
class Prefill:
    """How far the tokens are computed that are not drawn: the first `n_prompt` of the sequence.

    Each is counted once, whatever is cut and computed again: the first `n_counted` are part of `n_computed`, or of
    `n_cached` where the KV cache had them.
    """

    n_prompt: int = 0
    n_counted: int = 0
    n_computed: int = 0
    n_cached: int = 0

    def count_computed(self, n_past: int) -> int:
        """Count what has been computed up to `n_past`; return how many tokens that adds."""
        n_new = max(0, min(n_past, self.n_prompt) - self.n_counted)
        self.n_counted += n_new
        self.n_computed += n_new
        return n_new

    def count_cached(self, n_past: int) -> None:
        """Count what the KV cache had up to `n_past`."""
        n_new = max(0, min(n_past, self.n_prompt) - self.n_counted)
        self.n_counted += n_new
        self.n_cached += n_new


@dataclass(slots=True)
class Draw:
    """How the next token is drawn: `n_drawn` were since the last order, `n_completion` in all.

    While the last given token is being healed, `healed` has its bytes, and `candidates` may stand in its place. The
    `likelihoods` of tokens just drawn are there if they are to be told. The first token since came at `began_at`, s; it
    `is_late` when a line has ended later than the answer is to take.
    """

    sampler: Sampler | None = None
    healed: bytes = b""
    candidates: list[int] = field(default_factory=list)
    likelihoods: list[Likelihood] = field(default_factory=list)
    n_drawn: int = 0
    n_completion: int = 0
    began_at: float = 0.0
    is_late: bool = False

    def weigh(self, llama: Llama, tokens: list[int], row: int, n_top: int) -> None:
        """Find the log-probabilities of tokens that were drawn one after the other, from the rows from `row` on."""
        self.likelihoods = [
            llama.likelihood(row + i, token, n_top, self.candidates, len(self.healed)) for i, token in enumerate(tokens)
        ]

    def close(self) -> None:
        """Free the sampler; idempotent."""
        if self.sampler is not None:
            self.sampler.close()
            self.sampler = None


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One answer. `tokens` are prompt and answer; the first `n_past` of them are in the KV cache, or in `saved`.

    Tokens that were guessed one by one, each from the row of the one before, are `ahead` of them until they are judged.
    Its cells belong to the sequence `slot` of the KV cache, -1 without cells. The first token's `key` has its adapter's
    `salt`. Of its orders `n_orders` are carried out. The daemon knows that it is idle (`idle_sent`), and that it waits
    for others (`pause_sent`). `rearranged`: the turns of its prompt are not those of the request.
    """

    request: wire.Generate
    given: Given
    timeline: Timeline
    waiting_since: float | None
    grammar: str = ""
    salt: int = 0
    rearranged: bool = False

    status: SequenceStatus = WAITING
    held_at: float = 0.0
    slot: int = -1
    saved: Saved | None = None
    n_preempted: int = 0

    tokens: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    n_past: int = 0
    prefill: Prefill = field(default_factory=Prefill)
    draw: Draw = field(default_factory=Draw)
    unsent: Unsent = field(default_factory=Unsent)
    lookup: PromptLookup | None = None
    drafting: Chance = field(default_factory=lambda: Chance(MODEL_PRIOR))

    n_orders: int = 0
    idle_sent: bool = False
    pause_sent: bool = False
    busy_s: float = 0.0

    # --- questions -----------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether it waits for an order."""
        return self.status is HELD

    @property
    def is_running(self) -> bool:
        """Whether it has cells and is chosen."""
        return self.status is RUNNING

    @property
    def is_away(self) -> bool:
        """Whether its rows are at another machine: its cells stay, and it is not chosen anew."""
        return self.status is AT_PARTNER or self.status is IN_FLIGHT

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status is ENDED

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the last token is still to be computed."""
        return self.n_past < len(self.tokens) - 1

    @property
    def rules(self) -> wire.Generate:
        """The request with `min_tokens` counted from the beginning of the answer, as a sampler counts."""
        request, drawing, n_first = self.request, self.request.drawing, self.given.n_first
        if not (drawing.min_tokens and n_first):
            return request
        drawing = msgspec.structs.replace(drawing, min_tokens=drawing.min_tokens + n_first)
        return msgspec.structs.replace(request, drawing=drawing)

    @property
    def n_left(self) -> int | None:
        """How many tokens the answer may still get, appended ones included; None without a limit."""
        limit = self.request.max_tokens
        return None if limit is None else limit - (self.draw.n_drawn + len(self.given.tokens) - self.given.n_first)

    @property
    def expected_rest(self) -> float:
        """The tokens still to come as the daemon expects them, and no more than may; 0 where that is not known."""
        rest = self.request.rest
        if not rest:
            return 0.0
        expected, n_left = rest_at(rest, len(self.tokens) - len(self.given.prompt)), self.n_left
        return expected if n_left is None else min(expected, max(n_left, 0))

    @property
    def is_full(self) -> bool:
        """Whether the answer has all the tokens that were asked for."""
        n_left = self.n_left
        return n_left is not None and n_left <= 0

    def end_reason(self, n_ctx: int) -> str:
        """Return why the answer ends here, in a context of `n_ctx` tokens; empty if it goes on."""
        if self.unsent.text.stopped:
            return "length" if self.unsent.text.is_outdented else "stop"
        if self.is_full or self.draw.is_late:
            return "length"
        return wire.FULL if len(self.tokens) >= n_ctx else ""

    def key(self, start: int = 0, end: int | None = None) -> list[int]:
        """Return its tokens as the prefix index knows them: they are of use under its adapter only."""
        tokens = self.tokens + self.ahead if self.ahead else self.tokens
        return prefix_key(tokens[start:end], 0 if start else self.salt)

    @property
    def next_token(self) -> int:
        """The token whose row is computed next."""
        n = self.n_past - len(self.tokens)
        return self.tokens[self.n_past] if n < 0 else self.ahead[n]

    def job(self, swap_s: float) -> Job:
        """Describe it to the scheduler; `swap_s` is how long it takes to swap it in, s."""
        n_there = self.saved.n_past if self.saved is not None else self.n_past
        return Job(
            key=self.request.id,
            timeline=self.timeline,
            n_context=len(self.tokens),
            n_missing=max(0, len(self.tokens) - 1 - n_there),
            resume_s=swap_s,
            resident=self.slot >= 0,
            n_preempted=self.n_preempted,
            waiting_since=self.waiting_since,
            hurried=self.request.pace_tps is None,
            expected_rest=self.expected_rest,
        )

    # --- orders --------------------------------------------------------------------------------------------------

    def rewind(self, vocabulary: Vocabulary) -> None:
        """Begin again behind what was given: nothing is drawn, and no text is on its way."""
        self.draw.close()
        self.draw = Draw(n_completion=self.draw.n_completion)
        self.unsent = Unsent(vocabulary.stream(self.request, self.given.prompt, self.given.text))
        self.tokens, self.ahead = self.given.prompt + self.given.tokens, []
        self.prefill.n_prompt = len(self.tokens)
        self.lookup, self.idle_sent = None, False

    def heal(self, vocabulary: Vocabulary) -> None:
        """Have the last given token drawn again, if it may be the beginning of a longer one."""
        if self.given.tokens and not self.given.exact:
            self.draw.candidates = vocabulary.extensions(self.given.tokens[-1])
            if self.draw.candidates:
                self.draw.healed = vocabulary.piece(self.tokens.pop())
        self.prefill.n_prompt = len(self.tokens)

    def read_on(self, request: wire.Generate, timeline: Timeline, now: float) -> None:
        """Go on for a reader of another pace; what the reader has in hand stays, and what was late is past."""
        in_hand = round(self.timeline.stock_s(now) * self.timeline.pace_tps)
        self.request, self.timeline = request, timeline
        timeline.token(now, in_hand)

    # --- tokens --------------------------------------------------------------------------------------------------

    def new_sampler(self, llama: Llama) -> Sampler:
        """Make a sampler for what follows its tokens. Raises FormatError for what cannot be of its answer."""
        n = len(self.given.prompt)
        return llama.sampler(self.rules, self.tokens[n:], self.grammar, self.given.prompt)

    def take_token(self, token: int, piece: bytes, now: float, send: Send) -> bool:
        """Add a drawn token with its bytes, and send its text; False if it is just the one that was being healed."""
        draw, unsent = self.draw, self.unsent
        likelihoods = [draw.likelihoods.pop(0)] if draw.likelihoods else []
        self.tokens.append(token)
        if draw.candidates:
            piece = piece[len(draw.healed) :]
            draw.healed, draw.candidates = b"", []
            if not piece:
                self.prefill.n_prompt += 1
                return False
            unsent.has_ids = False  # from here on no text is exactly that of some tokens
        draw.began_at = draw.began_at if draw.n_drawn else now
        most_s = self.request.drawing.t_max_predict_ms / 1e3
        draw.is_late = 0 < most_s < now - draw.began_at and b"\n" in piece
        draw.n_drawn += 1
        draw.n_completion += 1
        unsent.n_tokens += 1
        unsent.ids.append(token)
        unsent.likelihoods += likelihoods
        self.timeline.token(now)
        self.emit(unsent.text.feed(piece), send)
        return True

    def emit(self, text: str, send: Send) -> None:
        """Send a thought that is complete, the text, with ids where they spell it, and pieces of calls."""
        unsent, id_ = self.unsent, self.request.id
        if thought := unsent.text.take_thought():
            send(wire.TextPiece(id=id_, text=thought, n_tokens=unsent.n_tokens, thought=True))
            unsent.n_tokens = 0
        likelihoods = unsent.take_likelihoods(text) if thought or text else ()
        if text:
            ids: tuple[int, ...] = ()
            if unsent.has_ids and unsent.text.whole:
                ids, unsent.ids = tuple(unsent.ids), []
            send(
                wire.TextPiece(
                    id=id_,
                    text=text,
                    n_tokens=unsent.n_tokens,
                    ids=ids,
                    alone=unsent.is_alone,
                    likelihoods=likelihoods,
                )
            )
            unsent.n_tokens = 0
        for index, name, arguments in unsent.text.take_calls():
            send(wire.CallPiece(id=id_, index=index, name=name, arguments=arguments, n_tokens=unsent.n_tokens))
            unsent.n_tokens, unsent.likelihoods = 0, []  # which are told of text only

    def send_progress(self, send: Send, *, idle: bool = False) -> None:
        """Send how much of the prompt is computed; `idle`: no more is, before an order or room for it comes."""
        self.idle_sent = idle
        counts = self.prefill
        send(
            wire.PrefillProgress(
                id=self.request.id,
                n_past=self.n_past,
                n_prompt=counts.n_prompt,
                idle=idle,
                n_orders=self.n_orders,
                n_prefilled=counts.n_computed,
                n_cached=counts.n_cached,
            )
        )

    def done_message(self, reason: str, split: wire.SplitUsage | None = None) -> wire.Done:
        """Return the message that it has ended; `split` is what a partner did for it."""
        prefill, n = self.prefill, self.draw.n_completion
        return wire.Done(
            id=self.request.id,
            reason=reason,
            n_prompt=prefill.n_computed,
            n_completion=n,
            busy_s=self.busy_s,
            n_cached=prefill.n_cached,
            split=split,
            stop=self.unsent.text.stop if reason == "stop" else None,
            rearranged=self.rearranged,
        )

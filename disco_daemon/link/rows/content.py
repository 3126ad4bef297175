"""The partner's content manager: which rows of which answer are there, and what is to be done with them. Pure.

After CE-CoLLM's (Jin and Wu) content manager. It knows positions, pending rows and credits, and neither a text nor a KV
cache: for each answer of each peer rows come in, wait until they can be computed, and are dropped once they are. The
rows of the prompt are computed as they come. Drafts wait for the `JudgeDrafts` that covers them, and are computed with
logits, together or one after the other; behind them the tokens are drawn. The verdict begins a new turn: with the first
token that is not the next draft, and what lies behind it need not be computed.

A row that a peer sends takes one of its credits, which comes back when the row is computed or dropped. All drafts that
may wait at a time need credits of their own, or they could wait for each other: at least 2 x MAX_JUDGED an answer.

What a peer gets wrong in one answer ends that answer (AnswerFailed); what no answer explains, such as rows beyond the
credits, raises BadFrameError: end the link. Wrong calls from our own engine raise ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..protocol import (
    N_ID,
    AnswerClosed,
    AnswerFailed,
    AnswerOpened,
    BadFrameError,
    BeginDrawing,
    CloseAnswer,
    Credit,
    CutAnswer,
    DraftVerdict,
    JudgeDrafts,
    NeedRows,
    OpenAnswer,
    SendRows,
    ToEdge,
)
from .codec import RowArray, decode_rows
from .gbnf import check_grammar
from .pending import MAX_JUDGED, BadContentError, Content, ContentKey

N_ENDED = 4096  # ids of ended answers of a peer that are known, for rows still on their way; more than credits


@dataclass(frozen=True, slots=True)
class ContentChange:
    """What follows from a message or a result: messages to send, in order, and what becomes of the KV cache.

    It keeps the first `keep` tokens if that is a number. If the answer has `ended`, nothing more is to be computed.
    """

    send: tuple[ToEdge, ...] = ()
    keep: int | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ReadyRows:
    """Rows to compute next, [n, n_embd], of the positions from `pos` on; logits are wanted of the last `n_logits`."""

    pos: int
    tokens: tuple[int, ...]
    rows: RowArray
    n_logits: int


@dataclass(slots=True)
class _Sender:
    """A peer: its open answers, the ids of its ended ones, and the credits that its rows hold."""

    answers: dict[str, Content] = field(default_factory=dict)
    ended: dict[str, None] = field(default_factory=dict)
    n_held: int = 0


class ContentManager:
    """The contents of all answers of all peers.

    Each peer may have `max_answers` open, of `n_ctx` tokens at most, and `credits` rows on their way or waiting. A row
    has `n_embd` numbers: none where all layers are here, which take the token ids.
    """

    def __init__(self, n_embd: int, n_vocab: int, n_ctx: int, max_answers: int, credits: int) -> None:
        if n_embd < 0 or min(n_vocab, n_ctx, max_answers) < 1 or credits < 2 * MAX_JUDGED * max_answers:
            msg = f"{credits} credits do not let {max_answers} answers of {n_ctx} tokens go on: drafts need them, too"
            raise ValueError(msg)
        self.n_embd, self.n_vocab, self.n_ctx = n_embd, n_vocab, n_ctx
        self.max_answers, self.credits = max_answers, credits
        self.n_rows = 0  # computed so far, of all answers
        self._peers: dict[int, _Sender] = {}

    # --- what is there ------------------------------------------------------------------------------------------------

    def get(self, key: ContentKey) -> Content | None:
        """Return an open answer's record, to be read only."""
        peer = self._peers.get(key[0])
        return peer.answers.get(key[1]) if peer else None

    @property
    def contents(self) -> list[Content]:
        """All open answers."""
        return [content for peer in self._peers.values() for content in peer.answers.values()]

    @property
    def n_held(self) -> int:
        """Rows in memory."""
        return sum(peer.n_held for peer in self._peers.values())

    # --- what a peer says ---------------------------------------------------------------------------------------------

    def open(self, peer: int, message: OpenAnswer, n_have: int) -> ContentChange:
        """Begin an answer of whose tokens the first `n_have` are in the KV cache already. Raises BadFrameError.

        The row of the last token is always expected: what follows it is drawn behind that row.
        """
        if (refused := self.refused(peer, message)) is not None:
            return refused
        n_past = max(0, min(n_have, len(message.tokens) - 1))
        self._peers[peer].answers[message.id] = Content((peer, message.id), message.private, n_past)
        return ContentChange((AnswerOpened(id=message.id, n_past=n_past),), keep=n_past)

    def refused(self, peer: int, message: OpenAnswer) -> ContentChange | None:
        """Return what follows if an answer cannot begin. Raises BadFrameError.

        Ask before its tokens are looked up: an id beyond the vocabulary may stand for another machine's text there.
        """
        sender = self._peers.setdefault(peer, _Sender())
        if not 0 < len(message.id) <= N_ID or message.id in sender.answers or message.id in sender.ended:
            raise BadFrameError(f"the id {message.id[:N_ID]!r} is none, or was used before")
        try:
            self._check_room(sender)
            self._check_tokens(message.tokens)
            self._check_end(len(message.tokens))
        except BadContentError as e:
            self._remember_ended(sender, message.id)
            return ContentChange((_failed(message.id, e),), ended=True)
        return None

    def rows(self, peer: int, message: SendRows, payload: bytes | memoryview) -> ContentChange:
        """Take rows that have come. Raises BadFrameError."""
        n = len(message.tokens)
        sender = self._sender(peer)
        if n > self.credits - sender.n_held:
            msg = f"{n} rows came, but only {self.credits - sender.n_held} of {self.credits} credits were left"
            raise BadFrameError(msg)
        content = self._find(sender, message.id)
        if content is None or message.turn < content.turn:
            return ContentChange(_credit(n))
        try:
            rows = self._decode(message, payload)
            self._check_end(message.pos + n)
            if message.turn > content.turn:
                content.hold_early(message, rows)
            else:
                content.append(message, rows)
        except BadContentError as e:
            return self._fail(content, e, n)
        sender.n_held += n
        return ContentChange()

    def begin(self, peer: int, message: BeginDrawing) -> ContentChange:
        """Let drafts be judged from now on. Raises BadFrameError."""
        content = self._find(self._sender(peer), message.id)
        if content is None:
            return ContentChange()
        try:
            self._check_tokens((*message.answer, *message.candidates, *message.sampling.prompt))
            self._check_end(max(len(message.answer), len(message.sampling.prompt)))
            check_grammar(message.sampling.grammar)
            content.begin_drawing()
        except BadContentError as e:
            return self._fail(content, e)
        except BadFrameError as e:
            return self._fail(content, BadContentError(str(e), "bad_grammar"))
        return ContentChange()

    def judge(self, peer: int, message: JudgeDrafts) -> ContentChange:
        """Let the drafts be computed as soon as they are all there. Raises BadFrameError."""
        content = self._find(self._sender(peer), message.id)
        if content is None or message.turn < content.turn:
            return ContentChange()
        try:
            self._check_end(message.end)
            self._check_end(len(message.left))
            self._check_tokens(message.left)
            content.judge(message)
        except BadContentError as e:
            return self._fail(content, e)
        return ContentChange()

    def cut(self, peer: int, message: CutAnswer) -> ContentChange:
        """Forget all beyond the first tokens; rows below that never came are asked for. Raises BadFrameError."""
        content = self._find(self._sender(peer), message.id)
        if content is None:
            return ContentChange()
        n_before = content.n_held
        try:
            self._check_end(message.n)
            content.cut(message)
        except BadContentError as e:
            n_dropped = n_before - content.n_held
            self._give_back(content, n_dropped)
            return self._fail(content, e, n_dropped)
        send: tuple[ToEdge, ...] = ()
        if content.turn != message.turn:
            send = (NeedRows(id=message.id, turn=content.turn, pos=content.n_received),)
        n_dropped = n_before - content.n_held
        return ContentChange((*send, *self._give_back(content, n_dropped)), keep=content.n_computed)

    def close(self, peer: int, message: CloseAnswer) -> ContentChange:
        """End an answer. Raises BadFrameError."""
        content = self._find(self._sender(peer), message.id)
        if content is None:
            return ContentChange()
        closed = AnswerClosed(id=message.id, n_rows=content.n_rows, busy_s=content.busy_s)
        return ContentChange((closed, *self._end(content)), ended=True)

    def peer_left(self, peer: int) -> tuple[ContentKey, ...]:
        """Forget a peer; return the keys of its open answers, all of which have ended."""
        sender = self._peers.pop(peer, _Sender())
        return tuple(content.key for content in sender.answers.values())

    # --- what the engine does -----------------------------------------------------------------------------------------

    def take(self, key: ContentKey, n: int) -> ReadyRows | None:
        """Return up to `n` rows to compute next, or None. They stay pending until `computed`.

        No message may be taken between this and `computed`.
        """
        content = self._content(key)
        n = min(n, content.n_plain + content.n_run)
        n_logits = max(0, n - content.n_plain)
        if n < 1:
            return None
        return ReadyRows(content.n_computed, tuple(content.tokens[:n]), np.stack(content.rows[:n]), n_logits)

    def computed(self, key: ContentKey, n: int, busy_s: float = 0.0) -> ContentChange:
        """Drop the `n` rows that `take` gave: they are computed, in `busy_s`."""
        content = self._content(key)
        if not 0 < n <= content.n_plain + content.n_run:
            msg = f"{n} rows cannot have been computed: {content.n_plain} could be, and {content.n_run} drafts"
            raise ValueError(msg)
        content.run += tuple(content.tokens[content.n_plain : n])
        content.n_computed += n
        content.n_rows += n
        self.n_rows += n
        content.busy_s += busy_s
        content.verdict_n_rows += n
        content.verdict_busy_s += busy_s
        del content.tokens[:n], content.rows[:n]
        return ContentChange(self._give_back(content, n))

    def draw(self, key: ContentKey, tokens: Sequence[int], *, ends: bool = False) -> ContentChange:
        """Take the tokens drawn behind rows that were computed: the drafts that were right and one more.

        Where the last of them is the next draft, its row is to be computed next, unless the text `ends` with it; else
        this is the verdict.
        """
        content = self._content(key)
        run, drawn = content.run, (*content.drawn, *tokens)
        if not len(content.drawn) < len(drawn) <= len(run) or drawn[:-1] != run[1 : len(drawn)]:
            raise ValueError(f"the tokens {drawn} cannot have been drawn behind the drafts {run}")
        content.drawn = drawn
        if content.n_run and len(drawn) == len(run) and content.tokens[0] == drawn[-1] and not ends:
            return ContentChange()
        return self._verdict(content)

    def _verdict(self, content: Content) -> ContentChange:
        """Begin a new turn behind the tokens drawn."""
        assert content.drafts_from is not None
        start, tokens = content.drafts_from, content.drawn
        n_judged, keep = len(content.run), start + len(tokens)
        n_dropped = len(content.tokens)
        content.begin_turn(content.turn + 1, keep)
        said = DraftVerdict(
            id=content.key[1],
            turn=content.turn,
            start=start,
            tokens=tokens,
            n_judged=n_judged,
            n_rows=content.verdict_n_rows,
            busy_s=content.verdict_busy_s,
        )
        content.verdict_n_rows, content.verdict_busy_s = 0, 0.0
        return ContentChange((said, *self._give_back(content, n_dropped)), keep=keep)

    def evicted(self, key: ContentKey, n_left: int) -> ContentChange:
        """Ask for rows again: only the first `n_left` tokens are in the KV cache yet.

        Before that comes the verdict on what is drawn already: the sampler has drawn it, and cannot do so again.
        """
        content = self._content(key)
        if n_left >= content.n_computed:
            return ContentChange()
        said = self._verdict(content).send if content.drawn else ()
        if content.run and content.drafts_from is not None:  # their logits are needed again, too
            n_left = min(n_left, content.drafts_from)
        n_dropped = len(content.tokens)
        content.begin_turn(content.turn + 1, n_left)
        need = NeedRows(id=key[1], turn=content.turn, pos=n_left)
        return ContentChange((*said, need, *self._give_back(content, n_dropped)), keep=n_left)

    def fail(self, key: ContentKey, reason: str, message: str, *, your_fault: bool = False) -> ContentChange:
        """End an answer that cannot go on."""
        failed = AnswerFailed(id=key[1], reason=reason, message=message, your_fault=your_fault)
        return ContentChange((failed, *self._end(self._content(key))), ended=True)

    # --- in parts -----------------------------------------------------------------------------------------------------

    def _sender(self, peer: int) -> _Sender:
        if (sender := self._peers.get(peer)) is None:
            raise BadFrameError("no answer was ever opened")
        return sender

    def _find(self, sender: _Sender, name: str) -> Content | None:
        """Return an open answer, or None for an ended one, of which something was still on its way."""
        content = sender.answers.get(name)
        if content is None and name not in sender.ended:
            raise BadFrameError(f"no answer {name[:N_ID]!r} was ever opened")
        return content

    def _content(self, key: ContentKey) -> Content:
        content = self.get(key)
        if content is None:
            raise ValueError(f"no answer {key} is open")
        return content

    def _decode(self, message: SendRows, payload: bytes | memoryview) -> RowArray:
        self._check_tokens(message.tokens)
        if not message.tokens:
            raise BadContentError("a frame without a row")
        try:
            return decode_rows(message.codec, payload, len(message.tokens), self.n_embd)
        except BadFrameError as e:
            raise BadContentError(str(e)) from e

    def _check_room(self, sender: _Sender) -> None:
        if len(sender.answers) >= self.max_answers:
            msg = f"{self.max_answers} answers are open already"
            raise BadContentError(msg, "overloaded")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if tokens and (min(tokens) < 0 or max(tokens) >= self.n_vocab):
            msg = f"ids from {min(tokens)} to {max(tokens)} are not all in the vocabulary of {self.n_vocab}"
            raise BadContentError(msg)

    def _check_end(self, end: int) -> None:
        if end > self.n_ctx:
            msg = f"{end} tokens do not fit into a context of {self.n_ctx}"
            raise BadContentError(msg, "context")

    def _give_back(self, content: Content, n: int) -> tuple[ToEdge, ...]:
        self._peers[content.key[0]].n_held -= n
        return _credit(n)

    def _fail(self, content: Content, why: BadContentError, n_free: int = 0) -> ContentChange:
        """End an answer by its peer's fault; `n_free` rows are given back besides those that it holds."""
        return ContentChange((_failed(content.key[1], why), *self._end(content, n_free)), ended=True)

    def _end(self, content: Content, n_free: int = 0) -> tuple[ToEdge, ...]:
        peer, name = content.key
        sender = self._peers[peer]
        del sender.answers[name]
        self._remember_ended(sender, name)
        sender.n_held -= content.n_held
        return _credit(content.n_held + n_free)

    def _remember_ended(self, sender: _Sender, name: str) -> None:
        sender.ended[name] = None
        while len(sender.ended) > max(N_ENDED, self.credits):
            del sender.ended[next(iter(sender.ended))]


def credits_for(max_answers: int) -> int:
    """Return how many rows may be on their way from a peer with so many answers: twice what its drafts need at most."""
    return 4 * MAX_JUDGED * max_answers


def _credit(n: int) -> tuple[ToEdge, ...]:
    return (Credit(rows=n),) if n else ()


def _failed(name: str, why: BadContentError) -> AnswerFailed:
    return AnswerFailed(id=name, reason=why.reason, message=str(why), your_fault=why.reason != "overloaded")

"""What the partner has of one answer: rows that are computed, rows that wait, and drafts to judge. Pure.

Part of the content manager (`content`), which has the rules for many answers; here are those for the rows of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol import ERA, CutAnswer, JudgeDrafts, SendRows, next_era
from .codec import RowArray

MAX_JUDGED = 32  # rows in one JudgeDrafts: more drafts than ever pay

ContentKey = tuple[int, str]  # number of the peer, id of the answer


class BadContentError(Exception):
    """What a peer says of an answer cannot be: reason and message of its AnswerFailed."""

    def __init__(self, message: str, reason: str = "bad_rows") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Content:
    """What is there of one answer: the rows below `n_computed` are in the KV cache, those behind it are pending.

    `drafts_from` is the position of the turn's first draft, `judged_to` the end of the drafts to judge, `run` the
    tokens of those that are computed, `drawn` the tokens drawn behind them so far, and `left` the tokens before them
    that the edge has drawn itself. `early` are rows of a turn to come.
    """

    key: ContentKey
    private: bool
    n_computed: int
    turn: int = 0
    is_drawing: bool = False
    drafts_from: int | None = None
    judged_to: int | None = None
    run: tuple[int, ...] = ()
    drawn: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    rows: list[RowArray] = field(default_factory=list)
    early: list[tuple[SendRows, RowArray]] = field(default_factory=list)
    n_rows: int = 0  # computed so far
    busy_s: float = 0.0
    verdict_n_rows: int = 0  # since the last verdict
    verdict_busy_s: float = 0.0

    @property
    def n_received(self) -> int:
        """Where the next row of this turn belongs."""
        return self.n_computed + len(self.tokens)

    @property
    def n_plain(self) -> int:
        """Rows that can be computed in pieces of any size."""
        end = self.n_received if self.drafts_from is None else min(self.drafts_from, self.n_received)
        return max(0, end - self.n_computed)

    @property
    def n_run(self) -> int:
        """Rows behind the plain ones that can be computed with logits: none before all of them are there."""
        if self.judged_to is None or self.drafts_from is None or self.n_received < self.judged_to:
            return 0
        return self.judged_to - self.drafts_from - len(self.run)

    @property
    def n_held(self) -> int:
        """Rows that hold a credit."""
        return len(self.tokens) + sum(len(message.tokens) for message, _ in self.early)

    def begin_turn(self, turn: int, n_computed: int, n_pending: int = 0) -> None:
        """Keep what is computed below `n_computed`, and the first pending rows."""
        del self.tokens[n_pending:], self.rows[n_pending:]
        self.turn, self.n_computed = turn, n_computed
        self.drafts_from = self.judged_to = None
        self.run = self.drawn = self.left = ()

    def append(self, message: SendRows, rows: RowArray) -> None:
        """Take rows of the present turn behind the pending ones. Raises BadContentError."""
        end = message.pos + len(message.tokens)
        if message.pos != self.n_received:
            raise BadContentError(f"rows from {message.pos} on came, but the next row is that of {self.n_received}")
        if message.drafts:
            if self.drafts_from is None:
                self.drafts_from = message.pos
            if message.pos < self.drafts_from:
                msg = f"drafts from {message.pos} on came, but those to judge begin at {self.drafts_from}"
                raise BadContentError(msg)
        elif self.drafts_from is not None and end > self.drafts_from:
            raise BadContentError(f"rows up to {end} came as no drafts, but drafts begin at {self.drafts_from}")
        self.tokens.extend(message.tokens)
        self.rows.extend(rows)

    def hold_early(self, message: SendRows, rows: RowArray) -> None:
        """Keep rows that came before the cut which begins their turn. Raises BadContentError for another turn."""
        last = self.early[-1][0].turn if self.early else self.turn
        if message.turn % ERA or message.turn < max(last, next_era(self.turn)):
            raise BadContentError(f"rows of turn {message.turn} came in turn {self.turn}")
        self.early.append((message, rows))

    def begin_drawing(self) -> None:
        """Let drafts be judged from now on. Raises BadContentError."""
        if self.is_drawing:
            raise BadContentError("drawing has begun already")
        self.is_drawing = True

    def cut(self, message: CutAnswer) -> None:
        """Begin the turn of a cut, with plain rows below it and rows that came before it. Raises BadContentError.

        If rows below it are missing, `turn` is one more: they are to be asked for.
        """
        if message.turn != next_era(self.turn) or message.n < 0:
            raise BadContentError(f"a cut to {message.n} tokens in turn {message.turn} cannot follow turn {self.turn}")
        n_computed = min(self.n_computed, message.n)
        self.begin_turn(message.turn, n_computed, min(self.n_plain, message.n - n_computed))
        self.is_drawing = False
        if self.n_received < message.n:
            self.turn += 1
        while self.early and self.early[0][0].turn <= self.turn:
            early, rows = self.early.pop(0)
            if early.turn == self.turn:
                self.append(early, rows)

    def judge(self, message: JudgeDrafts) -> None:
        """Let the drafts be computed as soon as they are all there. Raises BadContentError."""
        if not self.is_drawing or self.judged_to is not None or message.turn != self.turn:
            raise BadContentError(f"drafts of turn {message.turn} cannot be judged now, in turn {self.turn}")
        is_known = message.start >= self.n_received if self.drafts_from is None else message.start == self.drafts_from
        if not is_known or not 0 < message.end - message.start <= MAX_JUDGED:
            raise BadContentError(f"the rows from {message.start} to {message.end} are no drafts to judge")
        self.drafts_from, self.judged_to, self.left = message.start, message.end, message.left

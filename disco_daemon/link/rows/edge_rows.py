"""The edge's half of an answer that two machines compute: which rows it has, and which are due. Pure.

The mirror of the partner's `content`. The text is a list of token ids, behind it are drafts; each token has a row, of
which the latest ones may not be computed yet. The row of the last token of the text and those of the drafts are sent as
drafts, once drawing has begun: the next token is drawn behind them. The others only fill the partner's KV cache.

Where the partner has all layers, rows have no numbers (codec `ids`): each token of a text has its row as soon as it is
known, so the ids of a prompt go up before it is computed here.

All rows are kept as float32 as long as the answer lives, since the partner may lose what it has: a context of 4,096
tokens of 2,048 numbers takes 32 MiB. Rows that were never computed here (the edge's own KV cache had them) can be asked
for as well: `missing` says which.

The partner is a stranger: what cannot be true of a message from it raises BadFrameError. Wrong calls of our own raise
ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..protocol import (
    IDS,
    MAX_PAYLOAD,
    AnswerOpened,
    BadFrameError,
    BeginDrawing,
    CutAnswer,
    DraftVerdict,
    DrawRules,
    JudgeDrafts,
    NeedRows,
    OpenAnswer,
    SendRows,
    next_era,
)
from .codec import RowArray, encode_rows, row_bytes
from .credits import LinkCredits
from .pending import MAX_JUDGED

MAX_HELD = 16  # rows of tokens that left before they go up, if nothing is asked: the partner computes them as one batch
MAX_NEEDS = 32  # times that a partner may want rows again without a word of the text: more often it only keeps us busy
MAX_ROWS = 64  # in one frame: about 2 ms at 100 Mbit/s each of 576 numbers, so the partner begins early

_NO_NUMBERS: RowArray = np.empty(0, np.float32)

RowsToSend = tuple[SendRows, bytes]  # a message and the bytes behind it


@dataclass(frozen=True, slots=True)
class VerdictTaken:
    """What a verdict changes: the new `tokens` of the text, of which the first `n_right` had been drafted.

    The first `n_rows` rows stay; the KV cache is to be cut there. `n_drafts` of the tokens behind the text still stand.
    """

    tokens: tuple[int, ...]
    n_right: int
    n_rows: int
    n_drafts: int

    @property
    def n_standing(self) -> int:
        """How many drafts stand that had been made beyond the right ones: the last token drawn, and those behind it."""
        return self.n_drafts + 1 if self.n_right == len(self.tokens) else 0


class EdgeAnswer:
    """One answer at the edge, for as long as it lives, over any number of links.

    `is_eager`: drafts are sent as soon as they are computed, and not only once they are to be judged. Otherwise tokens
    may also leave here, without a verdict: `left` are those that the partner's sampler has not been told of.
    """

    def __init__(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        n_ctx: int,
        n_vocab: int,
        codec: str = "f32",
        is_private: bool = False,
        is_eager: bool = True,
    ) -> None:
        self.name, self.codec, self.is_eager = name, codec, is_eager
        self.tokens = list(tokens)  # the text, then the drafts
        self.n_text = len(self.tokens)
        self.turn = 0
        self.is_open = self.is_drawing = False
        self.left: list[int] = []
        self.judged: tuple[int, int] | None = None  # drafts whose verdict is awaited
        self.n_acknowledged = 0  # rows that the partner had computed when it last spoke of them
        self._n_uncounted = 0  # rows sent over this link that it has not said to have computed
        self._n_ctx, self._n_vocab, self._is_private = n_ctx, n_vocab, is_private
        self._rows: list[RowArray | None] = []  # by position, [n_embd] each
        self._next = 0  # position of the first row that was not sent in this turn
        self._n_begun = 0  # rows below it belong to no token that left
        self._n_needs = 0  # times that rows were wanted again since the text or the link last changed
        self._n_opened = self._n_kept = self.n_text  # tokens when it was opened; the least of them since
        self._fill_ids()

    # --- rows that are computed here ----------------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        """Where the next row belongs."""
        return len(self._rows)

    @property
    def missing(self) -> range:
        """Positions whose rows have to be sent next, but were never computed here; compute and `add` them."""
        end = start = self._next
        while end < len(self._rows) and self._rows[end] is None:
            end += 1
        return range(start, end)

    @property
    def n_covered(self) -> int:
        """How many tokens need not be computed for their rows: those are sent, or they are kept here."""
        at = self._next
        while at < len(self._rows) and self._rows[at] is not None:
            at += 1
        return at

    def add(self, pos: int, tokens: Sequence[int], rows: RowArray) -> None:
        """Add computed rows [n, n_embd] from `pos` on: at the end, behind a gap of rows not computed here, or in one.

        Tokens behind the text are drafts.
        """
        end = pos + len(tokens)
        known = self.tokens[pos:end]
        if len(rows) != len(tokens) or list(tokens[: len(known)]) != known or not 0 <= pos <= len(self.tokens):
            raise ValueError(f"{len(rows)} rows of {len(tokens)} tokens at {pos} are not those of the text")
        if end > self._n_ctx or any(row is not None for row in self._rows[pos:end]):
            raise ValueError(f"rows from {pos} to {end} are beyond the context of {self._n_ctx}, or there already")
        self.tokens[pos:end] = tokens
        self._rows.extend([None] * (end - len(self._rows)))
        self._rows[pos:end] = np.array(rows, np.float32)

    def fill(self, pos: int, tokens: Sequence[int], rows: RowArray) -> None:
        """As `add`, but leave out those that are there already: they were computed again for the KV cache here."""
        known = self._rows[pos : pos + len(tokens)]
        is_new = [i >= len(known) or known[i] is None for i in range(len(tokens))]
        for at in range(len(tokens)):
            if is_new[at] and (at == 0 or not is_new[at - 1]):
                end = next((i for i in range(at, len(tokens)) if not is_new[i]), len(tokens))
                self.add(pos + at, tokens[at:end], rows[at:end])

    @property
    def text_rows(self) -> list[RowArray]:
        """The rows of the text, up to the first that is not there; none where rows have no numbers."""
        rows = list[RowArray]()
        for row in self._rows[: 0 if self.codec == IDS else self.n_text]:
            if row is None:
                break
            rows.append(row)
        return rows

    @property
    def n_drafts(self) -> int:
        """How many tokens behind the text are drafts."""
        return len(self.tokens) - self.n_text

    # --- what is said to the partner ----------------------------------------------------------------------------------

    def open(self) -> OpenAnswer:
        """Begin the answer over a link, with the text as it is; drafts stay."""
        self.lose_link()
        self.turn = self._next = self.n_acknowledged = self._n_uncounted = 0
        self._n_opened = self._n_kept = self.n_text
        return OpenAnswer(id=self.name, tokens=tuple(self.tokens[: self.n_text]), private=self._is_private)

    def lose_link(self) -> None:
        """Stop waiting for the partner, and sending to it."""
        self.is_open = self.is_drawing = False
        self.judged = None
        self._next = self._n_needs = 0

    def begin_drawing(
        self, sampling: DrawRules, answer: Sequence[int] = (), candidates: Sequence[int] = ()
    ) -> BeginDrawing:
        """Let the partner draw what follows the text."""
        if self.is_drawing or not self.n_text:
            raise ValueError("drawing has begun already, or there is no text")
        self.is_drawing = True
        self._n_begun = max(0, self.n_text - 1)  # the row behind it is a draft
        self.left.clear()
        return BeginDrawing(id=self.name, sampling=sampling, answer=tuple(answer), candidates=tuple(candidates))

    def judge(self, n_drafts: int | None = None) -> JudgeDrafts:
        """Ask what follows the text, and the next drafts as long as they are right: all that have rows, or so many."""
        start = self.n_text - 1
        end = self.n_rows if n_drafts is None else self.n_text + n_drafts
        if not self.is_drawing or self.judged is not None or not start < end <= min(self.n_rows, start + MAX_JUDGED):
            raise ValueError(f"the drafts from {start} to {end} cannot be judged now")
        self.judged = (start, end)
        return self._judgement(start, end)

    def cut(self, n_tokens: int) -> CutAnswer:
        """Make the first `n_tokens` of text and drafts the text; drawing ends until it is begun again.

        The row of the last one is sent once more, since what follows it is drawn behind that row.
        """
        if not 0 <= n_tokens <= len(self.tokens):
            raise ValueError(f"a cut to {n_tokens} of {len(self.tokens)} tokens")
        n = max(0, n_tokens - 1)
        del self.tokens[n_tokens:], self._rows[n_tokens:]
        self.n_text = n_tokens
        self.turn = next_era(self.turn)
        self.is_drawing = False
        self.judged = None
        self._n_needs = 0
        self._next = min(self._next, n)
        self._n_kept = min(self._n_kept, n)
        self.n_acknowledged = min(self.n_acknowledged, n)
        return CutAnswer(id=self.name, turn=self.turn, n=n)

    def follow(self, tokens: Sequence[int]) -> CutAnswer | None:
        """Make these the text: forget what is no longer its, and add what is new. What is said of a cut is returned."""
        n = n_alike(tokens, self.tokens)
        said = self.cut(n) if self.is_drawing or self.tokens[n:] else None
        if len(tokens) > n:
            self.extend(tokens[n:])
        return said

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text, of which nothing is drafted or sent as a draft: before drawing begins."""
        if self.is_drawing or len(self.tokens) > self.n_text:
            raise ValueError("a text is extended before drawing begins, and without drafts")
        self.tokens.extend(tokens)
        self.n_text = len(self.tokens)
        self._fill_ids()

    def _fill_ids(self) -> None:
        """Where rows have no numbers, give all tokens of the text theirs."""
        if self.codec == IDS:
            self._rows += [_NO_NUMBERS] * (self.n_text - len(self._rows))

    def accept_drafts(self, n: int) -> None:
        """Make drafts part of the text without a verdict: none of them, nor the row before them, is sent as a draft."""
        if not 0 <= n <= len(self.tokens) - self.n_text or self.judged or (self.is_open and self._next >= self.n_text):
            raise ValueError(f"{n} drafts cannot be taken into the text now")
        if self.is_drawing:
            self.left += self.tokens[self.n_text : self.n_text + n]
        self.n_text += n

    def leave(self, token: int) -> None:
        """Add a token to the text that was drawn here, and has no row yet; drafts behind the text are none."""
        if not self.is_drawing:
            self.extend((token,))
            return
        self.tokens.append(token)
        try:
            self.accept_drafts(1)
        except ValueError:
            del self.tokens[-1]
            raise

    def drop_drafts(self) -> None:
        """Forget drafts that were not sent as such, with their rows."""
        if self.judged or self._next > self.n_text:
            raise ValueError("the drafts have been sent")
        del self.tokens[self.n_text :], self._rows[self.n_text :]

    @property
    def n_due(self) -> int:
        """Rows that could be sent now."""
        return max(0, self._end_due() - self._next)

    def send_due(self, credits: LinkCredits) -> list[RowsToSend]:
        """Return frames of the rows that are due, for as many as there are credits, which are spent."""
        frames = []
        while (n := min(self._end_due() - self._next, credits.left, MAX_ROWS)) > 0:
            pos, first_draft = self._next, self.n_text - 1
            if pos < first_draft:
                n = min(n, first_draft - pos)
            row = self._rows[pos]
            assert row is not None
            n = min(n, max(1, MAX_PAYLOAD // max(1, row_bytes(self.codec, len(row)))))
            rows = np.stack([row for row in self._rows[pos : pos + n] if row is not None])
            message = SendRows(
                id=self.name,
                turn=self.turn,
                pos=pos,
                tokens=tuple(self.tokens[pos : pos + n]),
                codec=self.codec,
                drafts=pos >= first_draft,
            )
            frames.append((message, encode_rows(self.codec, rows)))
            credits.spend(n)
            self._next += n
            self._n_uncounted += n
        return frames

    def _end_due(self) -> int:
        """Up to where rows may be sent now."""
        if not self.is_open:
            return 0
        end = self.n_text - 1
        if self.is_drawing and self.judged is not None:
            end = self.judged[1]  # drafts made since go up if they stand: the partner would drop them with this turn
        elif self.is_drawing and self.is_eager:
            end += 2 * MAX_JUDGED  # more would take the credits of other answers
        elif self.is_drawing and end - max(self._next, self._n_begun) < MAX_HELD:
            end = min(end, self._n_begun)
        end = min(end, self.n_rows)
        return next((at for at in range(self._next, end) if self._rows[at] is None), end)

    # --- what the partner says ----------------------------------------------------------------------------------------

    def opened(self, message: AnswerOpened) -> None:
        """Learn which rows the partner has already. Raises BadFrameError."""
        if self.is_open or not 0 <= message.n_past <= max(0, self._n_opened - 1):
            raise BadFrameError(f"{message.n_past} of {self._n_opened} tokens are said to be computed already")
        self.is_open = True
        self._next = self.n_acknowledged = min(message.n_past, self._n_kept)

    def verdict(self, message: DraftVerdict) -> VerdictTaken | None:
        """Take the tokens drawn into the text; None if the verdict came too late. Raises BadFrameError.

        Drafts beyond those that were judged stay if the last token drawn is the one that they follow.
        """
        if not self._is_next(message.turn):
            return None
        drawn = message.tokens
        start, end = self.judged or (0, 0)
        drafts = self.tokens[start + 1 : start + len(drawn)]
        if message.start != start or not 0 < len(drawn) <= end - start or list(drawn[:-1]) != drafts:
            msg = f"the tokens {drawn} cannot follow {message.start}: the drafts {drafts} from {start} to {end} do"
            raise BadFrameError(msg)
        if min(drawn) < 0 or max(drawn) >= self._n_vocab:
            raise BadFrameError(f"the ids {drawn} are not all in the vocabulary of {self._n_vocab}")
        if not 0 <= message.n_judged <= message.n_rows <= self._n_uncounted or not 0 <= message.busy_s < math.inf:
            msg = f"{message.n_rows} rows of {self._n_uncounted} cannot have been computed in {message.busy_s:g} s"
            raise BadFrameError(msg)
        self._n_uncounted -= message.n_rows
        n = start + len(drawn)
        is_drafted = self.tokens[n : n + 1] == [drawn[-1]]
        if not is_drafted:
            self.tokens[n:] = drawn[-1:]
            del self._rows[n:]
        self.n_text = n + 1
        self.left.clear()
        self.turn, self.judged, self._next, self.n_acknowledged = message.turn, None, n, n
        self._n_needs = 0
        return VerdictTaken(drawn, len(drawn) - 1 + is_drafted, self.n_rows, len(self.tokens) - self.n_text)

    def need(self, message: NeedRows) -> tuple[JudgeDrafts, ...]:
        """Let rows be sent again; return what is to be said again. Raises BadFrameError."""
        if not self._is_next(message.turn):
            return ()
        if not 0 <= message.pos <= self._next:
            raise BadFrameError(f"rows from {message.pos} on are wanted again, but only {self._next} were sent")
        if self._n_needs >= MAX_NEEDS:
            raise BadFrameError(f"rows are wanted again {MAX_NEEDS + 1} times, and not a token was drawn in between")
        self._n_needs += 1
        self.turn, self._next = message.turn, message.pos
        self.n_acknowledged = min(self.n_acknowledged, message.pos)
        if self.judged is None:
            return ()
        return (self._judgement(*self.judged),)

    def _judgement(self, start: int, end: int) -> JudgeDrafts:
        return JudgeDrafts(id=self.name, turn=self.turn, start=start, end=end, left=tuple(self.left))

    def _is_next(self, turn: int) -> bool:
        """Whether a turn that the partner begins is the next one; an older one crossed a cut. Raises BadFrameError."""
        if not self.is_open or turn > self.turn + 1 or turn < 0:
            raise BadFrameError(f"turn {turn} of the partner cannot follow turn {self.turn}")
        return turn == self.turn + 1


def n_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def send_all_due(answers: Iterable[EdgeAnswer], credits: LinkCredits) -> list[RowsToSend]:
    """Return the frames that are due of many answers: the smallest first, so that no draft waits behind a prompt."""
    waiting = sorted((answer for answer in answers if answer.n_due), key=lambda answer: answer.n_due)
    return [frame for answer in waiting for frame in answer.send_due(credits)]

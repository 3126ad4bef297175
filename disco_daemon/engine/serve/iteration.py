"""What one iteration computes: the rows of one llama_decode, or of several, and whose they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...scheduler.latency import IterationLoad
from ..llama.rows import Row
from .sequence import Sequence

Share = tuple[Sequence, int, int]  # a sequence, the number of its rows, and the row to sample from or -1
ChunkEnd = Callable[[int, int, int, int], int]
NO_LOAD = IterationLoad(0, 0, 0)


class DecodedRows(NamedTuple):
    """What became of a sequence's rows in the part just decoded: `n` of them from number `at` on.

    `last` is the one to sample from, or -1; those before it belong to the `draft`, if there is one.
    """

    draft: list[int]
    last: int
    at: int
    n: int
    ended_at: float


@dataclass(slots=True)
class Batch:
    """What one iteration computes: `rows` for llama_decode, and the `shares` that the sequences have in them.

    Answers whose next tokens are guessed have a draft; `load` is what the latency depends on. The rows are `alike` if
    each is the last one of another answer; then they may go to llama.cpp one by one (`apart`), each a part of its own.
    `is_extra`: nobody waits for its rows, which are computed on the chance that they are of use.
    `n_decoded` shares are decoded, in `took_s`; the latest part ended at `ended_at`, s by the batcher's clock.
    """

    rows: list[Row] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    load: IterationLoad = NO_LOAD
    alike: bool = False
    apart: bool = False
    is_extra: bool = False
    part: list[Share] = field(default_factory=list)
    n_decoded: int = 0
    took_s: float = 0.0
    ended_at: float = 0.0

    def add_last_tokens(self, decoding: list[Sequence]) -> None:
        """Add a row for the last token of each answer, and rows for its draft."""
        for s in decoding:
            tokens = (s.next_token, *self.drafts.get(s, ()))
            self.rows += [(token, i, s.slot, True) for i, token in enumerate(tokens, s.n_past)]
            self.shares.append((s, len(tokens), len(self.rows) - 1))

    def add_chunks(self, prefilling: list[Sequence], room: int, chunk_end: ChunkEnd | None = None) -> None:
        """Add up to `room` rows of prompts, the shortest rest first: that delays a long one little and helps a lot.

        `chunk_end` may end a chunk earlier, given the sequence's id, its beginning, its end, and the prompt's.
        """
        for s in sorted(prefilling, key=lambda s: len(s.tokens) - s.n_past):
            if room <= 0:
                return
            # The last token of a held sequence stays out: its logits are wanted when it may generate.
            end = min(len(s.tokens) - (1 if s.is_held else 0), s.n_past + room)
            end = end if chunk_end is None else chunk_end(s.slot, s.n_past, end, len(s.tokens))
            sample = end == len(s.tokens)
            self.rows += [(s.tokens[i], i, s.slot, sample and i == end - 1) for i in range(s.n_past, end)]
            self.shares.append((s, end - s.n_past, len(self.rows) - 1 if sample else -1))
            room -= end - s.n_past

    def weigh(self) -> None:
        """Set `load`; call it once all rows are there, before any of them is decoded."""
        decoding = [s for s, _, _ in self.shares if not s.is_prefilling]
        n_prefill = sum(n for s, n, _ in self.shares if s.is_prefilling)
        self.load = IterationLoad(len(decoding), n_prefill, sum(s.n_past for s in decoding))

    def next_rows(self) -> list[Row]:
        """Return the rows of the next part, and make it the present one; none if all are decoded."""
        n = self.n_decoded
        if self.apart and n < len(self.shares):
            self.part = [(self.shares[n][0], 1, 0)]
            return [self.rows[n]]
        self.part = [] if n else self.shares
        return [] if n else self.rows

    @property
    def is_decoded(self) -> bool:
        """Whether all rows have gone through."""
        return self.n_decoded == len(self.shares) > 0

"""Rows of texts that were computed at the edge, for other texts that begin alike. Pure.

The edge's KV cache keeps what ended answers left, so a text that begins like one of them is computed from there on
only. A partner that does not have that beginning any more, since it was started anew or needed the room, wants its rows
all the same; without these the edge would have to compute it once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .codec import RowArray
from .edge import EdgeAnswer, n_alike


@dataclass(slots=True)
class RowTexts:
    """The rows of the latest texts that have ended, `most` of them in all: as many as the KV cache has cells.

    A row has 4 bytes x n_embd. The oldest text gives way; one that another one begins with is kept only once.
    """

    most: int
    _texts: dict[tuple[int, ...], list[RowArray]] = field(default_factory=dict)

    @property
    def n_rows(self) -> int:
        """How many rows are kept."""
        return sum(map(len, self._texts.values()))

    def put(self, answer: EdgeAnswer) -> None:
        """Keep the rows of an answer's text, up to the first that is not there.

        What it begins with may have been cached where it was computed and with the partner; then other texts have it.
        """
        self.fill(answer, answer.tokens[: answer.n_text])
        rows = answer.text_rows[: self.most]
        text = tuple(answer.tokens[: len(rows)])
        if not text or any(other[: len(text)] == text for other in self._texts):
            return
        for other in [other for other in self._texts if text[: len(other)] == other]:
            del self._texts[other]
        self._texts[text] = rows
        while self.n_rows > self.most:
            del self._texts[next(iter(self._texts))]

    def fill(self, answer: EdgeAnswer, tokens: Sequence[int], running: Iterable[EdgeAnswer] = ()) -> int:
        """Give an answer the rows that another text has of its first `tokens`; return how many of them there were.

        That is the one that begins with most of them, of those kept, which counts as used now, and the `running` ones.
        """
        best, length, rows = None, 0, list[RowArray]()
        for text, there in self._texts.items():
            if (n := n_alike(text, tokens)) > length:
                best, length, rows = text, n, there
        if best is not None:
            self._texts[best] = self._texts.pop(best)
        for other in running:
            there = other.text_rows
            if (n := n_alike(other.tokens[: len(there)], tokens)) > length:
                length, rows = n, there
        if length:
            answer.fill(0, tokens[:length], np.stack(rows[:length]))
        return length

"""Rows of texts that were computed at the edge, for other texts that begin alike. Pure.

The edge's KV cache keeps what ended answers left, so a text that begins like one of them is computed from there on
only. A partner that does not have that beginning any more, since it was started anew or needed the room, wants its rows
all the same; without these the edge would have to compute it once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...link.rows.codec import RowArray
from ...link.rows.edge_rows import EdgeAnswer, n_alike
from .sorted_texts import SortedTexts, text_key, tokens_in_common


@dataclass(slots=True)
class RowTexts:
    """The rows of the latest texts that have ended, `most` of them in all: as many as the KV cache has cells.

    A row has 4 bytes x n_embd. The oldest text gives way; one that another one begins with is kept only once.
    """

    most: int
    n_rows: int = field(default=0, init=False)  # that are kept
    _texts: OrderedDict[bytes, list[RowArray]] = field(default_factory=OrderedDict)
    _sorted: SortedTexts = field(default_factory=SortedTexts)

    def put(self, answer: EdgeAnswer) -> None:
        """Keep the rows of an answer's text, up to the first that is not there.

        What it begins with may have been cached where it was computed and with the partner; then other texts have it.
        """
        self.fill(answer, answer.tokens[: answer.n_text])
        rows = answer.text_rows[: self.most]
        text = text_key(answer.tokens[: len(rows)])
        if not text or self._sorted.begins_one(text):
            return
        for other in self._sorted.beginnings(text):
            self._remove(other)
        self._texts[text] = rows
        self._sorted.add(text)
        self.n_rows += len(rows)
        while self.n_rows > self.most:
            self._remove(next(iter(self._texts)))

    def _remove(self, text: bytes) -> None:
        self._sorted.remove(text)
        self.n_rows -= len(self._texts.pop(text))

    def fill(self, answer: EdgeAnswer, tokens: Sequence[int], running: Iterable[EdgeAnswer] = ()) -> int:
        """Give an answer the rows that another text has of its first `tokens`; return how many of them there were.

        That is the one that begins with most of them, of those kept, which counts as used now, and the `running` ones.
        """
        length, rows, wanted = 0, list[RowArray](), text_key(tokens)
        near = self._sorted.near(wanted)
        best = max(near, key=lambda text: tokens_in_common(text, wanted), default=b"")
        if n := tokens_in_common(best, wanted):
            length, rows = n, self._texts[best]
            self._texts.move_to_end(best)
        for other in running:
            there = other.text_rows
            if (n := n_alike(other.tokens[: len(there)], tokens)) > length:
                length, rows = n, there
        if length:
            answer.fill(0, tokens[:length], np.stack(rows[:length]))
        return length

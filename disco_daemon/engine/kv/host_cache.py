"""Cached prefixes in main memory, out of the KV cache: to bring one back is cheaper than to compute it again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..llama.state import State
from .sorted_texts import SortedTexts, text_key, tokens_in_common


@dataclass(frozen=True, slots=True)
class Saved:
    """The KV cache's content of a sequence that was swapped out: its first `n_past` tokens."""

    data: State
    n_past: int


class HostCache:
    """Texts with the KV cache's content for them, the one used last at the end.

    Bounded by `max_bytes`: the texts unused for longest go first, to `spill` unless they are private.
    """

    def __init__(self, max_bytes: int, spill: Callable[[bytes, State], object] | None = None) -> None:
        self.n_bytes = 0
        self._max_bytes = max_bytes
        self._spill = spill
        self._kept: OrderedDict[bytes, State] = OrderedDict()  # content by the bytes of the tokens, int32 each
        self._sorted = SortedTexts()
        self._private: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tokens: Sequence[int], data: State, *, private: bool = False) -> None:
        """Keep a text, in place of those that are a beginning of it. A private one is never spilled."""
        key = text_key(tokens)
        for old in self._sorted.beginnings(key):
            self._remove(old)
        self._kept[key] = data
        self._sorted.add(key)
        self.n_bytes += len(data)
        if private:
            self._private.add(key)
        while self.n_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, key: bytes) -> State | None:
        """Return the content of just this text, given as the bytes of its int32 tokens; it stays here."""
        return self._kept.get(key)

    def match(self, tokens: Sequence[int]) -> int:
        """Count how many of these tokens the best matching text begins with."""
        return self._best(tokens)[0]

    def take(self, tokens: Sequence[int]) -> tuple[list[int], State, bool]:
        """Return the best matching text, its content, and whether it is private.

        It stays here if only its beginning matches; else it will come back longer. Raises KeyError if there is none.
        """
        n, key = self._best(tokens)
        kept, private = array("i", key).tolist(), key in self._private
        if n == len(kept):
            return kept, self._remove(key), private
        self._kept.move_to_end(key)
        return kept, self._kept[key], private

    def _best(self, tokens: Sequence[int]) -> tuple[int, bytes]:
        wanted = text_key(tokens)
        return max(((tokens_in_common(key, wanted), key) for key in self._sorted.near(wanted)), default=(0, b""))

    def _drop(self, key: bytes) -> None:
        """Remove a text to make room; spill it unless it is private."""
        private = key in self._private
        data = self._remove(key)
        if self._spill is not None and not private:
            self._spill(key, data)

    def _remove(self, key: bytes) -> State:
        self._private.discard(key)
        self._sorted.remove(key)
        data = self._kept.pop(key)
        self.n_bytes -= len(data)
        return data

"""Cached prefixes put out of the KV cache into main memory: to bring one back is cheaper than to compute it again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..llama.state import State


class HostCache:
    """Texts and what the KV cache had of them, the one used last at the end.

    Bounded by `max_bytes`: those go first that nobody has used for longest, to `spill` unless they are private.
    """

    def __init__(self, max_bytes: int, spill: Callable[[bytes, State], object] | None = None) -> None:
        self.n_bytes = 0
        self._max_bytes = max_bytes
        self._spill = spill
        self._kept: OrderedDict[bytes, State] = OrderedDict()  # tokens as an int32 array's bytes: what was saved
        self._private: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tokens: Sequence[int], data: State, *, private: bool = False) -> None:
        """Keep a text; those that are a beginning of it are not needed any more. A private one stays in memory."""
        key = array("i", tokens).tobytes()
        for old in [k for k in self._kept if key.startswith(k)]:
            self._remove(old)
        self._kept[key] = data
        self.n_bytes += len(data)
        if private:
            self._private.add(key)
        while self.n_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, key: bytes) -> State | None:
        """What was saved of just this text, given as the bytes of its int32 tokens; it stays here."""
        return self._kept.get(key)

    def match(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the text has that has most of them."""
        return self._best(tokens)[0]

    def take(self, tokens: Sequence[int]) -> tuple[list[int], State, bool]:
        """The text that has most of these tokens, what was saved of it, and whether it is private.

        It stays here if only its beginning is wanted; else it will come back longer. Raises KeyError if there is none.
        """
        n, key = self._best(tokens)
        kept, private = array("i", key).tolist(), key in self._private
        if n == len(kept):
            return kept, self._remove(key), private
        self._kept.move_to_end(key)
        return kept, self._kept[key], private

    def _best(self, tokens: Sequence[int]) -> tuple[int, bytes]:
        wanted = np.array(tokens, np.int32)
        return max(((n_common(np.frombuffer(key, np.int32), wanted), key) for key in self._kept), default=(0, b""))

    def _drop(self, key: bytes) -> None:
        """Remove a text for want of room."""
        private = key in self._private
        data = self._remove(key)
        if self._spill is not None and not private:
            self._spill(key, data)

    def _remove(self, key: bytes) -> State:
        self._private.discard(key)
        data = self._kept.pop(key)
        self.n_bytes -= len(data)
        return data


def n_common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many numbers from the first on two texts have in common."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n

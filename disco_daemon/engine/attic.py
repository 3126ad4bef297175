"""Cached prefixes put out of the KV cache into main memory: to bring one back is cheaper than to compute it again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Attic:
    """Texts and what the KV cache had of them, the one used last at the end.

    Bounded by `max_bytes`: those go first that nobody has used for longest.
    """

    def __init__(self, max_bytes: int) -> None:
        self.n_bytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()  # tokens as an int32 array's bytes: what was saved

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tokens: Sequence[int], data: bytes) -> None:
        """Keep a text; those that are a beginning of it are not needed any more."""
        key = array("i", tokens).tobytes()
        for old in [k for k in self._kept if key.startswith(k)]:
            self._remove(old)
        self._kept[key] = data
        self.n_bytes += len(data)
        while self.n_bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))

    def match(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the text has that has most of them."""
        return self._best(tokens)[0]

    def take(self, tokens: Sequence[int]) -> tuple[list[int], bytes]:
        """The text that has most of these tokens, and what was saved of it.

        It stays here if only its beginning is wanted; else it will come back longer. Raises KeyError if there is none.
        """
        n, key = self._best(tokens)
        kept = array("i", key).tolist()
        if n == len(kept):
            return kept, self._remove(key)
        self._kept.move_to_end(key)
        return kept, self._kept[key]

    def _best(self, tokens: Sequence[int]) -> tuple[int, bytes]:
        wanted = np.array(tokens, np.int32)
        return max(((_n_common(np.frombuffer(key, np.int32), wanted), key) for key in self._kept), default=(0, b""))

    def _remove(self, key: bytes) -> bytes:
        data = self._kept.pop(key)
        self.n_bytes -= len(data)
        return data


def _n_common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n

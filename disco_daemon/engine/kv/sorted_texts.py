"""Texts in sorted order: what one of them begins like is beside it, however many there are. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def text_key(tokens: Sequence[int]) -> bytes:
    """Return the bytes of a text's int32 tokens."""
    return array("i", tokens).tobytes()


def n_common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Count how many leading numbers two texts have in common."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def tokens_in_common(a: bytes, b: bytes) -> int:
    """Count how many leading tokens two texts have in common, given as the bytes of their int32 tokens."""
    return n_common(np.frombuffer(a, np.int32), np.frombuffer(b, np.int32))


class SortedTexts:
    """Different texts, each the bytes of its int32 tokens.

    In sorted order no text has more in common with another than one of its neighbours.
    """

    def __init__(self) -> None:
        self._keys: list[bytes] = []

    def __contains__(self, key: bytes) -> bool:
        at = bisect_left(self._keys, key)
        return at < len(self._keys) and self._keys[at] == key

    def add(self, key: bytes) -> None:
        """Take a text; twice is once."""
        if key not in self:
            insort(self._keys, key)

    def remove(self, key: bytes) -> None:
        """Forget a text. Raises KeyError if it is not here."""
        at = bisect_left(self._keys, key)
        if not (at < len(self._keys) and self._keys[at] == key):
            raise KeyError(key)
        del self._keys[at]

    def near(self, key: bytes) -> list[bytes]:
        """Return at most two texts, of which one has most in common with this one."""
        at = bisect_left(self._keys, key)
        return self._keys[max(0, at - 1) : at + 1]

    def begins_one(self, key: bytes) -> bool:
        """Whether this text is here, or one that goes on from it."""
        at = bisect_left(self._keys, key)
        return at < len(self._keys) and self._keys[at].startswith(key)

    def beginnings(self, key: bytes) -> list[bytes]:
        """Return the texts that this one begins with, itself included."""
        found = []
        at = bisect_left(self._keys, key)
        if at < len(self._keys) and self._keys[at] == key:
            found.append(key)
        while at:
            before = self._keys[at - 1]
            # Whatever begins this text stands in front of it, and begins all that is between the two.
            common = key[: 4 * tokens_in_common(before, key)]
            if common == before:
                found.append(before)
                at -= 1
            else:
                at = bisect_left(self._keys, common)
                if at < len(self._keys) and self._keys[at] == common:
                    found.append(common)
            key = common
            if not key:
                break
        return found

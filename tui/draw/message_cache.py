"""The words of unloaded messages: those used lately are in memory, all others in the store."""

from __future__ import annotations

from textual.cache import LRUCache

from ..data.store import Store, StoreError
from .entry import Words

KEPT = 64  # messages; some screens of them


class MessageCache:
    """Words by turn, read from `store` when they are needed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recent: LRUCache[int, Words] = LRUCache(KEPT)

    def __call__(self, turn: int) -> Words:
        """Return the words of a turn; where the disk does not give them, words that say so."""
        words = self._recent.get(turn)
        if words is None:
            try:
                found = self._store.turn(turn)
            except StoreError as e:
                return Words(disco={"error": str(e)})
            if found is None:
                return Words(disco={"error": "this message was removed in another window"})
            words = self._recent[turn] = Words(found.text, list(found.sides), found.disco)
        return words

    def put(self, turn: int, words: Words) -> None:
        """Keep the words of a turn, which the store has as well."""
        self._recent[turn] = words

    def clear(self) -> None:
        """Forget everything: another window may have continued the conversation."""
        self._recent.clear()

"""The words of messages that rest: those looked at lately in memory, all others in the store."""

from __future__ import annotations

from textual.cache import LRUCache

from ..data.store import Store, StoreError
from .entry import Words

KEPT = 64  # messages; some screens of them


class Shelf:
    """Words by turn. They are taken from `store` when somebody looks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lately: LRUCache[int, Words] = LRUCache(KEPT)

    def __call__(self, turn: int) -> Words:
        """The words of a turn; where the disk does not give them, words that say so."""
        words = self._lately.get(turn)
        if words is None:
            try:
                found = self._store.turn(turn)
            except StoreError as e:
                return Words(disco={"error": str(e)})
            if found is None:
                return Words(disco={"error": "this message was removed in another window"})
            words = self._lately[turn] = Words(found.text, list(found.sides), found.disco)
        return words

    def put(self, turn: int, words: Words) -> None:
        """These are the words of a turn, as the store has them, too."""
        self._lately[turn] = words

    def clear(self) -> None:
        """Look everything up anew: another window may have gone on with it."""
        self._lately.clear()

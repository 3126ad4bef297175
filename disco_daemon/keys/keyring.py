"""The keys in force: which of them a text is, and how many requests each may make a minute. Pure; time is passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from .named_key import NamedKey, parts_of

MINUTE_S = 60.0  # what `requests_per_minute` is about; in any of them, not by the clock's own


class RateWindow:
    """Admits at most so many requests in any minute, by the times of those that it has admitted."""

    def __init__(self) -> None:
        self._admitted: deque[float] = deque()  # at most the limit's number of them, s

    def admit(self, limit: int, now: float) -> float:
        """Count a request that is admitted, and return 0; else return how long to wait for the next one, s."""
        while self._admitted and self._admitted[0] + MINUTE_S <= now:
            self._admitted.popleft()
        if len(self._admitted) < limit:
            self._admitted.append(now)
            return 0.0
        return min(MINUTE_S, self._admitted[-limit] + MINUTE_S - now)  # the sum may be rounded up


class Keyring:
    """All keys with names that let somebody in; the daemon's loop alone changes them."""

    def __init__(self) -> None:
        self._by_id: dict[str, NamedKey] = {}
        self._rates: dict[str, RateWindow] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[NamedKey]:
        return iter(self._by_id.values())

    def use(self, keys: Iterable[NamedKey]) -> list[NamedKey]:
        """Let in by these keys from now on, and by no other; return those that are gone."""
        before, self._by_id = self._by_id, {key.key_id: key for key in keys}
        names = {key.name for key in self}
        self._rates = {name: rate for name, rate in self._rates.items() if name in names}
        return [key for key_id, key in before.items() if key_id not in self._by_id]

    def find(self, shown: str) -> NamedKey | None:
        """Return the key that a text is; None for any other text."""
        if (parts := parts_of(shown)) is None:
            return None
        key = self._by_id.get(parts[0])
        return key if key is not None and key.is_shown_by(parts[1]) else None

    def admit(self, key: NamedKey, now: float) -> float:
        """Count a request of a key, and return 0; beyond its rate return how long it has to wait, s."""
        limit = key.terms.requests_per_minute
        return 0.0 if limit is None else self._rates.setdefault(key.name, RateWindow()).admit(limit, now)

"""The places of connections that have not shown yet whose they are: few, and no one address has them all. Pure.

Whoever shows a member's certificate leaves its place at once, so strangers crowd out strangers only. Addresses count by
what one owner has of them: an IPv6 one by its /64.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict

STRANGERS_MAX = 32  # connections that have not shown yet that they are of members: TLS buffers, 0.5 MB each
STRANGERS_OF_HOST_MAX = 16  # of one address: one machine alone keeps nobody else out
STAYS_S = 1.0  # in which nobody is displaced for want of a place: a handshake between continents takes half of it
TRIES_BURST = 120  # connections that one address may make at once: a house of machines behind one, that all come back
TRIES_S = 10.0  # that it may make in a second from then on: a handshake takes 2 ms of a processor, so 2 % of one
ADDRESSES_MAX = 4096  # that are remembered, of those that came last: 1 MB
PREFIX_V6 = 64  # bits of an IPv6 address that one owner is given at least


def owner_of(host: str) -> str:
    """Return what of an address counts as one: an IPv4 address, as mapped in IPv6 as well; of IPv6 the /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, PREFIX_V6), strict=False))


class StrangerPlaces:
    """Who is let in before it is known, at times by any one clock, s.

    All mutable state: the places by a number each, with their owner and since when, oldest first; how many each owner
    has; and how many more connections each of the latest owners may make, as of when.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, float]] = {}
        self._of: Counter[str] = Counter()
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._n_given = 0

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, host: str, now: float) -> tuple[int | None, int | None]:
        """Return the number of a place for a connection from an address, and that of the one that has to go for it.

        The first is None where there is no place. One has to go that was long enough there to say who it is, or that
        is of an owner who has more of them than the new one would.
        """
        owner = owner_of(host)
        if not self._may_try(owner, now):
            return None, None
        loser: int | None = None
        if self._of[owner] >= STRANGERS_OF_HOST_MAX or len(self._places) >= STRANGERS_MAX:
            if (loser := self._loser(owner, now)) is None:
                return None, None
            self.leave(loser)
        self._n_given += 1
        self._places[self._n_given] = owner, now
        self._of[owner] += 1
        return self._n_given, loser

    def leave(self, place: int) -> None:
        """The connection at a place has ended, or it is known whose it is; idempotent."""
        owner, _ = self._places.pop(place, ("", 0.0))
        self._of[owner] -= 1
        if self._of[owner] <= 0:
            del self._of[owner]

    def forgive(self, host: str, now: float) -> None:
        """A connection from this address was a member's: it does not count as a try."""
        owner = owner_of(host)
        if owner in self._left:
            self._left[owner] = min(float(TRIES_BURST), self._left_at(owner, now) + 1.0), now

    def _may_try(self, owner: str, now: float) -> bool:
        left = self._left_at(owner, now)
        self._left[owner] = (left - 1.0 if left >= 1.0 else left), now
        self._left.move_to_end(owner)
        if len(self._left) > ADDRESSES_MAX:
            self._left.popitem(last=False)
        return left >= 1.0

    def _left_at(self, owner: str, now: float) -> float:
        left, at = self._left.get(owner, (float(TRIES_BURST), now))
        return min(float(TRIES_BURST), left + TRIES_S * max(0.0, now - at))

    def _loser(self, owner: str, now: float) -> int | None:
        """Return the place that is given to a connection of this owner; None if nobody has to go for it."""
        if self._of[owner] >= STRANGERS_OF_HOST_MAX:
            return self._oldest(owner, now - STAYS_S)
        busiest, n = max(self._of.items(), key=lambda one: one[1])
        if n > self._of[owner] + 1:
            return self._oldest(busiest, now)
        return self._oldest(None, now - STAYS_S)

    def _oldest(self, owner: str | None, until: float) -> int | None:
        """Return the oldest place, of this owner or of any, if it was taken before that."""
        found = ((place, since) for place, (of, since) in self._places.items() if owner in (None, of))
        place, since = next(found, (0, 0.0))
        return place if place and since <= until else None

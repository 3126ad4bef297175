"""What a client says of whom to ask, in OpenRouter's words: which of several servers may be asked, and in which order.

`provider = {"order": [...], "only": [...], "ignore": [...], "allow_fallbacks": false, "max_price": {...}}`. Names are
those of the servers in the settings, or of one of their models as `SERVER/MODEL`. Other names are of providers behind a
server that routes itself, and are its business: they narrow nothing here. What is said there of privacy,
`"data_collection": "deny"` or `"zdr": true`, such a server alone can keep, and none but those may be asked then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Offer:
    """A server's name, the name of its model there, and the price of it, $ per million tokens; None if unknown.

    `keeps_wishes`: it gets what the client says, and keeps to it.
    """

    server: str
    key: str
    usd: tuple[float, float] | None
    keeps_wishes: bool = False


@dataclass(frozen=True, slots=True)
class ServerWishes:
    """The wishes of one request; names are in lower case."""

    order: tuple[str, ...] = ()
    only: frozenset[str] = frozenset()
    ignore: frozenset[str] = frozenset()
    allow_fallbacks: bool = True
    is_confidential: bool = False  # nobody may keep the text
    most_usd: tuple[float, float] = (math.inf, math.inf)  # for a million prompt tokens, and of the answer

    @classmethod
    def of(cls, provider: object) -> ServerWishes:
        """Return what the field says; whatever is no wish in it is left to the server that gets it."""
        if not isinstance(provider, Mapping):
            return cls()
        price = provider.get("max_price")
        found = price if isinstance(price, Mapping) else {}
        return cls(
            tuple(_names(provider.get("order"))),
            frozenset(_names(provider.get("only"))),
            frozenset(_names(provider.get("ignore"))),
            provider.get("allow_fallbacks") is not False,
            _is_confidential(provider),
            (_amount(found.get("prompt")), _amount(found.get("completion"))),
        )

    def narrow(self, members: Sequence[T], offer: Callable[[T], Offer]) -> list[list[T]]:
        """Return the members that may be asked, in groups: all of one before any of the next."""
        offers = {id(one): offer(one) for one in members}
        names = {name for told in offers.values() for name in _names_of(told)}
        left = [one for one in members if self._allows(offers[id(one)], self.only & names)]
        wanted = [name for name in self.order if name in names]
        if not wanted:
            return [left] if left else []
        first = [[one for one in left if name in _names_of(offers[id(one)])] for name in dict.fromkeys(wanted)]
        named = {id(one) for group in first for one in group}
        rest = [one for one in left if id(one) not in named]
        return [group for group in ([*_once(first), rest] if self.allow_fallbacks else _once(first)) if group]

    def _allows(self, told: Offer, only: frozenset[str]) -> bool:
        names = _names_of(told)
        if self.is_confidential and not told.keeps_wishes:
            return False
        if (only and not only & names) or self.ignore & names:
            return False
        if self.most_usd == (math.inf, math.inf):
            return True
        return told.usd is not None and all(usd <= most for usd, most in zip(told.usd, self.most_usd, strict=True))


def _names_of(told: Offer) -> frozenset[str]:
    return frozenset({told.server.casefold(), told.key.casefold()})


def _once(groups: Iterable[list[T]]) -> list[list[T]]:
    """Return the groups, each member in the first one only that has it."""
    seen: set[int] = set()
    found = []
    for group in groups:
        found.append([one for one in group if id(one) not in seen])
        seen.update(map(id, group))
    return found


def _names(value: object) -> Iterable[str]:
    return [name.casefold() for name in value if isinstance(name, str)] if isinstance(value, list) else ()


def _is_confidential(provider: Mapping[Any, Any]) -> bool:
    """Whether the text is said to be nobody's to keep; a word that is unknown here may say just that."""
    return provider.get("data_collection", "allow") not in ("allow", None) or provider.get("zdr") not in (None, False)


def _amount(value: Any) -> float:
    """Return a price, which OpenRouter takes as a number or a text; one that is none is no limit."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return math.inf
    return found if found >= 0 else math.inf

"""What a client allows servers to bill for one answer, and what of a request fits into it. Pure.

A promise for the ledger: what is started is bounded by its prompt, with the margin of `caps`, and by the limit that is
sent along. It holds as far as a server keeps to that limit and counts no more than that margin.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .caps import server_bound
from .catalog import Price
from .spending import CostBound

# Of a limit that the client did not give, tokens: servers refuse one that is above what their model can say at a time,
# which is this or more with the models of today.
MOST_SENT = 16_384


def billed(price: Price, bound: CostBound) -> float:
    """Return the most that a request may cost, $."""
    return server_bound(price, bound.prompt_tokens, bound.max_tokens, choices=bound.choices, beside=bound.beside)


def fit(price: Price, bound: CostBound, left_usd: float) -> CostBound | None:
    """Return the request as it fits into what is left, $, or None. An unknown price does not fit.

    Where the client gave no limit, the answer gets one: what the rest buys, and at most MOST_SENT. None is needed where
    a whole context fits.
    """
    if not price.known:
        return None
    if bound.max_tokens is None and not (price.output and billed(price, bound) > left_usd):
        return bound if billed(price, bound) <= left_usd else None
    if bound.max_tokens is None:
        rest_usd = left_usd - billed(price, replace(bound, max_tokens=0))
        bound = replace(bound, max_tokens=max(1, _bought(price, rest_usd, bound.choices)))
        while bound.max_tokens and billed(price, bound) > left_usd:  # by a last bit of a float
            bound = replace(bound, max_tokens=bound.max_tokens - 1)
        if not bound.max_tokens:
            return None
    return bound if billed(price, bound) <= left_usd else None


def _bought(price: Price, usd: float, choices: int) -> int:
    """Return the tokens of each choice that an amount buys."""
    if usd <= 0:
        return 0
    return math.floor(min(usd * 1e6 / (price.output * max(1, choices)), MOST_SENT))

"""The bound on the cost of a request, and the message for a cap that is reached."""

from __future__ import annotations

from ..errors import EndpointError
from ..money.caps import sooner
from ..money.spending import CapRefusal, CostBound, Spending, retry_after_s
from ..types import GenerationRequest, Side

CHARS_PER_TOKEN = 4  # English text, for a prompt length while no tokenizer is loaded


def cost_bound(request: GenerationRequest, length: int, n_before: int = 0) -> CostBound:
    """Return the bound on a start's cost, for a prompt of `length` tokens and `n_before` of the answer."""
    max_tokens, choices = request.sampling.max_tokens, request.extra.get("n")
    left = None if max_tokens is None else max(1, max_tokens - n_before)
    return CostBound(length + n_before, left, choices if isinstance(choices, int) and choices > 1 else 1)


def affordable(spending: Spending, wanted: CostBound, sides: frozenset[Side], now: float) -> frozenset[Side]:
    """Return the sides that no cap closes, of those that can serve a request; `now` is Unix time, s.

    Raises EndpointError (429, with the time after which it is worth trying again) if none is left.
    """
    refusals = {side: spending.check(side, wanted, now) for side in sides}
    left = frozenset(side for side, refused in refusals.items() if refused is None)
    closed = [refused for refused in refusals.values() if refused is not None]
    if not left and closed:
        first = closed[0] if len(closed) == 1 else sooner(*closed)
        raise capped(first, "; ".join(refused.reason for refused in closed))
    return left


def capped(refused: CapRefusal, reason: str = "") -> EndpointError:
    """The error for a side that a cap closes."""
    told = reason or refused.reason
    message = f"A spending cap is reached: {told}. `disco config` shows the caps (section caps) and changes them."
    return EndpointError(refused.side, "cap_reached", message, retry_after_s=retry_after_s(refused))

"""Whether an answer has room to be whole on a side, and which side begins it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..endpoints.base import Endpoint
from ..types import BOTH, Continuation, GenerationRequest, Plan, Readiness, Side
from .spending import CHARS_PER_TOKEN

Remaining = Callable[[int], float]  # E[tokens still to come | so many made]
NOT_THE_DEVICE, NOT_THE_SERVER = Plan(math.inf, 0.0), Plan(0.0, math.inf)


def lacks_room(readiness: Readiness, n_tokens: int, remaining: Remaining, max_tokens: int | None, made: int) -> bool:
    """Whether the rest of an answer does not fit behind `n_tokens` of prompt and answer, `made` of them of the answer.

    The rest is what the client allows at most, or what answers have on average where that is less: clients like to
    allow more than they will ever get. An answer that is longer yet is handed over where the context ends.
    """
    if readiness.n_ctx is None:
        return False
    rest = remaining(made)
    if max_tokens is not None:
        rest = min(rest, max_tokens - made)
    return readiness.n_ctx - n_tokens < max(1.0, rest)


def fitting(
    plan: Plan,
    request: GenerationRequest,
    length: int,
    readiness: Mapping[Side, Readiness],
    endpoints: Mapping[Side, Endpoint],
    remaining: Remaining,
) -> Plan:
    """The plan without a start of the side that this request is not for while the other one serves.

    Not the device's, if its context has too little room; not a server's that may not go straight on from what the
    client has begun, or that nobody has tried. Each stays what is left if the other fails.
    """
    if not readiness.keys() >= BOTH:
        return plan
    n_given = length + -(-len(request.answer_so_far) // CHARS_PER_TOKEN)
    if lacks_room(readiness[Side.DEVICE], n_given, remaining, request.sampling.max_tokens, 0):
        return plan if readiness[Side.SERVER].down_s > 0 else NOT_THE_DEVICE
    server = endpoints[Side.SERVER]
    if request.answer_so_far and (
        server.continuation is Continuation.UNTRIED or server.overlap_of(request) is not None
    ):
        return NOT_THE_SERVER
    return plan

"""The plan of one answer: which side begins it, and when, by what is known of the prompt and of both sides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..endpoints.base import Endpoint
from ..types import (
    BOTH,
    EQUAL,
    Continuation,
    Delivery,
    GenerationRequest,
    Plan,
    PromptLength,
    Readiness,
    Reason,
    Relation,
    Side,
    Unequal,
)
from .context import AnswerContext
from .eligible import is_left_alone
from .endpoint_run import EndpointRun

CHARS_PER_TOKEN = 4  # English text, for a prompt length while no tokenizer is loaded
LATE_LOAD = 2.0  # times what the plan knew of a load, and `LATE_S` more: then a server that was not planned helps
LATE_S = 5.0  # beyond LATE_LOAD times: a short load that is late is no cause yet
UNPLANNED = Plan(math.inf, math.inf)
NOT_THE_DEVICE, NOT_THE_SERVER = Plan(math.inf, 0.0), Plan(0.0, math.inf)


def estimated(request: GenerationRequest) -> PromptLength:
    """Return the length of a prompt that nobody can count now."""
    return PromptLength(max(1, request.n_chars // CHARS_PER_TOKEN), counted=False)


async def prompt_length(request: GenerationRequest, available: frozenset[Side], context: AnswerContext) -> PromptLength:
    """Return the length of a prompt: by the device if it is among the `available` sides and can count, or estimated."""
    device = context.endpoints[Side.DEVICE] if Side.DEVICE in available else None
    length = await device.count(request) if device is not None else None
    return length or estimated(request)


def readiness_of(endpoints: Mapping[Side, Endpoint], sides: frozenset[Side], cached: int) -> dict[Side, Readiness]:
    """Return what these sides would meet the request with now; the device has `cached` tokens of its prompt."""
    readiness = {side: endpoints[side].readiness() for side in sides}
    if Side.DEVICE in readiness:
        readiness[Side.DEVICE] = replace(readiness[Side.DEVICE], cached=cached)
    return readiness


def fitted(
    plan: Plan,
    request: GenerationRequest,
    length: int,
    readiness: Mapping[Side, Readiness],
    context: AnswerContext,
    relation: Relation = EQUAL,
) -> Plan:
    """Return the plan for the sides there are, without a start of one that is not for this request.

    The device is not where its context has too little room, or where it does not know what a field means. A server
    is not whose context is known to have too little room, or that may not go straight on from what the client has
    begun, or that nobody has tried. Else both begin in a race. Else the side that the request prefers begins alone,
    or the other one while that side does not want to be asked. Else a stand-in waits for the better side, unless
    that does not want to be asked. Each side stays what is left if the other fails.
    """
    plan = plan.restricted(frozenset(readiness))
    if not readiness.keys() >= BOTH:
        return plan
    if readiness[Side.DEVICE].down_s > 0 and not readiness[Side.SERVER].down_s > 0:
        return NOT_THE_DEVICE
    n_given = length + -(-len(request.answer_so_far) // CHARS_PER_TOKEN)
    rest = context.planner.knowledge.outputs.expected_remaining(0, length)
    no_room = lacks_room(readiness[Side.DEVICE], n_given, rest, request.sampling.max_tokens, 0)
    if no_room or is_left_alone(context.endpoints[Side.DEVICE], request):
        return plan if readiness[Side.SERVER].down_s > 0 else NOT_THE_DEVICE
    server = context.endpoints[Side.SERVER]
    if lacks_room(readiness[Side.SERVER], n_given, rest, request.sampling.max_tokens, 0):
        return NOT_THE_SERVER
    if request.answer_so_far and (
        server.continuation is Continuation.UNTRIED or server.overlap_of(request) is not None
    ):
        return NOT_THE_SERVER
    if request.race:
        return replace(plan, device_s=0.0, server_s=plan.server_s if readiness[Side.SERVER].down_s > 0 else 0.0)
    if (begins := request.prefers) is not None:
        if readiness[begins].down_s > 0 and not readiness[begins.other].down_s > 0:
            begins = begins.other
        return replace(plan, **{f"{begins}_s": 0.0, f"{begins.other}_s": math.inf})
    if (better := relation.better) is not None and not readiness[better].down_s > 0:
        goes_on = not readiness[better.other].load_s and can_go_on(better, request, context)
        return context.planner.graded(plan, relation, length, readiness[Side.DEVICE], goes_on=goes_on)
    return plan


def can_go_on(side: Side, request: GenerationRequest, context: AnswerContext) -> bool:
    """Whether a side is known to go on with text that the other one has begun, and that may be held back for it.

    No tool call and no schema is such text.
    """
    is_known = context.endpoints[side].continuation not in {Continuation.NONE, Continuation.UNTRIED}
    return is_known and not request.needs and request.delivery is not Delivery.OFF


def lacks_room(readiness: Readiness, n_tokens: int, rest: float, max_tokens: int | None, made: int) -> bool:
    """Whether the rest of an answer does not fit behind `n_tokens` of prompt and answer, `made` of them of the answer.

    The rest is what the client allows at most, or `rest`, which answers have on average, where that is less: clients
    like to allow more than they will ever get. An answer that is longer yet is handed over where the context ends.
    """
    if readiness.n_ctx is None:
        return False
    if max_tokens is not None:
        rest = min(rest, max_tokens - made)
    return readiness.n_ctx - n_tokens < max(1.0, rest)


def insured(plan: Plan, readiness: Mapping[Side, Readiness]) -> Plan:
    """Return the plan, but with a late start of a server that was not to be asked, if the device is loading."""
    device = readiness.get(Side.DEVICE)
    if device is None or not device.load_s or Side.SERVER not in readiness or math.isfinite(plan.server_s):
        return plan
    return replace(plan, server_s=LATE_S + LATE_LOAD * device.load_s)


def reason_of(
    side: Side,
    request: GenerationRequest,
    available: frozenset[Side],
    runs: Sequence[EndpointRun],
    relation: Relation,
) -> Reason:
    """Return why it was `side` that gave the first token; `runs` are the starts until then."""
    others = [run for run in runs if run.side is side.other]
    if request.private:
        return Reason.PRIVATE
    if any(run.error is not None for run in others):
        return Reason.FAILURE
    if request.prefers is side or (request.allowed == {side} and request.prompt is None):
        return Reason.RULE if request.ruled else Reason.ROUTE
    if side.other not in available:
        return Reason.ONLY
    if relation.lower is not None:
        if side is not relation.lower:
            return Reason.GRADE
        # It begins where it may show the first words, or the better side was silent; else that could not be asked.
        may_begin = bool(others) or relation.unequal is Unequal.FIRST_WORDS
        return Reason.STAND_IN if may_begin else Reason.ONLY
    return Reason.RACE if others else Reason.PLAN

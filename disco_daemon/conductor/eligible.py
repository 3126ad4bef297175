"""Which endpoints can serve a request at all: by the user's switch, the request's own wish, and what it needs."""

from __future__ import annotations

import math
from dataclasses import replace

from ..endpoints.base import Endpoint, Graded, Selective
from ..errors import RequestError, Unavailable
from ..types import GenerationRequest, PromptLength, Refusal, Side, ignored, is_for_a_server, lacking
from .context import AnswerContext


def eligible(request: GenerationRequest, context: AnswerContext) -> tuple[GenerationRequest, frozenset[Side]]:
    """Return the request as it may be answered, kept here where everything is, and the sides that can serve it.

    Raises RequestError or Unavailable if none can.
    """
    if context.private:
        if Side.DEVICE not in request.allowed:
            asks = f"rule '{request.rule}' lets only" if request.ruled else "this request asks for"
            answer = " answer this" if request.ruled else ": use 'disco'"
            msg = f"Nothing may leave this machine (policy.private), and {asks} the server{answer}."
            raise RequestError(msg, status=403, param="model", code="private")
        request = replace(request, allowed=frozenset({Side.DEVICE}), private=True)
    wanted = {side: endpoint for side, endpoint in context.endpoints.items() if side in request.allowed}
    if not wanted:
        names = " or ".join(sorted(request.allowed))
        msg = f"no {names} is configured{_by_rule(request)}; see `disco config` for how to set one up"
        raise Unavailable(msg)
    refusals = {side: _refusal(side, endpoint, request) for side, endpoint in wanted.items()}
    sides = frozenset(side for side, refusal in refusals.items() if refusal is None)
    if not sides:
        why = "; ".join(r for r in refusals.values() if r)
        named = (r.param for r in refusals.values() if isinstance(r, Refusal))
        param = next(named, next((need for need in request.needs if need in why), None))
        raise RequestError(why + _by_rule(request), code="unsupported", param=param)
    return request, sides


def may_take_over(side: Side, request: GenerationRequest, context: AnswerContext) -> bool:
    """Whether a side may go on with an answer at all: it is there, wished for, able, and not known to fail."""
    endpoint = context.endpoints.get(side)
    if endpoint is None or side not in request.allowed or not endpoint.may_serve():
        return False
    return _refusal(side, endpoint, request) is None


def _by_rule(request: GenerationRequest) -> str:
    """Name the user's rule that has left nobody else, in parentheses; "" where none has."""
    return f" (and nobody else may answer this, by rule '{request.rule}')" if request.ruled else ""


def roomy(
    sides: frozenset[Side], request: GenerationRequest, length: PromptLength, context: AnswerContext
) -> frozenset[Side]:
    """Return the sides of these whose context may hold the prompt. Raises RequestError where none may.

    Only what surely does not fit counts: at the device a prompt that it has counted itself, at a server one that would
    not fit if its vocabulary made half as many tokens of it. `plan.fitted` has the others begin elsewhere.
    """
    contexts = {side: context.endpoints[side].capabilities.context_length for side in sides}
    least = {Side.DEVICE: length.tokens, Side.SERVER: length.tokens // 2} if length.counted else {}
    fitting = frozenset(side for side in sides if least.get(side, 0) < (contexts[side] or math.inf))
    if not fitting:
        lengths = " and ".join(f"{contexts[side]} tokens at the {side.value}" for side in sorted(sides))
        setting = f"the n_ctx of {request.local} in [[models]]" if request.local else "device.n_ctx"
        mend = f"Shorten the prompt, or raise {setting}." if Side.DEVICE in sides else "Shorten the prompt."
        mend += f" Nobody else may answer this, by rule '{request.rule}'." if request.ruled else ""
        msg = f"The maximum context length is {lengths}, but the prompt has {length.tokens}. {mend}"
        param = "messages" if request.prompt is None else "prompt"
        raise RequestError(msg, code="context_length_exceeded", param=param)
    return fitting


def _refusal(side: Side, endpoint: Endpoint, request: GenerationRequest) -> str | None:
    """Return why an endpoint is not for a request: what it says itself, or what it lacks; None if it is."""
    return endpoint.refuses(request) or lacking(side.value, endpoint.capabilities, request)


def ignored_by(endpoint: object, request: GenerationRequest) -> list[str]:
    """Return the fields that an answer by an endpoint does not heed, and what its API's translation left out."""
    if request.prompt is None and not request.extra:  # most requests
        found: list[str] = []
    elif isinstance(endpoint, Selective):
        found = endpoint.ignores(request)
    else:
        found = ignored(request.extra, on_device=False, is_raw=False)
    return sorted({*found, *request.left_out}) if request.left_out else found


def narrowed_by(endpoint: object, request: GenerationRequest) -> list[str]:
    """Return what a schema allows that an answer by an endpoint does not have all the same."""
    return endpoint.narrows(request) if request.extra and isinstance(endpoint, Selective) else []


def is_left_alone(endpoint: object, request: GenerationRequest) -> bool:
    """Whether an endpoint is not asked while the other one can be: a field may mean what it does not know."""
    return is_for_a_server(request.extra) and isinstance(endpoint, Selective)


def planned_quality(request: GenerationRequest, context: AnswerContext) -> str | None:
    """Return the quality that the device's answer is planned to have; None where all have the same."""
    device = context.endpoints.get(Side.DEVICE)
    if device is None or not isinstance(device, Graded):
        return None
    return device.planned_quality(replace(request, private=request.private or context.private))

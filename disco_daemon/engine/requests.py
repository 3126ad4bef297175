"""The messages that a request of the daemon becomes on its way to the engine process."""

from __future__ import annotations

from ..types import (
    Append,
    Delivery,
    GenerationRequest,
    Hold,
    Order,
    Pace,
    ToolUse,
    response_format,
    tool_use,
    top_logprobs,
)
from . import wire


def count_message(request_id: str, request: GenerationRequest, *, ids: bool) -> wire.Count:
    """Ask for the length of a request's prompt; with `ids`, also for its token ids and its text."""
    return wire.Count(
        id=request_id,
        messages=[dict(m) for m in request.messages],
        prompt=request.prompt,
        ids=ids,
        answer=request.answer_so_far,
        answer_ids=request.answer_ids,
        adapter=request.adapter,
        template_args=request.template_args,
        tools=_tools(request),
    )


def generate_message(request_id: str, request: GenerationRequest, *, hold: bool) -> wire.Generate:
    """Ask for an answer; without delivery at a pace, the reader takes tokens as fast as they come."""
    sampling = request.sampling
    return wire.Generate(
        id=request_id,
        messages=[dict(m) for m in request.messages],
        prompt=request.prompt,
        answer_so_far=request.answer_so_far,
        answer_ids=request.answer_ids,
        hold=hold,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=sampling.stop,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        drawing=request.drawing,
        pace_tps=None if request.delivery is Delivery.OFF else request.pace_tps,
        ttft_s=request.expected_ttft_s,
        rest=request.expected_rest,
        response_format=response_format(request.extra, whole=request.whole_schema),
        adapter=request.adapter,
        template_args=request.template_args,
        tools=_tools(request),
        private=request.private,
        mode=request.split.mode or "exact",
        theta=request.split.theta,
        goes_on=request.split.goes_on,
        top_logprobs=top_logprobs(request.extra),
        thought_budget=request.thought_budget,
    )


def _tools(request: GenerationRequest) -> ToolUse | None:
    """Return the tools that may be called: none by a raw prompt, in which nothing tells of them."""
    return tool_use(request.extra) if request.prompt is None else None


def order_message(order: Order, answer_id: str) -> wire.HoldAnswer | wire.AppendText | wire.SetPace:
    """Return the message for an order to one answer."""
    match order:
        case Hold():
            return wire.HoldAnswer(id=answer_id)
        case Append(text=text, ids=ids, go=go):
            return wire.AppendText(id=answer_id, text=text, go=go, ids=ids)
        case Pace(pace_tps=pace_tps):
            return wire.SetPace(id=answer_id, pace_tps=pace_tps)

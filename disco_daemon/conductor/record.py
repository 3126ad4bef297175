"""The record of an answer: the cost of each start, and how it was to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..delivery.qoe import reading
from ..types import Attempt, GenerationRequest, Reading, Side
from .context import AnswerContext
from .endpoint_run import EndpointRun

# A server that failed like this has not begun, and bills nothing; any other failure may come after the prefill.
UNBILLED = frozenset(
    {
        "unreachable", "unauthorized", "rate_limited", "server_error", "refused", "not_found", "no_continuation",
        "redirected", "overloaded",
    }
)  # fmt: skip


def attempt_of(run: EndpointRun, context: AnswerContext, began: float, length: int, max_tokens: int | None) -> Attempt:
    """Return one start with its price. A server that was asked and gave no usage is booked for the whole prompt.

    One that was closed before its end, and goes on generating for all we know, is booked for what answers as long as
    this one have left, and at most `max_tokens`: that is its full price (docs/design.md#handoff).
    """
    first_at = run.first_at if run.lost_at is None else None  # a parked loser's first token is of the handoff
    end = next((t for t in (first_at, run.lost_at, run.ended_at) if t is not None), context.clock.now())
    usage = replace(run.usage)
    turned_away = run.error is not None and run.error.reason in UNBILLED and not usage.completion_tokens
    asked = run.side is Side.SERVER and not turned_away
    if asked and usage.prompt_tokens + usage.cached_tokens == 0:
        usage.prompt_tokens = length + run.n_before
    attempt = Attempt(
        side=run.side,
        model=run.model,
        started_s=run.started - began,
        ttft_s=end - run.started,
        censored=first_at is None,
        usage=usage,
        error=run.error.reason if run.error else None,
        load_s=run.usage.load_s,
        n_busy=run.met.n_busy,
        continued=run.n_before > 0,
        disturbed=context.disturbed(run.started, end),
        unseen_tokens=_unseen(run, context, max_tokens) if asked and not run.whole else 0,
    )
    return context.spending.prices.booked(attempt)


def decode_tps(run: EndpointRun, context: AnswerContext) -> float | None:
    """The decode speed of a run, token/s; None where it does not show, or is not the endpoint's alone.

    A slow reader paused it, or this machine stood still.
    """
    if run.first_at is None or run.held_up or context.disturbed(run.first_at, run.last_at):
        return None
    return run.tps


def _unseen(run: EndpointRun, context: AnswerContext, max_tokens: int | None) -> int:
    """Estimate the tokens that a closed server goes on to make."""
    if context.spending.stops_billing:
        return 0
    made = run.n_before + run.usage.completion_tokens
    left = context.planner.knowledge.outputs.expected_remaining(made)
    return round(left if max_tokens is None else min(left, max(0, max_tokens - made)))


def tokens_of(counted: Mapping[Side, int], runs: Sequence[EndpointRun]) -> dict[Side, int]:
    """Tokens of the answer by side: as a side counts them itself, where it does and came to its own end.

    Of what it made and nobody got (a repetition, or what came too late for a handoff) the share is by our count.
    """
    tokens = dict(counted)
    for side, n in counted.items():
        made = [run for run in runs if run.side is side and run.n_tokens]
        if n and len(made) == 1 and made[0].whole and made[0].usage.told:
            tokens[side] = max(1, round(made[0].usage.completion_tokens * n / made[0].n_tokens))
    return tokens


def reading_of(arrivals: Sequence[float], began: float, expected_ttft_s: float, pace_tps: float) -> Reading | None:
    """Return how an answer was to read whose tokens were shown at `arrivals`, s; None when nothing was."""
    return reading(np.array(arrivals) - began, expected_ttft_s, pace_tps) if len(arrivals) else None


def transcript(request: GenerationRequest) -> str:
    """The prompt as text, for a history that keeps it."""
    if request.prompt is not None:
        return request.prompt if isinstance(request.prompt, str) else f"{len(request.prompt)} token ids"
    return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in request.messages)

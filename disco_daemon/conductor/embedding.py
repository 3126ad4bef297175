"""Embeddings: one text after the other is asked of the device, and all of a request is booked as one."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence

from ..endpoints.base import Embedder
from ..errors import DiscoError, RequestError
from ..money.purse import Asked, Refused
from ..types import Attempt, Embedding, Outcome, Plan, Side, Usage
from .spending import CHARS_PER_TOKEN, capped
from .stage import Stage

POLICY = "embedding"  # of an outcome that is no answer: nothing was planned
FINISHED = "embedding"  # its finish_reason


async def embed(
    stage: Stage, texts: Sequence[str | tuple[int, ...]], model: str, request_id: str, record: Callable[[Outcome], None]
) -> AsyncGenerator[Embedding, None]:
    """The embeddings of texts or token ids, in order. Raises DiscoError; close it to stop.

    Only the device makes them: vectors of two models have nothing to do with each other.
    """
    device = stage.endpoints.get(Side.DEVICE)
    if not isinstance(device, Embedder):
        raise RequestError(
            "Embeddings are made by this machine's own model only, and none is here.", code="unsupported"
        )
    began, created, usage = stage.clock.now(), stage.clock.wall(), Usage()
    n_tokens = sum(max(1, len(text) // CHARS_PER_TOKEN) if isinstance(text, str) else len(text) for text in texts)
    grant = stage.purse.reserve(Side.DEVICE, Asked(n_tokens, max_tokens=0), created)
    if isinstance(grant, Refused):
        raise capped(grant)
    stage.effort.begin(request_id, began)
    finish: str | None = "cancelled"
    error: str | None = None
    try:
        for text in texts:
            found = await device.embed(text)
            usage.prompt_tokens += found.n_tokens
            usage.busy_s += found.busy_s
            yield found
        finish = FINISHED
    except DiscoError as e:
        finish, error = None, e.code or type(e).__name__
        raise
    finally:
        took_s = stage.clock.now() - began
        # Disturbed: the time is no TTFT, and there is nothing to learn from.
        attempt = stage.purse.prices.booked(
            Attempt(Side.DEVICE, device.model, 0.0, took_s, True, usage, error, disturbed=True)
        )
        stage.effort.prefilled(request_id, began + took_s, usage.prompt_tokens)
        stage.effort.end(request_id, began + took_s)
        stage.purse.settle(grant, attempt)
        record(
            Outcome(
                request_id, created, model, POLICY, Plan(0.0, math.inf), usage.prompt_tokens,
                winner=Side.DEVICE if error is None else None, finish_reason=finish, error=error, ttft_s=None,
                duration_s=took_s, handoffs=0, tokens={}, attempts=(attempt,),
                cost_usd=stage.purse.prices.cost_usd(attempt), energy_j=attempt.energy_j,
            )
        )  # fmt: skip

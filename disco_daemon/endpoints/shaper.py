"""An endpoint with another one's latency: replays a real TTFT trace in front of a real one (`disco up --shape-ttft`).

For demonstrations and experiments without a key or a network: the answer and its tokens are real, the time to first
token is the recorded one, or the endpoint's own where that is longer; the tokens come at most at a given speed.
"""

from __future__ import annotations

import asyncio
import csv
import itertools
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..clock import Clock
from ..engine.supervisor import Engine
from ..errors import ConfigError
from ..plain import reason_of
from ..types import (
    Capabilities,
    CaughtUp,
    Embedding,
    Finish,
    GenerationRequest,
    Given,
    Paused,
    PromptLength,
    Readiness,
    TextTask,
    Token,
    Usage,
)
from .base import Controls
from .device import Device

N_REMEMBERED = 1024  # prompts whose recorded time to first token is remembered


def read_trace(path: Path) -> list[float]:
    """The `ttft_s` column of a CSV file, s, in its order. Raises ConfigError."""
    try:
        with path.open(newline="", encoding="utf-8") as f:
            values = [float(row["ttft_s"]) for row in csv.DictReader(r for r in f if not r.startswith("#"))]
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as e:
        msg = f"{path} is no trace: a CSV file with a column ttft_s is expected ({reason_of(e)})"
        raise ConfigError(msg) from e
    if not values or not all(0 <= v < math.inf for v in values):
        raise ConfigError(f"{path} has no TTFT values, or such as are negative or not finite")
    return values


@dataclass(frozen=True, slots=True)
class Shape:
    """TTFTs to replay, s (none: the endpoint's own), and the most token/s."""

    ttft_s: tuple[float, ...] = ()
    tps: float = math.inf


class Shaped:
    """`Endpoint` around a device whose tokens come when the shape says so."""

    def __init__(self, inner: Device, shape: Shape, clock: Clock) -> None:
        self._inner = inner
        self._trace = itertools.cycle(shape.ttft_s or (0.0,))
        self._step_s = 1 / shape.tps
        self._drawn: OrderedDict[int, float] = OrderedDict()
        self._clock = clock
        self.side = inner.side
        self.model = inner.model
        self.continuation = inner.continuation
        self.can_hold = inner.can_hold
        self.resumption = inner.resumption
        self.known_since = inner.known_since

    @property
    def adapters(self) -> Mapping[str, str]:
        """Return that of the endpoint behind."""
        return self._inner.adapters

    @property
    def capabilities(self) -> Capabilities:
        """Return those of the endpoint behind."""
        return self._inner.capabilities

    def refuses(self, request: GenerationRequest) -> str | None:
        """Return that of the endpoint behind."""
        return self._inner.refuses(request)

    def ignores(self, request: GenerationRequest) -> list[str]:
        """Return that of the endpoint behind."""
        return self._inner.ignores(request)

    def narrows(self, request: GenerationRequest) -> list[str]:
        """Return that of the endpoint behind."""
        return self._inner.narrows(request)

    def may_serve(self) -> bool:
        """Return that of the endpoint behind."""
        return self._inner.may_serve()

    def readiness(self) -> Readiness:
        """Return that of the endpoint behind."""
        return self._inner.readiness()

    async def count(self, request: GenerationRequest) -> PromptLength | None:
        """Return that of the endpoint behind."""
        return await self._inner.count(request)

    async def token_ids(self, request: GenerationRequest) -> tuple[int, ...] | None:
        """Return that of the endpoint behind."""
        return await self._inner.token_ids(request)

    async def render(self, request: GenerationRequest) -> str | None:
        """Return that of the endpoint behind."""
        return await self._inner.render(request)

    def overlap_of(self, request: GenerationRequest) -> None:
        """Goes right on, as the endpoint behind."""
        self._inner.overlap_of(request)

    async def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Paused | Finish, None]:
        """Wait as in a server's queue, then compute, so that the first token falls on the recorded time.

        A continued answer waits too, as for any request; orders of `controls` are applied after the queue.
        """
        due = self._clock.now() + self._ttft_s(request)
        length = await self._inner.count(request)
        n_missing = length.tokens - length.cached if length is not None else 0
        compute_s = n_missing / (self._inner.prefill_tps or float("inf"))
        await asyncio.sleep(max(0.0, due - compute_s - self._clock.now()))
        async with aclosing(self._inner.generate(request, usage, controls)) as events:
            async for event in events:
                await asyncio.sleep(max(0.0, due - self._clock.now()))
                yield event
                if isinstance(event, Token):
                    due = max(due, self._clock.now() - self._step_s) + event.n_tokens * self._step_s

    async def embed(self, texts: Sequence[Given], task: TextTask, usage: Usage) -> Embedding:
        """Return the vectors of the endpoint behind, without a wait."""
        return await self._inner.embed(texts, task, usage)

    def _ttft_s(self, request: GenerationRequest) -> float:
        """The next recorded TTFT; the same last message meets the same one again, so that alone and raced compare."""
        key = hash((str(request.messages[-1:]), request.prompt))
        if key not in self._drawn:
            self._drawn[key] = next(self._trace)
            if len(self._drawn) > N_REMEMBERED:
                self._drawn.popitem(last=False)
        return self._drawn[key]

    def status(self) -> dict[str, Any]:
        """Return the status of the endpoint behind, marked."""
        return self._inner.status() | {"shaped": True}

    @property
    def engine(self) -> Engine:
        """The engine of the endpoint behind."""
        return self._inner.engine

    def expect(self, still_s: Callable[[], float]) -> None:
        """Pass it to the endpoint behind."""
        self._inner.expect(still_s)

    async def start(self) -> None:
        """Start the endpoint behind."""
        await self._inner.start()

    async def close(self) -> None:
        """Close the endpoint behind."""
        await self._inner.close()

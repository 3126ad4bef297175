"""Lets answers be played: checks who can serve a request, plays it, keeps track of what is under way.

`Conductor.run` is the request path; `performance` plays one answer on the `stage`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..clock import Clock
from ..endpoints.base import Endpoint
from ..errors import RequestError, Unavailable
from ..types import Delivery, Embedding, GenerationRequest, Outcome, PromptLength, Refusal, Side
from .embedding import embed
from .performance import Performance
from .spending import CHARS_PER_TOKEN, affordable, asked
from .stage import Manner, Sink, Stage

__all__ = ["Conductor", "Manner", "Sink", "Stage"]

RESTART_S = 10.0  # until a daemon that is being stopped is back, if somebody starts it again
GIVE_UP_S = 3.0  # for telling it to all readers; one that does not read is not waited for
MAX_IN_FLIGHT = 512  # answers; each holds a connection on either side, and file descriptors end near 1,024


@dataclass(slots=True)
class Conductor:
    """Answers requests on a stage.

    What changes over time: `playing`, by request id, `n_served`, and `closing`, which is set when no more are taken.
    """

    stage: Stage
    record: Callable[[Outcome], None]
    playing: dict[str, Performance] = field(default_factory=dict)
    n_served: int = 0
    closing: bool = False
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def endpoints(self) -> Mapping[Side, Endpoint]:
        """The configured endpoints."""
        return self.stage.endpoints

    @property
    def clock(self) -> Clock:
        """The clock that all answers go by."""
        return self.stage.clock

    @property
    def in_flight(self) -> int:
        """Answers under way."""
        return len(self.playing)

    async def run(self, request: GenerationRequest, model: str, sink: Sink) -> Outcome:
        """Answer one request into `sink`.

        Raises DiscoError when it cannot be completed: before the first token nothing was written, after it the
        reader's part stands and the error must be told in-band. A cancellation stops both sides and is recorded too.
        """
        if self.in_flight >= MAX_IN_FLIGHT:
            msg = f"{MAX_IN_FLIGHT} answers are running already; try again later"
            raise Unavailable(msg)
        request = self._confined(request)
        available = self._available(request)
        length = await self._length(request, available)
        wanted = asked(request, length.tokens)
        available = affordable(self.stage.purse, wanted, available, self.stage.clock.wall())
        if self.closing:  # asked last: it may have been since the request came in
            raise _stopping("the daemon is being stopped; ask again when it is back")
        performance = Performance(self.stage, request, sink, available, length, model)
        self.playing[request.request_id] = performance
        try:
            return await performance.play(self.record)
        finally:
            del self.playing[request.request_id]
            self.n_served += 1
            self._ended.set()

    async def drain(self, patience_s: float) -> int:
        """Take no more requests, and let running answers end, unpaced; how many had to be ended after `patience_s`, s.

        Those are told in-band. Returns when nothing runs any more.
        """
        self.closing = True
        for performance in self.playing.values():
            performance.adjust(None, Delivery.OFF)
        if await self._still(patience_s):
            return 0
        late = list(self.playing.values())
        for performance in late:
            performance.give_up(_stopping("the daemon was stopped before the answer was whole"))
        await self._still(GIVE_UP_S)
        return len(late)

    async def _still(self, patience_s: float) -> bool:
        """Whether nothing runs any more, at the latest after so long."""
        try:
            await asyncio.wait_for(self._until(lambda: not self.playing), patience_s)
        except TimeoutError:
            return False
        return True

    async def left(self, stage: Stage) -> None:
        """Wait until no answer is played on that stage."""
        await self._until(lambda: all(p.stage is not stage for p in self.playing.values()))

    async def _until(self, true: Callable[[], bool]) -> None:
        """Look again whenever an answer has ended. Waiters share the event: whoever clears it has looked after that."""
        while not true():
            self._ended.clear()
            await self._ended.wait()

    def embed(
        self, texts: Sequence[str | tuple[int, ...]], model: str, request_id: str
    ) -> AsyncGenerator[Embedding, None]:
        """The embeddings of texts, or of token ids; see `embedding.embed`."""
        return embed(self.stage, texts, model, request_id, self.record)

    def adjust(self, request_id: str, pace_tps: float | None, delivery: Delivery | None) -> bool:
        """Deliver a running answer in another manner from now on; False if there is none of that name."""
        performance = self.playing.get(request_id)
        if performance is not None:
            performance.adjust(pace_tps, delivery)
        return performance is not None

    def _confined(self, request: GenerationRequest) -> GenerationRequest:
        """The request as it may be answered: kept here where everything is. Raises RequestError if it asks for more."""
        if not self.stage.private:
            return request
        if Side.DEVICE not in request.allowed:
            msg = "Nothing may leave this machine (policy.private), and this request asks for the server: use 'disco'."
            raise RequestError(msg, status=403, param="model", code="private")
        return replace(request, allowed=frozenset({Side.DEVICE}), private=True)

    def _available(self, request: GenerationRequest) -> frozenset[Side]:
        """The endpoints that can serve this request at all. Raises RequestError or Unavailable."""
        wanted = {side: endpoint for side, endpoint in self.endpoints.items() if side in request.allowed}
        if not wanted:
            names = " or ".join(sorted(request.allowed))
            msg = f"no {names} is configured; see `disco config` for how to set one up"
            raise Unavailable(msg)
        refusals = {side: endpoint.refuses(request) for side, endpoint in wanted.items()}
        available = frozenset(side for side, refusal in refusals.items() if refusal is None)
        if not available:
            why = "; ".join(r for r in refusals.values() if r)
            named = (r.param for r in refusals.values() if isinstance(r, Refusal))
            param = next(named, next((need for need in request.needs if need in why), None))
            raise RequestError(why, code="unsupported", param=param)
        return available

    async def _length(self, request: GenerationRequest, available: frozenset[Side]) -> PromptLength:
        """Prompt length by the device's tokenizer, or an estimate while none is loaded."""
        device = self.endpoints.get(Side.DEVICE)
        counted = await device.count(request) if device is not None and Side.DEVICE in available else None
        return counted or PromptLength(max(1, request.n_chars // CHARS_PER_TOKEN))


def _stopping(message: str) -> Unavailable:
    return Unavailable(message, retry_after_s=RESTART_S, code="stopping")

"""The path of a request: a place, the endpoints that can serve it, the caps, and then the run of its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from ..clock import Clock
from ..endpoints.base import Endpoint
from ..errors import RequestError, Unavailable
from ..types import Delivery, Embedding, GenerationRequest, LedgerEntry, Outcome, PromptLength, Refusal, Side
from .answer_run import AnswerRun
from .context import AnswerContext, Sink
from .embedding import EmbeddingRun
from .keeper import Keeper
from .spending import CHARS_PER_TOKEN, affordable, cost_bound

RESTART_S = 10.0  # until a daemon that is being stopped is back, if somebody starts it again
GIVE_UP_S = 3.0  # for telling it to all readers; one that does not read is not waited for
MAX_IN_FLIGHT = 512  # answers; each holds a connection on either side, and file descriptors end near 1,024
FULL_S = 1.0  # the Retry-After where MAX_IN_FLIGHT are under way: one of them ends in a moment
CONFINE_S = 2.0  # for closing what the server is not to get any more; takes milliseconds


@dataclass(slots=True)
class Conductor:
    """Answers requests with the context that `keeper` has for the next one.

    State: `in_flight`, the places taken, by requests that are counted, answered or embedded; `answering` and
    `embedding`, those under way by request id; `n_served`; and `closing`, which is set when no more are taken. `record`
    gets the outcome of each answer, and the context that it had; `book` gets the cost of each request for embeddings.
    """

    keeper: Keeper
    record: Callable[[AnswerContext, Outcome], None]
    book: Callable[[LedgerEntry], None]
    answering: dict[str, AnswerRun] = field(default_factory=dict)
    embedding: dict[str, EmbeddingRun] = field(default_factory=dict)
    in_flight: int = 0
    n_served: int = 0
    closing: bool = False
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def context(self) -> AnswerContext:
        """The context of the next request."""
        return self.keeper.context

    @property
    def endpoints(self) -> Mapping[Side, Endpoint]:
        """The configured endpoints."""
        return self.context.endpoints

    @property
    def clock(self) -> Clock:
        """The clock that all answers go by."""
        return self.context.clock

    async def run(self, request: GenerationRequest, model: str, sink: Sink) -> Outcome:
        """Answer one request into `sink`.

        Raises DiscoError when it cannot be completed: before the first token nothing was written, after it the
        reader's part stands and the error must be sent in-band. A cancellation stops both sides and is recorded too.
        """
        with self._admitted() as context:
            request = _confined(request, context)
            available = _available(request, context.endpoints)
            length = await _length(request, available, context.endpoints)
            if (confined := _confined(request, context)) is not request:  # the switch has been turned meanwhile
                request, available = confined, _available(confined, context.endpoints)
            wanted = cost_bound(request, length.tokens)
            available = affordable(context.spending, wanted, available, context.clock.wall())
            self._open()  # asked again: it may have been closed since the request came in
            answer_run = AnswerRun(context, request, sink, available, length, model)
            self.answering[request.request_id] = answer_run
            try:
                return await answer_run.run(lambda outcome: self.record(context, outcome))
            finally:
                del self.answering[request.request_id]
                self.n_served += 1

    async def embed(
        self, texts: Sequence[str | tuple[int, ...]], model: str, request_id: str
    ) -> AsyncGenerator[Embedding, None]:
        """The embeddings of texts, or of token ids, in order. Raises DiscoError; close it to stop."""
        with self._admitted() as context:
            run = self.embedding[request_id] = EmbeddingRun(context, texts, model, request_id)
            try:
                async with aclosing(run.embedded(self.book)) as found:
                    async for embedding in found:
                        yield embedding
            finally:
                del self.embedding[request_id]

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[AnswerContext]:
        """Take a place before any waiting, and give the context to answer with. Raises Unavailable."""
        self._open()
        if self.in_flight >= MAX_IN_FLIGHT:
            msg = f"{MAX_IN_FLIGHT} requests are being answered already; try again later"
            raise Unavailable(msg, retry_after_s=FULL_S)
        self.in_flight += 1
        try:
            with self.keeper.held() as context:
                yield context
        finally:
            self.in_flight -= 1
            self._ended.set()

    def _open(self) -> None:
        if self.closing:
            raise _stopping("the daemon is being stopped; ask again when it is back")

    async def drain(self, patience_s: float) -> int:
        """Take no more requests, and let running answers end, unpaced. Returns when nothing runs any more.

        The answers that had to be ended after `patience_s`, s, get an error in-band; return their number.
        """
        self.closing = True
        for answer_run in self.answering.values():
            answer_run.adjust(None, Delivery.OFF)
        if await self._still(patience_s):
            return 0
        late: list[AnswerRun | EmbeddingRun] = [*self.answering.values(), *self.embedding.values()]
        for work in late:
            work.give_up(_stopping("the daemon was stopped before the answer was whole"))
        await self._still(GIVE_UP_S)
        return len(late)

    async def _still(self, patience_s: float) -> bool:
        """Whether nothing runs any more; waits for that for `patience_s` at most."""
        try:
            async with asyncio.timeout(patience_s):
                while self.in_flight:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def still_s(self, device: Endpoint) -> float:
        """Return how long answers will still need another device than that one, s, as far as is known."""
        works: list[AnswerRun | EmbeddingRun] = [*self.answering.values(), *self.embedding.values()]
        return max((w.left_s() for w in works if w.context.endpoints.get(Side.DEVICE) is not device), default=0.0)

    async def confine(self) -> None:
        """`policy.private` is on: end what a server was asked for and has not begun, and wait until that is so.

        It is not known whether the text has left yet. What a server is already sending is taken to its end.
        """
        stopped = [task for answer_run in self.answering.values() for task in answer_run.confine()]
        if stopped:
            await asyncio.wait(stopped, timeout=CONFINE_S)

    def adjust(self, request_id: str, pace_tps: float | None, delivery: Delivery | None) -> bool:
        """Deliver a running answer at another pace or in another mode; False if there is none of that id."""
        answer_run = self.answering.get(request_id)
        if answer_run is not None:
            answer_run.adjust(pace_tps, delivery)
        return answer_run is not None


def _confined(request: GenerationRequest, context: AnswerContext) -> GenerationRequest:
    """The request as it may be answered: kept here where everything is. Raises RequestError if it asks for more."""
    if not context.private:
        return request
    if Side.DEVICE not in request.allowed:
        msg = "Nothing may leave this machine (policy.private), and this request asks for the server: use 'disco'."
        raise RequestError(msg, status=403, param="model", code="private")
    return replace(request, allowed=frozenset({Side.DEVICE}), private=True)


def _available(request: GenerationRequest, endpoints: Mapping[Side, Endpoint]) -> frozenset[Side]:
    """The endpoints that can serve this request at all. Raises RequestError or Unavailable."""
    wanted = {side: endpoint for side, endpoint in endpoints.items() if side in request.allowed}
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


async def _length(
    request: GenerationRequest, available: frozenset[Side], endpoints: Mapping[Side, Endpoint]
) -> PromptLength:
    """Prompt length by the device's tokenizer, or an estimate while none is loaded."""
    device = endpoints.get(Side.DEVICE)
    counted = await device.count(request) if device is not None and Side.DEVICE in available else None
    return counted or PromptLength(max(1, request.n_chars // CHARS_PER_TOKEN), counted=False)


def _stopping(message: str) -> Unavailable:
    return Unavailable(message, retry_after_s=RESTART_S, code="stopping")

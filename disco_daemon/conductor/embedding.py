"""Embeddings and ratings: the device gets some texts after the other, and a whole request is booked as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import accumulate

from ..endpoints.base import Embedder
from ..errors import DiscoError, RequestError
from ..money.spending import CapRefusal, CostBound, Reservation, capped
from ..types import OWNER, Attempt, Caller, Embedding, EntryKind, Given, LedgerEntry, Side, TextTask, Usage
from .context import AnswerContext
from .plan import CHARS_PER_TOKEN

AT_A_TIME = 64  # texts that the device gets at once: enough to be computed together
CHARS_AT_A_TIME = 16_384  # of those texts, each with its query: seconds of work on a slow device, lost if nobody waits


class EmbeddingRun:
    """The texts, or lists of token ids, of one request. Owns the waiting for each; `context` is what it began with.

    Only the device makes embeddings: vectors of two models have nothing to do with each other.
    """

    def __init__(
        self,
        context: AnswerContext,
        texts: Sequence[Given],
        task: TextTask,
        model: str,
        request_id: str,
        caller: Caller = OWNER,
    ) -> None:
        self.context, self.caller = context, caller
        self._texts, self._task, self._model, self._request_id = texts, task, model, request_id
        self._began, self._created = context.clock.now(), context.clock.wall()
        self._query_size = len(task.query or "")  # which the device reads with each text
        self._n_done = 0
        self._usage = Usage()
        self._patience: asyncio.Timeout | None = None
        self._given_up: DiscoError | None = None

    async def embedded(self, book: Callable[[LedgerEntry], None]) -> AsyncGenerator[Embedding, None]:
        """The embeddings, some at a time; `book` gets their cost in the end. Raises DiscoError; close it to stop."""
        context = self.context
        device = context.endpoints.get(Side.DEVICE)
        if not isinstance(device, Embedder):
            msg = "Embeddings are made by this machine's own model only, and none is here."
            raise RequestError(msg, code="unsupported")
        grant = self._reserved()
        context.energy.begin(self._request_id, self._began)
        cancelled, error = True, None
        try:
            while self._n_done < len(self._texts):
                found = await self._next(device, self._texts[self._n_done : self._n_done + self._n_next()])
                self._n_done += len(found.vectors)
                yield found
            cancelled = False
        except DiscoError as e:
            cancelled, error = False, e.code or type(e).__name__
            raise
        finally:
            book(self._settled(grant, device.model, error, cancelled=cancelled))

    def give_up(self, error: DiscoError) -> None:
        """End it here, with that error."""
        self._given_up = error
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())

    def left_s(self) -> float:
        """Return how long the rest will take at the speed so far, s."""
        took_s = self.context.clock.now() - self._began
        return took_s / max(1, self._n_done) * (len(self._texts) - self._n_done)

    def _n_next(self) -> int:
        """Return how many texts the device gets next, at least one."""
        texts = self._texts[self._n_done : self._n_done + AT_A_TIME]
        sizes = accumulate(self._query_size + len(text) for text in texts)
        return max(1, sum(size <= CHARS_AT_A_TIME for size in sizes))

    async def _next(self, device: Embedder, texts: Sequence[Given]) -> Embedding:
        if self._given_up is not None:
            raise self._given_up
        try:
            async with asyncio.timeout(None) as self._patience:  # the supervisor ends an engine that hangs
                return await device.embed(texts, self._task, self._usage)
        except TimeoutError:
            if self._given_up is None:
                raise
            raise self._given_up from None
        finally:
            self._patience = None

    def _reserved(self) -> Reservation:
        """Reserve what they may cost. Raises EndpointError where a cap is reached."""
        texts, more = self._texts, self._query_size
        n_tokens = sum(max(1, (more + len(t)) // CHARS_PER_TOKEN) if isinstance(t, str) else len(t) for t in texts)
        grant = self.context.spending.reserve(Side.DEVICE, CostBound(n_tokens, max_tokens=0), self._created)
        if isinstance(grant, CapRefusal):
            raise capped(grant)
        return grant

    def _settled(self, grant: Reservation, model: str, error: str | None, *, cancelled: bool) -> LedgerEntry:
        """Settle what was reserved by the real cost, and return its entry."""
        context, usage = self.context, self._usage
        took_s = context.clock.now() - self._began
        attempt = context.spending.prices.booked(Attempt(Side.DEVICE, model, 0.0, took_s, True, usage, error))
        context.energy.observe_prefill(self._request_id, self._began + took_s, usage.prompt_tokens)
        context.energy.end(self._request_id, self._began + took_s)
        context.spending.settle(grant, attempt)
        return LedgerEntry(
            EntryKind.EMBEDDING, self._request_id, self._created, self._model, attempt,
            cost_usd=context.spending.prices.cost_usd(attempt), duration_s=took_s, cancelled=cancelled,
            key=self.caller.name,
        )  # fmt: skip

"""The path of a request: a place, the endpoints that can serve it, the caps, and then the run of its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..endpoints.base import Endpoint
from ..money.spending import CostBound
from ..types import OWNER, Caller, Embedding, GenerationRequest, Given, LedgerEntry, Outcome, Side, TextTask
from .answer_run import AnswerRun
from .context import AnswerContext, LocalModels, Sink
from .cost_limit import CostLimit
from .eligible import eligible, roomy
from .embedding import EmbeddingRun
from .in_flight import InFlight
from .keeper import Keeper
from .plan import prompt_length

if TYPE_CHECKING:
    from .ruling import Ruling


@dataclass(slots=True)
class Conductor:
    """Answers requests with the context that `keeper` has for the next one.

    `in_flight` are the requests under way. `record` gets the outcome of each answer, and the context that it had;
    `book` gets the cost of each request for embeddings. `local` has the models that answer alone, where there are any,
    and `rules` the user's rules for who may answer what.
    """

    keeper: Keeper
    record: Callable[[AnswerContext, Outcome], None]
    book: Callable[[LedgerEntry], None]
    in_flight: InFlight = field(default_factory=InFlight)
    local: LocalModels | None = None
    rules: Ruling | None = None

    @property
    def context(self) -> AnswerContext:
        """The context of the next request."""
        return self.keeper.context

    @property
    def endpoints(self) -> Mapping[Side, Endpoint]:
        """The configured endpoints."""
        return self.context.endpoints

    def context_of(self, local: str) -> AnswerContext:
        """Return the context of a request now: one of several models', or the race's (""). Raises RequestError."""
        return self.local.context(local) if local and self.local is not None else self.context

    def held(self, local: str) -> AbstractContextManager[AnswerContext]:
        """Give that context; its endpoints stay open until the end of this. Raises DiscoError."""
        return self.local.held(local) if local and self.local is not None else self.keeper.held()

    async def run(self, request: GenerationRequest, model: str, sink: Sink) -> Outcome:
        """Answer one request into `sink`.

        Raises DiscoError when it cannot be completed: before the first token nothing was written, after it the
        reader's part stands and the error must be sent in-band. A cancellation stops both sides and is recorded too.
        """
        with self.in_flight.place(), self.held(request.local) as context:
            if context.servers is not None and not request.local:
                context = context.servers.context(context, request)
            # Which sides can serve it?
            request, available = eligible(request, context)
            # How long is the prompt? The device counts; where there is none, or it is not loaded, it is estimated.
            length = await prompt_length(request, available, context)
            if context.private:  # perhaps only since then
                request, available = eligible(request, context)
            # Where does it fit, and which sides does no cap close?
            available = roomy(available, request, length, context)
            bound = CostBound.of(request, length.tokens, counted=length.counted)
            available = context.spending.affordable(available, bound, context.clock.wall())
            available = CostLimit(request, context.spending).within(available, request, length)
            # Answer it, unless the daemon is being stopped by now, or the key that asks was revoked.
            self.in_flight.check_open(request.caller)
            answer_run = AnswerRun(context, request, sink, available, length, model)
            with self.in_flight.running(request.request_id, answer_run):
                return await answer_run.run(lambda outcome: self.record(context, outcome))

    async def embed(
        self,
        texts: Sequence[Given],
        task: TextTask,
        model: str,
        request_id: str,
        local: str = "",
        caller: Caller = OWNER,
    ) -> AsyncGenerator[Embedding, None]:
        """The embeddings of texts, or of token ids, some at a time. Raises DiscoError; close it to stop."""
        with self.in_flight.place(), self.held(local) as context:
            self.in_flight.check_open(caller)
            run = self.in_flight.embedding[request_id] = EmbeddingRun(context, texts, task, model, request_id, caller)
            try:
                async with aclosing(run.embedded(self.book)) as found:
                    async for embedding in found:
                        yield embedding
            finally:
                del self.in_flight.embedding[request_id]

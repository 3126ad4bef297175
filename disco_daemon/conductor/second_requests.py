"""Whether a silent server may be asked a second time for one answer, or another server as well, and what that holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dispatch.planner import Planned
from ..money.spending import CapRefusal, CostBound
from ..types import GenerationRequest
from .answer_server import OtherServer
from .context import AnswerContext
from .cost_limit import CostLimit
from .endpoint_run import EndpointRun, PromptSize
from .journal import Journal

if TYPE_CHECKING:
    from .runs import EndpointRuns


class SecondRequests:
    """Asked when a second request is due. What one may cost is held from then on; refused, it holds and uses nothing.

    None goes where the answer has let go of the run, nor beyond a cap, the limit of the client or the share of second
    requests, nor to a server without room for such: none of these is an error of the answer.
    """

    def __init__(
        self,
        context: AnswerContext,
        request: GenerationRequest,
        prompt: PromptSize,
        cost_limit: CostLimit,
        journal: Journal,
    ) -> None:
        self._context, self._request, self._prompt = context, request, prompt
        self._cost_limit, self._journal = cost_limit, journal

    # Each is given the `runs`, which have this: held by it they would be in a cycle, and wait for the collector.

    def admit(self, run: EndpointRun, planned: Planned, runs: EndpointRuns) -> bool:
        """Whether the server of a run may be asked a second time, now that it is silent."""
        context, hedges = self._context, self._context.planner.hedges
        if not self._is_wanted(run, runs) or not context.endpoints[run.side].readiness().hedgeable:
            return False
        if not hedges.allows(planned.length) or not self._cost_limit.admit_again(run, runs.all):
            return False
        grant = context.spending.reserve(run.side, self._bound, context.clock.wall())
        if isinstance(grant, CapRefusal):
            run.hedge_most_usd = 0.0
            return False
        hedges.take(planned.length)
        run.hedge_grant = grant
        self._journal.hedged(run)
        return True

    def admit_other(self, run: EndpointRun, other: OtherServer, runs: EndpointRuns) -> bool:
        """Whether another server may be asked as well, now that this one is silent; as `admit`, at its price."""
        context, spending = self._context, other.member.spending
        met = other.member.endpoint.readiness()
        if not self._is_wanted(run, runs) or met.down_s > 0 or not (met.hedgeable or other.is_due_anyway):
            return False
        length = self._prompt.length
        if not self._cost_limit.admit_elsewhere(run, self._request, length, runs.all, spending.price):
            return False
        grant = spending.reserve(run.side, self._bound, context.clock.wall())
        if isinstance(grant, CapRefusal) or not other.take():
            run.hedge_most_usd = 0.0
            if not isinstance(grant, CapRefusal):
                spending.caps.release(grant)
            return False
        run.hedge_grant = grant
        self._journal.hedged(run)
        return True

    def _is_wanted(self, run: EndpointRun, runs: EndpointRuns) -> bool:
        return not (self._context.private or runs.is_stale(run))

    @property
    def _bound(self) -> CostBound:
        return CostBound.of(self._request, self._prompt.n_tokens, counted=self._prompt.counted)

"""Whether an answer should move now: for money, away from a silent source, or later from a kept prefill."""

from __future__ import annotations

from dataclasses import replace

from ..answer import Answer
from ..dispatch.mover import View
from ..money.spending import CostBound
from ..types import Delivery, GenerationRequest, Side
from .context import AnswerContext, CurrentDelivery
from .eligible import is_left_alone
from .endpoint_run import EndpointRun, PromptSize
from .plan import lacks_room
from .runs import EndpointRuns

MAX_PARKED_BESIDE = 4  # answers on the device; with more of them a loser's prefill is not kept, its place is wanted
NOT_AGAIN = 1 << 62  # tokens


class MoveAdvisor:
    """Asks the mover about one answer. `next_check`: the generated tokens at which a move is considered again."""

    def __init__(
        self,
        context: AnswerContext,
        request: GenerationRequest,
        answer: Answer,
        runs: EndpointRuns,
        prompt: PromptSize,
        delivery: CurrentDelivery,
    ) -> None:
        self._context, self._request, self._answer = context, request, answer
        self._runs, self._prompt, self._delivery = runs, prompt, delivery
        self.next_check = 1 if len(answer.available) > 1 else NOT_AGAIN

    def target_now(self) -> Side | None:
        """Return the side that the answer should move to now. The reserve that bridges the move must be there first."""
        answer, mover = self._answer, self._context.mover
        assert answer.source is not None
        target = answer.source.other
        is_barred = is_left_alone(self._context.endpoints.get(target), self._request)
        if self._delivery.mode is Delivery.OFF or is_barred:
            self.next_check = NOT_AGAIN
            return None
        view = self._view(target)
        reserve = None if self._lacks_room(view) else mover.advise(view)
        answer.buffer.reserve = reserve or 0
        if reserve is None:
            self.next_check = mover.next_check(view.generated)
            return None
        if answer.buffer.n_held < reserve:
            return None
        self.next_check = mover.next_check(view.generated)
        return view.target

    def may_leave(self, source: Side) -> bool:
        """Whether budget, caps and the target itself allow a move away from a silent source."""
        context, target, n_made = self._context, source.other, self._answer.n_generated
        if target not in context.endpoints:
            return False
        planner, readiness = context.planner, context.endpoints[target].readiness()
        if readiness.down_s > 0 or (planner.policy.learns and not planner.allows(target, self._prompt.n_tokens)):
            return False
        if readiness.n_ctx is not None and self._prompt.n_tokens + n_made >= readiness.n_ctx:
            return False
        wanted = CostBound.of(self._request, self._prompt.n_tokens, n_made)
        return context.spending.check(target, wanted, context.clock.wall()) is None

    def is_worth_hearing(self, side: Side) -> bool:
        """Whether a server that has just lost the race is worth its first token: its prompt is billed already.

        That costs one output token, and turns "slower than the device" into a TTFT to learn from.
        """
        return side is Side.SERVER and self._context.shadow and self._context.planner.policy.learns

    def is_worth_keeping(self, run: EndpointRun) -> bool:
        """Whether the prefill of a device that has just lost is worth finishing, for a handoff soon."""
        endpoint = self._context.endpoints[run.side]
        if not endpoint.can_hold or not self._answer.joinable or self._delivery.mode is Delivery.OFF:
            return False
        if endpoint.readiness().n_busy > MAX_PARKED_BESIDE:
            return False
        view = replace(self._view(run.side), cached=run.n_prefilled)
        return not self._lacks_room(view) and self._context.mover.foresees(view)

    def _lacks_room(self, view: View) -> bool:
        rest = self._context.planner.knowledge.outputs.expected_remaining(view.generated, view.prompt)
        return lacks_room(view.readiness, view.prompt + view.generated, rest, view.max_tokens, view.generated)

    def _view(self, target: Side) -> View:
        """Return the answer as it stands, for the decision."""
        answer, endpoint = self._answer, self._context.endpoints[target]
        source, parked = self._runs.of(target.other), self._runs.parked_on(target)
        return View(
            key=self._request.request_id,
            target=target,
            prompt=self._prompt.n_tokens,
            generated=answer.n_generated,
            cached=parked.n_prefilled if parked is not None else 0,
            max_tokens=self._request.sampling.max_tokens,
            source_tps=source.tps if source is not None else None,
            pace_tps=self._delivery.pace_tps,
            readiness=endpoint.readiness(),
            handoffs=answer.handoffs,
            follows=endpoint.can_hold,
        )

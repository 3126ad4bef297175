"""Whether an answer should move now, for money, to a better side, from a silent source, or later from a kept prefill.

And whether the source of a move rests meanwhile: only where the reader has enough to read until the target comes and,
should it not come, until the source does that is asked again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from ..answer import Answer, AskAgain, Move, Rest
from ..dispatch.mover import View
from ..endpoints.base import Resumption
from ..money.spending import CostBound, beside_text
from ..types import Delivery, GenerationRequest, Relation, Side, Unequal
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
        relation: Relation,
    ) -> None:
        self._context, self._request, self._answer, self._relation = context, request, answer, relation
        self._runs, self._prompt, self._delivery = runs, prompt, delivery
        self.next_check = 1 if len(answer.available) > 1 else NOT_AGAIN

    def steps(self) -> Iterator[Move | Rest | AskAgain]:
        """What is to be done now: begin a move, let its source rest, or ask that again. The answer takes each at once.

        A move to another side begins when the reserve is there that bridges it.
        """
        answer = self._answer
        if answer.n_generated >= self.next_check and answer.movable:
            move = self._move_now()
            if move is not None:
                yield move
        if (handoff := answer.handoff) is not None:
            if handoff.may_rest and self._lasts_without(handoff.source):
                yield Rest()
            elif handoff.is_rested and self._is_wanted_again(handoff.source):
                yield AskAgain()

    def _move_now(self) -> Move | None:
        answer, mover = self._answer, self._context.mover
        assert answer.source is not None
        target = answer.source.other
        is_barred = is_left_alone(self._context.endpoints.get(target), self._request)
        if self._delivery.mode is Delivery.OFF or self._request.prefers is not None or is_barred:
            self.next_check = NOT_AGAIN
            return None
        if target is self._relation.lower:  # it may not stay: from there the answer may move for money again
            self.next_check, answer.buffer.reserve = mover.next_check(answer.n_generated), 0
            return None
        view = self._view(target)
        affordable, rises = self._runs.affords(target, view.generated), self._can_rise(target)
        reserve = None
        if affordable and not self._lacks_room(view):
            reserve = mover.reserve(view) if rises else mover.advise(view)
        answer.buffer.reserve = reserve or 0
        if reserve is None:
            may_rise = target is self._relation.better
            self.next_check = view.generated + 1 if may_rise else mover.next_check(view.generated)
            return None
        if answer.buffer.n_held < reserve:
            return None
        self.next_check = mover.next_check(view.generated)
        return Move(target, "grade" if rises else "cost")

    def _can_rise(self, target: Side) -> bool:
        """Whether the answer is a stand-in's, and may move to `target`, the better side, now.

        That is where the stand-in shows the first words only, and where the better side has lost the race and is there
        since: a server has shown its first token, and a device goes on reading anyway.
        """
        if target is not self._relation.better:
            return False
        is_there = target is Side.DEVICE or self._runs.has_heard(target)
        return (is_there or self._relation.unequal is Unequal.FIRST_WORDS) and self._may_ask(target)

    def may_leave(self, source: Side) -> bool:
        """Whether a move away from a silent source is allowed."""
        return self._may_ask(source.other)

    def _may_ask(self, target: Side) -> bool:
        """Whether budget, caps, the request's bound and the target itself allow to ask it to go on.

        The budget keeps nothing on a stand-in.
        """
        context, n_made = self._context, self._answer.n_generated
        if target not in context.endpoints or not self._runs.affords(target, n_made):
            return False
        planner, readiness = context.planner, context.endpoints[target].readiness()
        is_limited = planner.policy.learns and target is not self._relation.better
        if readiness.down_s > 0 or (is_limited and not planner.allows(target, self._prompt.n_tokens)):
            return False
        if readiness.n_ctx is not None and self._prompt.n_tokens + n_made >= readiness.n_ctx:
            return False
        prompt = self._prompt
        wanted = CostBound.of(self._request, prompt.n_tokens, n_made, counted=prompt.counted, beside=self._beside)
        return context.spending.check(target, wanted, context.clock.wall()) is None

    @cached_property
    def _beside(self) -> tuple[int, int]:
        return beside_text(self._request)

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
        if run.side is self._relation.lower:
            return False
        if endpoint.readiness().n_busy > MAX_PARKED_BESIDE:
            return False
        view = replace(self._view(run.side), cached=run.n_prefilled)
        is_wanted = run.side is self._relation.better or self._context.mover.foresees(view)
        return is_wanted and not self._lacks_room(view)

    # --- a source that rests ------------------------------------------------------------------------------------

    def _can_rest(self, source: Side) -> bool:
        """Whether a source may be stopped, and asked again, at all (docs/explain/handoff.md#a-source-that-rests)."""
        context = self._context
        if not (context.defaults.pause and self._delivery.mode is Delivery.PACED and self._answer.joinable):
            return False
        if source is Side.SERVER and not context.spending.stops_billing:
            return False
        begun, target = (context.endpoints[side].resumption for side in (source, source.other))
        return begun is Resumption.ALONE and target is not Resumption.UNSURE  # a device as target may say nothing more

    def _lasts_without(self, source: Side) -> bool:
        """Whether the reader's stock lasts without the source, which can be asked again whenever that is needed."""
        if not self._can_rest(source):
            return False
        view = self._view(source.other)
        if source is Side.DEVICE and view.source_busy > MAX_PARKED_BESIDE:  # its cells are wanted
            return False
        return self._answer.buffer.n_held >= self._context.mover.stock_to_rest(view) and self._may_ask(source)

    def _is_wanted_again(self, source: Side) -> bool:
        stock = self._answer.buffer.n_held if self._delivery.mode is Delivery.PACED else 0
        return stock <= self._context.mover.stock_to_ask_again(self._view(source.other))

    # --- the answer as it stands --------------------------------------------------------------------------------

    def left_s(self) -> float:
        """Return how long the answer will still take, s, by others of its length."""
        answer, max_tokens, pace_tps = self._answer, self._request.sampling.max_tokens, self._delivery.pace_tps
        left = self._context.planner.knowledge.outputs.expected_remaining(answer.n_generated, self._prompt.n_tokens)
        if max_tokens is not None:
            left = min(left, max(0, max_tokens - answer.n_generated))
        source = self._runs.of(answer.source)
        tps = source.tps if source is not None else None
        if tps is None or self._delivery.mode is Delivery.PACED:
            tps = min(tps or pace_tps, pace_tps)
        return left / tps

    def _lacks_room(self, view: View) -> bool:
        rest = self._context.planner.knowledge.outputs.expected_remaining(view.generated, view.prompt)
        return lacks_room(view.readiness, view.prompt + view.generated, rest, view.max_tokens, view.generated)

    def _view(self, target: Side) -> View:
        """Return the answer as it stands, for the decision."""
        answer, runs, endpoints = self._answer, self._runs, self._context.endpoints
        source, begun, readiness = runs.of(target.other), runs.of(target), endpoints[target].readiness()
        prepared = begun or runs.parked_on(target)
        if begun is not None:  # it is one of those that the target is busy with
            readiness = replace(readiness, n_busy=max(0, readiness.n_busy - 1))
        return View(
            key=self._request.request_id,
            target=target,
            prompt=self._prompt.n_tokens,
            generated=answer.n_generated,
            cached=prepared.n_prefilled if prepared is not None else 0,
            max_tokens=self._request.sampling.max_tokens,
            source_tps=source.tps if source is not None else None,
            pace_tps=self._delivery.pace_tps,
            readiness=readiness,
            handoffs=answer.handoffs,
            follows=endpoints[target].can_hold,
            rests=self._can_rest(target.other),
            source_busy=max(0, endpoints[target.other].readiness().n_busy - (source is not None)),
        )

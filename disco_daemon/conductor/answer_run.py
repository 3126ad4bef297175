"""One answer, from its plan to its record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from ..answer import (
    Answer,
    Begin,
    Cancel,
    Complete,
    Deliver,
    Effect,
    Fail,
    Feed,
    LoopWatch,
    Note,
    SetTimer,
    Start,
    State,
    Tick,
)
from ..delivery.buffer import TokenBuffer
from ..dispatch.planner import Planned
from ..errors import DiscoError, ReaderGone
from ..types import (
    Append,
    Caller,
    Delivery,
    GenerationRequest,
    Outcome,
    Pace,
    Plan,
    PromptLength,
    Side,
    most_tokens,
    n_choices,
    raced,
)
from .context import AnswerContext, CurrentDelivery, Sink
from .endpoint_run import PromptSize
from .inbox import EventInbox
from .journal import Journal
from .moves import MoveAdvisor
from .plan import UNPLANNED, fitted, insured, readiness_of
from .record import Recorder
from .runs import EndpointRuns
from .timers import Timers

MAX_COALESCED = 16  # events; tokens that are there at the same time leave in one write


class AnswerRun:
    """One answer under way.

    Owns its parts: the `Answer`, the endpoint runs, the timers, the move advice, the inbox, the journal, the recorder.
    """

    def __init__(
        self,
        context: AnswerContext,
        request: GenerationRequest,
        sink: Sink,
        available: frozenset[Side],
        length: PromptLength,
        model: str,
    ) -> None:
        defaults, endpoints = context.defaults, context.endpoints
        self._context, self._clock, self._sink = context, context.clock, sink
        self._relation = raced(context.relation()) if request.race else context.relation()
        self._delivery = CurrentDelivery(request.delivery or defaults.delivery, request.pace_tps or defaults.pace_tps)
        self._request = replace(
            request, delivery=self._delivery.mode, pace_tps=self._delivery.pace_tps,
            expected_ttft_s=defaults.expected_ttft_s,
        )  # fmt: skip
        self._length, self._prompt = length, PromptSize(length)
        self._inbox, self._journal = EventInbox(), Journal(context, self._request)
        continuation = {side: endpoint.continuation for side, endpoint in endpoints.items()}
        self._runs = EndpointRuns(
            context, self._request, self._prompt, self._inbox, self._journal, continuation
        )  # fmt: skip
        self._answer = Answer(
            UNPLANNED, available, most_tokens(request), request.sampling.stop,
            continuation,
            frozenset(side for side, endpoint in endpoints.items() if endpoint.can_hold),
            joinable=not request.needs,
            watch=LoopWatch(
                defaults.stop_repetition if request.stop_repetition is None else request.stop_repetition,
                strict=request.has_form,
                choices=n_choices(request.extra),
            ),
            before=request.answer_so_far,
            overlap=self._runs.overlap,
            again=self._runs.has_another,
            buffer=TokenBuffer(self._delivery.mode, self._delivery.pace_tps),
        )  # fmt: skip
        self._moves = MoveAdvisor(
            context, self._request, self._answer, self._runs, self._prompt, self._delivery, self._relation
        )
        self._timers = Timers(context, self._answer, self._inbox, self._runs, self._moves)
        self._recorder = Recorder(
            context, self._request, model, self._answer, self._runs, self._prompt, self._delivery, self._relation
        )
        self._now = self._recorder.began
        self._n_shown = 0  # characters of the answer
        self._reason: str | None = None
        self._error: DiscoError | None = None
        self._given_up: DiscoError | None = None

    @property
    def context(self) -> AnswerContext:
        """The context that it has from begin to end."""
        return self._context

    @property
    def caller(self) -> Caller:
        """Who has asked."""
        return self._request.caller

    # --- the story -----------------------------------------------------------------------------------------------

    async def run(self, record: Callable[[Outcome], None]) -> Outcome:
        """Answer the request, and record it whatever happens. Raises DiscoError, and a cancellation."""
        context, answer, n_tokens = self._context, self._answer, self._length.tokens
        readiness = readiness_of(context.endpoints, answer.available, self._length.cached)
        self._sink.prompt(n_tokens)
        # Plan: budget is held from here on, until recording the answer settles it, once.
        planned = context.planner.plan(n_tokens, readiness)
        plan = planned.plan
        try:
            plan = fitted(plan, self._request, n_tokens, readiness, context, self._relation)
            answer.plan = insured(plan, readiness) if self._request.prefers is None else plan
            # Answer: the task group owns all that runs for it; nothing of that is left when it has ended.
            async with asyncio.TaskGroup() as group:
                try:
                    await self._run(planned, group)
                finally:
                    self._timers.stop()
                    self._runs.stop_all()
        except asyncio.CancelledError:
            self._reason = "cancelled"
            raise
        except ExceptionGroup as e:  # a bug of ours, in the loop or in an endpoint: the reader gets an error, too
            self._journal.failed(e)
            self._error = DiscoError("internal error; the daemon's log has the details")
        finally:
            outcome = self._settle(planned, plan, record)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = self._given_up = None
        return outcome

    async def _run(self, planned: Planned, group: asyncio.TaskGroup) -> None:
        """Race, relay, hand over and deliver: one event in, effects out, until the answer is whole or lost."""
        answer, inbox = self._answer, self._inbox
        # Race: the first effects start the endpoints, each after its delay.
        effects = answer.on(Begin(), self._now)
        self._journal.started(answer.plan, self._prompt.n_tokens)
        n_events = 0
        while True:
            for effect in effects:
                if self._carry_out(effect, planned, group):
                    return
            # Deliver: tokens that are there at the same time leave in one write.
            n_events += 1
            if inbox.empty or n_events % MAX_COALESCED == 0:
                self._timers.arm()
                try:
                    await self._sink.flush()
                except ReaderGone as e:
                    self._reason, self._error = "cancelled", e
                    return
            run, event = await inbox.get()
            if self._given_up is not None:
                self._error = self._given_up
                return
            # Relay: the answer takes the event, unless it has let go of that run meanwhile.
            self._now = self._timers.last_event_at = self._clock.now()
            effects = [] if self._runs.is_stale(run) else answer.on(event, self._now)
            # Hand over: where a move pays now, it begins; its source may rest while the reader has enough to read.
            for step in self._moves.steps():
                effects += answer.on(step, self._now)

    def _carry_out(self, effect: Effect, planned: Planned, group: asyncio.TaskGroup) -> bool:
        """Execute one effect; True when the answer has ended."""
        match effect:
            case Deliver(token=token):
                self._recorder.begin(self._sink, self._now)
                self._sink.token(self._answer.generated.marked(token, self._n_shown), self._answer.maker(self._n_shown))
                self._n_shown += len(token.text)
            case Start(side=side):
                self._timers.cancel_start(side)
                self._runs.start(effect, planned, group)
            case Feed(side=side, text=text, ids=ids, go=go):
                self._runs.send(side, Append(text, ids, go))
            case SetTimer(side=side, delay_s=delay_s):
                self._timers.start_later(side, delay_s)
            case Cancel(side=side):
                self._cancel(side)
            case Note(text=text):
                if (move := self._answer.moves[-1]).source is move.target is Side.SERVER:
                    self._sink.mix()
                self._sink.note(text)
                self._journal.moved(text)
            case Complete(reason=reason):
                self._reason = reason
                return True
            case Fail(error=error):
                self._error = error
                return True
        return False

    def _cancel(self, side: Side) -> None:
        """Stop a side; one that has just lost the race may be listened to for its first token, or be kept."""
        run = self._runs.lost_race(side)
        if run is not None and self._answer.state is State.RELAYING:
            if self._moves.is_worth_hearing(side):
                self._runs.shadow(run)
                return
            if self._moves.is_worth_keeping(run):
                self._runs.park(run, self._now)
                return
        self._timers.cancel_start(side)
        self._runs.stop(side)

    def _settle(self, planned: Planned, plan: Plan, record: Callable[[Outcome], None]) -> Outcome:
        """Settle budget and caps, and make the outcome known. Lets go of what would keep the answer in a cycle."""
        outcome = self._recorder.settle(planned, plan, self._reason, self._error)
        self._journal.complete(outcome, self._recorder.trace(outcome), record)
        self._runs.let_go()
        self._answer.failures.errors.clear()
        return outcome

    # --- from outside --------------------------------------------------------------------------------------------

    def adjust(self, pace_tps: float | None, delivery: Delivery | None) -> None:
        """Deliver at another pace, or in another mode, from now on."""
        buffer, now, current = self._answer.buffer, self._clock.now(), self._delivery
        if pace_tps is not None:
            current.pace_tps = pace_tps
            buffer.set_pace(pace_tps, now)
        if delivery is not None:
            current.mode, self._moves.next_check = delivery, 1
            buffer.set_delivery(delivery, now)
        self._runs.send_all(Pace(None if current.mode is Delivery.OFF else current.pace_tps))
        self._inbox.post(Tick())

    def give_up(self, error: DiscoError) -> None:
        """End the answer here: what was delivered stands, and the reader gets the reason."""
        self._given_up = error
        self._inbox.post(Tick())

    def confine(self) -> list[asyncio.Task[None]]:
        """Take back what a server was asked for and has not begun; these tasks end then. The answer goes on here."""
        return self._runs.confine()

    def left_s(self) -> float:
        """Return how long it will still take, s, by other answers of its length."""
        return self._moves.left_s()

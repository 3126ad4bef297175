"""The starts of endpoints for one answer: their tasks, what they have sent, and what they may cost."""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import replace

from ..answer import Arrived, Broke, Ended, Followed, Start
from ..delivery.counting import TextCount
from ..dispatch.planner import Planned
from ..endpoints.base import Controls, Endpoint
from ..endpoints.hedge import Hedge
from ..errors import EndpointError, release_frames
from ..money.spending import CapRefusal, CostBound, capped
from ..types import Append, CaughtUp, Continuation, GenerationRequest, Hold, Order, Paused, Side, Token
from .answer_server import AnswerServer, Fits
from .context import AnswerContext
from .cost_limit import CostLimit
from .eligible import may_take_over
from .endpoint_run import EndpointRun, PromptSize
from .inbox import EventInbox
from .journal import Journal
from .second_requests import SecondRequests
from .silence import SilenceWatch

SHADOW_S = 10.0  # a server that lost the race is listened to for this long; longer says only "slow"
PRIVATE = "the server is asked nothing: policy.private is on"


class EndpointRuns:
    """All starts of endpoints for one answer, in order. Owns their tasks, and the budget that its moves hold."""

    def __init__(
        self,
        context: AnswerContext,
        request: GenerationRequest,
        prompt: PromptSize,
        inbox: EventInbox,
        journal: Journal,
        continuation: dict[Side, Continuation] | None = None,
    ) -> None:
        """`continuation` is how well each side continues: where another server takes a place, its way is told there."""
        self._context, self._request, self._prompt = context, request, prompt
        self._inbox, self._journal = inbox, journal
        self._loop, self._clock = asyncio.get_running_loop(), context.clock
        self.all: list[EndpointRun] = []
        self._current: dict[Side, EndpointRun] = {}
        self._parked: EndpointRun | None = None
        self._n_held_back = 0  # tokens of the budget that moves hold
        self._cost_limit = CostLimit(request, context.spending)
        self._continuation = {} if continuation is None else continuation
        self._second = SecondRequests(context, request, prompt, self._cost_limit, journal)

    # --- for reading ---------------------------------------------------------------------------------------------

    def of(self, side: Side | None) -> EndpointRun | None:
        """Return the run of a side that the answer listens to now."""
        return self._current.get(side) if side is not None else None

    def is_stale(self, run: EndpointRun | None) -> bool:
        """Whether an event of this run comes too late: the answer has let go of it. Our own events never do."""
        return run is not None and self._current.get(run.side) is not run

    def parked_on(self, side: Side) -> EndpointRun | None:
        """Return the run of this side that has lost, and whose prefill is still kept."""
        parked = self._parked
        return parked if parked is not None and parked.side is side and parked.ended_at is None else None

    def has_heard(self, side: Side) -> bool:
        """Whether a run of this side that lost the race has shown its first token since."""
        return any(run.side is side and run.shadow is not None and run.first_at is not None for run in self.all)

    def affords(self, side: Side, n_made: int) -> bool:
        """Whether the client's limit of the cost allows a start of `side` behind `n_made` tokens of the answer."""
        return side is Side.DEVICE or self._cost_limit.allows(self._request, self._prompt.length, n_made, self.all)

    def has_another(self, side: Side) -> bool:
        """Whether a side that has failed would be asked at another server now."""
        choice = self._context.endpoints.get(side)
        return isinstance(choice, AnswerServer) and choice.is_fresh and not self._context.private

    def overlap(self, side: Side, text: str) -> str | None:
        """Return what `side` would repeat of the client's beginning of the answer and `text`."""
        request = self._request
        return self._context.endpoints[side].overlap_of(replace(request, answer_so_far=request.answer_so_far + text))

    # --- starting and steering -----------------------------------------------------------------------------------

    def start(self, effect: Start, planned: Planned, group: asyncio.TaskGroup) -> None:
        """Start an endpoint, or let a parked one go on, if privacy and caps still allow it."""
        side, context = effect.side, self._context
        parked, self._parked = self.parked_on(side), None
        if parked is not None:
            self._current[side] = parked
            parked.controls.send(Append(effect.answer_so_far, effect.ids, go=not effect.held))
            return
        endpoint, controls = context.endpoints[side], Controls(held=effect.held)
        run = self._new_run(side, endpoint, effect.n_tokens, controls)
        if isinstance(endpoint, AnswerServer):
            if (other := endpoint.hedge) is not None and not run.n_before:
                run.other = other.member
                controls.hedge = Hedge(other.after_s, lambda: self._second.admit_other(run, other, self))
                endpoint.ask_twice(controls.hedge)
        elif side is Side.SERVER and planned.plan.hedge_s < math.inf and not run.n_before:
            controls.hedge = Hedge(planned.plan.hedge_s, lambda: self._second.admit(run, planned, self))
        self._current[side] = run
        if context.private and side is Side.SERVER:  # since the plan somebody has said that nothing leaves
            self._refuse(side, EndpointError(side, "private", PRIVATE))
            return
        asked = self._continued(effect) if effect.answer_so_far else self._request
        request = self._admitted(run, asked)
        if isinstance(request, EndpointError) and self._pass_over(endpoint, run):
            run = self._new_run(side, endpoint, effect.n_tokens)
            asked = self._continued(effect) if effect.answer_so_far else self._request
            request = self._admitted(run, asked)
        if isinstance(request, EndpointError):
            self._refuse(side, request)
            return
        if effect.answer_so_far:
            self._hold_budget(side, planned)
        if side is Side.DEVICE:
            request = replace(request, expected_rest=context.planner.knowledge.outputs.rest(self._prompt.n_tokens))
        run.task = group.create_task(self._run(run, endpoint, request, asked))

    def _refuse(self, side: Side, error: EndpointError) -> None:
        """Let a side fail that is not asked: what is in the way of one of several servers is so for this answer."""
        self._give_up(side)
        self._inbox.post(Broke(side, error))

    def _give_up(self, side: Side) -> None:
        """Ask no other server in the place of one, or the answer would ask for it again at once, without an end."""
        if isinstance(choice := self._context.endpoints[side], AnswerServer):
            choice.give_up()

    def send(self, side: Side, order: Order) -> None:
        """Steer the run of one side."""
        self._current[side].controls.send(order)

    def send_all(self, order: Order) -> None:
        """Steer every run that the answer listens to."""
        for run in self._current.values():
            run.controls.send(order)

    def _hold_budget(self, side: Side, planned: Planned) -> None:
        """Count a start that the plan did not foresee until the answer is settled."""
        if self._context.planner.policy.learns and side is planned.constrained:
            planned.pacer.reserve(0, self._prompt.n_tokens)
            self._n_held_back += self._prompt.n_tokens

    def release_budget(self, planned: Planned) -> None:
        """Give back what the moves held."""
        planned.pacer.release(0, self._n_held_back)
        self._n_held_back = 0

    def _continued(self, effect: Start) -> GenerationRequest:
        """Return the request to go on after the answer so far."""
        request, sampling = self._request, self._request.sampling
        if sampling.max_tokens is not None:
            n_left = sampling.max_tokens - effect.n_tokens + self._n_repeated(effect)
            sampling = replace(sampling, max_tokens=max(1, n_left))
        drawing = request.drawing.after(effect.n_tokens)
        least = {"min_tokens": drawing.min_tokens} if drawing != request.drawing else {}
        return replace(
            request,
            sampling=sampling,
            drawing=drawing,
            extra={**request.extra, **least},
            answer_so_far=request.answer_so_far + effect.answer_so_far,
            answer_ids=() if request.answer_so_far else effect.ids,
        )

    def _n_repeated(self, effect: Start) -> int:
        """Return how many tokens a side says again before it goes on: they count for its limit.

        That is what it is asked to repeat, or all of the answer where a probe has found that it does that unasked. Of
        one that nobody has tried it is none: it may end too soon, but never beyond what the client allows.
        """
        if self._context.endpoints[effect.side].continuation is not Continuation.GUARDED:
            return 0
        words = self.overlap(effect.side, effect.answer_so_far)
        return effect.n_tokens if words is None else TextCount().add(words)

    def _new_run(self, side: Side, endpoint: Endpoint, n_before: int, controls: Controls | None = None) -> EndpointRun:
        run = EndpointRun(
            side, endpoint.model, self._clock.now(), endpoint.readiness(), n_before, controls=controls or Controls()
        )
        if isinstance(endpoint, AnswerServer):
            run.server, run.spending = endpoint.now.server, endpoint.now.spending
        return run

    async def _run(
        self, run: EndpointRun, endpoint: Endpoint, request: GenerationRequest, asked: GenerationRequest
    ) -> None:
        """Let an endpoint run; one that closed a kept connection unheard is asked a second time, if that is allowed.

        Of several servers another one is asked in the place of one that failed before its first token. After it, the
        next start is there: how the answer moves is decided elsewhere. `request` is what was `asked`, within a limit.
        """
        error = await self._pump(run, endpoint, request)
        if error is not None and error.reason == "dropped" and (again := self._again(run, request)) is not None:
            run, error = again, await self._pump(again, endpoint, request)
        while isinstance(endpoint, AnswerServer) and error is not None and self._leave(endpoint, run, error):
            if run.n_tokens or run.n_before:
                break
            if (next_asked := self._in_place_of(run, endpoint, asked)) is None:
                self._give_up(run.side)
                break
            run, limited = next_asked
            error = await self._pump(run, endpoint, limited)
        if error is not None:
            await self._inbox.put(run, Broke(run.side, error))

    def _leave(self, choice: AnswerServer, run: EndpointRun, error: EndpointError) -> bool:
        """Have another server asked from now on, after this error of a run; False where there is none."""
        begun = bool(run.n_tokens or run.n_before)
        if self._context.private:
            self._give_up(run.side)
        run.give_back(self._context.spending.caps)
        if self.is_stale(run) or not choice.leave(error, self._fits(run), begun=begun):
            return False
        self._follow(choice)
        return True

    def _pass_over(self, endpoint: Endpoint, run: EndpointRun) -> bool:
        """Have another server asked in the place of one whose price does not fit; False where there is none."""
        if not isinstance(endpoint, AnswerServer) or not endpoint.pass_over(self._fits(run), begun=run.n_before > 0):
            return False
        self._follow(endpoint)
        return True

    def _fits(self, run: EndpointRun) -> Fits:
        return self._cost_limit.fitting(run, self._request, self._prompt, self.all, self._clock)

    def _follow(self, choice: AnswerServer) -> None:
        """Go by the prices and the ways of the server that is asked now."""
        self._context.spending = choice.now.spending
        self._cost_limit.follow(choice.now.spending)
        self._continuation[choice.side] = choice.continuation

    def _look_back(self, run: EndpointRun, endpoint: Endpoint) -> None:
        """Take what became of a second request: the answer is another server's from here on where that one has won."""
        if run.controls.hedge is None or not isinstance(endpoint, AnswerServer):
            return
        if endpoint.look_back(heard=not self.is_stale(run)):
            self._follow(endpoint)

    def _in_place_of(
        self, failed: EndpointRun, choice: AnswerServer, asked: GenerationRequest
    ) -> tuple[EndpointRun, GenerationRequest] | None:
        """Return a start of the server that is asked now, and its request; None where a cap or the limit forbids it."""
        run = self._new_run(failed.side, choice, 0)
        request = self._admitted(run, asked)
        if isinstance(request, EndpointError):
            return None
        run.task, failed.task = failed.task, None
        return run, request

    def _again(self, dropped: EndpointRun, request: GenerationRequest) -> EndpointRun | None:
        """Return a second start of a run whose request may have been read, or not; None where it may not be sent again.

        The first one is booked in full, and keeps what was reserved for it: limits hold for both together.
        """
        side, context = dropped.side, self._context
        if self.is_stale(dropped) or dropped.n_tokens or (context.private and side is Side.SERVER):
            return None
        run = self._new_run(side, context.endpoints[side], dropped.n_before)
        if isinstance(self._admitted(run, request), EndpointError):
            return None
        run.task = dropped.task
        return run

    def _admitted(self, run: EndpointRun, request: GenerationRequest) -> GenerationRequest | EndpointError:
        """Return the request of a start within its limit, whose most is held then; or why it may not be.

        The answer listens to it from now on.
        """
        context = self._context
        limited = self._cost_limit.admit(run, request, self._prompt.length, self.all)
        if limited is None:
            return self._cost_limit.reached()
        wanted = CostBound.of(self._request, self._prompt.n_tokens, run.n_before, counted=self._prompt.counted)
        grant = context.spending.reserve(run.side, wanted, context.clock.wall())
        if isinstance(grant, CapRefusal):
            return capped(grant)
        run.grant = grant
        self._current[run.side] = run
        self.all.append(run)
        return limited

    async def _pump(self, run: EndpointRun, endpoint: Endpoint, request: GenerationRequest) -> EndpointError | None:
        """Move one endpoint's tokens into the inbox. A full one pauses it, and with it the endpoint's stream.

        Returns the error that it ended with.
        """
        with self._journal.running(run):
            try:
                async with (
                    self._watch(run, endpoint),
                    aclosing(endpoint.generate(request, run.usage, run.controls)) as events,
                ):
                    async for event in events:
                        if isinstance(event, Token):
                            if run.paused:
                                run.pause(self._clock.now(), paused=False)
                            run.last_at = run.heard_at = self._clock.now()
                            if run.first_at is None:
                                run.first_at = run.last_at
                                self._look_back(run, endpoint)
                                self._prompt.measure(run)
                                self._journal.run_prefilled(run, run.first_at)
                            if run.shadow is not None:
                                return None
                            run.n_tokens += event.n_tokens
                            run.held_up |= await self._inbox.put(run, Arrived(run.side, event))
                        elif isinstance(event, CaughtUp):
                            await self._inbox.put(run, Followed(run.side))
                        elif isinstance(event, Paused):
                            run.pause(self._clock.now(), paused=event.paused)
                        else:
                            run.whole = True
                            self._look_back(run, endpoint)
                            await self._inbox.put(run, Ended(run.side, event))
            except EndpointError as e:
                release_frames(e)
                e.__traceback__ = None  # or the run would hold it, it this frame, and the frame the run
                run.error = e
                self._journal.run_failed(run, e)
                return e
            finally:
                if run.ended_at is None:  # else it was cut then: to let go of an endpoint takes a moment more
                    run.ended_at = self._clock.now()
                self._look_back(run, endpoint)
                if run.shadow is not None:
                    run.shadow.cancel()
        return None

    def _watch(self, run: EndpointRun, endpoint: Endpoint) -> AbstractAsyncContextManager[None]:
        """Return what lets a silent one of several servers go; to a device that can take over the answer moves."""
        if isinstance(endpoint, AnswerServer) and not may_take_over(Side.DEVICE, self._request, self._context):
            patience_s = self._context.defaults.stall_s
            return SilenceWatch(run, endpoint, self._fits(run), self._inbox, self._clock, patience_s)
        return nullcontext()

    # --- ending --------------------------------------------------------------------------------------------------

    def lost_race(self, side: Side) -> EndpointRun | None:
        """Return the run of a side if it has begun with the answer, and has no token of it yet."""
        run = self._current.get(side)
        return run if run is not None and run.task is not None and run.first_at is None and not run.n_before else None

    def shadow(self, run: EndpointRun) -> None:
        """Listen to a run that has lost, for its first token only."""
        del self._current[run.side]
        run.shadow = self._loop.call_later(SHADOW_S, self._cut, run)

    def park(self, run: EndpointRun, now: float) -> None:
        """Keep the prefill of a run that has lost at `now`."""
        del self._current[run.side]
        run.lost_at = now
        run.controls.send(Hold())
        self._parked = run

    def stop(self, side: Side) -> None:
        """Cancel one side at once; its task lives on only until the endpoint has confirmed."""
        run = self._current.pop(side, None)
        if run is not None:
            self._cut(run)

    def stop_all(self) -> None:
        """Cancel every run that has not ended."""
        for side in Side:
            self.stop(side)
        for run in self.all:
            if run.ended_at is None:
                self._cut(run)

    def confine(self) -> list[asyncio.Task[None]]:
        """Take back what a server was asked for and has not begun; these tasks end then."""
        stopped = []
        for run in self.all:
            has_begun = run.first_at is not None or run.ended_at is not None
            if run.side is Side.SERVER and not has_begun and run.task is not None and not run.task.done():
                self._give_up(run.side)
                self._inbox.post(Broke(run.side, EndpointError(run.side, "private", PRIVATE)), run)
                run.task.cancel()
                stopped.append(run.task)
        return stopped

    def let_go(self) -> None:
        """Be in no cycle: an error that was raised, or a task that was cancelled, holds the frames it went through."""
        for run in self.all:
            run.task = run.error = run.controls.hedge = None

    def _cut(self, run: EndpointRun) -> None:
        """End a run now; what it has not shown by this time is only known to take longer."""
        if run.task is not None and not run.task.done():
            run.ended_at = self._clock.now()
            run.task.cancel()

"""One answer being played: plan, race, relay, hand over, deliver (docs/design.md#one-request)."""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from ..answer import (
    Answer,
    Arrived,
    Begin,
    Broke,
    Cancel,
    Complete,
    Deliver,
    Due,
    Effect,
    Ended,
    Fail,
    Feed,
    Followed,
    Move,
    Note,
    SetTimer,
    Start,
    State,
    Tick,
)
from ..delivery.buffer import TokenBuffer
from ..delivery.trace import Trace
from ..dispatch.mover import View
from ..endpoints.base import Append, Endpoint, Hold, Pace, Reins
from ..errors import DiscoError, EndpointError, ReaderGone, release_frames
from ..money.spending import CapRefusal, CostBound
from ..types import (
    CaughtUp,
    Continuation,
    Delivery,
    GenerationRequest,
    Outcome,
    Paused,
    Plan,
    PromptLength,
    Readiness,
    Side,
    Token,
)
from .record import attempt_of, decode_tps, reading_of, tokens_of, transcript
from .room import fitting, lacks_room
from .spending import capped, cost_bound
from .stage import EnergyObserver, Inbox, Run, Sink, Stage

log = logging.getLogger("disco.answer")

MAX_COALESCED = 16  # events; tokens that are there at the same time leave in one write
SHADOW_S = 10.0  # a server that lost the race is listened to for this long; longer says only "slow"
MAX_PARKED_BESIDE = 4  # answers on the device; with more of them a loser's prefill is not kept, its place is wanted
STALL_STEP_S = 0.01  # between two looks at a source's silence, at least
PRIVATE = "the server is asked nothing: policy.private is on"
LATE_LOAD = 2.0  # times what the plan knew of a load, and `LATE_S` more: then a server that was not planned helps
LATE_S = 5.0  # beyond LATE_LOAD times: a short load that is late is no cause yet
NOT_AGAIN = 1 << 62  # tokens


class Performance:
    """One answer being played. Owns its tasks, timers, inbox and `Answer`; nobody else touches them."""

    def __init__(
        self,
        stage: Stage,
        request: GenerationRequest,
        sink: Sink,
        available: frozenset[Side],
        length: PromptLength,
        model: str,
    ) -> None:
        self._stage = stage
        self._clock = stage.clock
        self._sink = sink
        self._length, self._counted = length.tokens, length.counted
        self._model = model
        readiness = {side: stage.endpoints[side].readiness() for side in available}
        if Side.DEVICE in readiness:
            readiness[Side.DEVICE] = replace(readiness[Side.DEVICE], cached=length.cached)
        self._planned = stage.planner.plan(length.tokens, readiness)
        remaining = stage.planner.knowledge.outputs.expected_remaining
        plan = self._planned.plan.restricted(available)
        self._plan = fitting(plan, request, self._length, readiness, stage.endpoints, remaining)
        self._delivery = request.delivery or stage.manner.delivery
        self._pace_tps = request.pace_tps or stage.manner.pace_tps
        self._request = replace(
            request,
            delivery=self._delivery,
            pace_tps=self._pace_tps,
            expected_ttft_s=stage.manner.expected_ttft_s,
        )
        endpoints = stage.endpoints
        self._answer = Answer(
            _insured(self._plan, readiness),
            available,
            request.sampling.max_tokens,
            request.sampling.stop,
            {side: endpoint.continuation for side, endpoint in endpoints.items()},
            frozenset(side for side, endpoint in endpoints.items() if endpoint.can_hold),
            joinable=not request.needs,
            before=request.answer_so_far,
            overlap=partial(_overlap, endpoints, self._request),
            buffer=TokenBuffer(self._delivery, self._pace_tps),
        )
        self._inbox = Inbox()
        self._loop = asyncio.get_running_loop()
        self._current: dict[Side, Run] = {}
        self._runs: list[Run] = []
        self._parked: Run | None = None
        self._timers: dict[Side, asyncio.TimerHandle] = {}
        self._release: asyncio.TimerHandle | None = None
        self._release_at = 0.0
        self._stall: asyncio.TimerHandle | None = None
        self._held_back = 0  # tokens of the budget that its moves hold
        # Generated tokens at which a move is considered again.
        self._next_check = 1 if len(available) > 1 else NOT_AGAIN
        self._created = stage.clock.wall()
        self._began = self._now = stage.clock.now()
        self._first_at: float | None = None
        self._n_shown = 0  # characters of the answer
        self._reason: str | None = None
        self._error: DiscoError | None = None
        self._given_up: DiscoError | None = None

    @property
    def stage(self) -> Stage:
        """What it is played on, from begin to end."""
        return self._stage

    @property
    def _private(self) -> bool:
        """Whether nothing of it may be written down, on disk or into the log."""
        return self._request.private or self._stage.private

    async def play(self, record: Callable[[Outcome], None]) -> Outcome:
        """Run to the end; the outcome is recorded whatever happens."""
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    await self._perform(group)
                finally:
                    self._stop_all()
        except asyncio.CancelledError:
            self._reason = "cancelled"
            raise
        except ExceptionGroup as e:  # a bug of ours, in the loop or in an endpoint: told like any other failure
            self._tell_of(e)
            self._error = DiscoError("internal error; the daemon's log has the details")
        finally:
            outcome = self._outcome()
            self._planned.pacer.release(0, self._held_back)
            self._stage.planner.settle(self._planned, outcome)
            record(outcome)
            self._stage.traces.keep(self._trace(outcome))
            self._let_go()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = self._given_up = None
        return outcome

    def _let_go(self) -> None:
        """Be in no cycle: an error that was raised, or a task that was cancelled, holds the frames it went through."""
        for run in self._runs:
            run.task = run.error = None
        self._answer.failures.errors.clear()

    def _tell_of(self, bugs: ExceptionGroup) -> None:
        """Into the log; what an exception says may be words of the prompt, so those of a private one are not told."""
        if not self._private:
            log.error("answer.failed %s", self._request.request_id, exc_info=bugs)
            return
        for bug in bugs.exceptions:
            where = "".join(traceback.format_tb(bug.__traceback__))
            log.error("answer.failed %s %s\n%s", self._request.request_id, type(bug).__name__, where)

    async def _perform(self, group: asyncio.TaskGroup) -> None:
        """Event in, effects out, until the answer is whole or lost."""
        answer = self._answer
        effects = answer.on(Begin(), self._now)
        log.debug("answer.plan %s %s l=%d", self._request.request_id, answer.plan, self._length)
        n_events = 0
        while True:
            for effect in effects:
                if self._carry_out(effect, group):
                    return
            n_events += 1
            if self._inbox.empty or n_events % MAX_COALESCED == 0:
                self._arm()
                try:
                    await self._sink.flush()
                except ReaderGone as e:
                    self._reason, self._error = "cancelled", e
                    return
            run, event = await self._inbox.get()
            if self._given_up is not None:
                self._error = self._given_up
                return
            stale = run is not None and self._current.get(run.side) is not run
            self._now = self._clock.now()
            effects = [] if stale else answer.on(event, self._now)
            if answer.n_generated >= self._next_check and answer.movable:
                effects += self._considered()

    def _carry_out(self, effect: Effect, group: asyncio.TaskGroup) -> bool:
        """Execute one effect; True when the answer has ended."""
        match effect:
            case Deliver(token=token):
                if self._first_at is None:
                    self._first_at = self._now
                self._sink.token(token, self._answer.maker(self._n_shown))
                self._n_shown += len(token.text)
            case Start():
                self._start(effect, group)
            case Feed(side=side, text=text, ids=ids, go=go):
                self._current[side].reins.give(Append(text, ids, go))
            case SetTimer(side=side, delay_s=delay_s):
                self._timers[side] = self._loop.call_later(delay_s, self._inbox.post, Due(side))
            case Cancel(side=side):
                self._lose(side)
            case Note(text=text):
                self._sink.note(text)
                log.info("answer.handoff %s %s", self._request.request_id, text)
            case Complete(reason=reason):
                self._reason = reason
                return True
            case Fail(error=error):
                self._error = error
                return True
        return False

    def adjust(self, pace_tps: float | None, delivery: Delivery | None) -> None:
        """Deliver in another manner from now on."""
        buffer, now = self._answer.buffer, self._clock.now()
        if pace_tps is not None:
            self._pace_tps = pace_tps
            buffer.set_pace(pace_tps, now)
        if delivery is not None:
            self._delivery, self._next_check = delivery, 1
            buffer.set_delivery(delivery, now)
        for run in self._current.values():
            run.reins.give(Pace(None if self._delivery is Delivery.OFF else self._pace_tps))
        self._inbox.post(Tick())

    def give_up(self, error: DiscoError) -> None:
        """End the answer here: what was delivered stands, and the reader is told why there is no more."""
        self._given_up = error
        self._inbox.post(Tick())

    def confine(self) -> list[asyncio.Task[None]]:
        """Take back what a server was asked for and has not begun; these tasks end then. The answer goes on here."""
        stopped = []
        for run in self._runs:
            if run.side is Side.SERVER and run.first_at is None and run.task is not None and not run.task.done():
                self._inbox.post(Broke(run.side, EndpointError(run.side, "private", PRIVATE)), run)
                run.task.cancel()
                stopped.append(run.task)
        return stopped

    def left_s(self) -> float:
        """How long it will still take, s, as far as can be told from others of its length."""
        answer, max_tokens = self._answer, self._request.sampling.max_tokens
        left = self._stage.planner.knowledge.outputs.expected_remaining(answer.n_generated)
        if max_tokens is not None:
            left = min(left, max(0, max_tokens - answer.n_generated))
        source = self._current.get(answer.source) if answer.source is not None else None
        tps = source.tps if source is not None else None
        if tps is None or self._delivery is Delivery.PACED:
            tps = min(tps or self._pace_tps, self._pace_tps)
        return left / tps

    # --- timers --------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """One timer for the next release, and one for the source's silence. An early release timer may stand."""
        due = self._answer.buffer.due_at
        if due is not None and (self._release is None or due < self._release_at):
            if self._release is not None:
                self._release.cancel()
            self._release_at = due
            self._release = self._loop.call_later(due - self._clock.now(), self._ring)
        if self._stall is None and self._answer.source is not None:
            self._stall = self._loop.call_later(self._stage.manner.stall_s, self._listen)

    def _ring(self) -> None:
        self._release = None
        self._inbox.post(Tick())

    def _listen(self) -> None:
        """Begin a handoff if the source has said nothing for long; neither our backlog nor a pause is silence."""
        source = self._current.get(self._answer.source) if self._answer.source is not None else None
        patience_s = self._stage.manner.stall_s
        silent_s = 0.0
        if source is not None and source.first_at is not None and self._inbox.empty and not source.paused:
            silent_s = self._clock.now() - max(source.heard_at, self._now)
            if silent_s >= patience_s:
                if self._may_leave(source.side):
                    self._inbox.post(Move(source.side.other, "stall"))
                silent_s = 0.0
        self._stall = self._loop.call_later(max(STALL_STEP_S, patience_s - silent_s), self._listen)

    # --- moving --------------------------------------------------------------------------------------------------

    def _may_leave(self, source: Side) -> bool:
        """Whether budget, caps and the target itself allow a move away from a silent source."""
        stage, target, n_made = self._stage, source.other, self._answer.n_generated
        if target not in stage.endpoints:
            return False
        planner, readiness = stage.planner, stage.endpoints[target].readiness()
        if readiness.down_s > 0 or (planner.policy.learns and not planner.allows(target, self._length)):
            return False
        if readiness.n_ctx is not None and self._length + n_made >= readiness.n_ctx:
            return False
        return stage.spending.check(target, self._cost_bound(n_made), self._clock.wall()) is None

    def _lacks_room(self, view: View) -> bool:
        n_tokens, remaining = view.prompt + view.generated, self._stage.planner.knowledge.outputs.expected_remaining
        return lacks_room(view.readiness, n_tokens, remaining, view.max_tokens, view.generated)

    def _considered(self) -> list[Effect]:
        """Ask whether a move would pay now. Its reserve must be there before it begins."""
        answer = self._answer
        assert answer.source is not None
        if self._delivery is Delivery.OFF:
            self._next_check = NOT_AGAIN
            return []
        view = self._view(answer.source.other)
        reserve = None if self._lacks_room(view) else self._stage.mover.advise(view)
        answer.buffer.reserve = reserve or 0
        if reserve is None:
            self._next_check = self._stage.mover.next_check(view.generated)
            return []
        if answer.buffer.n_held < reserve:
            return []
        self._next_check = self._stage.mover.next_check(view.generated)
        return answer.on(Move(view.target, "cost"), self._now)

    def _view(self, target: Side) -> View:
        """The answer as it stands, for the decision."""
        answer, parked = self._answer, self._parked
        source = self._current.get(target.other)
        kept = parked is not None and parked.side is target and parked.ended_at is None
        return View(
            key=self._request.request_id,
            target=target,
            prompt=self._length,
            generated=answer.n_generated,
            cached=_there(parked) if kept and parked is not None else 0,
            max_tokens=self._request.sampling.max_tokens,
            source_tps=source.tps if source is not None else None,
            pace_tps=self._pace_tps,
            readiness=self._stage.endpoints[target].readiness(),
            handoffs=answer.handoffs,
            follows=self._stage.endpoints[target].can_hold,
        )

    # --- endpoints -----------------------------------------------------------------------------------------------

    def _start(self, effect: Start, group: asyncio.TaskGroup) -> None:
        side = effect.side
        if (timer := self._timers.pop(side, None)) is not None:
            timer.cancel()
        parked, self._parked = self._parked, None
        if parked is not None and parked.side is side and parked.ended_at is None:
            self._current[side] = parked
            parked.reins.give(Append(effect.answer_so_far, effect.ids, go=not effect.held))
            return
        endpoint = self._stage.endpoints[side]
        reins = Reins(held=effect.held)
        run = Run(side, endpoint.model, self._clock.now(), endpoint.readiness(), effect.n_tokens, reins=reins)
        self._current[side] = run
        if self._stage.private and side is Side.SERVER:  # since the plan somebody has said that nothing leaves
            self._inbox.post(Broke(side, EndpointError(side, "private", PRIVATE)))
            return
        grant = self._stage.spending.reserve(side, self._cost_bound(effect.n_tokens), self._clock.wall())
        if isinstance(grant, CapRefusal):  # since the plan others have spent what was left
            self._inbox.post(Broke(side, capped(grant)))
            return
        run.grant = grant
        self._runs.append(run)
        if effect.answer_so_far:
            self._hold_budget(side)
        run.task = group.create_task(self._pump(run, endpoint, self._continued(effect)))
        log.debug("answer.%s.started %s after=%d tokens", side, self._request.request_id, effect.n_tokens)

    def _hold_budget(self, side: Side) -> None:
        """A start that the plan did not foresee counts until the answer is settled."""
        if self._stage.planner.policy.learns and side is self._planned.constrained:
            self._planned.pacer.reserve(0, self._length)
            self._held_back += self._length

    def _cost_bound(self, n_before: int) -> CostBound:
        """What a start may cost that goes on after so many tokens of the answer."""
        return cost_bound(self._request, self._length, n_before)

    def _continued(self, effect: Start) -> GenerationRequest:
        request = self._request
        if not effect.answer_so_far:
            return request
        sampling = request.sampling
        exact = self._stage.endpoints[effect.side].continuation is Continuation.EXACT
        if (
            sampling.max_tokens is not None and exact
        ):  # another may repeat the answer first; the answer itself counts too
            sampling = replace(sampling, max_tokens=max(1, sampling.max_tokens - effect.n_tokens))
        return replace(
            request,
            sampling=sampling,
            answer_so_far=request.answer_so_far + effect.answer_so_far,
            answer_ids=() if request.answer_so_far else effect.ids,
        )

    async def _pump(self, run: Run, endpoint: Endpoint, request: GenerationRequest) -> None:
        """Move one endpoint's tokens into the inbox. A full one pauses it, and with it the endpoint's stream."""
        energy = self._stage.energy if run.side is Side.DEVICE else None
        if energy is not None:
            energy.begin(id(run), run.started)
        try:
            async with aclosing(endpoint.generate(request, run.usage, run.reins)) as events:
                async for event in events:
                    if isinstance(event, Token):
                        if run.paused:
                            run.pause(self._clock.now(), paused=False)
                        run.last_at = run.heard_at = self._clock.now()
                        if run.first_at is None:
                            run.first_at = run.last_at
                            self._measure(run)
                            if energy is not None:
                                energy.prefilled(id(run), run.first_at, run.usage.prompt_tokens)
                        if run.shadow is not None:
                            return
                        run.n_tokens += event.n_tokens
                        run.held_up |= await self._inbox.put(run, Arrived(run.side, event))
                    elif isinstance(event, CaughtUp):
                        await self._inbox.put(run, Followed(run.side))
                    elif isinstance(event, Paused):
                        run.pause(self._clock.now(), paused=event.paused)
                    else:
                        run.whole = True
                        await self._inbox.put(run, Ended(run.side, event))
        except EndpointError as e:
            release_frames(e)
            e.__traceback__ = None  # or the run would hold it, it this frame, and the frame the run
            run.error = e
            log.warning("%s failed (%s)%s", run.side, e.reason, "" if self._private else f": {e}")
            await self._inbox.put(run, Broke(run.side, e))
        finally:
            if run.ended_at is None:  # else it was cut then: to let go of an endpoint takes a moment more
                run.ended_at = self._clock.now()
            if run.shadow is not None:
                run.shadow.cancel()
            if energy is not None:
                self._worked(energy, run)

    def _measure(self, run: Run) -> None:
        """Whoever has read the whole prompt knows its length; until then it may have been estimated."""
        read = _there(run)
        if not self._counted and read and not run.n_before:
            self._length, self._counted = read, run.side is Side.DEVICE

    def _worked(self, energy: EnergyObserver, run: Run) -> None:
        """Tell what a run of the device has computed."""
        now = self._clock.now()
        if run.first_at is None:
            energy.prefilled(id(run), now, run.usage.prompt_tokens)
        energy.end(id(run), now, run.usage.completion_tokens)

    def _lose(self, side: Side) -> None:
        """A side is not wanted any more: it is heard on for its first token, parked for a handoff, or stopped."""
        run = self._current.get(side)
        lost_race = run is not None and run.task is not None and run.first_at is None and not run.n_before
        if run is not None and lost_race and self._answer.state is State.RELAYING:
            if self._worth_hearing(side):
                self._listen_on(run)
                return
            if self._worth_keeping(side, run):
                self._park(run)
                return
        self._stop(side)

    def _worth_hearing(self, side: Side) -> bool:
        """Whether a server that has just lost the race is worth its first token: its prompt is billed already.

        That costs one output token, and turns "slower than the device" into a TTFT to learn from.
        """
        stage = self._stage
        return side is Side.SERVER and stage.shadow and stage.planner.policy.learns

    def _worth_keeping(self, side: Side, run: Run) -> bool:
        """Whether the prefill of a device that has just lost is worth finishing, for a handoff soon."""
        endpoint = self._stage.endpoints[side]
        if not endpoint.can_hold or not self._answer.joinable or self._delivery is Delivery.OFF:
            return False
        if endpoint.readiness().n_busy > MAX_PARKED_BESIDE:
            return False
        view = replace(self._view(side), cached=_there(run))
        return not self._lacks_room(view) and self._stage.mover.foresees(view)

    def _listen_on(self, run: Run) -> None:
        del self._current[run.side]
        assert run.task is not None
        run.shadow = self._loop.call_later(SHADOW_S, self._cut, run)

    def _park(self, run: Run) -> None:
        del self._current[run.side]
        run.lost_at = self._now
        run.reins.give(Hold())
        self._parked = run

    def _stop(self, side: Side) -> None:
        """Cancel one side at once; its pump task lives on only until the endpoint has confirmed."""
        if (timer := self._timers.pop(side, None)) is not None:
            timer.cancel()
        run = self._current.pop(side, None)
        if run is not None:
            self._cut(run)

    def _cut(self, run: Run) -> None:
        """End a run now; what it has not shown by this time is only known to take longer."""
        if run.task is not None and not run.task.done():
            run.ended_at = self._clock.now()
            run.task.cancel()

    def _stop_all(self) -> None:
        for side in Side:
            self._stop(side)
        for timer in (self._release, self._stall):
            if timer is not None:
                timer.cancel()
        for run in self._runs:
            if run.ended_at is None:
                self._cut(run)

    # --- the record ----------------------------------------------------------------------------------------------

    def _trace(self, outcome: Outcome) -> Trace:
        """When its tokens came and were shown. Without its text, which the history keeps if anybody wants it."""
        outcome = replace(outcome, prompt=None, answer=None, arrivals_s=())
        expected, pace = self._stage.manner.expected_ttft_s, self._pace_tps
        return Trace.of(outcome, self._answer.buffer, self._began, pace_tps=pace, expected_ttft_s=expected)

    def _outcome(self) -> Outcome:
        answer, stage = self._answer, self._stage
        max_tokens = self._request.sampling.max_tokens
        for run in self._runs:
            if run.whole:
                self._measure(run)
        attempts = tuple(attempt_of(run, stage, self._began, self._length, max_tokens) for run in self._runs)
        for run, attempt in zip(self._runs, attempts, strict=True):
            if (tps := decode_tps(run, stage)) is not None:
                stage.mover.observe(run.side, tps)
            if run.grant is not None:
                stage.spending.settle(run.grant, attempt)
                run.grant = None
        failed, now = self._error, self._clock.now()
        keep_text = stage.keep_text and not self._private
        return Outcome(
            request_id=self._request.request_id,
            created=self._created,
            model=self._model,
            policy=stage.planner.policy.name,
            plan=self._plan,
            prompt_tokens=self._length,
            winner=answer.winner,
            finish_reason=self._reason,
            error=None if failed is None else failed.code or type(failed).__name__,
            ttft_s=None if self._first_at is None else self._first_at - self._began,
            duration_s=now - self._began,
            handoffs=answer.handoffs,
            tokens=tokens_of(answer.tokens, self._runs),
            attempts=attempts,
            cost_usd=sum(stage.spending.prices.cost_usd(a) for a in attempts),
            energy_j=sum(a.energy_j for a in attempts),
            prompt=transcript(self._request) if keep_text else None,
            answer=answer.text if keep_text else None,
            moves=tuple(answer.moves),
            reading=reading_of(answer.buffer.arrivals, self._began, stage.manner.expected_ttft_s, self._pace_tps),
            delivery=self._delivery,
            arrivals_s=answer.buffer.arrivals,
        )


def _there(run: Run) -> int:
    """Tokens that the device has in its KV cache for a run."""
    return run.usage.prompt_tokens + run.usage.cached_tokens


def _overlap(endpoints: Mapping[Side, Endpoint], request: GenerationRequest, side: Side, text: str) -> str | None:
    """What `side` repeats of the request's beginning of the answer and `text`."""
    return endpoints[side].overlap_of(replace(request, answer_so_far=request.answer_so_far + text))


def _insured(plan: Plan, readiness: Mapping[Side, Readiness]) -> Plan:
    """The plan, but a server that was not to be asked is, if the device takes far longer to load than is known."""
    device = readiness.get(Side.DEVICE)
    if device is None or not device.load_s or Side.SERVER not in readiness or math.isfinite(plan.server_s):
        return plan
    return replace(plan, server_s=LATE_S + LATE_LOAD * device.load_s)

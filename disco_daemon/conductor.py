"""One coroutine owns one answer: plan, race, relay, deliver, record (DESIGN §3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from .answer import (
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
    Event,
    Fail,
    SetTimer,
    Start,
    State,
)
from .clock import Clock
from .endpoints.base import Endpoint
from .errors import DiscoError, EndpointError, ReaderGone, RequestError, Unavailable
from .money.prices import Prices
from .scheduling.planner import Planner
from .types import Attempt, Finish, GenerationRequest, Outcome, Readiness, Side, Token, Usage

log = logging.getLogger("disco.answer")

# A server that failed like this has not begun, and bills nothing; any other failure may come after the prefill.
UNBILLED = frozenset(
    {"unreachable", "unauthorized", "rate_limited", "server_error", "refused", "not_found", "no_continuation"}
)
MAX_IN_FLIGHT = 512  # answers; each holds a connection on either side, and file descriptors end near 1,024
MAX_COALESCED = 16  # events; tokens that are there at the same time leave in one write
QUEUE_SIZE = 256  # events; a reader slower than the model pauses it through this, see `_pump`
SHADOW_S = 10.0  # a server that lost the race is listened to for this long; longer says only "slow"
CHARS_PER_TOKEN = 4  # English text, for a prompt length while no tokenizer is loaded


class Sink(Protocol):
    """Where an answer goes: the HTTP response."""

    def token(self, token: Token, winner: Side) -> None:
        """Take one token of the answer."""
        ...

    async def flush(self) -> None:
        """Show the tokens taken so far; may wait for a slow reader. Raises ReaderGone."""
        ...


@dataclass(slots=True, eq=False)
class Run:
    """One start of one endpoint for one answer; `n_before` tokens had been delivered by then.

    In the `shadow` it has lost the race and runs on to its first token only, which is measured and thrown away.
    """

    side: Side
    model: str
    started: float
    met: Readiness
    n_before: int = 0
    usage: Usage = field(default_factory=Usage)
    task: asyncio.Task[None] | None = None
    first_at: float | None = None
    ended_at: float | None = None
    error: EndpointError | None = None
    shadow: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Conductor:
    """Answers requests with the endpoints at hand. All that changes over time is `in_flight` and `n_served`.

    `disturbed(begin, end)` says whether this process stood still between two times; `shadow` whether a server that lost
    the race may still show its first token, where that is learned from.
    """

    endpoints: Mapping[Side, Endpoint]
    planner: Planner
    clock: Clock
    prices: Prices
    record: Callable[[Outcome], None]
    disturbed: Callable[[float, float], bool]
    shadow: bool = True
    keep_text: bool = False
    in_flight: int = 0
    n_served: int = 0

    async def run(self, request: GenerationRequest, model: str, sink: Sink) -> Outcome:
        """Answer one request into `sink`.

        Raises DiscoError when it cannot be completed: before the first token nothing was written, after it the
        reader's part stands and the error must be told in-band. A cancellation stops both sides and is recorded too.
        """
        if self.in_flight >= MAX_IN_FLIGHT:
            msg = f"{MAX_IN_FLIGHT} answers are running already; try again later"
            raise Unavailable(msg)
        available = self._available(request)
        length = await self._length(request, available)
        performance = _Performance(self, request, sink, available, length, model)
        self.in_flight += 1
        try:
            return await performance.play()
        finally:
            self.in_flight -= 1
            self.n_served += 1

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
            raise RequestError("; ".join(r for r in refusals.values() if r), code="unsupported")
        return available

    async def _length(self, request: GenerationRequest, available: frozenset[Side]) -> int:
        """Prompt length by the device's tokenizer, or an estimate while none is loaded; tokens."""
        device = self.endpoints.get(Side.DEVICE)
        counted = await device.count(request) if device is not None and Side.DEVICE in available else None
        return counted if counted is not None else max(1, request.n_chars // CHARS_PER_TOKEN)


class _Performance:
    """One answer being played. Owns its tasks, its queue and its `Answer`; nobody else touches them."""

    def __init__(
        self,
        conductor: Conductor,
        request: GenerationRequest,
        sink: Sink,
        available: frozenset[Side],
        length: int,
        model: str,
    ) -> None:
        self._conductor = conductor
        self._clock = conductor.clock
        self._request = request
        self._sink = sink
        self._length = length
        self._model = model
        readiness = {side: conductor.endpoints[side].readiness() for side in available}
        self._planned = conductor.planner.plan(length, readiness)
        self._answer = Answer(
            self._planned.plan,
            available,
            request.sampling.max_tokens,
            {side: endpoint.continuation for side, endpoint in conductor.endpoints.items()},
            joinable=not request.needs,
        )
        self._queue: asyncio.Queue[tuple[Run | None, Event]] = asyncio.Queue(QUEUE_SIZE)
        self._current: dict[Side, Run] = {}
        self._runs: list[Run] = []
        self._timers: dict[Side, asyncio.Task[None]] = {}
        self._created = conductor.clock.wall()
        self._began = conductor.clock.now()
        self._first_at: float | None = None
        self._reason: str | None = None
        self._error: DiscoError | None = None

    async def play(self) -> Outcome:
        """Run to the end; the outcome is recorded whatever happens."""
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    await self._loop(group)
                finally:
                    self._stop_all()
        except asyncio.CancelledError:
            self._reason = "cancelled"
            raise
        except ExceptionGroup:  # a bug of ours, in the loop or in an endpoint: told like any other failure
            log.exception("answer.failed %s", self._request.request_id)
            self._error = DiscoError("internal error; the daemon's log has the details")
        finally:
            outcome = self._outcome()
            self._conductor.planner.settle(self._planned, outcome)
            self._conductor.record(outcome)
        if self._error is not None:
            raise self._error
        return outcome

    async def _loop(self, group: asyncio.TaskGroup) -> None:
        """Event in, effects out, until the answer is whole or lost."""
        effects = self._answer.on(Begin())
        log.debug("answer.plan %s %s l=%d", self._request.request_id, self._answer.plan, self._length)
        n_events = 0
        while True:
            for effect in effects:
                if self._carry_out(effect, group):
                    return
            n_events += 1
            if self._queue.empty() or n_events % MAX_COALESCED == 0:
                try:
                    await self._sink.flush()
                except ReaderGone as e:
                    self._reason, self._error = "cancelled", e
                    return
            run, event = await self._queue.get()
            stale = run is not None and self._current.get(run.side) is not run
            effects = [] if stale else self._answer.on(event)

    def _carry_out(self, effect: Effect, group: asyncio.TaskGroup) -> bool:
        """Execute one effect; True when the answer has ended."""
        match effect:
            case Deliver(token=token):
                if self._first_at is None:
                    self._first_at = self._clock.now()
                assert self._answer.winner is not None
                self._sink.token(token, self._answer.winner)
            case Start(side=side, answer_so_far=answer_so_far):
                self._start(side, answer_so_far, group)
            case SetTimer(side=side, delay_s=delay_s):
                self._timers[side] = group.create_task(self._alarm(side, delay_s))
            case Cancel(side=side):
                if self._worth_hearing(side):
                    self._listen_on(side)
                else:
                    self._stop(side)
            case Complete(reason=reason):
                self._reason = reason
                return True
            case Fail(error=error):
                self._error = error
                return True
        return False

    # --- endpoints -----------------------------------------------------------------------------------------------

    def _start(self, side: Side, answer_so_far: str, group: asyncio.TaskGroup) -> None:
        if (timer := self._timers.pop(side, None)) is not None:
            timer.cancel()
        endpoint = self._conductor.endpoints[side]
        run = Run(side, endpoint.model, self._clock.now(), endpoint.readiness(), self._answer.n_delivered)
        self._runs.append(run)
        self._current[side] = run
        run.task = group.create_task(self._pump(run, endpoint, self._continued(answer_so_far)))
        log.debug("answer.%s.started %s after=%d chars", side, self._request.request_id, len(answer_so_far))

    def _continued(self, answer_so_far: str) -> GenerationRequest:
        request = self._request
        if not answer_so_far:
            return request
        sampling, done = request.sampling, self._answer.n_delivered
        if sampling.max_tokens is not None:
            sampling = replace(sampling, max_tokens=max(1, sampling.max_tokens - done))
        return replace(request, sampling=sampling, answer_so_far=request.answer_so_far + answer_so_far)

    async def _pump(self, run: Run, endpoint: Endpoint, request: GenerationRequest) -> None:
        """Move one endpoint's tokens into the queue. A full queue pauses it, and with it the endpoint's stream."""
        try:
            async with aclosing(endpoint.generate(request, run.usage)) as events:
                async for event in events:
                    if isinstance(event, Finish):
                        await self._queue.put((run, Ended(run.side, event)))
                    else:
                        if run.first_at is None:
                            run.first_at = self._clock.now()
                        if run.shadow is not None:
                            return
                        await self._queue.put((run, Arrived(run.side, event)))
        except EndpointError as e:
            run.error = e
            log.warning("%s failed (%s): %s", run.side, e.reason, e)
            await self._queue.put((run, Broke(run.side, e)))
        finally:
            run.ended_at = self._clock.now()
            if run.shadow is not None:
                run.shadow.cancel()

    def _worth_hearing(self, side: Side) -> bool:
        """Whether a server that has just lost the race is worth its first token: its prompt is billed already.

        That costs one output token, and turns "slower than the device" into a TTFT to learn from.
        """
        run, conductor = self._current.get(side), self._conductor
        lost_race = self._answer.state is State.RELAYING and run is not None and run.first_at is None
        return lost_race and side is Side.SERVER and conductor.shadow and conductor.planner.policy.learns

    def _listen_on(self, side: Side) -> None:
        run = self._current.pop(side)
        assert run.task is not None
        run.shadow = asyncio.get_running_loop().call_later(SHADOW_S, run.task.cancel)

    async def _alarm(self, side: Side, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._queue.put((None, Due(side)))

    def _stop(self, side: Side) -> None:
        """Cancel one side at once; its pump task lives on only until the endpoint has confirmed."""
        if (timer := self._timers.pop(side, None)) is not None:
            timer.cancel()
        run = self._current.pop(side, None)
        if run is not None and run.task is not None:
            run.ended_at = self._clock.now()
            run.task.cancel()

    def _stop_all(self) -> None:
        for side in Side:
            self._stop(side)
        for run in self._runs:
            if run.shadow is not None and run.task is not None:
                run.task.cancel()

    # --- the record ----------------------------------------------------------------------------------------------

    def _attempt(self, run: Run) -> Attempt:
        """What one start came to. A server that was asked and told nothing is booked for the whole prompt."""
        end = run.first_at if run.first_at is not None else run.ended_at
        end = self._clock.now() if end is None else end
        usage = replace(run.usage)
        turned_away = run.error is not None and run.error.reason in UNBILLED and not usage.completion_tokens
        if run.side is Side.SERVER and usage.prompt_tokens == 0 and not turned_away:
            usage.prompt_tokens = self._length + run.n_before
        censored = run.first_at is None
        error = run.error.reason if run.error else None
        return Attempt(
            side=run.side,
            model=run.model,
            started_s=run.started - self._began,
            ttft_s=end - run.started,
            censored=censored,
            usage=usage,
            error=error,
            load_s=run.met.load_s,
            n_busy=run.met.n_busy,
            continued=run.n_before > 0,
            disturbed=self._conductor.disturbed(run.started, end),
        )

    def _outcome(self) -> Outcome:
        answer, conductor = self._answer, self._conductor
        attempts = tuple(self._attempt(run) for run in self._runs)
        failed = self._error
        return Outcome(
            request_id=self._request.request_id,
            created=self._created,
            model=self._model,
            policy=conductor.planner.policy.name,
            plan=answer.plan,
            prompt_tokens=self._length,
            winner=answer.winner,
            finish_reason=self._reason,
            error=None if failed is None else failed.code or type(failed).__name__,
            ttft_s=None if self._first_at is None else self._first_at - self._began,
            duration_s=self._clock.now() - self._began,
            handoffs=answer.handoffs,
            tokens=dict(answer.tokens),
            attempts=attempts,
            cost_usd=sum(conductor.prices.cost_usd(a) for a in attempts),
            energy_j=sum(conductor.prices.energy_j(a) for a in attempts),
            prompt=_transcript(self._request) if conductor.keep_text else None,
            answer=answer.text if conductor.keep_text else None,
        )


def _transcript(request: GenerationRequest) -> str:
    return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in request.messages)

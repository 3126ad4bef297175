"""The timers of one answer: starts that the plan delays, the buffer's next release, and the source's silence."""

from __future__ import annotations

import asyncio

from ..answer import Answer, Due, Move, Tick
from ..types import Side
from .context import AnswerContext
from .inbox import EventInbox
from .moves import MoveAdvisor
from .runs import EndpointRuns

STALL_STEP_S = 0.01  # between two looks at a source's silence, at least


class Timers:
    """Posts events into the inbox when their time has come; `last_event_at` is when the answer got its last one, s."""

    def __init__(
        self, context: AnswerContext, answer: Answer, inbox: EventInbox, runs: EndpointRuns, moves: MoveAdvisor
    ) -> None:
        self._clock, self._patience_s = context.clock, context.defaults.stall_s
        self._answer, self._inbox, self._runs, self._moves = answer, inbox, runs, moves
        self._loop = asyncio.get_running_loop()
        self._starts: dict[Side, asyncio.TimerHandle] = {}
        self._release: asyncio.TimerHandle | None = None
        self._release_at = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self.last_event_at = self._clock.now()

    def start_later(self, side: Side, delay_s: float) -> None:
        """Post Due(side) after `delay_s`."""
        self._starts[side] = self._loop.call_later(delay_s, self._inbox.post, Due(side))

    def cancel_start(self, side: Side) -> None:
        """Post no Due(side) any more."""
        if (timer := self._starts.pop(side, None)) is not None:
            timer.cancel()

    def arm(self) -> None:
        """Set the timers for the next release and for the source's silence. An early release timer may stand."""
        due = self._answer.buffer.due_at
        if due is not None and (self._release is None or due < self._release_at):
            if self._release is not None:
                self._release.cancel()
            self._release_at = due
            self._release = self._loop.call_later(due - self._clock.now(), self._post_tick)
        if self._silence is None and self._answer.source is not None:
            self._silence = self._loop.call_later(self._patience_s, self._check_silence)

    def stop(self) -> None:
        """Cancel all of them."""
        for side in tuple(self._starts):
            self.cancel_start(side)
        for timer in (self._release, self._silence):
            if timer is not None:
                timer.cancel()
        self._release = self._silence = None

    def _post_tick(self) -> None:
        self._release = None
        self._inbox.post(Tick())

    def _check_silence(self) -> None:
        """Begin a handoff if the source has sent nothing for long; neither our backlog nor a pause is silence."""
        source = self._runs.of(self._answer.source)
        silent_s = 0.0
        if source is not None and source.first_at is not None and self._inbox.empty and not source.paused:
            silent_s = self._clock.now() - max(source.heard_at, self.last_event_at)
            if silent_s >= self._patience_s:
                if self._moves.may_leave(source.side):
                    self._inbox.post(Move(source.side.other, "stall"))
                silent_s = 0.0
        next_s = max(STALL_STEP_S, self._patience_s - silent_s)
        self._silence = self._loop.call_later(next_s, self._check_silence)

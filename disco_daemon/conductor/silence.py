"""Lets go of one of several servers that is silent, where another one can answer or go on.

Before the first token a silent server is joined by another one, if a hedge is left for that; behind it a device takes
over. Where neither is so, the reader would wait for the time-out of a token, which is many times as long.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from ..clock import Clock
from ..errors import EndpointError
from .answer_server import AnswerServer, Fits
from .endpoint_run import EndpointRun
from .inbox import EventInbox

LOOKS = 4  # in the patience of a run; it is let go at most a quarter later than it might


class SilenceWatch:
    """Context of one run of `choice`. Raises EndpointError where it is silent for `patience_s`, s.

    Another one has to be there that `fits` into what the answer may still cost. To one that has not shown a token as
    long is given as its breaker finds usual.
    """

    def __init__(
        self, run: EndpointRun, choice: AnswerServer, fits: Fits, inbox: EventInbox, clock: Clock, patience_s: float
    ) -> None:
        self._run, self._choice, self._fits, self._inbox, self._clock = run, choice, fits, inbox, clock
        self._patience_s = patience_s
        self._timeout = asyncio.timeout(None)
        self._look: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        """Begin to look."""
        await self._timeout.__aenter__()
        self._later()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Look no more; say so where it was let go."""
        if self._look is not None:
            self._look.cancel()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as e:
            raise EndpointError(self._run.side, "stalled", "the server was silent, and another one was there") from e

    def _later(self) -> None:
        self._look = asyncio.get_running_loop().call_later(self._patience_s / LOOKS, self._check)

    def _check(self) -> None:
        run = self._run
        if self._is_silent() and self._choice.may_pass_on(self._fits, begun=bool(run.n_tokens or run.n_before)):
            self._timeout.reschedule(asyncio.get_running_loop().time())
        else:
            self._later()

    def _is_silent(self) -> bool:
        """Whether nothing has come for long; neither our backlog nor a pause is silence, and two are waited for."""
        run = self._run
        if run.paused or run.shadow is not None or not self._inbox.empty or run.hedge_grant is not None:
            return False
        since = run.started if run.first_at is None else run.heard_at
        now = self._clock.now()
        return now - since >= self._patience_s and (run.first_at is not None or self._choice.is_silent(now))

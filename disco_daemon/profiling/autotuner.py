"""Runs a tune as a child process: at once for `disco tune`, and once in an idle hour for the daemon."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..clock import Clock
from ..engine.measure.tune_messages import Tuned, TuneJob
from ..errors import DiscoError
from ..system.idle import IDLE_S, is_machine_quiet, unless, until_idle
from ..system.job import run_job

log = logging.getLogger("disco.tune")

BUDGET_S = 30.0  # of one tune
MAX_TRIES = 8  # broken off by requests; then the machine is left alone until the next start
LAST_S = 10 * BUDGET_S  # a tune that takes longer hangs


class TuneError(DiscoError):
    """The model cannot be measured; the message is fit for a user."""


async def run_tune(job: TuneJob, progress: Callable[[str], None]) -> Tuned:
    """Run a job in a child process, which a cancellation kills. Raises TuneError."""
    module = "disco_daemon.engine.measure.tune"
    return await run_job(module, job, progress, Tuned, TuneError, name="the tune", timeout_s=LAST_S)


class Autotuner:
    """Owns the task that tunes once while the daemon is idle; a request ends the tune, and it is tried again later.

    `adopt` is called with the result. `busy` says whether an answer is being made, `undisturbed` whether the machine
    has power and no other work. `state` is idle, waiting, measuring, done or failed.
    """

    def __init__(
        self,
        job: TuneJob,
        busy: Callable[[], bool],
        adopt: Callable[[Tuned], None],
        clock: Clock,
        *,
        idle_s: float = IDLE_S,
        undisturbed: Callable[[], bool] | None = None,
    ) -> None:
        self.state = "idle"
        self.n_tries = 0
        self._job, self._busy, self._adopt, self._clock = job, busy, adopt, clock
        self._idle_s = idle_s
        self._undisturbed = undisturbed or is_machine_quiet

    async def run(self) -> None:
        """Tune once, then return; until cancelled."""
        while self.state not in ("done", "failed") and self.n_tries < MAX_TRIES:
            self.state = "waiting"
            await until_idle(self._busy, self._undisturbed, self._clock, self._idle_s)
            self.n_tries += 1
            self.state = "measuring"
            try:
                if (tuned := await self._unless_busy()) is not None:
                    await asyncio.to_thread(self._adopt, tuned)
                    self.state = "done"
            except (TuneError, OSError) as e:
                self.state = "failed"
                log.warning("the device is not tuned: %s", e)
                return

    async def _unless_busy(self) -> Tuned | None:
        """Return the result, or None if a request came in between."""
        log.info("measuring which threads are fastest here, once, while there are no requests (device.autotune)")
        tuned = await unless(run_tune(self._job, log.debug), self._busy, "tune")
        if tuned is None:
            log.info("a request came: measuring again later")
        return tuned

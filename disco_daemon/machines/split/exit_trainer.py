"""Trains the exit that joined machines lack, while a partner that was asked to (`partner.train_exits`) is idle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from ...clock import Clock
from ...errors import DiscoError
from ...system.idle import IDLE_S, is_machine_quiet, is_on_mains, unless, until_idle

log = logging.getLogger("disco.exits")

LOOK_AGAIN_S = 60.0  # for a machine that joined behind another cut; a training takes minutes


class ExitTrainer:
    """Owns the task that trains; a request or a battery ends a training, which goes on later from the rows it kept.

    `lacking` returns the cut that has members but no exit, or None, and reads files; `train` trains behind a cut.
    `state` is idle, waiting, training or failed.
    """

    def __init__(
        self,
        lacking: Callable[[], int | None],
        train: Callable[[int], Coroutine[Any, Any, object]],
        busy: Callable[[], bool],
        clock: Clock,
        *,
        idle_s: float = IDLE_S,
        undisturbed: Callable[[], bool] = is_machine_quiet,
        on_mains: Callable[[], bool] = is_on_mains,
    ) -> None:
        self.state = "idle"
        self._lacking, self._train, self._busy, self._clock = lacking, train, busy, clock
        self._idle_s, self._undisturbed, self._on_mains = idle_s, undisturbed, on_mains

    async def run(self) -> None:
        """Train whatever is lacking, until cancelled; after a failure no more until the next start."""
        while self.state != "failed":
            cut = await asyncio.to_thread(self._lacking)
            if cut is None:
                self.state = "idle"
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            self.state = "waiting"
            await until_idle(self._busy, self._undisturbed, self._clock, self._idle_s)
            self.state = "training"
            log.info("training an exit behind %d layers while there is nothing else to do (partner.train_exits)", cut)
            try:
                if await unless(self._train(cut), self._ended, "exit") is None:
                    log.info("the training of an exit is left for later: there is other work")
            except (DiscoError, OSError) as e:
                self.state = "failed"
                log.warning("no exit is trained: %s", e)

    def _ended(self) -> bool:
        return self._busy() or not self._on_mains()

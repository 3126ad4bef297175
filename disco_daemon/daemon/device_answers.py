"""What the history teaches of the device's answers, for rules that ask for it: read now and then, and nobody waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..errors import DiscoError
from ..estimation.will_do import MOST_EXAMPLES, WillDo, answer_of
from ..store import History

log = logging.getLogger("disco.daemon")

RELEARN_AFTER = 20  # requests; reading the latest rows takes some tens of milliseconds


class DeviceAnswers:
    """Owns what was learned of the device's `model`, and the task that reads it; `served` counts the requests."""

    def __init__(self, history: History, served: Callable[[], int], model: str) -> None:
        self._history, self._served, self._model = history, served, model
        self._read_at: int | None = None
        self._reading: asyncio.Task[None] | None = None
        self.known = WillDo()

    def relearn(self) -> None:
        """Begin to read the history if enough was answered since; meanwhile what was known holds."""
        served = self._served()
        is_old = self._read_at is None or served - self._read_at >= RELEARN_AFTER
        if is_old and (self._reading is None or self._reading.done()):
            self._read_at = served
            self._reading = asyncio.create_task(self._learn(), name="what was learned of the device's answers")

    async def learn(self) -> None:
        """Read the history if enough was answered since, and wait for it."""
        self.relearn()
        if self._reading is not None:
            await asyncio.shield(self._reading)

    async def _learn(self) -> None:
        """Read the history. Where it cannot be read, what was known holds."""
        try:
            self.known = await asyncio.to_thread(self._read)
        except DiscoError as e:
            log.warning("what was learned of this machine's answers stays as it is: %s", e)

    def _read(self) -> WillDo:
        rows = self._history.taught(self._model, MOST_EXAMPLES)
        return WillDo(answer for row in rows if (answer := answer_of(row)) is not None)

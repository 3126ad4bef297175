"""What the history teaches of the device's answers, for rules that ask for it: read now and then, beside the loop."""

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
    """Owns what was learned; `served` counts the requests. The one who asks when it is old reads the history."""

    def __init__(self, history: History, served: Callable[[], int]) -> None:
        self._history, self._served = history, served
        self._read_at: int | None = None
        self.known = WillDo()

    async def learn(self) -> None:
        """Read the history if enough was answered since. Where it cannot be read, what was known holds."""
        served = self._served()
        if self._read_at is not None and served - self._read_at < RELEARN_AFTER:
            return
        self._read_at = served  # no other request reads it meanwhile
        try:
            self.known = await asyncio.to_thread(self._read)
        except DiscoError as e:
            log.warning("what was learned of this machine's answers stays as it is: %s", e)

    def _read(self) -> WillDo:
        rows = self._history.recent(MOST_EXAMPLES)
        return WillDo(answer for row in rows if (answer := answer_of(row)) is not None)

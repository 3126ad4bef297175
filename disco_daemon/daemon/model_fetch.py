"""Fetches a model of the list for the device, one at a time, and has it used without a restart.

The daemon owns the fetch: a client that leaves does not end it, and any client sees how far it is. What was fetched in
part is kept, whatever ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ..clock import Clock
from ..errors import DiscoError, RequestError
from ..models.default import models_dir
from ..plain import reason_of
from ..system.job import run_job
from ..system.tasks import cancel_all

if TYPE_CHECKING:
    from ..models.offered import OfferedModel

log = logging.getLogger("disco.models")

LONGEST_S = 7 * 86400.0  # of one fetch: the largest of the list at 0.3 Mbit/s; a silent line is given up much sooner
RATE_S = 10.0  # the shown speed is that of the last seconds

Use = Callable[[str], Awaitable[list[str]]]


class FetchError(DiscoError):
    """A model could not be fetched, or not be put in use; the message says why, or what to do."""


class ModelFetch:
    """The fetch that runs or ran last. `use` puts a fetched file in use, and returns what to say."""

    def __init__(self, use: Use, private: Callable[[], bool], clock: Clock) -> None:
        self._use, self._private, self._clock = use, private, clock
        self._task: asyncio.Task[None] | None = None
        self._model: OfferedModel | None = None
        self._state, self._message = "", ""
        self._done = 0
        self._seen: deque[tuple[float, int]] = deque()

    def document(self) -> dict[str, Any] | None:
        """Return how far it is; None if nothing was fetched since the start. Speed in bytes/s, None while unknown."""
        model = self._model
        if model is None:
            return None
        return {
            "id": model.name, "title": model.title, "state": self._state, "done_bytes": self._done,
            "bytes": model.n_bytes, "bytes_per_s": self._rate(), "message": self._message,
        }  # fmt: skip

    def start(self, model: OfferedModel) -> None:
        """Begin to fetch a model, or go on with it. Raises RequestError while another one is fetched."""
        if self._private():
            msg = "policy.private is on, so nobody is asked for anything: turn it off (F3), then fetch"
            raise RequestError(msg, code="private")
        if self._task is not None and not self._task.done():
            if self._model is model and self._state == "fetching":
                return
            assert self._model is not None
            msg = f"{self._model.title} is being fetched: cancel that first, or let it end"
            raise RequestError(msg, status=429, code="busy")
        self._model, self._state, self._message, self._done = model, "fetching", "", 0
        self._seen.clear()
        self._task = asyncio.create_task(self._run(model), name="model-fetch")

    async def cancel(self) -> None:
        """End the fetch that runs; what came is kept. Not while the model is put in use."""
        if self._state == "fetching" and self._task is not None:
            await cancel_all(self._task)
            self._state = "cancelled"

    async def close(self) -> None:
        """End it with the daemon."""
        await cancel_all(self._task)

    async def _run(self, model: OfferedModel) -> None:
        from ..models.fetching import Fetched, FetchJob

        try:
            job = FetchJob(f"{model.repo}:{model.file}", str(models_dir()))
            found = await run_job(
                "disco_daemon.models.fetching", job, self._note, Fetched, FetchError, name="the fetch",
                timeout_s=LONGEST_S, hint="fetch again: it goes on from there",
            )  # fmt: skip
            self._state, self._done = "loading", model.n_bytes
            self._message = " ".join(await self._use(found.path))
            self._state = "done"
        except (DiscoError, OSError) as e:
            self._message, self._state = reason_of(e), "failed"
            log.warning("%s is not in use: %s", model.title, e)

    def _note(self, done: str) -> None:
        now, self._done = self._clock.now(), int(done)
        self._seen.append((now, self._done))
        while now - self._seen[0][0] > RATE_S and len(self._seen) > 2:
            self._seen.popleft()

    def _rate(self) -> float | None:
        if self._state != "fetching" or len(self._seen) < 2:
            return None
        (then, least), (now, most) = self._seen[0], self._seen[-1]
        return round((most - least) / (now - then)) if now > then else None

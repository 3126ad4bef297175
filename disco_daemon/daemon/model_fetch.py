"""Fetches models for the device, two at once at most, and has those used without a restart for which that was asked.

The daemon owns a fetch: a client that leaves does not end it, but for one that was begun by `follow` alone. Any client
sees how far it is, and after a restart it goes on. What was fetched in part is kept, whatever ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..clock import Clock
from ..config.layers import write_private
from ..errors import DiscoError, RequestError
from ..models.default import models_dir
from ..models.quants import parse
from ..plain import reason_of
from ..system.job import run_job
from ..system.smallfile import open_regular
from ..system.tasks import cancel_all

if TYPE_CHECKING:
    from ..models.fetching import FetchProgress
    from ..models.offered import OfferedModel

log = logging.getLogger("disco.models")

MOST = 2  # fetches at once: more share the same line
KEPT = 8  # fetches that are shown, with those that have ended
LONGEST_S = 7 * 86400.0  # of one fetch: the largest of the list at 0.3 Mbit/s; a silent line is given up much sooner
RATE_S = 10.0  # the shown speed is that of the last seconds
LATEST = ":latest"  # what clients of Ollama put behind a name
MOST_KEPT_BYTES = 1 << 16  # of the file of fetches that are under way

Use = Callable[[str], Awaitable[list[str]]]


class FetchError(DiscoError):
    """A model could not be fetched, or not be put in use; the message says why, or what to do."""


class WantedModel(msgspec.Struct, frozen=True):
    """A model to fetch: its name, its title, what `models.hub.pull` fetches, and its bytes (0 = not known yet).

    With `use` it is put in use in place of the file `instead_of`, which was `device.model` when that was asked for.
    """

    name: str
    title: str
    spec: str
    n_bytes: int = 0
    use: bool = False
    instead_of: str = ""


def offered(model: OfferedModel, instead_of: str) -> WantedModel:
    """Return what to fetch for a model of the list that is to be used."""
    return WantedModel(model.name, model.title, f"{model.repo}:{model.file}", model.n_bytes, True, instead_of)


def named(name: str, models: Iterable[OfferedModel]) -> WantedModel:
    """Return what a client of Ollama's API means: a model of the list, or `[hf.co/]USER/REPO[:QUANT]`.

    Nothing else is asked for anything. Raises RequestError.
    """
    asked = name.strip().removesuffix(LATEST)
    known = {model.name: model for model in models}
    if (model := known.get(asked.casefold().replace(":", "-"))) is not None:
        return WantedModel(name, model.title, f"{model.repo}:{model.file}", model.n_bytes)
    with suppress(DiscoError):
        parse(asked)
        return WantedModel(name, asked, asked)
    msg = (
        f"pull model manifest: file does not exist: {name!r} is neither USER/REPO[:QUANT] of the Hugging Face Hub nor "
        f"one of {', '.join(known)}"
    )
    raise RequestError(msg, status=404, param="model", code="model_not_found")


class ModelFetch:
    """One fetch. `use` puts a fetched file in use, and returns what to say; `ended` is called at its end."""

    def __init__(self, wanted: WantedModel, use: Use, clock: Clock, ended: Callable[[], None]) -> None:
        self.wanted, self.state = wanted, "fetching"
        self._use, self._clock, self._ended = use, clock, ended
        self._message = ""
        self._done, self._n_bytes = 0, wanted.n_bytes
        self._file: FetchProgress | None = None
        self._seen: deque[tuple[float, int]] = deque()
        self._changed = asyncio.Event()
        self._followers, self._lasting = 0, False
        self._task = asyncio.create_task(self._run(), name="model-fetch")

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return not self._task.done()

    def document(self) -> dict[str, Any]:
        """Return how far it is. Speed in bytes/s, None while unknown."""
        return {
            "id": self.wanted.name, "title": self.wanted.title, "state": self.state, "done_bytes": self._done,
            "bytes": self._n_bytes, "bytes_per_s": self._rate(), "message": self._message,
        }  # fmt: skip

    def last(self) -> None:
        """Have it go on when nobody follows it."""
        self._lasting = True

    async def follow(self) -> AsyncGenerator[tuple[dict[str, Any], FetchProgress | None], None]:
        """Yield document and file at each step to the end. When all who follow leave, it ends, unless it lasts."""
        self._followers += 1
        try:
            while True:
                changed = self._changed
                yield self.document(), self._file
                if not self.runs:
                    return
                await changed.wait()
        finally:
            self._followers -= 1
            if not self._followers and not self._lasting:
                await self.cancel()

    async def cancel(self) -> None:
        """End it; what came is kept. Not while the model is put in use."""
        if self.state == "fetching" and self.runs:
            await cancel_all(self._task)
            self._become("cancelled")
            self._ended()

    async def close(self) -> None:
        """End it with the daemon."""
        await cancel_all(self._task)

    async def _run(self) -> None:
        from ..models.fetching import Fetched, FetchJob

        title = self.wanted.title
        try:
            job = FetchJob(self.wanted.spec, str(models_dir()))
            found = await run_job(
                "disco_daemon.models.fetching", job, self._note, Fetched, FetchError, name="the fetch",
                timeout_s=LONGEST_S, hint="fetch again: it goes on from there",
            )  # fmt: skip
            self._done = self._n_bytes
            if self.wanted.use:
                self._become("loading")
                self._message = " ".join(await self._use(found.path))
            else:
                self._message = f"`disco models use {Path(found.path).name}` makes it this machine's model."
            self._become("done")
        except (DiscoError, OSError) as e:
            self._message = reason_of(e)
            self._become("failed")
            log.warning("%s is not in use: %s" if self.wanted.use else "%s is not fetched: %s", title, e)
        self._task.add_done_callback(lambda _: self._tell())
        self._ended()

    def _become(self, state: str) -> None:
        self.state = state
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _note(self, text: str) -> None:
        from ..models.fetching import FetchProgress

        self._file = msgspec.json.decode(text, type=FetchProgress)
        self._n_bytes = self._file.all_bytes
        now, self._done = self._clock.now(), self._file.before + self._file.done
        self._seen.append((now, self._done))
        while now - self._seen[0][0] > RATE_S and len(self._seen) > 2:
            self._seen.popleft()
        self._tell()

    def _rate(self) -> float | None:
        if self.state != "fetching" or len(self._seen) < 2:
            return None
        (then, least), (now, most) = self._seen[0], self._seen[-1]
        return round((most - least) / (now - then)) if now > then else None


class ModelFetches:
    """All fetches. `private` says whether nobody may be asked; those under way are written to `kept`, a file."""

    def __init__(self, use: Use, private: Callable[[], bool], clock: Clock, kept: Path) -> None:
        self._use, self._private, self._clock, self._kept = use, private, clock, kept
        self._fetches: list[ModelFetch] = []
        self._using = asyncio.Lock()

    def document(self) -> dict[str, Any] | None:
        """Return how far the newest one to be used is, of those that run if some do; None without any."""
        found = self._to_be_used()
        return ([fetch for fetch in found if fetch.runs] or found)[-1].document() if found else None

    def documents(self) -> list[dict[str, Any]]:
        """Return how far each is, the newest one last."""
        return [fetch.document() for fetch in self._fetches]

    def start(self, wanted: WantedModel) -> ModelFetch:
        """Begin to fetch a model, go on with it, or return the fetch of it that runs. Raises RequestError."""
        if self._private():
            msg = "policy.private is on, so nobody is asked for anything: turn it off (F3), then fetch"
            raise RequestError(msg, code="private")
        running = [fetch for fetch in self._fetches if fetch.runs]
        for fetch in running:
            if fetch.wanted.spec == wanted.spec and (fetch.wanted.use or not wanted.use):
                return fetch
        if len(running) >= MOST or wanted.spec in [fetch.wanted.spec for fetch in running]:
            titles = " and ".join(fetch.wanted.title for fetch in running)
            verb = "is" if len(running) == 1 else "are"
            msg = f"{titles} {verb} being fetched: cancel that first, or let it end"
            raise RequestError(msg, status=429, code="busy")
        started = ModelFetch(wanted, self._use_in_turn, self._clock, self._keep)
        self._fetches = [*self._fetches[1 - KEPT :], started]
        self._keep()
        return started

    def resume(self, in_use: str) -> None:
        """Go on with those that the end of an earlier daemon has stopped; none while nobody may be asked.

        One is put in use only if what it was to replace, `device.model`, still is `in_use`. Blocks on disk.
        """
        try:
            with open_regular(self._kept) as f:
                wanted = msgspec.json.decode(f.read(MOST_KEPT_BYTES), type=list[WantedModel])
        except (OSError, msgspec.MsgspecError):
            return
        for one in wanted[:MOST]:
            with suppress(RequestError):
                use = one.use and one.instead_of == in_use
                self.start(msgspec.structs.replace(one, use=use)).last()

    async def cancel(self) -> None:
        """End the newest one to be used that runs; what came is kept."""
        for fetch in reversed(self._to_be_used()):
            if fetch.runs:
                await fetch.cancel()
                return

    async def close(self) -> None:
        """End all with the daemon; the next one goes on with them."""
        for fetch in self._fetches:
            await fetch.close()

    def _to_be_used(self) -> list[ModelFetch]:
        return [fetch for fetch in self._fetches if fetch.wanted.use]

    async def _use_in_turn(self, path: str) -> list[str]:
        async with self._using:
            return await self._use(path)

    def _keep(self) -> None:
        """Write down what is under way. A disk that fails costs the next daemon the knowledge, and this one nothing."""
        going = [fetch.wanted for fetch in self._fetches if fetch.state in ("fetching", "loading")]
        try:
            if going:
                write_private(self._kept, msgspec.json.encode(going).decode())
            else:
                self._kept.unlink(missing_ok=True)
        except OSError as e:
            log.warning("%s cannot be written, so a restart ends fetches: %s", self._kept, e)

"""Fetches models for the device, two at once at most, and has those used without a restart for which that was asked.

The daemon owns a fetch, and any client sees how far it is. A user ends it for good: by `cancel`, or by leaving one that
is not to be used and that nobody else follows. The end of the daemon and `policy.private` only stop it: the next one,
or this one when it may ask again, goes on with it. What was fetched in part is kept, whatever ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..clock import Clock
from ..config.layers import write_private
from ..errors import DiscoError, RequestError
from ..models.default import models_dir
from ..models.part import drop_old
from ..models.quants import NO_PIN, Pin, parse
from ..plain import reason_of
from ..system.job import run_job
from ..system.smallfile import open_regular

if TYPE_CHECKING:
    from ..models.fetching import FetchProgress
    from ..models.offered import OfferedModel

log = logging.getLogger("disco.models")

MOST = 2  # fetches at once: more share the same line
KEPT = 8  # fetches that are shown, with those that have ended
LONGEST_S = 7 * 86400.0  # of one fetch: the largest of the list at 0.3 Mbit/s; a silent line is given up much sooner
RATE_S = 10.0  # the shown speed is that of the last seconds
LATEST = ":latest"  # what clients of Ollama put behind a name
MOST_KEPT_BYTES = 1 << 16  # of the file of fetches that have not ended
RUNNING, KEPT_STATES = ("fetching", "loading"), ("fetching", "loading", "stopped")
PRIVATE = "policy.private is on, so nobody is asked for anything: it goes on when that is off"
CLOSED = "the daemon ends: the next one goes on with it"

Use = Callable[[str], Awaitable[list[str]]]


class FetchError(DiscoError):
    """A model could not be fetched, or not be put in use; the message says why, or what to do."""


class WantedModel(msgspec.Struct, frozen=True):
    """A model to fetch: its name, its title, what `models.hub.pull` fetches, and its bytes (0 = not known yet).

    With `use` it is put in use in place of the file `instead_of`, which was `device.model` when that was asked for.
    Its file has to be the one of its `pin`.
    """

    name: str
    title: str
    spec: str
    n_bytes: int = 0
    use: bool = False
    instead_of: str = ""
    pin: Pin = NO_PIN


def offered(model: OfferedModel, instead_of: str) -> WantedModel:
    """Return what to fetch for a model of the list that is to be used."""
    return WantedModel(model.name, model.title, model.spec, model.n_bytes, True, instead_of, model.pin)


def named(name: str, models: Iterable[OfferedModel]) -> WantedModel:
    """Return what a client of Ollama's API means: a model of the list, or `[hf.co/]USER/REPO[:QUANT]`.

    Nothing else is asked for anything. Raises RequestError.
    """
    asked = name.strip().removesuffix(LATEST)
    known = {model.name: model for model in models}
    if (model := known.get(asked.casefold().replace(":", "-"))) is not None:
        return WantedModel(name, model.title, model.spec, model.n_bytes, pin=model.pin)
    with suppress(DiscoError):
        parse(asked)
        return WantedModel(name, asked, asked)
    msg = (
        f"pull model manifest: file does not exist: {name!r} is neither USER/REPO[:QUANT] of the Hugging Face Hub nor "
        f"one of {', '.join(known)}"
    )
    raise RequestError(msg, status=404, param="model", code="model_not_found")


class ModelFetch:
    """One fetch: "stopped", after `begin` "fetching", "loading" if it is to be used, at last "done" or "failed".

    `end` makes it "cancelled", or "stopped" again. `use` puts a fetched file in use, and returns what to say; `changed`
    is called after each change of its state.
    """

    def __init__(
        self,
        wanted: WantedModel,
        use: Callable[[ModelFetch, str], Awaitable[list[str]]],
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self.wanted, self.state = wanted, "stopped"
        self._use, self._clock, self._has_changed = use, clock, changed
        self._message = PRIVATE  # why it waits, until it is begun
        self._done, self._n_bytes = 0, wanted.n_bytes
        self._file: FetchProgress | None = None
        self._seen: deque[tuple[float, int]] = deque()
        self._changed = asyncio.Event()
        self._followers = 0
        self._ending: tuple[str, str] | None = None  # the state and message that a cancelled task leaves
        self._task: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        """Whether it is under way."""
        return self.state in RUNNING

    def begin(self) -> None:
        """Go on, if it is stopped."""
        if self.state == "stopped":
            self._seen.clear()
            self._ending = None
            self._become("fetching")
            self._task = asyncio.create_task(self._run(), name="model-fetch")
            self._task.add_done_callback(self._leave)

    def document(self) -> dict[str, Any]:
        """Return how far it is. Speed in bytes/s, None while unknown."""
        return {
            "id": self.wanted.name, "title": self.wanted.title, "state": self.state, "done_bytes": self._done,
            "bytes": self._n_bytes, "bytes_per_s": self._rate(), "message": self._message,
        }  # fmt: skip

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[AsyncIterator[tuple[dict[str, Any], FetchProgress | None]]]:
        """Give document and file at each step, until it runs no more. When all who follow have left, it is cancelled.

        One that is to be used goes on without them.
        """
        self._followers += 1
        try:
            yield self._steps()
        finally:
            self._followers -= 1
            if not self._followers and not self.wanted.use and self.state == "fetching":
                await self.end("cancelled")

    async def _steps(self) -> AsyncIterator[tuple[dict[str, Any], FetchProgress | None]]:
        while True:
            changed = self._changed
            yield self.document(), self._file
            if not self.runs:
                return
            await changed.wait()

    async def end(self, state: str, message: str = "") -> None:
        """End it as "cancelled", which is for good, or as "stopped", until `begin`; what came is kept."""
        if self.state == "stopped":
            self._become(state, message)
        elif self.runs and self._task is not None:
            if self._ending is None:
                self._ending = state, message
                self._task.cancel()
            await asyncio.wait([self._task])

    def _leave(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._become(*(self._ending or ("stopped", CLOSED)))

    async def _run(self) -> None:
        from ..models.fetching import Fetched, FetchJob

        title = self.wanted.title
        try:
            job = FetchJob(self.wanted.spec, str(models_dir()), self.wanted.pin)
            found = await run_job(
                "disco_daemon.models.fetching", job, self._note, Fetched, FetchError, name="the fetch",
                timeout_s=LONGEST_S, hint="fetch again: it goes on from there",
            )  # fmt: skip
            self._done = self._n_bytes
            if self.wanted.use:
                self._become("loading")
                message = " ".join(await self._use(self, found.path))
            else:
                message = f"`disco models use {Path(found.path).name}` makes it this machine's model."
            self._become("done", message)
        except Exception as e:  # a fault of ours too: who follows would wait for ever, and each restart try it again
            ours = None if isinstance(e, (DiscoError, OSError)) else e
            log.warning("%s is not in use: %s" if self.wanted.use else "%s is not fetched: %s", title, e, exc_info=ours)
            self._become("failed", reason_of(e))

    def _become(self, state: str, message: str = "") -> None:
        self.state, self._message = state, message
        self._has_changed()
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
    """All fetches. `private` says whether nobody may be asked; those that have not ended are written to a file, `kept`.

    `in_use` returns `device.model`. None is begun behind `close`.
    """

    def __init__(
        self, use: Use, private: Callable[[], bool], in_use: Callable[[], str], clock: Clock, kept: Path
    ) -> None:
        self._use, self._private, self._in_use, self._clock, self._kept = use, private, in_use, clock, kept
        self._fetches: list[ModelFetch] = []
        self._using = asyncio.Lock()
        self._closed = False

    def document(self) -> dict[str, Any] | None:
        """Return how far the newest one to be used is, of those that run if some do; None without any."""
        found = [fetch for fetch in self._fetches if fetch.wanted.use]
        return ([fetch for fetch in found if fetch.runs] or found)[-1].document() if found else None

    def documents(self) -> list[dict[str, Any]]:
        """Return how far each is, the newest one last."""
        return [fetch.document() for fetch in self._fetches]

    def start(self, wanted: WantedModel) -> ModelFetch:
        """Begin to fetch a model, or return the fetch of it that runs: it is used if one asks for that.

        Raises RequestError.
        """
        if self._private():
            msg = "policy.private is on, so nobody is asked for anything: turn it off (F3), then fetch"
            raise RequestError(msg, code="private")
        if self._closed:
            raise RequestError("the daemon ends: fetch again when it runs", status=429, code="closing")
        running = [fetch for fetch in self._fetches if fetch.runs]
        for fetch in running:
            if fetch.wanted.spec == wanted.spec:
                if wanted.use and fetch.state == "fetching":
                    fetch.wanted = wanted
                    self._keep()
                return fetch
        if len(running) >= MOST:
            msg = (
                f"{' and '.join(fetch.wanted.title for fetch in running)} are being fetched: cancel one, or let it end"
            )
            raise RequestError(msg, status=429, code="busy")
        if len(self._fetches) >= KEPT:
            self._fetches.remove(next(fetch for fetch in self._fetches if fetch.state not in KEPT_STATES))
        started = self._add(wanted)
        started.begin()
        return started

    def resume(self, in_use: str) -> None:
        """Go on with those that the end of an earlier daemon has stopped, once somebody may be asked.

        One is put in use only if what it was to replace, `device.model`, still is `in_use`. Blocks on disk. What other
        fetches left long ago goes.
        """
        drop_old(models_dir())
        try:
            with open_regular(self._kept) as f:
                wanted = msgspec.json.decode(f.read(MOST_KEPT_BYTES), type=list[WantedModel])
        except (OSError, msgspec.MsgspecError):
            return
        for one in wanted[:MOST]:
            self._add(one)
        self._go_on(in_use)

    async def hold(self, in_use: str) -> None:
        """Stop all if nobody may be asked, and return when nobody is; else go on with them as `resume` does."""
        if self._private():
            await self._stop(("fetching", "stopped"), PRIVATE)
        else:
            self._go_on(in_use)

    async def cancel(self) -> None:
        """End one that is not loading, the newest one to be used before others; what came is kept."""
        going = [fetch for fetch in self._fetches if fetch.state in ("fetching", "stopped")]
        if going:
            await max(reversed(going), key=lambda fetch: fetch.wanted.use).end("cancelled")

    async def close(self) -> None:
        """Stop all with the daemon; the next one goes on with them. From now on none is begun."""
        self._closed = True
        await self._stop(KEPT_STATES, CLOSED)

    async def _stop(self, states: Iterable[str], why: str) -> None:
        await asyncio.gather(*(fetch.end("stopped", why) for fetch in self._fetches if fetch.state in states))

    def _go_on(self, in_use: str) -> None:
        for fetch in self._fetches:
            if fetch.state == "stopped" and not self._private() and not self._closed:
                use = fetch.wanted.use and fetch.wanted.instead_of == in_use
                fetch.wanted = msgspec.structs.replace(fetch.wanted, use=use)
                fetch.begin()

    def _add(self, wanted: WantedModel) -> ModelFetch:
        self._fetches.append(fetch := ModelFetch(wanted, self._use_in_turn, self._clock, self._keep))
        return fetch

    async def _use_in_turn(self, fetch: ModelFetch, path: str) -> list[str]:
        """Put a file in use, unless somebody has chosen another one since; those fetched beside it then follow it."""
        async with self._using:
            before = self._in_use()
            if before != fetch.wanted.instead_of:
                name = Path(path).name
                raise FetchError(f"another model was chosen while it was fetched; `disco models use {name}` uses it")
            notes = await self._use(path)
            for other in self._fetches:
                if other is not fetch and other.state in KEPT_STATES and other.wanted.instead_of == before:
                    other.wanted = msgspec.structs.replace(other.wanted, instead_of=self._in_use())
            return notes

    def _keep(self) -> None:
        """Write down what has not ended. A disk that fails costs the next daemon that knowledge, and this one none."""
        going = [fetch.wanted for fetch in self._fetches if fetch.state in KEPT_STATES]
        try:
            if going:
                write_private(self._kept, msgspec.json.encode(going).decode())
            else:
                self._kept.unlink(missing_ok=True)
        except OSError as e:
            log.warning("%s cannot be written, so a restart ends fetches: %s", self._kept, e)

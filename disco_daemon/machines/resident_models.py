"""The models of `[[models]]`: an engine for each, and one owner of the memory that all of them have.

    [[models]] -> ResidentModels.follow -> a ResidentDevice each, not loaded
    a request  -> hold(name): noted, held, wanted -> `scheduler.residency` says who leaves -> the engine starts
    nobody asks, or memory gets short -> one comes back, or one leaves

All decisions are made without waiting, by `scheduler.residency`; one task carries them out, one after the other, so
memory is taken by one load at a time. Only a load that nobody asked for gives way: to a model that is wanted meanwhile,
which is loaded beside it or in its place. A model that is held is never closed: its request waits for it, or reads.
What is taken off the limit for the device of the race is the caller's to say, and it stays where it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from ..clock import Clock
from ..config.schema import Config, DeviceSettings, FleetSettings, ModelSettings, ServerSettings, SplitSettings
from ..endpoints.device import LOAD_WAIT_S
from ..engine.inbox import EngineGone
from ..engine.supervisor import LOAD_GUESS_S, Engine, EngineState
from ..errors import ConfigError, EndpointError
from ..models import places
from ..scheduler.expected_use import ExpectedUse
from ..scheduler.residency import JUST_USED_S, ModelUse, Swap, coming_back, leaving_for, next_to_load
from ..system.control_groups import ProcessMemory, memory
from ..system.tasks import cancel_all
from .device_settings import require_regular
from .model_memory import predicted_bytes
from .resident_device import ResidentDevice, ResidentModel
from .whole_device import expected_n_ctx, text_kind_of, whole_config

log = logging.getLogger("disco.daemon")

LOOK_S = 5.0  # between two looks at memory, and whether a model comes back
TRY_AGAIN_S = 30.0  # after a load that failed: by then memory may be free, or the file be another
CLOSE_S = 20.0  # for an engine to end: its supervisor kills it sooner
SPARE = 0.05  # of the memory that stays free: below it models leave before the system swaps
LOAD_BYTES_S = 1.5e9  # a guess until a model was loaded: what a disk reads, bytes/s


class ResidentModels:
    """Owns the engines of all named models, and the task that loads and closes them.

    `taken` says how many bytes are the device's of the race, and what of them it has now; `busy` whether anything is
    answered. Nothing is in memory before somebody has asked for it, now or in an earlier life of the daemon. The task
    lives until `close`: whatever goes wrong with a model is logged, and that model's.
    """

    def __init__(self, clock: Clock, taken: Callable[[], tuple[int, ProcessMemory]], busy: Callable[[], bool]) -> None:
        self._clock, self._taken, self._busy = clock, taken, busy
        self._models: dict[str, ResidentModel] = {}
        self._removed: list[ResidentModel] = []
        self._wanted: list[ResidentModel] = []
        self._limit = 0
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def by_name(self) -> Mapping[str, ResidentModel]:
        """The models that may be asked for now."""
        return self._models

    # --- settings -----------------------------------------------------------------------------------------------------

    def follow(self, made: Mapping[str, ResidentModel], limit: int) -> None:
        """Have these models from now on, each new or one of the present ones, in `limit` bytes together.

        One that is gone is closed when its last answer has ended; one that cannot be loaded is tried again.
        """
        for name, model in self._models.items():
            if made.get(name) is not model:
                self._removed.append(model)
                if model in self._wanted:
                    self._wanted.remove(model)
                    model.device.place.set(is_open=False, why_not=f"the model {name} is no longer in the settings")
        self._models, self._limit = dict(made), limit
        self._news.set()
        if (self._models or self._removed) and self._task is None:
            self._task = asyncio.create_task(self._run(), name="resident models")

    async def close(self) -> None:
        """End the task, and all engines."""
        if self._task is not None:
            await cancel_all(self._task)
            self._task = None
        await asyncio.gather(*(self._close(model) for model in (*self._models.values(), *self._removed)))

    # --- requests -----------------------------------------------------------------------------------------------------

    @contextmanager
    def hold(self, model: ResidentModel) -> Iterator[None]:
        """Keep a model in memory until the end of this, and have it loaded if it is not there.

        Raises EngineGone where it could never be, or could not be just now.
        """
        now, place = self._clock.now(), model.device.place
        if self._models.get(model.settings.name) is not model:
            raise EngineGone(f"the model {model.settings.name} is no longer in the settings")
        if model.failed_at is not None and now - model.failed_at < TRY_AGAIN_S:
            raise EngineGone(place.why_not)
        if model.n_bytes > self._limit:
            need, limit = model.n_bytes / 2**30, self._limit / 2**30
            msg = (
                f"the model {model.settings.name} takes {need:.1f} GiB, and all models together may have {limit:.1f} "
                "(device.models_gib)"
            )
            raise EngineGone(msg)
        model.use.observe(self._clock.wall())
        model.used_at = now
        model.n_held += 1
        if not place.is_open and model not in self._wanted:
            place.set(is_open=False)  # whoever was told before why not is told anew
            self._wanted.append(model)
            self._news.set()
        elif model.device.engine.state is EngineState.FAILED:
            self._news.set()
        try:
            yield
        finally:
            model.n_held -= 1
            model.used_at = self._clock.now()
            if not model.n_held:
                if model in self._wanted:  # whoever wanted it has left before it had a place
                    self._wanted.remove(model)
                if self._wanted or self._removed or any(m.has_left for m in self._models.values()):
                    self._news.set()  # also for one that comes back in its place at once

    def document(self) -> list[dict[str, Any]]:
        """Return the `models` of `disco status --json`; `last_used_s` is how long ago, s."""
        now, wall = self._clock.now(), self._clock.wall()
        return [
            {
                "name": name,
                "state": model.state,
                "memory_bytes": model.n_bytes if model.is_here else 0,
                "last_used_s": None if model.used_at is None else round(now - model.used_at, 1),
                "expected_per_hour": round(model.use.per_hour(wall), 2),
            }
            for name, model in self._models.items()
        ]

    # --- memory -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Load what is wanted, close what is removed or in the way, until cancelled."""
        while True:
            self._news.clear()
            try:
                await self._close_left()
                self._measure()
                if await self._step():
                    continue
            except Exception:  # a bug of ours, or a disk: nobody else loads or closes a model
                log.exception("the named models: looking at them again in %g s", LOOK_S)
                await asyncio.sleep(LOOK_S)
            else:
                await self._look_later()

    async def _look_later(self) -> None:
        """Wait for news, or for the time to look at memory again: while a model is loaded, or may come by itself."""
        left = any(m.has_left or m.is_expected for m in self._models.values())
        idle = [m for m in self._removed if not m.n_held]  # their engines have not ended in their time
        busy = self._wanted or left or idle or any(m.is_here for m in self._models.values())
        try:
            async with asyncio.timeout(LOOK_S if busy else None):
                await self._news.wait()
        except TimeoutError:
            return

    async def _step(self) -> bool:
        """Carry out one decision; return whether there was one."""
        uses, limit = self._uses(), self._room()
        present = list(self._models.values())
        self._wanted = [m for m in self._wanted if m in present and not m.device.place.is_open]
        if self._wanted:
            swap = next_to_load([m.settings.name for m in self._wanted if not m.is_here], uses, limit)
            if swap is not None:
                await self._swap(swap)
                return True
            waits = any(use.is_busy and use.is_here for use in uses) or any(m.n_held for m in self._removed)
            if not waits:  # it will not get better
                self._refuse(limit)
                return True
        over = leaving_for(0, uses, limit)
        if over is None:  # those that answer have more than there is: no idle one adds to that
            over = tuple(use.name for use in uses if use.is_here and not use.is_busy)
        if over:
            log.warning("memory gets short: %s left", ", ".join(over))
            await self._swap(Swap("", over))
            return True
        loading = any(m.is_here and m.device.engine.state is EngineState.LOADING for m in present)
        if self._wanted or loading or (back := coming_back(uses, limit, beside=self._busy())) is None:
            return False
        await self._swap(back)
        return True

    async def _swap(self, swap: Swap) -> None:
        """Close those that leave, then load the one that comes, if all is as it was by then; waits until it has."""
        coming = self._models.get(swap.name)
        is_wanted = coming in self._wanted
        leaving = [self._models[name] for name in swap.leaving]
        for model in leaving:
            model.device.place.set(is_open=False)  # from here on nobody begins there
            model.has_left = True
        await asyncio.gather(*(self._close(model) for model in leaving))
        if coming is None or self._models.get(swap.name) is not coming or (is_wanted and coming not in self._wanted):
            return
        if not is_wanted and self._wanted:  # since it was decided on: that one is decided on first
            return
        self._measure()
        if leaving_for(coming.n_bytes, self._uses(), self._room()) != ():  # others have taken the room meanwhile
            return
        if coming in self._wanted:  # since it was decided on, too
            self._wanted.remove(coming)
        ahead, place = "" if is_wanted else " ahead", f" in place of {', '.join(swap.leaving)}" if swap.leaving else ""
        log.info("model %s is loaded%s%s", swap.name, ahead, place)
        coming.has_left, coming.failed_at, engine = False, None, coming.device.engine
        try:
            await coming.device.start()
            coming.device.place.set(is_open=True)
            await (engine.ready(LOAD_WAIT_S) if is_wanted else self._ready_ahead(coming))
        except EndpointError as e:
            log.warning("model %s is not loaded: %s", swap.name, e)
            if engine.state not in (EngineState.LOADING, EngineState.READY):  # else it goes on, from a slow disk
                await self._give_up(coming, str(e))
        except Exception as e:
            log.exception("model %s cannot be started", swap.name)
            await self._give_up(coming, f"the model {swap.name} cannot be started: {type(e).__name__}")

    async def _ready_ahead(self, model: ResidentModel) -> None:
        """Wait for a model that nobody has asked for, or until another one is wanted: then it loads on by itself.

        Raises EndpointError where it cannot be loaded, and that is known by then; later `_close_left` finds out.
        """
        ready = asyncio.create_task(model.device.engine.ready(LOAD_WAIT_S), name="a load ahead")
        news: asyncio.Task[Any] | None = None
        try:
            while not ready.done() and all(m.device.place.is_open for m in self._wanted):
                self._news.clear()  # whoever comes back from here looks at everything
                news = asyncio.create_task(self._news.wait(), name="news of models")
                await asyncio.wait((ready, news), return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            if ready.done():
                await ready
        finally:
            await cancel_all(ready, news)

    async def _give_up(self, model: ResidentModel, why: str) -> None:
        """Let a model that cannot be loaded have no memory; requests are told why, until one may try again."""
        model.failed_at = self._clock.now()
        if model in self._wanted:
            self._wanted.remove(model)
        await self._close(model, why)

    def _refuse(self, limit: int) -> None:
        """Tell whoever waits for a model that there is no memory for it, and none will become free by itself."""
        model = self._wanted.pop(0)
        need, free = model.n_bytes / 2**30, max(0, limit) / 2**30
        msg = (
            f"the model {model.settings.name} takes {need:.1f} GiB, and {free:.1f} are free for models now "
            "(device.models_gib; others use the rest)"
        )
        log.warning("%s", msg)
        model.device.place.set(is_open=False, why_not=msg)

    async def _close_left(self) -> None:
        """Close what is removed and held by nobody, what has failed since, and what did not end in its time."""
        for model in [m for m in self._removed if not m.n_held]:
            await self._close(model)
            if model.device.engine.pid is None:
                self._removed.remove(model)
        for model in list(self._models.values()):
            engine, place = model.device.engine, model.device.place
            if place.is_open and engine.state is EngineState.FAILED:
                await self._give_up(model, engine.last_error or f"the model {model.settings.name} cannot be loaded")
            elif model.is_ending:
                await self._close(model, place.why_not)

    async def _close(self, model: ResidentModel, why_not: str = "") -> None:
        """End an engine; one that does not end keeps its `pid`, and is closed again later."""
        model.device.place.set(is_open=False, why_not=why_not)
        try:
            async with asyncio.timeout(CLOSE_S):
                await model.device.close()
        except Exception:  # whatever it was: it is closed again later, and the others have their turn
            log.exception("the engine of %s did not end as it should, within %g s", model.settings.name, CLOSE_S)

    def _measure(self) -> None:
        for model in (*self._models.values(), *self._removed):
            model.measure()

    def _uses(self) -> list[ModelUse]:
        wall = self._clock.wall()
        return [
            ModelUse(
                name, model.n_bytes, max(LOAD_GUESS_S / 10, model.device.load_s), model.use.per_hour(wall),
                model.is_here, model.n_held > 0 or model.device.engine.in_flight > 0 or model.is_ending, model.has_left,
                model.is_expected,
                model.used_at is not None and self._clock.now() - model.used_at < JUST_USED_S,
            )
            for name, model in self._models.items()
        ]  # fmt: skip

    def _room(self) -> int:
        """Return what all named models together may have now, bytes: by the limit, and by what others leave.

        All of our models' processes are thought away, so what one has not taken yet is not free for another.
        """
        taken, has = self._taken()
        total, free = memory(without=(has, *(m.has for m in (*self._models.values(), *self._removed))))
        kept = sum(m.n_bytes for m in self._removed if m.is_here)
        return min(self._limit, free - int(SPARE * total)) - taken - kept


def make_models(
    config: Config, clock: Clock, before: Mapping[str, ResidentModel], saved: Callable[[str], Any]
) -> dict[str, ResidentModel]:
    """Return the models of the settings; one of those `before` where it would be the same. Raises ConfigError.

    `saved` has what was known of the use of a new one, None for nothing. Reads the headers of files: for a thread.
    """
    made = dict[str, ResidentModel]()
    for settings in config.models:
        own = settings_of(config, settings)
        path = Path(own.device.model)
        load = msgspec.structs.replace(whole_config(own, path), disk=None, one_gpu=True)
        old = before.get(settings.name)
        if old is not None and old.device.engine.config == load and _may_go_on(old):
            made[settings.name] = old
            continue
        n_bytes = predicted_bytes(own.device, path)
        device = ResidentDevice(Engine(load, clock), settings.name, max(LOAD_GUESS_S, n_bytes / LOAD_BYTES_S))
        device.expected_n_ctx = expected_n_ctx(own.device, path)
        device.expected_text_kind = cache(partial(text_kind_of, path))
        use = _use(saved(settings.name), clock.wall()) if old is None else old.use
        made[settings.name] = ResidentModel(settings, device, n_bytes, use)
    return made


def _may_go_on(model: ResidentModel) -> bool:
    """Whether a model is not known to fail: after a reload that one is tried again, by its file as it is then."""
    return model.failed_at is None and model.device.may_serve()


def _use(saved: Any, now: float) -> ExpectedUse:
    try:
        return ExpectedUse(now) if saved is None else ExpectedUse.from_json(saved, now)
    except ValueError as e:
        log.warning("starting without what was known of when models are asked for: %s", e)
        return ExpectedUse(now)


def settings_of(config: Config, settings: ModelSettings) -> Config:
    """Return the settings as if this model were the device's, alone and without a server. Raises ConfigError.

    What is said of the device's own model (adapters, template, draft) is not said of this one.
    """
    shared, path = config.device, path_of(settings)
    device = DeviceSettings(
        model=str(path), n_ctx=settings.n_ctx, scheduler=shared.scheduler, n_threads=shared.n_threads,
        n_threads_batch=shared.n_threads_batch, n_ubatch=shared.n_ubatch, flash_attn=shared.flash_attn,
        kv_type=shared.kv_type, speculation=shared.speculation, n_gpu_layers="auto",
    )  # fmt: skip
    return msgspec.structs.replace(
        config, device=device, server=ServerSettings(), split=SplitSettings(), fleet=FleetSettings()
    )


def path_of(settings: ModelSettings) -> Path:
    """Return the file of a model: a path, or a name as `disco models list` has it. Raises ConfigError."""
    path = Path(settings.model).expanduser()
    if not path.exists():
        try:
            path = places.choose_model(settings.model, places.find()).path
        except ConfigError as e:
            msg = f"[[models]] {settings.name}: {e}; `disco models pull {settings.model}` fetches a repository"
            raise ConfigError(msg) from e
    require_regular(f"[[models]] {settings.name}:", path)
    return path

"""One of several models of this machine: its engine runs only while it has a place in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import psutil

from ..config.schema import ModelSettings
from ..endpoints.device import LOAD_WAIT_S
from ..engine.inbox import EngineGone
from ..engine.supervisor import Engine, EngineState
from ..scheduler.expected_use import ExpectedUse
from ..system.control_groups import ProcessMemory
from ..types import Embedding, Given, Readiness, TextTask, Usage
from .whole_device import WholeDevice


@dataclass(slots=True)
class Place:
    """Whether an engine may use memory: `is_open` from the decision to load it until the one that it leaves.

    `why_not` says why it cannot be loaded, until somebody wants that again; who holds it is told, also who waits only
    later. Written by `ResidentModels` only.
    """

    is_open: bool = False
    why_not: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, *, is_open: bool, why_not: str = "") -> None:
        """Say how it is now, to all that wait."""
        self.is_open, self.why_not = is_open, why_not
        self.changed.set()
        self.changed = asyncio.Event()

    async def opened(self, timeout_s: float) -> None:
        """Wait until it is open. Raises EngineGone when it cannot be, or not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_open:
                    if self.why_not:
                        raise EngineGone(self.why_not)
                    await self.changed.wait()
        except TimeoutError:
            msg = f"no memory became free within {timeout_s:g} s: models that answer stay, and others load first"
            raise EngineGone(msg) from None


class ResidentDevice(WholeDevice):
    """A whole model whose engine runs only while it has a place in memory; requests wait for that."""

    def __init__(self, engine: Engine, name: str, load_guess_s: float) -> None:
        super().__init__(engine, name)
        self.place, self._load_guess_s = Place(), load_guess_s

    @property
    def ready(self) -> bool:
        """Whether the model is in memory, and stays there."""
        return self.place.is_open and super().ready

    @property
    def load_s(self) -> float:
        """How long loading it takes, s, as it took last or as its size says."""
        info = self.engine.info
        return self._load_guess_s if info is None else info.load_s

    def may_serve(self) -> bool:
        """Whether its model is not known to crash: it is loaded when it is asked for."""
        return not self.engine.down_s

    def readiness(self) -> Readiness:
        """Return what a request would meet: where it is not in memory, a cold start."""
        found = super().readiness()
        return found if self.place.is_open else replace(found, load_s=self.load_s)

    async def embed(self, texts: Sequence[Given], task: TextTask, usage: Usage) -> Embedding:
        """The vectors of texts, or of token ids; waits for its place first. Raises EndpointError."""
        await self.place.opened(LOAD_WAIT_S)
        return await super().embed(texts, task, usage)

    async def _wait_for_load(self, usage: Usage) -> None:
        began_at = self.engine.clock.now()
        try:
            await self.place.opened(LOAD_WAIT_S)
        finally:
            usage.load_s = self.engine.clock.now() - began_at
        waited_s = usage.load_s
        try:
            await super()._wait_for_load(usage)
        finally:
            usage.load_s += waited_s


@dataclass(slots=True, eq=False)
class ResidentModel:
    """One of the models, with all that is known of it; times are by the daemon's clock, s.

    It takes `n_bytes`, at least what was predicted; its process `has` so much now. The last load failed at `failed_at`,
    and no later one has been of use.
    """

    settings: ModelSettings
    device: ResidentDevice
    n_bytes: int
    use: ExpectedUse
    n_held: int = 0
    used_at: float | None = None
    has_left: bool = False
    failed_at: float | None = None
    has: ProcessMemory = field(default_factory=ProcessMemory)
    predicted_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.predicted_bytes = self.n_bytes

    @property
    def state(self) -> str:
        """What `disco status` says of it."""
        engine, place = self.device.engine, self.device.place
        if not place.is_open:
            if self.n_held:
                return "waiting"
            return "unloaded" if self.failed_at is None else "failed"
        return engine.state.value

    @property
    def is_expected(self) -> bool:
        """Whether it is known to be asked for, and may come into free memory; not if it could not be loaded."""
        return self.failed_at is None and self.use.is_known

    @property
    def is_here(self) -> bool:
        """Whether it has memory, or is about to: also one whose process has not ended yet."""
        engine = self.device.engine
        return engine.pid is not None or (self.device.place.is_open and engine.state is not EngineState.FAILED)

    @property
    def is_ending(self) -> bool:
        """Whether it has no place any more, but its process still has memory."""
        return self.device.engine.pid is not None and not self.device.place.is_open

    def measure(self) -> None:
        """Look at what its process has; while weights are laid out anew it is more than it will be."""
        engine = self.device.engine
        self.has = memory_of(engine.pid)
        if engine.state is EngineState.READY and any(self.has):
            self.n_bytes = max(self.predicted_bytes, sum(self.has))


def memory_of(pid: int | None) -> ProcessMemory:
    """Return what a process has of the memory; nothing of one that has ended, or is not there."""
    try:
        found = None if pid is None else psutil.Process(pid).memory_info()
    except (psutil.Error, OSError):
        return ProcessMemory()
    if found is None:
        return ProcessMemory()
    mapped = getattr(found, "shared", 0)  # Linux alone says so
    return ProcessMemory(found.rss - mapped, mapped)

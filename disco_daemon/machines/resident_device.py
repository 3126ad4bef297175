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
from ..types import Embedding, Given, Readiness, TextTask, Usage
from .whole_device import WholeDevice


@dataclass(slots=True)
class Place:
    """Whether an engine may use memory: `is_open` from the decision to load it until the one that it leaves.

    `why_not` says why it cannot be loaded now; who waits for it is told. Written by `ResidentModels` only.
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
                    await self.changed.wait()
                    if self.why_not:
                        raise EngineGone(self.why_not)
        except TimeoutError:
            msg = f"no memory became free within {timeout_s:g} s: all models that are loaded answer"
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

    async def embed(self, texts: Sequence[Given], task: TextTask) -> Embedding:
        """The vectors of texts, or of token ids; waits for its place first. Raises EndpointError."""
        await self.place.opened(LOAD_WAIT_S)
        return await super().embed(texts, task)

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
    """One of the models, with all that is known of it; times are by the daemon's clock, s."""

    settings: ModelSettings
    device: ResidentDevice
    n_bytes: int
    use: ExpectedUse
    n_held: int = 0
    used_at: float | None = None
    has_left: bool = False

    @property
    def state(self) -> str:
        """What `disco status` says of it."""
        engine, place = self.device.engine, self.device.place
        if not place.is_open:
            return "waiting" if self.n_held else "unloaded"
        return engine.state.value

    @property
    def is_here(self) -> bool:
        """Whether it has memory; one that cannot be loaded has none."""
        return self.device.place.is_open and self.device.engine.state is not EngineState.FAILED

    def measure(self) -> None:
        """Take what its process has of the memory, if that is more than was predicted."""
        pid = self.device.engine.pid
        if pid is not None:
            try:
                self.n_bytes = max(self.n_bytes, psutil.Process(pid).memory_info().rss)
            except psutil.Error:
                return

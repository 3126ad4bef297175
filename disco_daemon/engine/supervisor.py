"""The daemon's side of the engine: start it, notice its death at once, start it again, and ask it.

It is longer than other files, since all of it acts on one process and its state; what has no part in that is in
`channel`, `lives`, `hang` and `early`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path

import msgspec

from ..clock import Clock
from ..errors import EndpointError
from ..plain import reason_of
from ..system.supervised import ChildProcess, SupervisedProcess
from ..types import GenerationRequest, Usage
from . import framing, wire
from .channel import RequestChannel
from .door import Hosts, hand_over
from .early import EarlyEngine, start_worker
from .fleet_orders import FleetOrders
from .hang import LOOK_S, HangWatch, look_at
from .inbox import EngineAnswer, EngineGone, wait_for_embedding
from .lives import CRASHES, EngineLives
from .requests import count_message, generate_message

log = logging.getLogger("disco.engine")

LOAD_TIMEOUT_S = 300.0  # a large model from a cold disk
STOP_TIMEOUT_S = 9.0  # after the socket is closed, while texts go to disk; then SIGKILL
IDS_TIMEOUT_S = 0.5  # for a handoff: the answer goes on meanwhile, so there is time
COUNT_TIMEOUT_S = 0.05  # takes 1-5 ms; a hanging engine must not hold up the server, an estimate will do
LOAD_GUESS_S = 2.0  # for the first load of a model; what it took is known from then on
LOAD_LEAST_S = 0.1  # while it is not loaded, however long that takes already


class EngineState(StrEnum):
    """Where the engine process is in its life."""

    STOPPED = "stopped"
    LOADING = "loading"
    READY = "ready"
    UNLOADED = "unloaded"
    BACKOFF = "restarting"
    FAILED = "failed"


class Engine:
    """One supervised engine process.

    All mutable state: the process of the present life, `state`, and the requests in flight on its socket (`_channel`).
    """

    def __init__(
        self,
        config: wire.Load,
        clock: Clock,
        attach: Callable[[socket.socket], object] | None = None,
        hosts: Hosts | None = None,
        early: EarlyEngine | None = None,
        keep_alive_s: float = 0.0,
    ) -> None:
        """With `attach`, each process gets a socket pair to a relay: `attach` is called with the relay's end of it.

        So it is for each `reattach`. In place of that, `hosts` start other processes for each of this engine's. Without
        either, the first process is the `early` one, if nobody has taken that. After `keep_alive_s` without a
        request the model is unloaded; 0 = never.
        """
        self.config, self.keep_alive_s = config, keep_alive_s
        self.state = EngineState.STOPPED
        self.info: wire.Loaded | None = None
        self.stats: wire.Stats | None = None
        self.last_error: str | None = None
        self.restarts = 0
        self.pid: int | None = None
        self._clock = clock
        self._attach, self._hosts, self._early = attach, hosts, early
        self._door: socket.socket | None = None
        self._channel = RequestChannel(clock, lambda: self.last_error)
        self.fleet = FleetOrders(self._channel, config.ranges)
        self._changed = asyncio.Condition()
        self._lives = EngineLives(clock.now())
        self._unloading = False
        self._expected = False
        self._wanted = asyncio.Event()
        self._why_killed: str | None = None
        self._repack = True  # until a load crashes because of it
        self._has_loaded = False  # since `start`
        self._supervised: SupervisedProcess | None = None

    def __repr__(self) -> str:
        return f"<Engine {self.state} pid={self.pid} restarts={self.restarts} in flight={self.in_flight}>"

    @property
    def clock(self) -> Clock:
        """The clock that all its times are by."""
        return self._clock

    def is_set_as(self, other: Engine) -> bool:
        """Whether another engine would load the same, in the same way, and keep it as long."""
        return (self.config, self.keep_alive_s) == (other.config, other.keep_alive_s)

    @property
    def in_flight(self) -> int:
        """The number of requests the engine has not finished yet."""
        return self._channel.n_in_flight

    @property
    def silent_s(self) -> float:
        """How long the engine has owed an answer and been silent, s; 0 while it owes none."""
        return self._clock.now() - self._channel.heard_at if self._channel.owes_reply else 0.0

    @property
    def load_wait_s(self) -> float:
        """How long loading the model will still take, s, judging by the last load; 0 when it is in memory."""
        whole = self.info.load_s if self.info is not None else LOAD_GUESS_S
        if self.state is EngineState.UNLOADED or self._expected:
            return whole
        if self.state not in (EngineState.LOADING, EngineState.BACKOFF):
            return 0.0
        return max(LOAD_LEAST_S, whole - (self._clock.now() - self._lives.born_at))

    @property
    def n_crashed(self) -> int:
        """How many lives in a row have ended at a request, and gave no answer."""
        return self._lives.n_crashed

    @property
    def down_s(self) -> float:
        """How long it is to be left alone, s: its model cannot be loaded, or crashes it again and again."""
        if self.state is EngineState.FAILED:
            return LOAD_TIMEOUT_S
        if not self._lives.crashes or self.state not in (EngineState.BACKOFF, EngineState.LOADING):
            return 0.0
        return max(LOAD_LEAST_S, self._lives.down_until - self._clock.now())

    # --- life ----------------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """Report loading from now on, although it begins only with `start`."""
        self.state, self._expected = EngineState.LOADING, True

    def start(self) -> None:
        """Begin supervising; loading happens in the background. Raises RuntimeError where that has begun."""
        if self._supervised is not None:
            raise RuntimeError("the engine runs already")
        self.state, self._expected, self._has_loaded = EngineState.LOADING, False, False
        self._supervised = SupervisedProcess(
            "engine", self._spawn, self._live, rest=self._rest, patience_s=STOP_TIMEOUT_S, log=log
        )

    def wake(self) -> None:
        """Load the model again if it was unloaded, in the background."""
        if self.state is EngineState.UNLOADED:
            self.state, self._lives.born_at = EngineState.LOADING, self._clock.now()
            self._wanted.set()

    async def close(self) -> None:
        """Stop the engine and wait for it; idempotent."""
        if self._supervised is not None:
            await self._supervised.close()
            self._supervised = None
        self._expected = False
        await self._enter(EngineState.STOPPED)

    async def ready(self, timeout_s: float) -> wire.Loaded:
        """Wait until the model is loaded. Raises EngineGone when it cannot be, or not in time."""
        self.wake()
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not self._is_coming)
        except TimeoutError:
            raise EngineGone(f"the device model was not loaded within {timeout_s:g} s") from None
        if self.state is not EngineState.READY or self.info is None:
            raise EngineGone(self.last_error or "the device engine is stopped")
        return self.info

    @property
    def _is_coming(self) -> bool:
        """Whether the model will be in memory before long."""
        return self.state is EngineState.LOADING or (self.state is EngineState.BACKOFF and not self._lives.crashes)

    async def _rest(self, _: str) -> bool:
        """Wait for the next life of the process; return whether there is to be one."""
        lives = self._lives
        if self.state is EngineState.FAILED:
            log.error("engine cannot load its model: %s", self.last_error)
            return False
        if self._unloading:
            self._unloading = False
            lives.unload()
            await self._wanted.wait()
            return True
        if lives.is_given_up(has_loaded=self._has_loaded):  # llama.cpp reads the whole file each time
            self.last_error = lives.given_up(Path(self.config.model_path).name, self.last_error or "")
            log.error("engine given up: %s", self.last_error)
            await self._enter(EngineState.FAILED)
            return False
        log.warning("engine stopped (%s), starting again in %.1f s", self.last_error, lives.pause_s)
        self.restarts += 1
        await asyncio.sleep(lives.pause_s)
        return True

    async def _live(self, child: ChildProcess) -> str:
        """Run one life of the process, to the end of its socket; what there is to say of that is in `last_error`."""
        self.pid, ours = child.pid, child.sockets[0]
        ours.setblocking(False)
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            self._channel.open(writer)
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(child))
                try:
                    await self._converse(reader, child)
                except (TypeError, ValueError, msgspec.MsgspecError) as e:  # whatever it is, it is not our engine
                    self._kill(child, f"it sent what is no message: {type(e).__name__}")
                if not self._unloading:  # else the watch ends the process
                    watch.cancel()
        finally:
            await asyncio.shield(self._bury(child))
        return ""

    async def _spawn(self) -> ChildProcess:
        """Start the process, or take the one started early. Raises OSError."""
        self._lives.begin(self._clock.now())
        await self._enter(EngineState.LOADING)
        is_alone = self._attach is None and self._hosts is None
        if is_alone and self._early is not None and (started := self._early.take()) is not None:
            return started
        try:
            if self._hosts is not None:
                await self._hosts.prepare()
            child = await start_worker(1 if is_alone else 2)
        except OSError as e:
            self.last_error = f"cannot start the engine process: {reason_of(e)}"
            self._lives.end(self._clock.now(), 0, 0)
            raise
        if self._hosts is not None:
            self._hosts.attach(child.sockets[1])
        elif self._attach is not None:
            self._door = child.sockets[1]
            self.reattach()
        return child

    def reattach(self) -> None:
        """Give the process another socket pair to a relay, if there is one: the relay before has gone."""
        if self._attach is not None and self._door is not None:
            with contextlib.suppress(OSError):  # the process has died, and the next one gets a pair of its own
                self._attach(hand_over(self._door))

    async def _watch(self, child: ChildProcess) -> None:
        """Kill an engine that owes answers and is silent; unload a model that has long been unused.

        A long prompt reports each chunk, so silence is a hang, unless it could not run.
        """
        hang = HangWatch()
        while not self._idle_for_long():
            await asyncio.sleep(LOOK_S)
            hangs = hang.hangs(self._clock.now(), self.silent_s, look_at(child.pid), self.info)
            if hangs and self.state is EngineState.READY:
                log.error("engine gave no sign of life for %.0f s: killing it", hang.silent_s)
                self._kill(child, f"it gave no sign of life for {hang.silent_s:.0f} s")
        self._unload()
        await child.end(STOP_TIMEOUT_S)

    def _idle_for_long(self) -> bool:
        """Whether the model has been unused in memory for `keep_alive_s`."""
        now, keep_alive_s = self._clock.now(), self.keep_alive_s
        if self._channel.n_in_flight or self.state is not EngineState.READY:
            self._channel.used_at = now
        return keep_alive_s > 0 and now - self._channel.used_at >= keep_alive_s

    def _unload(self) -> None:
        """Close the socket, and with it the process: no answer is running, and none can begin from here on."""
        log.info("engine unloaded: unused for %g s", self.keep_alive_s)
        self.state, self._unloading = EngineState.UNLOADED, True
        self._wanted.clear()
        self._channel.close()

    def _kill(self, child: ChildProcess, why: str) -> None:
        self._why_killed = why
        child.kill()

    async def _converse(self, reader: asyncio.StreamReader, child: ChildProcess) -> None:
        load = msgspec.structs.replace(
            self.config, ranges=self.fleet.ranges, repack=self.config.repack and self._repack
        )
        try:
            self._channel.write(load)
        except EngineGone:
            return
        except EndpointError as e:  # such as a path that is no UTF-8
            self.last_error = f"{self.config.model_path}: {e}"
            await self._enter(EngineState.FAILED)
            return
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                first = await framing.read_async(reader)
        except TimeoutError:
            self._kill(child, f"loading {load.model_path} took more than {LOAD_TIMEOUT_S:g} s")
            return
        if first is None:
            return
        match wire.decode_from_engine(first):
            case wire.Loaded() as info:
                self.info, self._has_loaded = info, True
                guesses = ", its own layer guesses" if info.own_layer else ""
                log.info(
                    "engine ready: %s, %d tokens of context%s, %.2f s", info.model, info.n_ctx, guesses, info.load_s
                )
                for name, why in info.adapters.items():
                    if why:
                        log.warning("engine goes on without adapter %s: %s", name, why)
                if info.layer_failure:
                    log.warning("engine goes on without guesses of the model's own layer: %s", info.layer_failure)
                self._lives.ready_at = self._channel.heard_at = self._clock.now()  # nothing is owed from before
                self.fleet.begin()
                await self._enter(EngineState.READY)
            case wire.LoadFailed(message=message):
                self.last_error = message
                if not self._has_loaded:  # it has loaded before: then this passes, such as memory being short
                    await self._enter(EngineState.FAILED)
                return
            case other:
                raise TypeError(f"expected Loaded, not {type(other).__name__}")
        while (body := await framing.read_async(reader)) is not None:
            self._channel.heard_at = self._clock.now()
            match wire.decode_from_engine(body):
                case wire.Stats() as stats:
                    self.stats = stats
                case wire.Alive():
                    pass
                case wire.Loaded() as measured:
                    self.info = measured
                case wire.LoadFailed():
                    raise TypeError("unexpected LoadFailed")
                case reply:
                    self._lives.hear(reply)
                    self._channel.deliver(reply)

    async def _bury(self, child: ChildProcess) -> None:
        """End the process for certain, fail all requests in flight, and record why."""
        if self.state is not EngineState.FAILED and not self._unloading:
            await self._enter(EngineState.BACKOFF)  # at once: no answer may start on a dead process
        self._channel.close()
        if self._door is not None:
            self._door.close()
            self._door = None
        await child.end(STOP_TIMEOUT_S)
        code = child.process.returncode or 0
        if self._hosts is not None:
            await self._hosts.detach()
        self.pid, self.stats = None, None
        if self.state is not EngineState.FAILED and not self._unloading:
            detail = child.last_words if code > 0 else ""
            if code in CRASHES and self._lives.ready_at is None and self._why_killed is None and self._repack:
                self._repack = False
                log.warning("engine crashed while it loaded: weights stay as the file has them from now on")
            if self._why_killed is not None:
                detail, self._why_killed = f": {self._why_killed}", None
            self.last_error = f"the engine process {child.ending}{detail}"
            self._lives.end(self._clock.now(), code, self._channel.n_in_flight)
            if self._lives.crashes:
                self.last_error = self._lives.verdict(self.last_error)
                await self._enter(EngineState.BACKOFF)  # who waits for the next life does so no longer
        self._channel.fail_all(EngineGone(self.last_error or "the engine has stopped"))

    async def _enter(self, state: EngineState) -> None:
        async with self._changed:
            self.state = state
            self._changed.notify_all()

    # --- requests ------------------------------------------------------------------------------------------------

    async def count(self, request: GenerationRequest, *, ids: bool = False) -> wire.Counted | None:
        """Count a prompt's tokens; with `ids`, also return its token ids and its text, both with the answer so far.

        None while no model is loaded, or if the engine is too slow.
        """
        if self.state is not EngineState.READY:
            self.wake()  # a counted prompt will be followed by its request
            return None
        try:
            with self._channel.inbox() as (request_id, inbox):
                self._channel.write(count_message(request_id, request, ids=ids))
                async with asyncio.timeout(IDS_TIMEOUT_S if ids else COUNT_TIMEOUT_S):
                    reply = await inbox.replies.get()
        except (EndpointError, TimeoutError):  # it has gone, or such a request cannot be sent to it
            return None
        return reply if isinstance(reply, wire.Counted) else None

    def open(self, request: GenerationRequest, *, hold: bool = False) -> EngineAnswer:
        """Start one answer. Raises EngineGone, and EndpointError if the request cannot be sent."""
        request_id, inbox = self._channel.expect("g")
        try:
            self._channel.write(generate_message(request_id, request, hold=hold))
        except BaseException:  # whatever it was: no inbox may stay, or the engine would owe its reply for ever
            self._channel.forget(request_id)
            raise
        return EngineAnswer(request_id, inbox, self._channel.order, self._channel.forget)

    async def embed(self, asked: wire.Embed, usage: Usage) -> wire.Embedded | wire.Failed:
        """Embed texts, under an id of their own; `usage` gets what that took, also where it is cancelled.

        Raises EngineGone, and EndpointError for what cannot be sent.
        """
        request_id, inbox = self._channel.expect("q")
        withdraw = partial(self._channel.write, wire.CancelRequest(id=request_id))
        try:
            self._channel.write(msgspec.structs.replace(asked, id=request_id))
            return await wait_for_embedding(inbox, usage, withdraw)
        finally:
            self._channel.forget(request_id)

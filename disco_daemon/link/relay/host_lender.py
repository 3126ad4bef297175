"""The relay of a machine that lends its home hosts: one connection always waits there, until home takes it.

Each connection is one life of a host. When home takes one, which is known by the first bytes that come, the next one
is made, so that a host that dies has a successor at once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import time
from contextlib import suppress

import msgspec

from ...plain import plain
from ...system.tasks import TaskSet, cancel_all
from ..trust import tls
from ..trust.refusals import RETRIED, LinkEndedError
from .connector import (
    JITTER,
    RETRY_FIRST_S,
    RETRY_MAX_S,
    RETRY_REFUSED_MAX_S,
    RETRY_REFUSED_S,
    RefusedError,
    ask,
    connect_first,
)
from .frame_stream import FrameStream
from .handshake import HostAccepted, TellLoad, first_frame
from .host_pipe import Report, carry
from .orders import HomeEnded, HomeReached, LendHosts, LinkDown

MAX_LIVES = 3  # hosts at a time: one of an engine that ends, one of that which follows it, and one that waits
TELL_AGAIN_S = 5.0  # after the connection by which home hears of this machine has broken
UNUSED_S = 1.0  # a host that home gave back sooner counts as an attempt that failed


class HostLender:
    """Keeps a connection at home that waits to be taken, as `config` says; `run` it until it is cancelled.

    All mutable state: the addresses, the latest one first, the connections that stand, and what home is to hear of
    this machine.
    """

    def __init__(self, report: Report, config: LendHosts) -> None:
        """Raises ssl.SSLError for a key that is none."""
        self._report, self._config = report, config
        self._context = tls.client_context(config.identity)
        self._addresses = list(config.addresses)
        self._lives = itertools.count(1)
        self._standing = TaskSet()
        self._changed = asyncio.Event()
        self._load: TellLoad | None = None
        self._has_news = asyncio.Event()

    def tell(self, load: TellLoad) -> None:
        """Say to home how this machine is; what it has not been told yet is replaced."""
        self._load = load
        self._has_news.set()

    def use(self, config: LendHosts) -> bool:
        """Offer what this says from now on; return whether that is possible, since only the offer has changed."""
        before, self._config = self._config, msgspec.structs.replace(self._config, offer=config.offer)
        if self._config != config:
            self._config = before
            return False
        if config.offer != before.offer:
            self._changed.set()
        return True

    async def run(self) -> None:
        """Connect, wait until home takes the host, and connect again."""
        loop = asyncio.get_running_loop()
        pause_s, refused_s, told = RETRY_FIRST_S, RETRY_REFUSED_S, ""
        telling = asyncio.create_task(self._keep_telling(), name="how this machine is")
        try:
            while True:
                began, stream = loop.time(), None
                try:
                    stream = await self._offer()
                    told = ""
                    await self._lend(stream)
                    if loop.time() - began > UNUSED_S:
                        pause_s, refused_s = RETRY_FIRST_S, RETRY_REFUSED_S
                        continue
                    final = False
                except LinkEndedError as e:
                    final = isinstance(e, RefusedError) and e.reason not in RETRIED
                    if (said := f"{e.reason} {e.message}") != told:  # once, not at each attempt
                        told = said
                        name, message = self._config.name, plain(e.message)
                        self._report(LinkDown(name=name, reason=e.reason, message=message, final=final))
                if await self._rest((refused_s if final else pause_s) * random.uniform(1 - JITTER, 1)):
                    continue
                if final:
                    refused_s = min(2 * refused_s, RETRY_REFUSED_MAX_S)
                else:
                    pause_s = min(2 * pause_s, RETRY_MAX_S)
        finally:
            await cancel_all(telling, *self._standing)

    async def _keep_telling(self) -> None:
        """Say to home how this machine is whenever there is news, by a connection of its own."""
        while True:
            await self._has_news.wait()
            with suppress(LinkEndedError):
                stream, _ = await connect_first(self._addresses, self._context, tls.tls_name(self._config.name))
                try:
                    while True:
                        await self._has_news.wait()
                        self._has_news.clear()
                        assert self._load is not None
                        stream.write(first_frame(self._load))
                        await stream.drain()
                finally:
                    stream.abort()
            await asyncio.sleep(TELL_AGAIN_S)

    async def _rest(self, pause_s: float) -> bool:
        """Wait before the next attempt; return whether there is something else to offer, at once."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._changed.wait()
        return self._changed.is_set()

    async def _offer(self) -> FrameStream:
        """Return a connection that home has accepted. Raises LinkEndedError."""
        self._changed.clear()
        stream, address = await connect_first(self._addresses, self._context, tls.tls_name(self._config.name))
        self._addresses.remove(address)
        self._addresses.insert(0, address)
        try:
            offer = msgspec.structs.replace(self._config.offer, now=time.time())
            await ask(stream, first_frame(offer), HostAccepted)
        except BaseException:  # a cancellation too; it is raised again
            stream.abort()
            raise
        return stream

    async def _lend(self, stream: FrameStream) -> None:
        """Give the connection to a process, and wait until home takes it, it has ended, or another one is offered."""
        taken = asyncio.Event()
        life = self._standing.begin(self._live(stream, next(self._lives), taken), "life of a host")
        life.add_done_callback(lambda _: taken.set())
        waits = [asyncio.create_task(event.wait()) for event in (taken, self._changed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(*waits)
        if not taken.is_set():
            await cancel_all(life)
        if len(self._standing) >= MAX_LIVES:
            await asyncio.wait(self._standing, return_when=asyncio.FIRST_COMPLETED)

    async def _live(self, stream: FrameStream, number: int, taken: asyncio.Event) -> None:
        why = "this machine has ended it"
        ours, theirs = socket.socketpair()
        try:
            self._report(HomeReached(life=number), theirs.detach())
            why = await carry(stream, ours, taken.set)
        finally:
            ours.close()
            stream.abort()
            self._report(HomeEnded(life=number, message=why))

"""The life of a child process of this program, said once: for engine, hosts, relay, keeper and what is lent.

A child ends with us, however we end: with the socket whose other end it has. Its last words are kept, and
what does not end in its time is killed. What a child says, and what ends with it, its owner knows.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from ..clock import Clock, SystemClock
from ..plain import plain, reason_of
from .process import RestartPause, end, spawn
from .tasks import cancel_all

N_WORDS = 50  # lines of stderr that are kept, to say why it ended


class ChildProcess:
    """One life of a process. `sockets` are our ends of the pairs that it was started with: their owner closes them."""

    def __init__(self, process: Process, sockets: Sequence[socket.socket] = ()) -> None:
        self.process, self.sockets, self.pid = process, sockets, process.pid
        self._said: deque[str] = deque(maxlen=N_WORDS)
        self._reading = asyncio.create_task(_drain(process.stderr, self._said), name="a child's stderr")

    @classmethod
    async def start(cls, module: str, *words: str, n_sockets: int = 0, fds: Sequence[int] = ()) -> ChildProcess:
        """Start a module of this program, which is told the numbers of its sockets and of `fds` before the `words`.

        Raises OSError.
        """
        pairs = [socket.socketpair() for _ in range(n_sockets)]
        passed = [*(theirs.fileno() for _, theirs in pairs), *fds]
        try:
            process = await spawn(
                module, *map(str, passed), *words, pass_fds=passed, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
            )
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        return cls(process, [ours for ours, _ in pairs])

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self.process.returncode is None

    @property
    def ending(self) -> str:
        """How it ended."""
        code = self.process.returncode
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with status {code}"

    @property
    def last_words(self) -> str:
        """What it said last, behind a colon; "" if it said nothing."""
        return f": {self._said[-1]}" if self._said else ""

    def kill(self) -> None:
        """Kill it, if it still lives."""
        with suppress(ProcessLookupError):
            self.process.kill()

    async def end(self, patience_s: float = 0.0) -> bool:
        """Wait for its end for so long, then kill it; return whether it ended by itself. Idempotent."""
        try:
            async with asyncio.timeout(patience_s):
                await self.process.wait()
                return True
        except TimeoutError:
            await end(self.process)
            return False
        finally:
            await asyncio.wait((self._reading,))

    async def discard(self) -> None:
        """End it at once, and close our ends of its sockets: nobody has taken it."""
        for sock in self.sockets:
            sock.close()
        await self.end()


class SupervisedProcess:
    """A child process that is started again whenever it ends, until this is closed.

    `start` begins a life and `converse` speaks with it to its end, closing what it ends with; it has `patience_s` then.
    `lost` hears why a life has ended. In place of that and of our pause, `rest` hears it, waits for the next life, and
    says whether there is to be one. All mutable state: the child of the present life, and the lives so far.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[ChildProcess]],
        converse: Callable[[ChildProcess], Awaitable[str]],
        lost: Callable[[str], None] = lambda _: None,
        *,
        patience_s: float,
        log: logging.Logger,
        clock: Clock | None = None,
        pause: RestartPause | None = None,
        rest: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """`converse` returns why the life ended; "" where it can say no more than how the process ended."""
        self.child: ChildProcess | None = None
        self.n_restarts = 0
        self._name, self._start, self._converse, self._lost = name, start, converse, lost
        self._clock, self._pause = clock or SystemClock(), pause or RestartPause()
        self._patience_s, self._log, self._rest = patience_s, log, rest or self._pause_longer
        self._task = asyncio.create_task(self._run(), name=f"{name} supervisor")

    async def close(self) -> None:
        """End the process and wait for it; idempotent."""
        await cancel_all(self._task)

    async def _run(self) -> None:
        self._born_at = self._clock.now()
        while await self._rest(await self._live()):
            self._born_at = self._clock.now()

    async def _pause_longer(self, why: str) -> bool:
        pause_s = self._pause.after(0.0, self._clock.now() - self._born_at)
        self._log.warning("%s stopped (%s), starting again in %.1f s", self._name, why, pause_s)
        self._lost(why)
        self.n_restarts += 1
        await asyncio.sleep(pause_s)
        return True

    async def _live(self) -> str:
        """Run one life of the process; return why it ended, or cannot begin."""
        try:
            child = self.child = await self._start()
        except OSError as e:
            return f"the {self._name} process cannot be started: {reason_of(e)}"
        try:
            why = await self._converse(child)
        except OSError as e:
            why = reason_of(e)
        finally:
            await asyncio.shield(child.end(self._patience_s))
            self.child = None
        return why or f"it {child.ending}{child.last_words}"


async def _drain(stream: asyncio.StreamReader | None, lines: deque[str]) -> None:
    """Read a child's stderr, so that its pipe never fills; keep the last lines."""
    while stream is not None:
        try:
            line = await stream.readline()
        except ValueError:  # a line over the limit: skip it
            continue
        if not line:
            return
        # llama.cpp repeats what it reads in the model file.
        lines.append(plain(line.decode("utf-8", "replace").rstrip()))

"""The life of a child process: real processes of a few words, by a clock and pauses of the test's own."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable

import psutil
import pytest

from disco_daemon.system import supervised
from disco_daemon.system.process import RestartPause
from disco_daemon.system.supervised import ChildProcess, SupervisedProcess

PATIENCE_S = 30.0
UNTIL_STDIN_ENDS = "import sys; print('here', flush=True); sys.stdin.read()"
DEAF = "import sys, time; print('here', flush=True); time.sleep(3600)"


async def python(code: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=PIPE, stdout=PIPE, stderr=PIPE)


async def child_of(code: str) -> ChildProcess:
    return ChildProcess(await python(code))


class Clock:
    """Time that passes as the test says."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at


class Pauses(RestartPause):
    """None, and what each was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[float, float]] = []

    def after(self, start_s: float, worked_s: float) -> float:
        self.asked.append((start_s, worked_s))
        return 0.0


class Bench:
    """A supervised process whose conversation ends with its stdout, and closes its stdin."""

    def __init__(self, start: Callable[[], Awaitable[ChildProcess]], patience_s: float = PATIENCE_S) -> None:
        self.clock, self.pauses = Clock(), Pauses()
        self.began: asyncio.Queue[ChildProcess] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.why = ""
        self.supervised = SupervisedProcess(
            "test", start, self._converse, self.lost.put_nowait, clock=self.clock, pause=self.pauses,
            patience_s=patience_s, log=logging.getLogger("disco.test"),
        )  # fmt: skip

    async def _converse(self, child: ChildProcess) -> str:
        stdin, stdout = child.process.stdin, child.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            while await stdout.readline():
                self.began.put_nowait(child)
        finally:
            stdin.close()
        return self.why

    async def life(self) -> ChildProcess:
        async with asyncio.timeout(PATIENCE_S):
            return await self.began.get()

    async def ending(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return await self.lost.get()


async def test_one_that_is_killed_is_started_again_after_the_pause_that_its_life_asks_for() -> None:
    bench = Bench(lambda: child_of(UNTIL_STDIN_ENDS))
    first = await bench.life()
    assert bench.supervised.child is first
    bench.clock.at += 42.0
    first.kill()
    assert await bench.ending() == "it was killed by signal 9"
    second = await bench.life()
    assert second.pid != first.pid
    assert (bench.supervised.n_restarts, bench.pauses.asked) == (1, [(0.0, 42.0)])
    await bench.supervised.close()
    assert second.ending == "exited with status 0", "its stdin was closed, and it had time to end"
    assert not psutil.pid_exists(second.pid)
    await bench.supervised.close()


async def test_its_last_words_say_why_unless_the_conversation_knows_better() -> None:
    bench = Bench(lambda: child_of("import sys; sys.exit('\\x1b[31mno memory\\nis left')"))
    assert await bench.ending() == "it exited with status 1: is left"
    bench.why = "it sent what is no message"
    while (why := await bench.ending()) != bench.why:  # lives that began before
        assert "is left" in why
    await bench.supervised.close()


async def test_one_that_cannot_be_started_is_tried_again() -> None:
    n = 0

    async def start() -> ChildProcess:
        nonlocal n
        n += 1
        if n < 3:
            raise OSError("no more processes")
        return await child_of(UNTIL_STDIN_ENDS)

    bench = Bench(start)
    for _ in range(2):
        assert await bench.ending() == "the test process cannot be started: no more processes"
    await bench.life()
    await bench.supervised.close()


async def test_one_that_does_not_end_in_its_time_is_killed() -> None:
    bench = Bench(lambda: child_of(DEAF), patience_s=0.1)
    child = await bench.life()
    await bench.supervised.close()
    assert not psutil.pid_exists(child.pid)
    assert child.ending == "was killed by signal 9"
    assert await child.end(), "it is over, as often as one asks"


async def test_a_child_ends_with_our_end_of_its_socket_and_none_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    child = await ChildProcess.start("disco_daemon.link.relay.worker", n_sockets=1)
    assert len(child.sockets) == 1
    child.sockets[0].close()
    async with asyncio.timeout(PATIENCE_S):
        assert await child.process.wait() == 0
    await child.discard()
    made: list[socket.socket] = []
    pair = socket.socketpair

    def kept() -> tuple[socket.socket, socket.socket]:
        made.extend(found := pair())
        return found

    async def refuse(*_: object, **__: object) -> Process:
        raise OSError("no more processes")

    monkeypatch.setattr(socket, "socketpair", kept)
    monkeypatch.setattr(supervised, "spawn", refuse)
    with pytest.raises(OSError, match="no more"):
        await ChildProcess.start("disco_daemon.link.relay.worker", n_sockets=2)
    assert [sock.fileno() for sock in made] == [-1] * 4

"""Processes of this program that neither a cancellation nor our own end can leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import subprocess
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .program import command, environment

Result = TypeVar("Result")

PAUSE_FIRST_S = 0.1  # a crash is mostly a one-off: be back before the next request
PAUSE_MAX_S = 30.0  # the longest pause between two starts
PAUSE_JITTER = 0.5  # of a pause: several daemons whose engines fell together do not load together
USEFUL_S = 10.0  # a life that worked for longer, and longer than it took to start, says nothing against the next one
LONGEST_LINE = 2**24  # bytes of a job's report in one line; a table of all that was measured takes some thousand


class RestartPause:
    """How long to wait before a process that has ended is started again.

    Each life in a row that was of little use doubles the pause, so that starts do not take the machine; a useful one
    begins anew, however often that happens: whoever reads an answer waits for the restart.
    """

    def __init__(self) -> None:
        self._next_s = PAUSE_FIRST_S

    def after(self, start_s: float, worked_s: float) -> float:
        """Return the pause, s, behind a life that took `start_s` until it was ready, and worked for `worked_s`."""
        if worked_s > max(USEFUL_S, start_s):
            self._next_s = PAUSE_FIRST_S
        pause_s = self._next_s * random.uniform(1 - PAUSE_JITTER, 1)
        self._next_s = min(PAUSE_MAX_S, 2 * self._next_s)
        return pause_s


async def spawn(module: str, *args: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a module of this program; `options` as `asyncio.create_subprocess_exec` takes them. Raises OSError.

    A cancellation waits for the fork and takes it back: asyncio's own clean-up of a subprocess whose creation is
    cancelled can wait for ever (seen on CPython 3.11).
    """
    starting = asyncio.create_subprocess_exec(*command(module, *args), env=environment(module=module), **options)
    fork = asyncio.ensure_future(starting)
    try:
        return await asyncio.shield(fork)
    except asyncio.CancelledError:
        await end(await fork)
        raise


def start(module: str, *args: str, sock: socket.socket) -> subprocess.Popen[bytes]:
    """Start a module that is told the number of `sock` last, and ends with the other end of it. Raises OSError."""
    words = command(module, *args, str(sock.fileno()))
    return subprocess.Popen(words, pass_fds=[sock.fileno()], env=environment(module=module), stdin=subprocess.DEVNULL)


async def run_job(
    module: str,
    job: bytes,
    decode: Callable[[bytes], Any],
    progress: Callable[[str], None],
    result: type[Result],
    error: type[Exception],
    *,
    name: str,
    timeout_s: float,
    hint: str = "memory may be short",
) -> Result:
    """Run a module with a job as the one line on its stdin; return the result, which is the last that it prints.

    A reply with a `text` goes to `progress` at once; one with a `message` says why there is no result. Lines that
    `decode` refuses with a MsgspecError are none: a library may print something. A cancellation kills the process.
    Raises OSError, and `error` with a sentence for the user, also after having killed it at the end of its time.
    """
    process = await spawn(module, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=LONGEST_LINE)
    reply: Any = None
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(job + b"\n")  # left open: the child ends with that pipe, should we be killed
        async with asyncio.timeout(timeout_s):
            while line := await process.stdout.readline():
                with contextlib.suppress(msgspec.MsgspecError):
                    reply = decode(line)
                    if (text := getattr(reply, "text", None)) is not None:
                        progress(text)
            code = await process.wait()
    except TimeoutError:
        msg = f"{name} gave no result in {timeout_s:g} s"
        raise error(msg) from None
    finally:
        await asyncio.shield(end(process))
    if isinstance(reply, result):
        return reply
    raise error(getattr(reply, "message", f"{name} ended without a result (exit status {code}): {hint}"))


def run(
    module: str, *args: str, line: bytes = b"", timeout_s: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a module of this program to its end, with `line` on its stdin, which ends when we do. Blocks.

    Raises OSError, and subprocess.TimeoutExpired after having killed it.
    """
    read_end, write_end = os.pipe()
    try:
        with subprocess.Popen(
            command(module, *args), stdin=read_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        ) as process:
            os.write(write_end, line)
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)
    finally:
        os.close(read_end)
        os.close(write_end)


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a process if it still lives, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def waited_s(task: Path) -> float:
    """Return how long a thread was ready to run and had no processor, s, since it began.

    `task` is its folder in /proc, or that of a process for its main thread. It is 0 where the kernel does not say, as
    Linux does, and for one that has ended.
    """
    try:
        return 1e-9 * int((task / "schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0

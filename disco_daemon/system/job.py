"""One piece of work in a process of its own: both ends of what it is told, what it says meanwhile, and its result.

It is killed with whoever waits for it, and ends when that one has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from .control_socket import BlockingControl, ControlClosedError, ControlSocket
from .supervised import ChildProcess

Result = TypeVar("Result", bound=msgspec.Struct)
Job = TypeVar("Job")
Prepared = TypeVar("Prepared")

ENDING_S = 1.0  # for a process that has closed its socket, until it is killed


class JobProgress(msgspec.Struct, tag=True, frozen=True):
    """A line for the user on what is being done."""

    text: str


class JobFailed(msgspec.Struct, tag=True, frozen=True):
    """Why there is no result, fit for a user."""

    message: str


async def run_job(
    module: str,
    job: msgspec.Struct,
    progress: Callable[[str], None],
    result: type[Result],
    error: type[Exception],
    *,
    name: str,
    timeout_s: float,
    hint: str = "memory may be short",
) -> Result:
    """Have a module do a job, and return its result; each line that it says meanwhile goes to `progress`.

    A cancellation kills the process. Raises OSError, and `error` with a sentence for the user, also after having
    killed it at the end of its time.
    """
    reply: msgspec.msgpack.Decoder[Result | JobProgress | JobFailed]
    reply = msgspec.msgpack.Decoder(result | JobProgress | JobFailed)
    child = await ChildProcess.start(module, n_sockets=1)
    sock = ControlSocket(child.sockets[0])
    said: Result | JobProgress | JobFailed
    try:
        async with asyncio.timeout(timeout_s):
            await sock.send(job)
            while isinstance(said := reply.decode((await sock.receive())[0]), JobProgress):
                progress(said.text)
    except TimeoutError:
        said = JobFailed(f"{name} gave no result in {timeout_s:g} s")
    except (ControlClosedError, msgspec.MsgspecError):
        await child.end(ENDING_S)
        said = JobFailed(f"{name} {child.ending} without a result{child.last_words or f': {hint}'}")
    finally:
        sock.close()
        await asyncio.shield(child.end())
    if isinstance(said, JobFailed):  # raised behind all handlers: no error of a socket stands behind its words
        raise error(said.message)
    assert not isinstance(said, JobProgress)
    return said


class JobSocket:
    """The end of the process that does the job: the socket whose number is its first word."""

    def __init__(self) -> None:
        self._control = BlockingControl(socket.socket(fileno=int(sys.argv[1])))

    def job(
        self, kind: type[Job], prepare: Callable[[Job], Prepared], end: Callable[[Job], object] = lambda _: None
    ) -> tuple[Job, Prepared]:
        """Return the job, and what `prepare` makes of it, which confines this process: it still has one thread only.

        From then on this process ends with the one that has given the job, after `end`. Raises OSError.
        """
        job = msgspec.msgpack.decode(self._control.receive()[0], type=kind)
        prepared = prepare(job)

        def give_up() -> None:
            end(job)
            os._exit(1)

        self._control.end_with(give_up)
        return job, prepared

    def progress(self, text: str) -> None:
        """Say how it goes on."""
        self._control.send(JobProgress(text))

    def done(self, result: msgspec.Struct) -> None:
        """Give the result."""
        self._control.send(result)

    @contextlib.contextmanager
    def refusing(self, *errors: type[Exception]) -> Iterator[None]:
        """Say of such an error why there is no result."""
        try:
            yield
        except errors as e:
            self._control.send(JobFailed(str(e)))

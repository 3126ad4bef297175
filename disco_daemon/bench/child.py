"""The processes of a measurement: started with this very code, heard, and always ended."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import disco_daemon
from disco_daemon.errors import DiscoError

START_S = 60.0  # until a child listens, s; a cold start reads its modules from disk
STOP_S = 5.0  # from SIGTERM to SIGKILL, s
EQUAL = {"DISCO_POLICY_UNEQUAL": "race"}
NOT_STOPPED = {"DISCO_DELIVERY_STOP_REPETITION": "false"}
LOG_TAIL = 2000  # of a child's stderr shown when it fails, characters


class BenchError(DiscoError):
    """The measurement failed or its answers were wrong: there is no figure."""


def child_env(folder: Path) -> dict[str, str]:
    """Return the children's environment: this very code, none of the user's settings, files or proxies.

    Their Unix sockets are where this process looks for them; each is named by its daemon's port, and goes with it. A
    small model may stand for either side here, so both count as equal.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("DISCO_")}
    package = str(Path(disco_daemon.__file__).parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, env.get("PYTHONPATH")]))
    env["OPENAI_API_KEY"] = "loopback"
    env["NO_PROXY"] = env["no_proxy"] = "127.0.0.1,localhost"
    for name in ("CONFIG_HOME", "DATA_HOME", "CACHE_HOME"):
        env[f"XDG_{name}"] = str(folder)
    return env | EQUAL


async def start(argv: Sequence[str], env: Mapping[str, str], log: Path) -> asyncio.subprocess.Process:
    """Start a process with pipes for stdin and stdout, and stderr in a file."""
    pipe = asyncio.subprocess.PIPE
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        return await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=descriptor, env=env)
    finally:
        os.close(descriptor)


Starter = Callable[[Sequence[str], Mapping[str, str], Path], Awaitable[asyncio.subprocess.Process]]  # like `start`


@asynccontextmanager
async def child(
    argv: Sequence[str], folder: Path, name: str, env: Mapping[str, str] | None = None, starter: Starter = start
) -> AsyncIterator[str]:
    """Run a child as `child_process` does; yield its address alone."""
    async with child_process(argv, folder, name, env, starter) as (url, _):
        yield url


@asynccontextmanager
async def child_process(
    argv: Sequence[str], folder: Path, name: str, env: Mapping[str, str] | None = None, starter: Starter = start
) -> AsyncIterator[tuple[str, int]]:
    """Run a child that says `{"url": …}` in a line of stdout; yield that address and its process id, end it afterwards.

    `env` adds variables to those of `child_env`; with a PYTHONPATH of its own the code is another checkout's, which may
    not know our settings. A daemon with a device stops no answers that repeat themselves, as
    a small model's do: a measurement, or a test, wants as many tokens as it asks for.
    """
    log = folder / f"{name}.log"
    more = NOT_STOPPED if "up" in argv and "--no-device" not in argv else {}
    ours, its = child_env(folder) | more, dict(env or {})
    if "PYTHONPATH" in its:
        ours = {name: value for name, value in ours.items() if name not in EQUAL | NOT_STOPPED}
    process = await starter(argv, ours | its, log)
    try:
        assert process.stdout is not None
        url: str | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while url is None and (line := await process.stdout.readline()):
                    with suppress(ValueError, KeyError, TypeError):  # some other line
                        url = json.loads(line)["url"]
        if url is None:
            tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip()
            raise BenchError(f"the {name} did not start listening within {START_S:g} s or ended:\n{tail}")
        yield url, process.pid
    finally:
        await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """End a child: SIGTERM, then SIGKILL."""
    with suppress(ProcessLookupError):
        process.terminate()
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.communicate(), STOP_S)  # reads stdout to its end: a full pipe blocks a child
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

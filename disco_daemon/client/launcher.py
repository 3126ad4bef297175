"""Launches a daemon as a child process that ends with the program that asks it, such as the terminal UI or an agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from ..plain import reason_of
from ..system.net import hostname, is_loopback
from ..system.program import verb
from .once import NOT_RUNNING, DaemonError
from .stream import Link

STOP_TIMEOUT_S = 8.0  # this window's answers have ended by then; those of other clients get this long
START_S, SOON_S = 60.0, 0.2  # how long a daemon that is starting is waited for, and between two looks, s
SERVICE_TIMEOUT_S = 120.0  # for installing the service, which starts the daemon


def startable(root: str) -> bool:
    """Whether a daemon at this address would run on this machine."""
    return is_loopback(hostname(root))


class DaemonLauncher:
    """Starts `disco up` for an address, with its output in `log`, and stops it again."""

    def __init__(self, root: str, log: Path | None) -> None:
        self._root = root
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Whether the launched daemon runs."""
        return self._process is not None and self._process.returncode is None

    @property
    def has_failed(self) -> bool:
        """Whether the launched daemon has ended by itself."""
        return self._process is not None and self._process.returncode is not None

    def command(self) -> list[str]:
        """Return the command line of the daemon."""
        parts = urlsplit(self._root)
        where = ["--host", parts.hostname or "127.0.0.1", "--port", str(parts.port or 4747)]
        return verb("up", *where, "--until-eof")

    async def start(self) -> None:
        """Start the daemon, unless it runs. Raises OSError."""
        if self.running:
            return
        with contextlib.ExitStack() as stack:
            out: int = asyncio.subprocess.DEVNULL
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                opened = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                stack.callback(os.close, opened)
                out = opened
            # A session of its own: Ctrl+C in this terminal is for the window. Its stdin ends when this process does,
            # also if the terminal was closed or we were killed.
            self._process = await asyncio.create_subprocess_exec(
                *self.command(), stdin=asyncio.subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
            )

    def service_command(self) -> list[str]:
        """Return the command line that installs the service."""
        return verb("service", "install")

    async def install_service(self) -> tuple[bool, str]:
        """Install the service, which starts a daemon now and at each login. Returns (success, output)."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self.service_command(), stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=asyncio.subprocess.STDOUT
            )
        except OSError as e:
            return False, reason_of(e)
        try:
            said, _ = await asyncio.wait_for(process.communicate(), SERVICE_TIMEOUT_S)
        except TimeoutError:
            return False, "the service manager does not answer"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode == 0, said.decode("utf-8", "replace").strip()

    def hand_over(self) -> None:
        """Have the daemon end with the program that this process becomes. To be called once.

        It is told this process's id, which that program keeps, since a pipe would also be held by what the program
        leaves behind. Where no process can be waited for by its id (macOS, Linux before 5.3), it holds the pipe still.
        """
        if self._process is None or self._process.stdin is None:
            return
        pipe: int = self._process.stdin.get_extra_info("pipe").fileno()
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (AttributeError, OSError):
            os.set_inheritable(pipe, True)
        else:
            with contextlib.suppress(BrokenPipeError):
                os.write(pipe, b"%d\n" % os.getpid())

    def why_ended(self) -> str:
        """Return what is known of why the daemon has ended: what killed it, or the last line of its log."""
        if self._process is not None and (code := self._process.returncode or 0) < 0:
            return f"it was killed by signal {-code}."
        if self._log is None:
            return ""
        with contextlib.suppress(OSError):
            lines = self._log.read_text("utf-8", "replace").strip().splitlines()
            return lines[-1].removeprefix("disco: ") if lines else ""
        return ""

    async def close(self) -> None:
        """Stop the daemon, if it runs."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def have_daemon(
    launcher: DaemonLauncher, root: str, key: str, until: str, say: Callable[[str], None], *, settled: bool = False
) -> None:
    """Start a daemon if none runs and this machine could run it, and wait until it answers. Raises DaemonError.

    `until` says when it ends, such as "ends with this chat". With `settled` its model is waited for, too: what that can
    do is known then.
    """
    async with Link(root, key) as link:
        for _ in range(int(START_S / SOON_S)):
            try:
                state = await link.state()
            except DaemonError as e:
                if e.code != NOT_RUNNING or not startable(root):
                    return  # the question itself says what is wrong
                if launcher.has_failed:
                    msg = f"no daemon was running, and the one that was started has ended: {launcher.why_ended()}"
                    raise DaemonError(msg) from e
                if not launcher.running:
                    say(f"No daemon was running: one is starting, and {until} …")
                    await _started(launcher)
            else:
                if not settled or state["endpoints"].get("device", {}).get("state") != "loading":
                    return
            await asyncio.sleep(SOON_S)


async def _started(launcher: DaemonLauncher) -> None:
    try:
        await launcher.start()
    except OSError as e:
        raise DaemonError(f"no daemon runs, and none can be started: {reason_of(e)}") from e

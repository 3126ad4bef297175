"""Runs a daemon until SIGINT or SIGTERM; at SIGHUP it reads its configuration again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..errors import ConfigError
from ..system.tasks import TaskSet, cancel_all
from .daemon import Daemon
from .tasks.collector import collect_at_leisure

log = logging.getLogger("disco.daemon")

SWITCH_INTERVAL_S = 0.001  # a fit in its thread gives way to the loop within this time
STDIN = 0


async def run_until_signal(
    daemon: Daemon, announce: Callable[[str], None], *, until_eof: bool = False, early: Sequence[int] = ()
) -> None:
    """Serve until SIGINT or SIGTERM, then let running answers end; a second signal ends everything at once.

    With `until_eof` the end of stdin asks for the same, however the parent process has ended. It does not count as a
    signal: a parent that sends one and closes its end of the pipe asks once. A line with a process id there has the end
    of that process count in place of stdin's (`client.launcher.DaemonLauncher.hand_over`). `early` are the signals that
    came before this began to listen to them: they are obeyed as if they came now.
    """
    stop, signalled_before = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if signalled_before.is_set():
            log.warning("a second signal: ending at once")
            os._exit(128 + number)
        signalled_before.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    if signal.SIGTERM in early:
        on_signal(signal.SIGTERM)

    def on_stdin() -> None:
        said = os.read(STDIN, 4096)
        if not said or said.strip().isdigit():
            loop.remove_reader(STDIN)
            if not said or not _on_end(int(said), stop.set):
                stop.set()

    if until_eof:
        try:
            loop.add_reader(STDIN, on_stdin)
        except OSError as e:  # a file, or /dev/null, whose end is never reported
            msg = "--until-eof is for a pipe as standard input, which ends with the process that holds it"
            raise ConfigError(msg) from e
    reloads = TaskSet()

    def on_hangup() -> None:
        reloads.begin(_reload(daemon), "reload")

    async with daemon.serving() as url, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(lambda: cancel_all(*reloads))
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        if signal.SIGHUP in early:
            on_hangup()
        # Objects of the imports live for ever: they are frozen, or each full collection would walk all of them and stop
        # every stream for tens of milliseconds. The few of them that are garbage, some 3,000, are not looked for: that
        # takes a tenth of a start.
        gc.freeze()
        # A fit in its thread gives way to the loop within a millisecond, not five.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        collecting = asyncio.create_task(collect_at_leisure(lambda: len(daemon.conductor.in_flight)), name="collector")
        stack.push_async_callback(lambda: cancel_all(collecting))
        announce(url)
        daemon.manager.ready(f"listens on {url}")
        await stop.wait()
        running = len(daemon.conductor.in_flight)
        daemon.manager.stopping(f"{running} answers are running")
        log.info("stopping; %d answers are running", running)
        patience_s = daemon.config.api.drain_s
        if late := await daemon.conductor.in_flight.drain(patience_s):
            log.warning("%d answers were not whole after %g s; their readers were told", late, patience_s)


def _on_end(pid: int, call: Callable[[], None]) -> bool:
    """Call once a process has ended; return whether there is one with that id whose end will be heard of."""
    try:
        watched = os.pidfd_open(pid)
    except (AttributeError, OSError, OverflowError):
        return False
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(watched)
        os.close(watched)
        call()

    loop.add_reader(watched, ended)
    return True


async def _reload(daemon: Daemon) -> None:
    """Reload at a SIGHUP. A wrong configuration changes nothing; the log says what is wrong."""
    daemon.manager.reloading()
    try:
        await daemon.reload()
    except ConfigError as e:
        log.warning("the configuration was not taken up, the old one stays: %s", e)
    except Exception:  # a bug of ours: the old configuration still answers
        log.exception("the configuration was not taken up, the old one stays")
    finally:
        daemon.manager.ready(f"listens on {daemon.url}")


def announce_json(url: str) -> None:
    """Print the URL as one JSON line, for a parent process."""
    sys.stdout.write(json.dumps({"url": url, "pid": os.getpid(), "version": __version__}) + "\n")
    sys.stdout.flush()

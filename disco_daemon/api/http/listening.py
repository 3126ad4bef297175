"""Opens the doors: the TCP port and the Unix socket, each handed over by a service manager or made here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from aiohttp import web

from ...errors import ConfigError
from ...system import socketfile
from ...system.net import is_loopback
from ..doors import DOOR
from .guard import CONFIG, ApiConfig

log = logging.getLogger("disco.api")

BACKLOG = 128  # connections that wait to be taken
GIVE_KEY = "`disco config set api.key SECRET`, or `disco keys add NAME` for a key with a name"
BIND_TIMEOUT_S = 10.0  # a host's name is looked up


@asynccontextmanager
async def open_doors(
    runner: web.AppRunner, config: ApiConfig, port: int, given: Sequence[socket.socket], second: int = 0
) -> AsyncIterator[str]:
    """Serve at both doors until the context ends; yield the base URL. `given` are sockets that listen already.

    The same is served at a `second` port; 0 is none, and where it cannot be had, the log says so.

    Raises ConfigError when the port is taken, or open to others without a key.
    """
    async with AsyncExitStack() as stack:
        handed = [taken for taken in given if taken.family != socket.AF_UNIX]
        tcp = handed or await _bind(config.host, port)
        for taken in tcp:
            stack.callback(taken.close)
        own = tcp[0].getsockname()
        for taken in tcp:
            _require_key(taken.getsockname()[0], config, handed=bool(handed))
        if not all(is_loopback(taken.getsockname()[0]) for taken in tcp):
            runner.app[CONFIG] = replace(config, is_open=True)
        local, path = _take_over(given)
        if local is None:
            local, path = await _make_socket(own[1], stack)
        more = await _second(config, second, own[1])
        for taken in more:
            stack.callback(taken.close)
        runner.app[DOOR].path = path
        await runner.setup()
        stack.push_async_callback(runner.cleanup)  # before any socket is closed: asyncio would not find it
        # The Unix socket first: a client that waited at the port then finds it.
        for taken in (*([local] if local is not None else []), *tcp, *more):
            await web.SockSite(runner, taken, backlog=BACKLOG).start()
        host = own[0] if handed else config.host
        yield f"http://{f'[{host}]' if ':' in host else host}:{own[1]}/v1"


async def _second(config: ApiConfig, port: int, first: int) -> list[socket.socket]:
    """Return sockets on a second port; none if there is to be none, or if it cannot be had, which is no failure."""
    if port in (0, first):
        return []
    found: list[socket.socket] = []
    try:
        found = await _bind(config.host, port, "another program, perhaps Ollama itself, has it")
        for taken in found:
            _require_key(taken.getsockname()[0], config, handed=False)
    except ConfigError as e:
        for taken in found:
            taken.close()
        log.warning("api.ollama_port: %s", e)
        return []
    log.info("api.ollama_port: also listening on %s:%d", config.host, port)
    return found


def _require_key(host: str, config: ApiConfig, *, handed: bool) -> None:
    """Raise ConfigError where other machines could come in without a key, or none could."""
    if is_loopback(host) or config.key or len(config.keys):
        return
    mend = "`disco service install`, which makes it as the settings say, or " if handed else ""
    who = "the service manager hands over a socket on" if handed else "refusing to listen on"
    raise ConfigError(f"{who} {host}, open to others, and there is no API key: {mend}{GIVE_KEY}")


async def _bind(host: str, port: int, maybe: str = "is a daemon running already? (--port)") -> list[socket.socket]:
    """Return sockets on all addresses of a host, with one port. Raises ConfigError, which says what `maybe` is why."""
    found: list[socket.socket] = []
    try:
        async with asyncio.timeout(BIND_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            places = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(places):
            made = socket.socket(family, socket.SOCK_STREAM)
            found.append(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((address[0], found[0].getsockname()[1] if len(found) > 1 else port, *address[2:]))
    except OSError as e:
        for made in found:
            made.close()
        why = "its name is not found in time" if isinstance(e, TimeoutError) else e.strerror or e
        raise ConfigError(f"cannot listen on {host}:{port}: {why}; {maybe}") from e
    return found


def _take_over(given: Sequence[socket.socket]) -> tuple[socket.socket | None, str]:
    """Return a service manager's Unix socket and its path. Raises ConfigError if other users may use it."""
    for taken in given:
        if taken.family == socket.AF_UNIX:
            path = os.fsdecode(taken.getsockname())
            there = path.startswith("/") and socketfile.is_private(Path(path), kind=stat.S_IFSOCK)
            if not there:
                msg = (
                    f"the service manager hands over the Unix socket {path!r}, which others may use: "
                    "`disco service install` makes one for you alone"
                )
                raise ConfigError(msg)
            return taken, path
    return None, ""


async def _make_socket(port: int, stack: AsyncExitStack) -> tuple[socket.socket | None, str]:
    """Return our own Unix socket, open until the stack ends; none where it cannot be made: TCP is served all the same.

    Raises ConfigError if another daemon has it.
    """
    making = socketfile.listening(port)
    try:
        made = await asyncio.to_thread(making.__enter__)
    except socketfile.SocketTakenError as e:
        raise ConfigError(str(e)) from e
    except socketfile.SocketFileError as e:
        log.warning("no Unix socket, so that controls are served over TCP with a key only: %s", e)
        return None, ""
    stack.push_async_callback(_end, making)
    return made, os.fsdecode(made.getsockname())


async def _end(making: contextlib.AbstractContextManager[socket.socket]) -> None:
    await asyncio.to_thread(making.__exit__, None, None, None)

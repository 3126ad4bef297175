"""A host on another machine, as the product reaches it: two relays with mutual TLS, and a slow line between them.

    home's engine - relay - proxy - relay - the host's process

The relays are the product's processes, and so is the host; the proxy is a process as well, since what passes it must
wait for nobody. In place of both daemons is a thread of home's process, which has nothing to do once a host is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from disco_daemon.bench.child import BenchError
from disco_daemon.link.protocol import Build, Welcome
from disco_daemon.link.relay.handshake import OfferHost
from disco_daemon.link.relay.orders import (
    Address,
    HomeReached,
    HostOffered,
    Identity,
    LendHosts,
    Listening,
    RelayReady,
    ServeMembers,
)
from disco_daemon.link.relay.relay_process import RelayProcess
from disco_daemon.link.trust.certificates import new_request
from disco_daemon.link.trust.pairing import Issuer
from disco_daemon.system import process

from ..split.proxy import SlowLine, proxy_process

LOOPBACK = "127.0.0.1"
START_S = 60.0  # for relays, proxy and a host's process, on a machine that others use
END_S = 10.0
BUILD = Build(disco="0", llama="0", model="m", n_layers=2, n_embd=1024, n_vocab=1000)  # relays only compare both sides'
WELCOME = Welcome(build=BUILD, cut=1, n_ctx=1024, max_answers=1, credits=1024)


@dataclass
class RelayedHosts:
    """Hosts behind a line; home's relay may run on the processors `home_cpus`, the other machine on `cpus`.

    `open` is that of an engine. All mutable state: the thread with its loop, the hosts' processes, and the sockets of
    hosts that nobody has taken yet.
    """

    line: SlowLine
    home_cpus: Sequence[int] = ()
    cpus: Sequence[int] = ()
    _offered: queue.SimpleQueue[socket.socket | BaseException] = field(default_factory=queue.SimpleQueue)
    _between: list[int] = field(default_factory=list)
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _thread: threading.Thread | None = None

    def open(self) -> socket.socket:
        """Return home's end of the way to a host. Raises BenchError if there is none in time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="daemons of both machines", daemon=True)
            self._thread.start()
        try:
            found = self._offered.get(timeout=START_S)
        except queue.Empty:
            found = TimeoutError(f"no host was offered within {START_S:g} s")
        if isinstance(found, BaseException):
            msg = f"no host behind the line: {found}"
            raise BenchError(msg) from found
        found.setblocking(True)
        return found

    def pids(self) -> list[int]:
        """Return the processes between home and the host."""
        return list(self._between)

    def close(self) -> None:
        """End everything."""
        if self._thread is not None:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(END_S)
        while not self._offered.empty():
            if isinstance(sock := self._offered.get(), socket.socket):
                sock.close()
        for host in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.wait(END_S)
            host.kill()
            host.wait()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except (OSError, TimeoutError, BenchError) as e:
            self._offered.put(e)

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        port: asyncio.Future[int] = self._loop.create_future()
        ready = asyncio.Event()

        def at_home(event: object) -> None:
            match event:
                case Listening(port=number) if number and not port.done():
                    port.set_result(number)

        def there(event: object) -> None:
            if isinstance(event, RelayReady):
                ready.set()

        home, other = RelayProcess(at_home, self._take), RelayProcess(there, self._take)
        try:
            with tempfile.TemporaryDirectory() as name:
                issuer = Issuer(Path(name) / "peers")
                role = _joined(issuer)
                home.start()
                other.start()
                home.serve(
                    ServeMembers(
                        identity=issuer.identity(), listen=Address(host=LOOPBACK, port=0), members=issuer.members(),
                        welcome=WELCOME,
                    )
                )  # fmt: skip
                async with asyncio.timeout(START_S):
                    listens = await port
                    await ready.wait()
                async with proxy_process(listens, self.line) as (proxy, by):
                    for relay, cpus in ((home, self.home_cpus), (other, self.cpus)):
                        assert relay.pid is not None
                        _pin(relay.pid, cpus)
                        self._between.append(relay.pid)
                    self._between.append(proxy)
                    address = Address(host=LOOPBACK, port=by)
                    offer = OfferHost(build=BUILD, has=(), n_threads=1)
                    other.join(LendHosts(identity=role, name="home", addresses=(address,), offer=offer))
                    await self._ended.wait()
        finally:
            await asyncio.gather(home.close(), other.close())

    def _take(self, event: HostOffered | HomeReached, sock: socket.socket) -> None:
        """Home gets a host; the other machine starts the process for it."""
        if isinstance(event, HostOffered):
            self._offered.put(sock)
            return
        with sock:
            host = process.start("disco_daemon.engine.hosts.process", sock=sock)
        _pin(host.pid, self.cpus)
        self._started.append(host)


def _joined(issuer: Issuer) -> Identity:
    """Return what a machine has that has just joined."""
    code = issuer.new_code([Address(host=LOOPBACK, port=1)], "home")
    key, csr = new_request("other")
    return Identity(certificate=issuer.grant(code.secret, csr, "other"), key=key, ca=issuer.identity().ca)


def _pin(pid: int, cpus: Sequence[int]) -> None:
    if cpus and sys.platform == "linux":
        os.sched_setaffinity(pid, cpus)

"""Talks to systemd from the daemon: sd_notify(3), the watchdog, and the listening sockets that systemd hands over.

The protocol is a datagram of lines `NAME=value` to the socket that NOTIFY_SOCKET names; no library is needed for it.
Without a service manager that asks for it, everything here does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import MutableMapping

log = logging.getLogger("disco.service")

FIRST_FD = 3  # SD_LISTEN_FDS_START
LEAST_WATCHDOG_S = 0.05  # between two watchdog messages


class ServiceChannel:
    """The service manager that started this process, if any.

    Removes its variables from `env`: they are for this process only, and a child that had them could speak in its
    name.
    """

    def __init__(self, env: MutableMapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        self._address = env.pop("NOTIFY_SOCKET", "")
        usec, pid = env.pop("WATCHDOG_USEC", ""), env.pop("WATCHDOG_PID", "")
        asked = usec.isdigit() and pid in ("", str(os.getpid()))
        self.watchdog_s: float | None = int(usec) / 1e6 if asked and self._address else None
        self._n_sockets = _n_sockets(env)

    @property
    def present(self) -> bool:
        """Whether a service manager listens."""
        return bool(self._address)

    def sockets(self) -> list[socket.socket]:
        """Return the listening sockets that were handed over, once: they belong to the caller then."""
        n, self._n_sockets = self._n_sockets, 0
        found = []
        for number in range(FIRST_FD, FIRST_FD + n):
            os.set_inheritable(number, False)
            taken = socket.socket(fileno=number)
            taken.setblocking(False)
            found.append(taken)
        return found

    def tell(self, **state: str | int) -> bool:
        """Send assignments, such as `READY=1`; return False if no manager listens, or sending fails."""
        if not self._address:
            return False
        text = "\n".join(f"{name}={value}" for name, value in state.items()).encode()
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)) as sending:
                sending.setblocking(False)
                sending.connect(address)
                sending.sendall(text)
        except OSError as e:
            log.warning("the service manager cannot be told %s: %s", ", ".join(state), e)
            return False
        return True

    def ready(self, status: str) -> None:
        """Say that the daemon serves."""
        self.tell(READY=1, STATUS=_line(status), MAINPID=os.getpid())

    def reloading(self) -> None:
        """Say that the daemon reads its configuration again; `ready` ends that."""
        self.tell(RELOADING=1, MONOTONIC_USEC=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)

    def stopping(self, status: str) -> None:
        """Say that the daemon takes no more requests."""
        self.tell(STOPPING=1, STATUS=_line(status))

    async def watch(self) -> None:
        """Report that the event loop turns, again and again until cancelled; return at once if no watchdog runs."""
        if self.watchdog_s is None:
            return
        every = max(LEAST_WATCHDOG_S, self.watchdog_s / 3)
        while True:
            self.tell(WATCHDOG=1)
            await asyncio.sleep(every)


def _n_sockets(env: MutableMapping[str, str]) -> int:
    """Return how many sockets were handed to this process."""
    pid, n = env.pop("LISTEN_PID", ""), env.pop("LISTEN_FDS", "")
    env.pop("LISTEN_FDNAMES", None)
    return int(n) if pid == str(os.getpid()) and n.isdigit() else 0


def _line(text: str) -> str:
    return " ".join(text.split())

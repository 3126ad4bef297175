"""Hosts of this machine: processes that compute inner layers for an engine, each behind a socket pair."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from disco_daemon.system import process

ENDED_S = 5.0  # for a host whose home has gone


@dataclass(slots=True)
class LocalHosts:
    """Starts processes, and ends them. Each may run on the processors `cpus` (empty: on all), where the system can."""

    cpus: Sequence[int] = ()
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _spare: socket.socket | None = None

    def prepare(self) -> None:
        """Start a host in advance, as the daemon does, if there is none. Raises OSError."""
        if self._spare is None:
            self._spare = self._start()

    def open(self) -> socket.socket:
        """Start a host, or take the one that is there; return home's end of the socket to it. The host ends with that.

        Raises OSError.
        """
        ours, self._spare = self._spare, None
        return self._start() if ours is None else ours

    def _start(self) -> socket.socket:
        for host in self.started:
            host.poll()  # those that have ended are not kept as zombies
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                host = process.start("disco_daemon.engine.hosts.process", sock=theirs)
            except OSError:
                ours.close()
                raise
        if self.cpus and sys.platform == "linux":
            os.sched_setaffinity(host.pid, self.cpus)
        self.started.append(host)
        return ours

    def close(self) -> None:
        """Wait until all have ended, whose sockets are closed by now; those that do not are killed."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        for host in self.started:
            try:
                host.wait(ENDED_S)
            except subprocess.TimeoutExpired:
                host.kill()
                host.wait()

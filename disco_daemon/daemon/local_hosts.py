"""Hosts of this machine: processes that compute inner layers for an engine, each behind a socket pair."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from .. import program

ENDED_S = 5.0  # for a host whose home has gone


@dataclass(slots=True)
class LocalHosts:
    """Starts processes, and ends them. Each may run on the processors `cpus` (empty: on all), where the system can."""

    cpus: Sequence[int] = ()
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def open(self) -> socket.socket:
        """Start a host; return home's end of the socket to it. The host ends with that. Raises OSError."""
        for process in self.started:
            process.poll()  # those that have ended are not kept as zombies
        ours, theirs = socket.socketpair()
        with theirs:
            command = program.command("disco_daemon.engine.hosts.process", str(theirs.fileno()))
            try:
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=program.environment(), stdin=subprocess.DEVNULL
                )
            except OSError:
                ours.close()
                raise
        if self.cpus and sys.platform == "linux":
            os.sched_setaffinity(process.pid, self.cpus)
        self.started.append(process)
        return ours

    def close(self) -> None:
        """Wait until all have ended, whose sockets are closed by now; those that do not are killed."""
        for process in self.started:
            try:
                process.wait(ENDED_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

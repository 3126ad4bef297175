"""The keeper: `python -m disco_daemon.fleet_keeper.keeper FD`, the one process that knows Ray.

At home it starts Ray's head, or watches a cluster that is there, and places an actor on each node that lends a host; at
a machine that has joined it starts a node. The actor keeps the process alive that lends the host, and Ray the actor. No
token of an answer goes this way: Ray gone, hosts compute on, and only nobody restarts them.

Ray does not promise that what an actor has started ends with it: that ends with its stdin, whose other end the actor
has, and Ray's own processes end with this one (PR_SET_PDEATHSIG), which ends with its socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..system.control_socket import BlockingControl
from ..system.program import line
from .keeper_messages import KeeperJob, KeeperState, RayHost

NAMESPACE = "disco"
RESOURCE = "disco_host"  # that a node has which lends a host: one of it, for one actor
LEND = "DISCO_FLEET_LEND"  # variable in which a node tells its actor what to start
START_S = 180.0  # for Ray to start and to be reached: 10 s on a quiet machine
LOOK_S = 1.0  # between two looks at the nodes
STOP_S = 5.0  # for Ray's processes to end by themselves
OBJECTS_BYTES = 80_000_000  # of Ray's object store, the least that it takes: nothing of ours goes there
CLI = "from ray.scripts.scripts import main; main()"
PR_SET_PDEATHSIG = 1


class LendingActor:
    """Keeps the command alive that lends a host on its node; when that ends, so does the actor, and Ray restarts it."""

    def __init__(self) -> None:
        words: list[str] = json.loads(os.environ[LEND])
        self._child = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def pid(self) -> int:
        """Return the process that lends the host."""
        return self._child.pid

    def _watch(self) -> None:
        self._child.wait()
        os._exit(1)


@dataclass(slots=True)
class RayRole:
    """One role in one cluster. All mutable state: Ray's services that were started here, and the actors by node."""

    job: KeeperJob
    say: Callable[[KeeperState], None]
    services: subprocess.Popen[bytes] | None = None
    _actors: dict[str, Any] = field(default_factory=dict)
    _asked: dict[str, Any] = field(default_factory=dict)
    _hosts: dict[str, RayHost] = field(default_factory=dict)

    def run(self) -> None:
        """Start what is to be started, and say how it is, for ever. Raises OSError."""
        self.say(KeeperState(state="starting"))
        if self.job.role != "watch":
            self.services = self._start()
        if self.job.role == "node":
            assert self.services is not None
            self.say(KeeperState(state="up", version=_version()))
            code = self.services.wait()
            self.say(KeeperState(state="lost", why=f"Ray's node has ended ({code})"))
            return
        why = self._connect()
        while not why:
            self.say(KeeperState(state="up", version=_version(), hosts=self._look()))
            time.sleep(LOOK_S)
            if self.services is not None and self.services.poll() is not None:
                why = f"Ray's head has ended ({self.services.returncode})"
        self.say(KeeperState(state="lost", why=why))

    def _start(self) -> subprocess.Popen[bytes]:
        """Start Ray's services of this machine."""
        job = self.job
        words = ["start", "--block", "--disable-usage-stats", f"--object-store-memory={OBJECTS_BYTES}"]
        if job.own:
            words.append(f"--node-ip-address={job.own}")
        if job.role == "head":
            port = job.address.rpartition(":")[2]
            words += ["--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=0"]
        else:
            resources = json.dumps({RESOURCE: 1})
            words += [f"--address={job.address}", f"--num-cpus={job.n_threads}", f"--resources={resources}"]
        environment = os.environ | {LEND: json.dumps(job.lend)}
        return subprocess.Popen(
            line(CLI, *words), env=environment, stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(), stderr=sys.stderr.fileno(), preexec_fn=_end_with_parent,
        )  # fmt: skip

    def _connect(self) -> str:
        """Reach the cluster; return why that is not possible, "" if it was."""
        import ray

        deadline = time.monotonic() + START_S
        while True:
            if self.services is not None and self.services.poll() is not None:
                return f"Ray's head has ended ({self.services.returncode}) while it started"
            try:
                ray.init(address=self.job.address, namespace=NAMESPACE, log_to_driver=False)
            except SystemExit:  # that is how Ray takes a wrong token
                return "Ray refuses the token"
            except Exception as e:  # whatever foreign code raises while its head is starting
                if time.monotonic() > deadline:
                    return f"Ray cannot be reached at {self.job.address}: {e}"
                time.sleep(LOOK_S)
            else:
                return ""

    def _look(self) -> tuple[RayHost, ...]:
        """Have an actor on each node that lends a host; return how those are."""
        import ray

        alive = {
            str(node["NodeID"]): str(node["NodeManagerAddress"])
            for node in ray.nodes()
            if node["Alive"] and RESOURCE in node["Resources"]
        }
        for node, address in alive.items():
            if node not in self._actors:
                self._actors[node], self._hosts[node] = _place(node), RayHost(node=node, address=address)
            self._ask(node)
        for node in self._actors.keys() - alive.keys():
            del self._actors[node], self._hosts[node]
            self._asked.pop(node, None)
        return tuple(self._hosts.values())

    def _ask(self, node: str) -> None:
        """Ask a node's actor for its process, or take the answer."""
        import ray

        if node not in self._asked:
            self._asked[node] = self._actors[node].pid.remote()
            return
        if not ray.wait([self._asked[node]], timeout=0)[0]:
            return
        host, found = self._hosts[node], None
        with contextlib.suppress(ray.exceptions.RayError):  # it is being restarted
            found = int(ray.get(self._asked.pop(node)))
        self._asked.pop(node, None)
        n = host.restarts + (found is not None and host.pid is not None and found != host.pid)
        self._hosts[node] = RayHost(node=node, address=host.address, pid=found or host.pid, restarts=n)

    def stop(self) -> None:
        """End Ray's services of this machine."""
        if self.services is None or self.services.poll() is not None:
            return
        self.services.terminate()
        try:
            self.services.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.services.kill()


def _place(node: str) -> Any:
    """Return the actor on a node, which is made if there is none; Ray restarts it for ever."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    kept = ray.remote(LendingActor).options(
        name=f"host-{node}", lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1,
        resources={RESOURCE: 1}, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )  # fmt: skip
    return kept.remote()


def _version() -> str:
    from importlib.metadata import version

    return version("ray")


def _end_with_parent() -> None:
    """Let the kernel end Ray's services when this process is killed, and leave its group, which Ctrl-C is sent to."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> None:
    """Do the job of the inherited socket until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's; it ends us by closing the socket
    control = BlockingControl(socket.socket(fileno=int(sys.argv[1])))
    job = msgspec.msgpack.decode(control.receive()[0], type=KeeperJob)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    if job.token_path:
        os.environ["RAY_AUTH_TOKEN_PATH"] = job.token_path
    keeper = RayRole(job, control.send)

    def end() -> None:
        keeper.stop()
        os._exit(0)

    control.end_with(end)
    try:
        keeper.run()
    except (OSError, ImportError) as e:
        control.send(KeeperState(state="lost", why=str(e)))
    keeper.stop()
    os._exit(1)  # Ray has threads that a usual end waits for


if __name__ == "__main__":
    main()

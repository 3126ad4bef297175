"""What the single binary is like: the engine in it, and how long `disco --help` and `disco status` take."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from disco_daemon.engine.measure.checkup_messages import CheckupJob, Examined
from disco_daemon.system.control_socket import BlockingControl
from disco_daemon.system.program import PART

N_WARM = 9
START_TIMEOUT_S = 120.0  # a first start on a slow disk
STOP_TIMEOUT_S = 60.0  # running answers may end first
CHECKUP = "disco_daemon.engine.measure.checkup"


def engine(binary: Path) -> str:
    """Version of the engine, and what of the processor it uses. `binary` may be a Python that has disco, too."""
    ours, theirs = socket.socketpair()
    command = [str(binary), PART, CHECKUP, str(theirs.fileno())]
    with ours, home() as env, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env):
        theirs.close()
        control = BlockingControl(ours)
        control.send(CheckupJob(()))  # asked for nothing of a model
        found = msgspec.msgpack.decode(control.receive()[0], type=Examined).bindings
        assert found is not None, "the engine's part says nothing of itself"
    return f"llama.cpp {found.version}, {' '.join(found.features)}"


def times(binary: Path) -> Iterator[str]:
    """Lines for a table; ratios are to a bare Python that does nothing."""
    bare = median([sys.executable, "-c", "pass"], dict(os.environ))
    with home() as env:
        help_ = [str(binary), "--help"]
        yield f"first     {describe(run(help_, env), bare)}: `disco --help`, which unpacks the program"
        if forget(Path(env["HOME"])):
            yield f"cold      {describe(run(help_, env), bare)}: `disco --help`, nothing of it in memory"
        yield f"warm      {describe(median(help_, env), bare)}: `disco --help`"
        with daemon(binary, env) as (url, _):
            status = [str(binary), "status", "--url", url]
            yield f"          {describe(median(status, env), bare)}: `disco status`, of a daemon that runs"


@contextlib.contextmanager
def home() -> Iterator[dict[str, str]]:
    """An environment with an empty home, and nothing on the PATH."""
    with tempfile.TemporaryDirectory(prefix="disco-home-") as folder:
        yield {"HOME": folder, "PATH": ""}


@dataclass(frozen=True, slots=True)
class Took:
    """What a command took: by the clock, and of the processor with its children, s."""

    wall_s: float
    cpu_s: float


def run(command: list[str], env: dict[str, str]) -> Took:
    """Run a command."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True, timeout=START_TIMEOUT_S)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Took(wall_s, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def median(command: list[str], env: dict[str, str]) -> Took:
    """The medians of some runs; the first one is not counted."""
    run(command, env)
    all_ = [run(command, env) for _ in range(N_WARM)]
    return Took(statistics.median(t.wall_s for t in all_), statistics.median(t.cpu_s for t in all_))


def describe(one: Took, bare: Took) -> str:
    """Its times, and how often a bare Python could have been started meanwhile: on a busy machine both are slow."""
    ratios = f"{one.wall_s / bare.wall_s:.1f} and {one.cpu_s / bare.cpu_s:.1f} x `python -c pass`"
    return f"{1e3 * one.wall_s:5.0f} ms, {1e3 * one.cpu_s:4.0f} ms of the processor ({ratios})"


def forget(folder: Path) -> bool:
    """Put all files below out of the system's cache; whether that can be done here."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(handle)  # what is not written yet stays in memory
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
    return True


@contextlib.contextmanager
def daemon(binary: Path, env: dict[str, str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A daemon out of the binary: its address, and its process."""
    command = [str(binary), "up", "--port", "0", "--json", "--log-level", "error"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
            line = process.stdout.readline() if ready else b""
            assert line, "the daemon did not come up"
            yield json.loads(line)["url"].removesuffix("/v1"), process
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)

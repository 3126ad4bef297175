"""A daemon that a test has forked is the process that it would have started."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from disco_daemon.bench import child
from disco_daemon.models.default import default_model_path
from tests.fixtures import forked
from tests.fixtures.daemon import PATIENCE_S, running

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no other system's daemons are forked")
SERVER = {"DISCO_SERVER_BASE_URL": "http://127.0.0.1:9/v1", "DISCO_SERVER_MODEL": "a"}
STARTERS = {"a true start": child.start, "a fork": forked.start}
# What a library has read when it was imported would be the same in all forks.
PROGRAM = """
import os, sys, wsgiref.handlers  # which reads all, and is of no use here

class Heard(type(os.environ)):
    def __getitem__(self, name):
        names.add(name)
        return super().__getitem__(name)

names = set()
os.environ.__class__ = Heard
from tests.fixtures import forked
names.clear()
forked.preload()
print(*sorted(name for name in names if name.startswith(forked.READ_LATER)))
"""


def up(folder: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-P", "-m", forked.CLI, "up", "--port", "0", "--json", "--until-eof",
        "--history", str(folder / "history.sqlite"), *(more or ["--no-device"]),
    ]  # fmt: skip


@asynccontextmanager
async def listening(starter: child.Starter, folder: Path, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await starter(up(folder, *more), child.child_env(folder) | SERVER, folder / "log")
    try:
        assert process.stdout is not None
        assert await process.stdout.readline(), (folder / "log").read_text()
        yield process
    finally:
        await child.end(process)


def looked_at(pid: int) -> dict[str, Any]:
    """What a process is, as others see it."""
    one, lines = psutil.Process(pid), status_of(pid)
    fields = ("Umask:", "SigBlk:", "SigIgn:", "SigCgt:", "ShdPnd:", "Cap", "NoNewPrivs:", "Seccomp:", "Groups:", "Uid:")
    return {
        "status": [line for line in lines if line.startswith(fields)],
        "limits": Path(f"/proc/{pid}/limits").read_text("ascii"),
        "standard streams": [stat.S_IFMT(Path(f"/proc/{pid}/fd/{fd}").stat().st_mode) for fd in range(3)],
        "command": [word for word in one.cmdline() if word],
        "place": (one.exe(), one.cwd(), one.nice(), os.getpgid(pid), os.getsid(pid)),
    }


def status_of(pid: int) -> list[str]:
    """The lines of a process' status, at rest: for the moment in which it starts a thread, libc blocks all signals."""
    until = time.monotonic() + PATIENCE_S
    while True:
        lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
        is_starting = any(line.startswith("SigBlk:\tffff") for line in lines)
        if not is_starting or time.monotonic() > until:
            return lines


def ends_of(pid: int) -> set[str]:
    """The pipes and sockets that a process has a descriptor of."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has just been closed
            found.add(str(path.readlink()))
    return {link for link in found if link.startswith(("pipe:", "socket:"))}


async def test_a_fork_is_what_the_true_start_is(tmp_path: Path) -> None:
    seen = []
    for starter in STARTERS.values():
        async with listening(starter, tmp_path) as process:
            seen.append(looked_at(process.pid))
    assert seen[0] == seen[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="at what is confined only root may look")
@pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")
async def test_an_engine_and_a_host_of_a_fork_are_what_true_ones_are(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[fleet]\nenabled = true\nhosts = 1\ncuts = [5, 22]\n[server]\nprobe = false\n")
    seen = []
    for starter in STARTERS.values():
        async with listening(
            starter, tmp_path, "--config", str(config), "--model", str(default_model_path())
        ) as daemon:
            async with asyncio.timeout(PATIENCE_S):
                while not (parts := parts_of(daemon.pid)).keys() >= set(forked.PARTS):
                    await asyncio.sleep(0.05)  # nobody else hears that they are confined
            mine = ends_of(daemon.pid)
            shared = {name: len(ends_of(pid) & mine) for name, pid in parts.items()}
            assert set(shared.values()) == {1}, "the pipe of its last words"
            seen.append({name: looked_at(pid) | {"ends": len(ends_of(pid))} for name, pid in parts.items()})
    for one in (*seen[0].values(), *seen[1].values()):
        del one["command"][4:]  # the numbers of the descriptors, which depend on what the daemon had open
    assert seen[0] == seen[1]


def parts_of(pid: int) -> dict[str, int]:
    """The daemon's engine and its host, once they are confined and as nice as what computes; they are its children."""
    found, daemon = {}, psutil.Process(pid)
    for one in daemon.children():
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            is_confined = "Seccomp:\t2" in Path(f"/proc/{one.pid}/status").read_text("ascii")
            if is_confined and one.nice() > daemon.nice():
                found[one.cmdline()[3]] = one.pid
    return found


async def test_a_fork_holds_no_descriptor_of_another_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with listening(forked.start, tmp_path / "a") as a, listening(forked.start, tmp_path / "b") as b:
        assert a.pid != b.pid
        of_server = psutil.Process(b.pid).ppid()
        assert of_server == psutil.Process(a.pid).ppid() != os.getpid()
        assert not ends_of(a.pid) & ends_of(b.pid)
        assert not (ends_of(a.pid) | ends_of(b.pid)) & ends_of(of_server)


@pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")
async def test_a_daemon_as_most_tests_start_it_is_a_fork_and_its_engine_is_one_of_it(tmp_path: Path) -> None:
    """What is asked for beside the daemon, such as a variable more, must not make all of them true starts unseen."""
    async with running(tmp_path) as daemon:
        await daemon.device_ready()
        pid = (await daemon.state())["pid"]
        [engine] = [one for one in psutil.Process(pid).children() if forked.PARTS[0] in one.cmdline()]
        server = psutil.Process(pid).parent()
        assert server is not None
        assert server.pid == forked.server().pid
        environ = Path(f"/proc/{engine.pid}/environ").read_bytes()
        assert environ == Path(f"/proc/{server.pid}/environ").read_bytes(), "an exec would have brought its own"


async def test_no_module_reads_at_its_import_what_may_be_another_in_a_fork() -> None:
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", PROGRAM, env=forked.BEGAN, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await done.communicate()
    assert (done.returncode, out.split()) == (0, [])


@pytest.mark.parametrize("starter", STARTERS.values(), ids=STARTERS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT])
async def test_how_a_fork_ends_is_told_as_of_any_process(number: int, starter: child.Starter, tmp_path: Path) -> None:
    async with listening(starter, tmp_path) as process:
        process.send_signal(number)
        returncode = await process.wait()
    assert returncode == (0 if number in (signal.SIGTERM, signal.SIGINT) else -number)


@pytest.mark.parametrize("starter", STARTERS.values(), ids=STARTERS)
async def test_what_a_fork_says_as_it_ends_is_all_there(starter: child.Starter, tmp_path: Path) -> None:
    process = await starter(up(tmp_path, "--policy", "none"), child.child_env(tmp_path) | SERVER, tmp_path / "log")
    out, _ = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert "policy.name" in (tmp_path / "log").read_text()

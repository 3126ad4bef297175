"""A daemon beside files that are not its own, and on disks that it cannot write: it starts, says so, and answers."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from disco_daemon.bench.child import child_env, end
from tests.fixtures.upstream import Upstream

KEY = {"Authorization": "Bearer hush"}
BASHRC = "alias ll='ls -l'\n" * 300


class Running:
    """A daemon with an environment of its own; its log is what it wrote to stderr."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.root = url.removesuffix("/v1")
        self.session = session
        self.log = b""

    async def told(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.request(method, self.root + path, json=body, headers=KEY) as response:
            return response.status, await response.json()

    async def answers(self) -> bool:
        body = {"model": "disco", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        status, _ = await self.told("POST", "/v1/chat/completions", body)
        return status == 200

    async def history(self) -> dict[str, Any]:
        _, state = await self.told("GET", "/disco/v1/state")
        found: dict[str, Any] = state["history"]
        return found


@asynccontextmanager
async def running(folder: Path, env: Mapping[str, str], *, no_room: bool = False) -> AsyncIterator[Running]:
    """`disco up` on a server alone; with `no_room` no file can grow, as on a full disk."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    settings = {"DISCO_API_KEY": "hush", "OPENAI_API_KEY": "", "DISCO_SERVER_MODEL": "loopback"}
    settings |= {"DISCO_SERVER_PROBE": "false"}
    argv = [sys.executable, "-P", "-m", "disco_daemon.cli.main", "up", "--port", "0", "--json", "--no-device"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=pipe, stdout=pipe, stderr=pipe, env=child_env(folder) | settings | dict(env),
        preexec_fn=full if no_room else None,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    heard = asyncio.create_task(process.stderr.read())
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        async with aiohttp.ClientSession() as session:
            found = Running(json.loads(line or b"{}").get("url", ""), session)
            try:
                yield found
            finally:
                process.terminate()
                found.log = await asyncio.wait_for(heard, 60)
    finally:
        heard.cancel()
        await end(process)


async def test_a_user_s_file_in_the_history_s_place_is_unharmed_by_any_start(tmp_path: Path) -> None:
    """F2: `history.path` that leads to somebody's shell start-up file, and beside it a lock of another program."""
    bashrc, lock = tmp_path / ".bashrc", tmp_path / ".bashrc.lock"
    bashrc.write_text(BASHRC)
    lock.write_text("mine")
    async with Upstream() as upstream:
        for _ in range(2):
            env = {"DISCO_SERVER_BASE_URL": upstream.url, "DISCO_HISTORY_PATH": str(bashrc)}
            async with running(tmp_path / "home", env) as daemon:
                assert await daemon.answers()
                assert "left alone" in (await daemon.history())["error"]
                status, said = await daemon.told("GET", "/disco/v1/history")
                assert (status, "left alone" in said["error"]["message"]) == (503, True)
            assert b"left alone" in daemon.log
            assert str(bashrc).encode() in daemon.log
    assert (bashrc.read_text(), lock.read_text()) == (BASHRC, "mine")
    assert bashrc.stat().st_mode & 0o777 == 0o644
    assert {path.name for path in tmp_path.iterdir()} <= {".bashrc", ".bashrc.lock", "home"}


@pytest.mark.parametrize("folder", ["/proc/nope", "a file"])
async def test_folders_that_cannot_be_made_keep_no_daemon_from_its_work(folder: str, tmp_path: Path) -> None:
    """A home that is read-only: root's eyes see no modes, so here it is a folder that not even root can make."""
    if folder == "a file":
        (tmp_path / "file").touch()
        folder = str(tmp_path / "file" / "below")
    names = ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR")
    async with Upstream() as upstream:
        env = dict.fromkeys(names, folder) | {"DISCO_SERVER_BASE_URL": upstream.url, "OPENAI_API_KEY": "k"}
        async with running(tmp_path, env) as daemon:
            assert await daemon.answers()
            assert (await daemon.history())["error"]
            shown = await asyncio.to_thread(status, tmp_path, env, daemon.root)
            assert "history      none: " in shown
        assert b"requests go unrecorded meanwhile" in daemon.log
        assert b"nothing keeps a second daemon from it" in daemon.log
        assert b"that cannot be kept in" in daemon.log, "whose the key is"
        assert [e.headers["Authorization"] for e in upstream.exchanges] == ["Bearer k"]


def status(folder: Path, env: Mapping[str, str], root: str) -> str:
    argv = [sys.executable, "-P", "-m", "disco_daemon.cli.main", "status", "--url", root]
    full = child_env(folder) | {"DISCO_API_KEY": "hush"} | dict(env)
    return subprocess.run(argv, env=full, capture_output=True, text=True, check=True, timeout=60).stdout


async def test_a_full_disk_keeps_no_daemon_from_its_work(tmp_path: Path) -> None:
    """No file of this process may grow by a byte."""
    async with Upstream() as upstream:
        env = {"DISCO_SERVER_BASE_URL": upstream.url, "OPENAI_API_KEY": "k"}
        async with running(tmp_path, env, no_room=True) as daemon:
            assert await daemon.answers()
            assert (await daemon.history())["error"]
        assert b"requests go unrecorded meanwhile" in daemon.log
        assert b"Traceback" not in daemon.log
        assert not [path for path in tmp_path.rglob("*.new") if path.is_file()], "nothing half written stays"

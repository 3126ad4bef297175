"""disco under a systemd user manager that runs: installed, started at the first word, killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tomlkit
from openai import AsyncOpenAI

from disco_daemon.models.default import default_model_path
from tests.fixtures.ports import free_port
from tests.fixtures.usermanager import NoManagerError, user_manager

PATIENCE_S = 60.0


def configure(home: Path, port: int) -> None:
    device = {"autotune": False, "watts": 15.0, "model": str(default_model_path()), "n_threads": 1}
    (home / "config.toml").write_text(tomlkit.dumps({"api": {"port": port}, "device": device}))


class Service:
    """`disco service …` in one home; `env` is how its service manager is reached."""

    def __init__(self, command: Sequence[str], home: Path, env: Mapping[str, str]) -> None:
        self.home = home
        self._command = command
        self._env = dict(env) | {"DISCO_CONFIG": str(home / "config.toml")}

    async def run(self, *words: str) -> tuple[int, str]:
        """Exit code and what it prints; errors are none of these."""
        process = await asyncio.create_subprocess_exec(
            *self._command, "service", *words, env=self._env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert (err, process.returncode is None) == (b"", False)
        return process.returncode or 0, out.decode()

    async def __call__(self, action: str) -> str:
        code, out = await self.run(action)
        assert code == 0, out
        return out

    async def status(self) -> dict[str, Any]:
        code, out = await self.run("status", "--json")
        told: dict[str, Any] = json.loads(out)
        assert (code == 0) == (told["state"] == "running")
        return told

    async def running(self) -> dict[str, Any]:
        """The first status that says so: the manager hears of a daemon's start a moment after who asks the daemon."""
        async with asyncio.timeout(PATIENCE_S):
            while (told := await self.status())["state"] != "running":
                pass
        return told


async def state(root: str) -> dict[str, Any]:
    """How the daemon is. A daemon that starts lets one wait: the port is systemd's, and open all the time."""
    patience = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=patience) as session, session.get(f"{root}/disco/v1/state") as response:
        found: dict[str, Any] = await response.json()
        return found


SOURCE = [sys.executable, "-P", "-m", "disco_daemon.cli.main"]
BINARY = Path(__file__).resolve().parents[3] / "dist" / "disco"
NO_BINARY = pytest.mark.skipif(not BINARY.exists(), reason="no dist/disco: `make binary` builds it, with PyInstaller")


@pytest.mark.slow
@pytest.mark.parametrize("command", [SOURCE, pytest.param([str(BINARY)], marks=NO_BINARY)], ids=["source", "binary"])
async def test_a_live_user_manager_installs_starts_restarts_and_removes_it(command: list[str], tmp_path: Path) -> None:
    port = free_port()
    root = f"http://127.0.0.1:{port}"
    configure(tmp_path, port)
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    try:
        async with user_manager(tmp_path, {"PYTHONPATH": path}) as env:
            await lives(Service(command, tmp_path, env), root)
    except NoManagerError as e:
        pytest.skip(str(e))


async def lives(service: Service, root: str) -> None:
    """From installation to removal."""
    wrote = await service("install")
    assert wrote.count("wrote ") == 2
    units = [Path(line.removeprefix("wrote ")) for line in wrote.splitlines() if line.startswith("wrote ")]
    assert all(unit.is_relative_to(service.home) and unit.exists() for unit in units)
    first = await service.status()
    assert first["state"] == "running"

    async with AsyncOpenAI(base_url=f"{root}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="disco", messages=[{"role": "user", "content": "Say hello."}], max_tokens=4
        )
        assert answer.choices[0].message.content

    os.kill(first["pid"], signal.SIGKILL)
    assert (await state(root))["endpoints"]["device"]
    again = await service.running()
    assert again["pid"] != first["pid"]
    assert "restarted 1 time" in again["detail"]

    assert await service("stop") == "stopped\n"
    assert (await service.status())["state"] == "stopped"
    with pytest.raises(aiohttp.ClientConnectorError):
        await state(root)
    assert await service("start") == "started\n"
    await state(root)
    assert await service("restart") == "restarted\n"
    await state(root)

    assert (await service("uninstall")).count("removed ") == 2
    assert (await service.status())["state"] == "not-installed"
    assert not any(unit.exists() for unit in units)
    with pytest.raises(aiohttp.ClientConnectorError):
        await state(root)
    assert (service.home / "config.toml").exists(), "what is the user's stays"

"""`disco models pull` as a process, which is killed in mid-file, and finds the Hub by HF_ENDPOINT."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from disco_daemon.models.part import PREFIX
from tests.fixtures.gguf import model_file
from tests.fixtures.hub import Fault, HubServer, Repo

SIZE = 8 << 20
PATIENCE_S = 60.0


async def started(*words: str, env: Mapping[str, str]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "disco_daemon.cli.main", "models", *words, env=env, stdout=pipe, stderr=pipe
    )


async def ended(*words: str, env: Mapping[str, str]) -> tuple[int | None, str, str]:
    process = await started(*words, env=env)
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return process.returncode, out.decode(), err.decode()


async def arrived(folder: Path, n_bytes: int) -> None:
    """Wait until so much of a file is on the disk; another process writes it, and has no event for that."""
    async with asyncio.timeout(PATIENCE_S):
        while not any(part.stat().st_size >= n_bytes for part in folder.glob(f"{PREFIX}*")):
            await asyncio.sleep(0.01)


async def test_killed_in_mid_file_it_goes_on_where_it_was_and_the_checksum_is_right(tmp_path: Path) -> None:
    head = model_file(tmp_path / "source.gguf").read_bytes()
    content = head + random.Random(1).randbytes(SIZE - len(head))
    folder = tmp_path / "models"
    go = threading.Event()
    repo = Repo(files={"tiny-Q8_0.gguf": content})
    with HubServer(repo) as server:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DISCO_", "XDG_", "HF_"))}
        env |= {"HOME": str(tmp_path), "HF_ENDPOINT": server.url, "DISCO_MODELS_DIR": str(folder)}
        env |= {"DISCO_CONFIG": str(tmp_path / "config.toml")}
        half = SIZE // 2
        for kill in range(1, 4):
            repo.faults = [Fault(after=half // 4, go=go)]
            process = await started("pull", repo.name, env=env)
            try:
                await arrived(folder, kill * half // 4)
            finally:
                process.kill()
                await process.communicate()
        go.set()
        repo.faults = [Fault(after=half // 8), Fault(after=half // 8, reset=True)]
        code, out, err = await ended("pull", repo.name, "--use", "--json", env=env)
        assert (code, json.loads(out)["path"]) == (0, str(folder / "tiny-Q8_0.gguf")), err
    assert "going on with tiny-Q8_0.gguf" in err
    assert "Traceback" not in err
    assert hashlib.sha256((folder / "tiny-Q8_0.gguf").read_bytes()).digest() == hashlib.sha256(content).digest()
    assert [path.name for path in folder.iterdir()] == ["tiny-Q8_0.gguf"]
    begins = [request.begin for request in repo.asked]
    assert begins[:4] == [0, half // 4, half // 2, 3 * half // 4]
    assert begins == sorted(begins)
    assert str(folder / "tiny-Q8_0.gguf") in (tmp_path / "config.toml").read_text()


async def test_a_hub_that_refuses_is_one_line(tmp_path: Path) -> None:
    with HubServer(Repo(refusal=(404, "RepoNotFound"))) as server:
        env = dict(os.environ) | {"HOME": str(tmp_path), "HF_ENDPOINT": server.url, "DISCO_MODELS_DIR": str(tmp_path)}
        code, out, err = await ended("pull", "maker/none", env=env)
    assert (code, out) == (1, "")
    assert err.startswith("disco: there is no maker/none at the Hub")
    assert len(err.splitlines()) == 1

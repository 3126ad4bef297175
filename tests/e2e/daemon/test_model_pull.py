"""`POST /api/pull` of a real daemon, from a hub on loopback: its lines, its errors, and who may ask."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from disco_daemon.models.part import PREFIX
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.gguf import header, number
from tests.fixtures.hub import Fault, HubServer, Repo
from tests.fixtures.upstream import Upstream

PATIENCE_S = 120.0
CONTENT = header(number("x.block_count", 1)) + random.Random(0).randbytes(400_000)
DIGEST = hashlib.sha256(CONTENT).hexdigest()
KEY = "the-key-of-the-test"


@pytest_asyncio.fixture
async def pulling(tmp_path: Path) -> AsyncIterator[tuple[DaemonProcess, Repo, Path]]:
    repo, models = Repo(files={"tiny-Q4_K_M.gguf": CONTENT}), tmp_path / "models"
    with HubServer(repo) as hub:
        told = {"DISCO_MODELS_DIR": str(models), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        async with (
            Upstream() as upstream,
            running(
                tmp_path / "d",
                server=upstream.url,
                device=False,
                settings={"api": {"key": KEY}},
                before=f"import os\nos.environ |= {told}",
            ) as daemon,
        ):
            yield daemon, repo, models  # fmt: skip


async def pull(daemon: DaemonProcess, **asked: Any) -> tuple[int, list[dict[str, Any]]]:
    async with daemon.controls.post(f"{daemon.root}/api/pull", json=asked) as response:
        return response.status, [json.loads(line) async for line in response.content]


async def test_a_model_is_pulled_with_the_lines_that_clients_of_ollama_read(
    pulling: tuple[DaemonProcess, Repo, Path],
) -> None:
    daemon, repo, models = pulling
    status, lines = await pull(daemon, model="hf.co/maker/tiny-GGUF:latest")
    assert status == 200
    assert lines[0] == {"status": "pulling manifest"}
    shown = [line for line in lines if "digest" in line]
    assert shown[-1] == {
        "status": f"pulling {DIGEST[:12]}", "digest": f"sha256:{DIGEST}", "total": len(CONTENT),
        "completed": len(CONTENT),
    }  # fmt: skip
    assert [line["completed"] for line in shown] == sorted(line["completed"] for line in shown)
    said = "`disco models use tiny-Q4_K_M.gguf` makes it this machine's model."
    ends = [{"status": status} for status in ("verifying sha256 digest", "writing manifest", said, "success")]
    assert lines[-4:] == ends
    assert (models / "tiny-Q4_K_M.gguf").read_bytes() == CONTENT
    state = await daemon.state()
    assert (state["endpoints"].keys(), state["fetch"]) == ({"server"}, None), "what is in use stays in use"
    assert await pull(daemon, name="maker/tiny-GGUF", stream=False) == (200, [{"status": "success"}])
    assert len(repo.asked) == 1, "it was here already"


async def test_what_cannot_be_pulled_is_an_error_as_ollama_says_it(pulling: tuple[DaemonProcess, Repo, Path]) -> None:
    daemon, repo, models = pulling
    status, [line] = await pull(daemon, model="llama3.2")
    assert status == 404
    assert line["error"].startswith("pull model manifest: file does not exist")
    assert (await pull(daemon))[0] == 400
    assert (await pull(daemon, model=7))[0] == 400
    repo.refusal = (403, "GatedRepo")
    status, lines = await pull(daemon, model="maker/tiny-GGUF")
    assert (status, lines[0], list(lines[-1])) == (200, {"status": "pulling manifest"}, ["error"])
    for words in ("licence", "HF_TOKEN", "~/.cache/huggingface/token"):
        assert words in lines[-1]["error"]
    status, [line] = await pull(daemon, model="maker/tiny-GGUF", stream=False)
    assert status == 502
    assert "licence" in line["error"]
    assert not list(models.glob("*.gguf"))


async def test_over_tcp_it_wants_the_key_of_the_owner(pulling: tuple[DaemonProcess, Repo, Path]) -> None:
    daemon, _, _ = pulling
    url, asked = f"{daemon.root}/api/pull", {"model": "maker/tiny-GGUF", "stream": False}
    async with daemon.session.post(url, json=asked) as response:
        assert response.status == 401
        assert next(iter(await response.json())) == "error"
    async with daemon.session.post(url, json=asked, headers={"Authorization": f"Bearer {KEY}"}) as response:
        assert await response.json() == {"status": "success"}


async def test_a_client_that_leaves_ends_it_and_the_next_pull_goes_on(
    pulling: tuple[DaemonProcess, Repo, Path],
) -> None:
    daemon, repo, models = pulling
    go = threading.Event()
    repo.faults = [Fault(after=100_000, go=go)]
    asked = {"model": "maker/tiny-GGUF"}
    async with asyncio.timeout(PATIENCE_S):
        async with daemon.controls.post(f"{daemon.root}/api/pull", json=asked) as response:
            await response.content.readline()
            while sum(part.stat().st_size for part in models.glob(f"{PREFIX}*")) != 100_000:  # no line need say so
                await asyncio.sleep(0.02)
            response.close()
        await daemon.until(lambda state: state["fetches"][-1]["state"] == "cancelled")
    go.set()
    status, lines = await pull(daemon, **asked)
    assert (status, lines[-1]) == (200, {"status": "success"})
    assert [request.begin for request in repo.asked] == [0, 100_000]
    assert (models / "tiny-Q4_K_M.gguf").read_bytes() == CONTENT

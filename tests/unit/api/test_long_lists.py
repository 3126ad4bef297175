"""Lists of thousands of models keep no answer waiting: what takes long of them is made beside the loop."""

from __future__ import annotations

import asyncio
import json
import time
from asyncio.events import Handle
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from disco_daemon.api.answering import CONDUCTOR
from disco_daemon.api.app import _models
from disco_daemon.api.control.documents import DOCUMENTS
from disco_daemon.api.http.guard import CONFIG, ApiConfig
from disco_daemon.api.names import ModelNames
from disco_daemon.api.ollama import ollama_routes
from disco_daemon.api.ollama.ollama_models import DeviceFile
from disco_daemon.conductor import Conductor, Keeper
from disco_daemon.config.schema import NamedServer
from disco_daemon.keys.named_key import KeyTerms
from disco_daemon.types import Capabilities
from tests.unit.daemon.test_server_pool import pool_of, several
from tests.unit.daemon.test_wiring import Scene, scene  # noqa: F401 - a fixture

N_SERVERS, N_MODELS = 10, 300
HELD_S = 0.02  # of the processor, by one step of the loop
FILE = DeviceFile("llama", "Q8_0", 1000, 135_000_000, thinks=False, is_loaded=True, leaves_at=None, on_gpu=0.0)


@pytest.fixture
def conductor(scene: Scene) -> Conductor:  # noqa: F811
    """A conductor with ten servers that have told of their 300 models each."""
    servers = [
        NamedServer(name=f"s{n}", base_url=f"http://127.0.0.1:{9100 + n}/v1", model="owner/0") for n in range(N_SERVERS)
    ]
    parts = several(scene, *servers)
    pool = pool_of(parts)
    told = {f"owner/{n}": Capabilities(context_length=4096) for n in range(N_MODELS)}
    pool.lists._told = {one.name: told for one in servers}
    asyncio.run(pool._listed())
    return Conductor(Keeper(parts.context), lambda *_: None, lambda _: None)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of the processor that each step of a loop has taken, in order: other work does not count."""
    found: list[float] = []
    plain = Handle._run

    def measured(self: Handle) -> None:
        began = time.thread_time()
        plain(self)
        found.append(time.thread_time() - began)

    monkeypatch.setattr(Handle, "_run", measured)
    return found


@pytest.mark.parametrize("path", ["/v1/models", "/api/tags", "/api/ps"])
async def test_a_list_of_thousands_of_models_holds_no_answer_up(
    conductor: Conductor, steps: list[float], path: str
) -> None:
    async def device_files() -> dict[str, DeviceFile]:
        return {"": FILE}

    documents: Any = SimpleNamespace(device_files=device_files)
    app = web.Application()
    app[CONDUCTOR], app[CONFIG], app[DOCUMENTS] = conductor, ApiConfig("127.0.0.1", ""), documents
    app.router.add_get("/v1/models", _models)
    ollama_routes.add_routes(app)
    async with TestClient(TestServer(app)) as client:
        steps.clear()
        async with client.get(path) as answer:
            body = await answer.read()
        held_s = max(steps)
        assert answer.status == 200
    page = json.loads(body)
    names = [one.get("id") or one["name"] for one in page.get("data") or page["models"]]
    here = {"disco", "disco/device"}
    assert {name.removesuffix(":latest") for name in names} >= here
    assert (len(names) > N_SERVERS * N_MODELS) is (path != "/api/ps")
    assert held_s < HELD_S


async def test_the_many_patterns_of_a_key_hold_no_answer_up(conductor: Conductor, steps: list[float]) -> None:
    patterns = tuple(f"s{n % 10}/owner/{n}*x" for n in range(100))
    key: Any = SimpleNamespace(name="anna", terms=KeyTerms(models=("s3/owner/7", *patterns)))
    names = ModelNames(conductor, {}, key)
    steps.clear()
    cards = await asyncio.create_task(names.cards())
    assert [card["id"] for card in cards] == ["s3/owner/7"]
    await asyncio.sleep(0)
    assert max(steps) < HELD_S

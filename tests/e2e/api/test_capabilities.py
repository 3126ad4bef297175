"""What a server tells and refuses decides where a request goes, until a reload: a real daemon, device and server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.errors import EndpointError
from disco_daemon.types import GenerationRequest, Usage
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.servers import llama_server
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
SETTINGS: dict[str, dict[str, Any]] = {
    # A way to continue that is set needs no probe, so that the list of models is all that is asked for.
    "server": {"probe": True, "continuation": "continue_final_message"},
    "policy": {"shadow": False},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
PICTURE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]


class Telling(Upstream):
    """A server whose list says how long a context is, and that it sees no images."""

    async def models(self, request: web.Request) -> web.StreamResponse:
        del request
        model = {"id": "loopback", "max_model_len": 2048, "max_output": 512, "capabilities": {"images": False}}
        return web.json_response({"object": "list", "data": [model]})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upstream() -> AsyncIterator[Upstream]:
    async with Telling(tokens=4) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("d")
    async with running(folder, server=upstream.url, policy="all-server", settings=SETTINGS) as started:
        await started.device_ready()
        yield started


async def asked(daemon: DaemonProcess, **more: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "disco", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 24} | more
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=body) as response:
        return response.status, await response.json()


async def reloaded(daemon: DaemonProcess) -> None:
    async with daemon.controls.post(f"{daemon.root}/disco/v1/reload") as response:
        assert response.status == 200


async def test_a_model_has_what_the_server_tells_of_it(daemon: DaemonProcess) -> None:
    await daemon.until(lambda s: s["endpoints"]["server"]["capabilities"]["context_length"] == 2048)
    async with daemon.session.get(f"{daemon.url}/models/disco/server") as response:
        card = await response.json()
    assert (card["context_length"], card["max_output"]) == (2048, 512)
    assert card["capabilities"] == {"images": False, "continuation": True}
    status, body = await asked(daemon, messages=[{"role": "user", "content": PICTURE}])
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported", "messages")
    assert "does not support images" in body["error"]["message"]


async def test_what_a_server_has_refused_goes_to_the_device_and_is_forgotten_by_a_reload(
    daemon: DaemonProcess, upstream: Upstream
) -> None:
    error = {"error": {"message": "'response_format' of type 'json_schema' is not supported with this model"}}
    with upstream.status(400, error):
        for n_asked in (1, 1):
            status, body = await asked(daemon, response_format=FORM)
            assert (status, body["disco"]["winner"]) == (200, "device")
            assert upstream.n_requests == n_asked, "the first refusal is remembered"
    status, body = await asked(daemon)
    assert (status, body["disco"]["winner"]) == (200, "server"), "all else is the server's as ever"
    (refused,) = (await daemon.state())["endpoints"]["server"]["refused"]
    assert refused["what"] == "json_schema"
    assert 86_000 < refused["for_s"] <= 86_400
    assert refused["said"].startswith("the server said 400")
    await reloaded(daemon)
    assert (await daemon.state())["endpoints"]["server"]["refused"] == []
    assert (await asked(daemon, response_format=FORM))[1]["disco"]["winner"] == "server"


async def test_where_nobody_can_it_is_a_400_that_names_the_capability(
    daemon: DaemonProcess, upstream: Upstream
) -> None:
    for _ in range(2):
        n_before = upstream.n_requests
        with upstream.status(400, {"error": "loopback does not support tools"}):
            status, body = await asked(daemon, tools=[TOOL], stream=True)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported", "tools")
        assert "the server does not support tools" in body["error"]["message"]
    assert upstream.n_requests == n_before, "the second one did not reach the server"
    await reloaded(daemon)
    assert (await asked(daemon, tools=[TOOL]))[0] == 200


async def test_a_real_llama_server_tells_its_context_and_refuses_what_it_lacks(tmp_path: Path) -> None:
    async with llama_server(tmp_path) as url:
        server = Server(ServerConfig(url, "default", ""))
        await server.start()
        try:
            await server.inquire()
            told = server.capabilities
            assert told.context_length is not None
            assert told.images is False
            too_long = "word " * told.context_length * 2
            for content, code in ((too_long, "context_length_exceeded"), (PICTURE, "unsupported")):
                message = {"role": "user", "content": content}
                request = GenerationRequest("r", (message,), text_only=content is too_long)
                with pytest.raises(EndpointError) as refused:
                    await anext(server.generate(request, Usage()))
                assert (refused.value.code, refused.value.status) == (code, 400)
        finally:
            await server.close()


async def test_embeddings_name_the_model_that_made_them(daemon: DaemonProcess) -> None:
    async with daemon.session.post(f"{daemon.url}/embeddings", json={"model": "disco", "input": "Hi"}) as response:
        assert response.status == 200
        device = (await daemon.state())["endpoints"]["device"]["model"]
        assert (response.headers["X-Disco-Model"], response.headers["X-Disco-Route"]) == (device, "device")

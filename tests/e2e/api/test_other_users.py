"""Other users of this machine get nothing without a key, unless they are let in; tried as another user, by root."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.raw import NOBODY, as_root, message, replied, socket_of
from tests.fixtures.upstream import Upstream

pytestmark = [as_root, pytest.mark.asyncio(loop_scope="module")]
CHAT = json.dumps({"model": "disco", "messages": [{"role": "user", "content": "Whose am I?"}]}).encode()
CLOSED = [("GET", "/v1/models", None), ("POST", "/v1/chat/completions", CHAT), ("POST", "/v1/completions", CHAT),
          ("POST", "/v1/embeddings", CHAT), ("POST", "/v1/rerank", CHAT), ("POST", "/v1/responses", CHAT),
          ("POST", "/v1/messages", CHAT),
          ("POST", "/api/chat", CHAT), ("GET", "/api/tags", None), ("GET", "/api/version", None),
          ("GET", "/disco/v1/state", None), ("GET", "/disco/v1/settings", None),
          ("POST", "/disco/v1/reload", b"{}"), ("GET", "/v1/nothing", None), ("GET", "//health", None),
          ("GET", "/", None)]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(tokens=4) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    async with running(tmp_path_factory.mktemp("d"), device=False, server=upstream.url) as started:
        yield started


@pytest.mark.parametrize(("method", "path", "body"), CLOSED)
async def test_another_user_is_turned_away_and_told_how_to_be_let_in(
    method: str, path: str, body: bytes | None, daemon: DaemonProcess, upstream: Upstream
) -> None:
    before = len(upstream.exchanges)
    reply = await replied(daemon.url, message(method, path, body), uid=NOBODY)
    assert reply.status == 403
    assert reply.error["code"] == "other_user"
    assert str(NOBODY) in reply.error["message"]
    assert "api.key" in reply.error["message"]
    assert "api.any_user" in reply.error["message"]
    assert len(upstream.exchanges) == before


async def test_an_app_of_another_user_is_turned_away_before_it_may_ask(daemon: DaemonProcess) -> None:
    asked = message("OPTIONS", "/v1/models", Origin="app://obsidian.md", Access_Control_Request_Method="GET")
    reply = await replied(daemon.url, asked, uid=NOBODY)
    assert (reply.status, reply.error["code"]) == (403, "other_user")
    assert "access-control-allow-methods" not in reply.headers


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_health_and_metrics_are_for_everybody(path: str, daemon: DaemonProcess) -> None:
    assert (await replied(daemon.url, message("GET", path), uid=NOBODY)).status == 200


async def test_who_has_keys_is_told_to_nobody_else(daemon: DaemonProcess) -> None:
    async with daemon.controls.post(f"{daemon.root}/disco/v1/keys", json={"name": "anna"}) as response:
        headers = {"Authorization": f"Bearer {(await response.json())['key']}"}
    chat = {"model": "disco", "messages": [{"role": "user", "content": "Hi"}]}
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=chat, headers=headers) as response:
        assert response.status == 200
    for openmetrics in (False, True):
        accept = {"Accept": "application/openmetrics-text; version=1.0.0" if openmetrics else "*/*"}
        reply = await replied(daemon.url, message("GET", "/metrics", None, **accept), uid=NOBODY)
        assert b"disco_answers_total" in reply.body
        assert b"anna" not in reply.body
        assert b"disco_key" not in reply.body
        assert reply.body.endswith(b"# EOF\n") is openmetrics
        for door in (daemon.session, daemon.controls):
            async with door.get(f"{daemon.root}/metrics", headers=accept) as response:
                told = await response.text()
            assert 'disco_key_requests_total{key="anna"} 1.0' in told, "the owner's own programs see it"
            assert told.count("# EOF") == openmetrics


async def test_a_connection_is_looked_at_once_and_stays_whose_it_was(daemon: DaemonProcess) -> None:
    reader, writer = await asyncio.open_connection(sock=socket_of(NOBODY, daemon.url))
    for path, status in (("/health", b"200"), ("/v1/models", b"403"), ("/health", b"200"), ("/v1/models", b"403")):
        writer.write(message("GET", path, Connection="keep-alive"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] == status
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        await reader.readexactly(length)
    writer.close()


@pytest.mark.parametrize("uid", [NOBODY, None], ids=["another user's", "our own"])
async def test_a_client_that_closes_at_once_is_nobody_and_starts_nothing(
    uid: int | None, daemon: DaemonProcess, upstream: Upstream
) -> None:
    before = len(upstream.exchanges)
    for _ in range(40):
        end = socket_of(uid, daemon.url)
        end.sendall(message("POST", "/v1/chat/completions", CHAT))
        end.close()
    assert (await ask(daemon, "A question of ours")).text
    asked = [json.dumps(exchange.body["messages"]) for exchange in list(upstream.exchanges)[before:]]
    if uid == NOBODY:
        assert ["A question of ours" in text for text in asked] == [True]
    else:  # whoever was quick enough to be seen as ours may have asked; root's name alone has let nobody in
        assert sum("A question of ours" in text for text in asked) == 1
    await daemon.until(lambda s: s["in_flight"] == 0)


async def test_a_process_of_another_user_is_turned_away(daemon: DaemonProcess) -> None:
    if not (shutil.which("setpriv") and shutil.which("bash")):
        pytest.skip("needs setpriv and bash")
    parts = urlsplit(daemon.url)
    script = f'exec 3<>/dev/tcp/{parts.hostname}/{parts.port}; printf "$1" >&3; cat <&3'
    sent = message("GET", "/v1/models").decode().replace("\r\n", "\\r\\n")
    process = await asyncio.create_subprocess_exec(
        "setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "bash", "-c", script, "-", sent,
        stdout=asyncio.subprocess.PIPE, cwd="/",
    )  # fmt: skip
    said, _ = await process.communicate()
    assert said.startswith(b"HTTP/1.1 403"), said
    assert b"api.any_user" in said


async def test_all_users_are_let_in_where_the_settings_say_so(upstream: Upstream, tmp_path: Path) -> None:
    settings = {"api": {"any_user": True}}
    async with running(tmp_path, device=False, server=upstream.url, settings=settings) as daemon:
        reply = await replied(daemon.url, message("POST", "/v1/chat/completions", CHAT), uid=NOBODY)
        assert reply.status == 200


async def test_with_a_key_who_shows_it_is_served_whoever_it_is(upstream: Upstream, tmp_path: Path) -> None:
    settings = {"api": {"key": "hush"}}
    async with running(tmp_path, device=False, server=upstream.url, settings=settings) as daemon:
        shown = message("GET", "/v1/models", Authorization="bearer hush")
        assert (await replied(daemon.url, shown, uid=NOBODY)).status == 200
        for said in ("", "hush", "Bearer", "Bearer wrong", "Basic hush"):
            reply = await replied(daemon.url, message("GET", "/v1/models", Authorization=said), uid=NOBODY)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        reply = await replied(daemon.url, message("GET", "/v1/models", Authorization="Bearer \udcff"))
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert "Traceback" not in daemon.log

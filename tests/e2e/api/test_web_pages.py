"""What a browser lets a web page send is turned away before a token is made, but for pages that the settings name."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import pytest_asyncio

from disco_daemon.api.doors import ROUTES
from tests.fixtures.daemon import PATIENCE_S, DaemonProcess, running
from tests.fixtures.ports import free_port
from tests.fixtures.raw import message, replied
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = json.dumps({"model": "disco", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}).encode()
FRIEND = "https://chat.example"
TEXT, FORM = "text/plain;charset=UTF-8", "application/x-www-form-urlencoded"
REFUSED = {
    "a page of a stranger": ({"Origin": "https://evil.example", "Sec_Fetch_Site": "cross-site"}, 403),
    "one that does not say its origin": ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}, 403),
    "a page of another program here": ({"Origin": "http://localhost:3000", "Sec_Fetch_Site": "same-site"}, 403),
    "a file": ({"Origin": "null"}, 403),
    "a file of an app's browser": ({"Origin": "file://"}, 403),
    "a scheme that only looks like this machine": ({"Origin": "evil://localhost"}, 403),
    "an address of this machine that no browser calls so": ({"Origin": "http://0.0.0.0:3000"}, 403),
    "a page that asks for the private network": (
        {"Origin": "https://evil.example", "Access_Control_Request_Private_Network": "true"},
        403,
    ),
    "a frame without an origin and with a form": ({"Origin": "null", "Content_Type": "multipart/form-data"}, 403),
    "a rebound name that ends like ours": ({"Host": "localhost.evil.example"}, 403),
    "a rebound name and an origin of ours": ({"Host": "evil.example", "Origin": "http://127.0.0.1"}, 403),
    "a form that hides behind a type of ours": (
        {"Origin": "http://localhost:3000", "Content_Type": "text/plain; application/json"},
        415,
    ),
    "an extension": ({"Origin": "chrome-extension://abcdef"}, 403),
    "a rebound name": ({"Host": "evil.example:4747"}, 403),
    "a friend's look-alike": ({"Origin": f"{FRIEND}.evil.example", "Sec_Fetch_Site": "cross-site"}, 403),
    "a form of an old browser": ({"Origin": "http://localhost:3000", "Content_Type": FORM}, 415),
    "a text of an old browser": ({"Origin": "http://localhost:3000", "Content_Type": TEXT}, 415),
    "a friend's text": ({"Origin": FRIEND, "Sec_Fetch_Site": "cross-site", "Content_Type": TEXT}, 415),
    "a page without type": ({"Sec_Fetch_Mode": "no-cors", "Content_Type": ""}, 415),
}
SERVED = {
    "no browser, any type": {"Content_Type": TEXT},
    "no browser, no type": {"Content_Type": ""},
    "a friend": {"Origin": FRIEND, "Sec_Fetch_Site": "cross-site"},
    "a program with an origin": {"Origin": "http://localhost:3000", "Content_Type": "application/json; charset=utf-8"},
    "node's fetch": {"Sec_Fetch_Mode": "cors"},
    "a container": {"Host": "host.docker.internal:4747"},
    "a name of ours": {"Host": "chat.localhost"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(tokens=4) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    settings = {"api": {"hosts": ["host.docker.internal"], "origins": [FRIEND]}}
    async with running(tmp_path_factory.mktemp("d"), device=False, server=upstream.url, settings=settings) as started:
        yield started


@pytest.mark.parametrize("what", REFUSED)
async def test_a_web_page_gets_nothing_and_no_token_is_made(
    what: str, daemon: DaemonProcess, upstream: Upstream
) -> None:
    headers, status = REFUSED[what]
    before = len(upstream.exchanges)
    reply = await replied(daemon.url, message("POST", "/v1/chat/completions", CHAT, **headers))
    assert (reply.status, reply.error["type"]) == (status, "invalid_request_error")
    told = {name: value for name, value in reply.headers.items() if name.startswith("access-control")}
    assert told == ({"access-control-allow-origin": FRIEND} if headers.get("Origin") == FRIEND else {})
    assert len(upstream.exchanges) == before


def listeners(daemon: DaemonProcess) -> set[int]:
    """The TCP ports at which the processes of a daemon listen."""
    every = [(c.pid, c.laddr.port) for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr]
    owner = psutil.Process(next(pid for pid, port in every if port == port_of(daemon)))
    tree = {owner.pid} | {child.pid for child in owner.children(recursive=True)}
    return {port for pid, port in every if pid in tree}


def port_of(daemon: DaemonProcess) -> int:
    port = urlsplit(daemon.url).port
    assert port is not None
    return port


async def test_every_listener_turns_pages_and_rebound_names_away(upstream: Upstream, tmp_path: Path) -> None:
    """Also Ollama's port, and the one for other machines, which speaks to nobody without a certificate."""
    second, third = free_port(), free_port()
    settings: dict[str, dict[str, Any]] = {
        "api": {"ollama_port": second},
        "peer": {"port": third},
        "fleet": {"enabled": True, "listen": "127.0.0.1", "ray": "off"},
    }
    async with running(tmp_path, server=upstream.url, settings=settings) as daemon:
        await daemon.device_ready()
        async with daemon.controls.post(f"{daemon.root}/disco/v1/fleet/new", json={"address": "127.0.0.1"}) as made:
            assert made.status == 200, await made.text()
        ports = listeners(daemon)
        assert ports == {port_of(daemon), second, third}
        before = len(upstream.exchanges)
        for port in ports - {third}:
            for what, (headers, status) in REFUSED.items():
                if headers.get("Origin") != FRIEND:
                    asked = message("POST", "/api/chat", CHAT, **headers)
                    assert (await replied(f"http://127.0.0.1:{port}/v1", asked)).status == status, what
        for asked in (message("POST", "/v1/chat/completions", CHAT), message("GET", "/disco/v1/state")):
            reader, writer = await asyncio.open_connection("127.0.0.1", third)
            writer.write(asked)
            async with asyncio.timeout(PATIENCE_S):
                with suppress(ConnectionError):
                    assert b"HTTP" not in await reader.read(), "no word of HTTP to whom shows no certificate"
            writer.close()
        assert len(upstream.exchanges) == before
    assert "Traceback" not in daemon.log, "it has ended in order"


async def test_a_page_of_a_stranger_gets_nothing_of_any_route(daemon: DaemonProcess, upstream: Upstream) -> None:
    before = len(upstream.exchanges)
    headers, _ = REFUSED["a page of a stranger"]
    for method, path in ROUTES:
        body = None if method == "GET" else CHAT
        reply = await replied(daemon.url, message(method, re.sub(r"{\w+}", "disco", path), body, **headers))
        assert (reply.status, reply.error["code"]) == (403, 403 if path == "/infill" else "wrong_origin"), path
        assert "access-control-allow-origin" not in reply.headers
    assert len(upstream.exchanges) == before


@pytest.mark.parametrize("what", SERVED)
async def test_who_is_no_page_or_a_named_one_is_served(what: str, daemon: DaemonProcess) -> None:
    reply = await replied(daemon.url, message("POST", "/v1/chat/completions", CHAT, **SERVED[what]))
    assert reply.status == 200, reply


@pytest.mark.parametrize("target", ["http://evil.example/health", "http://evil@127.0.0.1/health", "evil.example:80"])
async def test_a_target_that_names_another_host_is_refused(target: str, daemon: DaemonProcess) -> None:
    method = "GET" if "/" in target else "CONNECT"
    assert (await replied(daemon.url, message(method, target))).status in (400, 403)


async def test_a_named_page_may_ask_first_and_read_the_answer_and_our_headers(daemon: DaemonProcess) -> None:
    asked = message(
        "OPTIONS", "/v1/chat/completions", Origin=FRIEND, Access_Control_Request_Method="POST",
        Access_Control_Request_Headers="authorization, content-type",
    )  # fmt: skip
    reply = await replied(daemon.url, asked)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (204, FRIEND)
    for more in (b"", b', "stream": true'):
        body = CHAT[:-1] + more + b"}"
        reply = await replied(daemon.url, message("POST", "/v1/chat/completions", body, Origin=FRIEND))
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, FRIEND)
        exposed = reply.headers["access-control-expose-headers"].lower().split(", ")
        assert set(exposed) == {name for name in reply.headers if name.startswith("x-disco-")} >= {"x-disco-route"}


async def test_a_preflight_of_another_page_grants_nothing(daemon: DaemonProcess) -> None:
    asked = message(
        "OPTIONS", "/v1/chat/completions", Origin="http://localhost:3000", Access_Control_Request_Method="POST"
    )
    reply = await replied(daemon.url, asked)
    assert reply.status >= 400
    assert not [name for name in reply.headers if name.startswith("access-control")]

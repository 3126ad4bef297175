"""Clients that say nothing, or not all of it, or too much, are ended by a real daemon, and hold nothing meanwhile."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from disco_daemon.api.http.connections import MAX_STRANGERS
from disco_daemon.daemon.open_files import WANTED_FILES
from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.raw import NOBODY, as_root, message, parsed, replied, socket_of
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
TIMEOUT_S = 1.0
PATIENCE_S = 60.0
CHAT = "/v1/chat/completions"
HELLO = json.dumps({"model": "disco", "messages": [{"role": "user", "content": "Hello!"}]}).encode()
SLOW = {
    "an idle one": b"",
    "half a header": b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-",
    "half a body": message("POST", CHAT, HELLO)[:-20],
    "half a chunk": message("POST", CHAT, b"ff\r\n{", Transfer_Encoding="chunked", Content_Length=""),
    "half a body to where none is wanted": message("POST", "/disco/v1/reload", b"{", Content_Length="5000"),
    "half a body to nowhere": message("POST", "/v1/nothing", b"{", Content_Length="5000"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(tokens=4) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    settings = {"api": {"receive_timeout_s": TIMEOUT_S}}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))  # as macOS has it, or less
    try:
        async with running(
            tmp_path_factory.mktemp("d"), device=False, server=upstream.url, settings=settings
        ) as started:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            yield started
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("what", SLOW)
async def test_a_client_that_does_not_go_on_is_ended(what: str, daemon: DaemonProcess, upstream: Upstream) -> None:
    before = len(upstream.exchanges)
    reader, writer = await asyncio.open_connection(sock=socket_of(None, daemon.url))
    writer.write(SLOW[what])
    async with asyncio.timeout(PATIENCE_S):
        said = await reader.read()
    writer.close()
    assert not said or parsed(said).status in (200, 403, 404, 408)
    assert what != "half a body" or parsed(said).error["code"] == "timeout"
    assert len(upstream.exchanges) == before


async def test_a_promise_of_50_gb_is_refused_at_once(daemon: DaemonProcess) -> None:
    took_s = []
    for _ in range(3):  # a busy machine may hold one of them up
        begun = asyncio.get_running_loop().time()
        reader, writer = await asyncio.open_connection(sock=socket_of(None, daemon.url))
        writer.write(message("POST", CHAT, b"{", Content_Length=str(50 * 10**9)))
        head = await reader.readuntil(b"\r\n\r\n")
        took_s.append(asyncio.get_running_loop().time() - begun)
        writer.close()
        assert head.startswith(b"HTTP/1.1 413")
    assert min(took_s) < TIMEOUT_S


async def test_a_hundred_slow_clients_are_in_nobodys_way(daemon: DaemonProcess) -> None:
    slow = [socket_of(None, daemon.url) for _ in range(100)]
    for i, end in enumerate(slow):
        end.sendall(list(SLOW.values())[i % len(SLOW)])
    assert (await ask(daemon, "Is anybody there?")).text
    process = psutil.Process((await daemon.state())["pid"])
    async with asyncio.timeout(PATIENCE_S):
        while len(process.net_connections()) > 20:
            await asyncio.sleep(0.05)  # another process' connections have no event
    for end in slow:
        end.close()


@as_root
async def test_other_users_cannot_use_up_the_connections(daemon: DaemonProcess) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:  # until the machine is quick enough: who says nothing is let go after TIMEOUT_S
            begun = asyncio.get_running_loop().time()
            held = [socket_of(NOBODY, daemon.url) for _ in range(MAX_STRANGERS)]
            reply = await replied(daemon.url, message("GET", "/health"), uid=NOBODY)
            if reply.status == 503 or asyncio.get_running_loop().time() - begun < TIMEOUT_S:
                break
            for end in held:
                end.close()
    assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
    assert int(reply.headers["retry-after"]) >= 1
    assert (await ask(daemon, "And we?")).text
    for end in held:
        end.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read in /proc")
async def test_the_daemon_may_open_more_files_than_it_was_started_with(daemon: DaemonProcess) -> None:
    limits = Path(f"/proc/{(await daemon.state())['pid']}/limits").read_text()
    soft, hard = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
    assert int(soft) == (WANTED_FILES if hard == "unlimited" else min(WANTED_FILES, int(hard)))


async def test_nothing_is_left_and_the_log_has_no_fault_of_ours(daemon: DaemonProcess) -> None:
    await daemon.until(lambda s: s["in_flight"] == 0)
    assert "Traceback" not in daemon.log

"""Two hundred bad bodies on each route of the newer APIs: a 4xx each, in the route's own shape, and soon."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.fuzz_http import REAL, mutate, scramble
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.raw import message, replied
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
N_BAD = 200
MOST = 3000  # bodies tried to have so many bad ones: a mutated one may be a good one
SOON_S = 0.1
BODIES = {path: body for method, path, body in REAL if method == "POST"}
ROUTES = [path for path in BODIES if path.startswith(("/api/", "/v1/messages", "/v1/responses")) and "pull" not in path]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    async with (
        Upstream(tokens=1) as server,
        running(tmp_path_factory.mktemp("d"), device=False, server=server.url) as started,
    ):
        yield started


def has_own_shape(path: str, told: Any) -> bool:
    """Whether an error is in the shape of this path's API."""
    if path.startswith("/api/"):
        return isinstance(told["error"], str) and told.keys() <= {"error", "code"}
    if path.startswith("/v1/messages"):
        return bool(told["type"] == "error" and told["error"].keys() <= {"type", "message", "code"})
    return set(told["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ROUTES)
async def test_bad_bodies_get_an_error_in_the_shape_of_the_route(path: str, daemon: DaemonProcess) -> None:
    rng, took_s = random.Random(path), list[float]()
    for _ in range(MOST):
        body = json.dumps(mutate(BODIES[path], rng)).encode()
        sent = scramble(body, rng) if rng.random() < 0.5 else body
        began = time.perf_counter()
        async with daemon.session.post(f"{daemon.root}{path}", data=sent) as response:
            told = await response.read()
        assert response.status < 500, (sent, told)
        if response.status >= 400:
            took_s.append(time.perf_counter() - began)
            assert has_own_shape(path, json.loads(told)), (sent, told)
        if len(took_s) == N_BAD:
            break
    assert len(took_s) == N_BAD
    assert statistics.median(took_s) < SOON_S


@pytest.mark.parametrize("path", ROUTES)
async def test_a_body_that_announces_too_much_is_refused_in_the_shape_of_the_route(
    path: str, daemon: DaemonProcess
) -> None:
    reply = await replied(daemon.root, message("POST", path, b"x", Content_Length=str(50 * 10**9)))
    assert reply.status == 413
    assert has_own_shape(path, json.loads(reply.body)), reply

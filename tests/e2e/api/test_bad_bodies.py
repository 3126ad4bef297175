"""Two hundred bad bodies on each route that takes one: a 4xx each, in the route's own shape, and soon.

`python -m benchmarks.faults.routes --only bodies` shows how soon, the worst ones too.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.faults.route_bodies import ROUTES, has_own_shape, refusals
from disco_daemon.api.doors import ROUTES as DOORS
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.raw import message, replied
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
N_BAD = 200
SOON_S = 0.1
# A 501, whatever is sent; and a control, for its owner alone.
NO_BODY = {"/api/create", "/api/push", "/api/copy", "/api/blobs/{digest}", "/api/pull"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    async with (
        Upstream(tokens=1) as server,
        running(tmp_path_factory.mktemp("d"), device=False, server=server.url) as started,
    ):
        yield started


async def test_all_routes_that_answer_are_among_these() -> None:
    served = {path for method, path in DOORS if method == "POST" and path.startswith(("/v1/", "/api/", "/infill"))}
    assert served - set(ROUTES) == NO_BODY


@pytest.mark.parametrize("path", ROUTES)
async def test_bad_bodies_get_an_error_in_the_shape_of_the_route(path: str, daemon: DaemonProcess) -> None:
    told = [refusal async for refusal in refusals(daemon.root, daemon.session, path, N_BAD)]
    assert len(told) == N_BAD
    assert [fault for one in told if (fault := one.fault(path))] == []
    assert statistics.median(one.took_s for one in told) < SOON_S


@pytest.mark.parametrize("path", ROUTES)
async def test_a_body_that_announces_too_much_is_refused_in_the_shape_of_the_route(
    path: str, daemon: DaemonProcess
) -> None:
    reply = await replied(daemon.root, message("POST", path, b"x", Content_Length=str(50 * 10**9)))
    assert reply.status == 413
    assert has_own_shape(path, json.loads(reply.body)), reply

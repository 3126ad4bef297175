"""What holds on every route that answers: privacy, caps, and that no web page of a stranger gets anything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.faults.route_bodies import ROUTES as WITH_BODY
from benchmarks.faults.route_bodies import has_own_shape
from disco_daemon.api.doors import ROUTES
from disco_daemon.api.llama_server.rerank_routes import PATHS as RATING
from tests.e2e.conductor.test_private import trap
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO = [{"role": "user", "content": "Tell me about lighthouses."}]
GAP = {"input_prefix": "def f(", "input_suffix": "    return 1"}
# What a route is asked; those in ANSWERS may be answered by a server as well.
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/v1/completions": {"prompt": "Once upon a", "max_tokens": 3},
    "/v1/completions, suffix": {"prompt": "def f(", "suffix": "    return 1", "max_tokens": 3},
    "/infill": GAP | {"n_predict": 3},
    "/v1/responses": {"input": "Tell me about lighthouses.", "max_output_tokens": 3},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
    "/api/chat": {"messages": HELLO, "stream": False, "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "Tell me about lighthouses.", "stream": False, "options": {"num_predict": 3}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/responses/input_tokens": {"input": "Tell me about lighthouses."},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": "a lamp"},
    **{path: {"query": "a lamp", "documents": ["a light", "a tax"]} for path in RATING},
    "/api/embed": {"input": "a lamp"},
    "/api/embeddings": {"prompt": "a lamp"},
    "/api/show": {},
}
FILLS = {"/v1/completions, suffix", "/infill"}  # which the embedded model has no tokens for, so that only a server can
UNABLE = FILLS | set(RATING)  # what the embedded model cannot do
FILLING: dict[str, dict[str, Any]] = {"server": {"capabilities": {"fim": True}}}
HERE = {"/v1/completions"}  # which goes to no server in any case


@dataclass(frozen=True, slots=True)
class Told:
    path: str
    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def is_refused(self) -> bool:
        """Whether it is an error in the shape of the route's API."""
        return 400 <= self.status < 500 and has_own_shape(self.path, self.body)


async def asked(daemon: DaemonProcess, route: str, **more: Any) -> Told:
    path, body = route.partition(",")[0], {"model": "disco"} | (ANSWERS | OTHERS)[route] | more
    async with daemon.session.post(f"{daemon.root}{path}", json=body) as response:
        return Told(path, response.status, json.loads(await response.read()), dict(response.headers))


async def test_these_are_all_routes_with_a_body() -> None:
    assert {route.partition(",")[0] for route in ANSWERS | OTHERS} == set(WITH_BODY)


# --- privacy ------------------------------------------------------------------------------------------------------


Ends = tuple[DaemonProcess, Upstream]


@asynccontextmanager
async def with_both(folder: Path, settings: dict[str, Any]) -> AsyncIterator[Ends]:
    """A daemon with a device, and its server, which it prefers."""
    async with (
        Upstream(tokens=3) as server,
        running(folder, server=server.url, policy="all-server", settings=settings) as daemon,
    ):
        await daemon.device_ready()
        yield daemon, server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def private(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[DaemonProcess, list[object]]]:
    """A daemon with `policy.private`, and who has called its server."""
    settings = {"policy": {"private": True}} | FILLING
    async with (
        trap() as (url, callers),
        running(tmp_path_factory.mktemp("p"), server=url, policy="all-server", settings=settings) as daemon,
    ):
        await daemon.device_ready()
        yield daemon, callers


@pytest.mark.parametrize("route", ANSWERS | OTHERS)
async def test_in_private_mode_no_route_asks_the_server(
    route: str, private: tuple[DaemonProcess, list[object]]
) -> None:
    daemon, callers = private
    told = await asked(daemon, route)
    assert told.is_refused if route in UNABLE else told.status == 200, told
    if route in ANSWERS:
        assert (await asked(daemon, route, model="disco/server")).is_refused
        assert (await asked(daemon, route, disco={"route": "server"})).is_refused
    assert callers == [], "not even a connection"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ends]:
    """A daemon whose server answers all that it may."""
    async with with_both(tmp_path_factory.mktemp("b"), FILLING) as ends:
        yield ends


@pytest.mark.parametrize("route", ANSWERS)
async def test_a_request_that_is_private_stays_here_on_every_route(route: str, both: Ends) -> None:
    daemon, server = both
    before = server.n_requests
    told = await asked(daemon, route, disco={"private": True})
    assert told.is_refused if route in FILLS else told.status == 200, told
    assert (await asked(daemon, route, model="disco/server", disco={"private": True})).is_refused
    assert server.n_requests == before
    # Without the wish it goes there; else nothing is shown. This server fills no gaps: it says 404, and counts nothing.
    told = await asked(daemon, route)
    assert "the server said 404" in str(told.body) if route in FILLS else told.status == 200
    assert server.n_requests == before + (route not in FILLS | HERE)


# --- caps ---------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def capped(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ends]:
    """A daemon that may spend no money."""
    async with with_both(tmp_path_factory.mktemp("c"), {"caps": {"usd_per_day": 0.0}} | FILLING) as ends:
        yield ends


@pytest.mark.parametrize("route", ANSWERS | OTHERS)
async def test_where_no_money_is_left_every_route_is_the_devices_alone(route: str, capped: Ends) -> None:
    daemon, server = capped
    told = await asked(daemon, route)
    assert told.is_refused if route in UNABLE else told.status == 200, told
    if route in ANSWERS:
        assert (await asked(daemon, route, model="disco/server")).is_refused
    assert server.n_requests == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spent(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ends]:
    """A daemon that may spend neither money nor energy."""
    async with with_both(
        tmp_path_factory.mktemp("s"), {"caps": {"usd_per_day": 0.0, "wh_per_day": 0.0}} | FILLING
    ) as ends:
        yield ends


@pytest.mark.parametrize("route", ANSWERS)
async def test_a_cap_that_is_used_up_is_told_in_the_routes_own_shape(route: str, spent: Ends) -> None:
    daemon, server = spent
    told = await asked(daemon, route)
    assert told.is_refused
    assert told.status == 429
    assert "cap" in json.dumps(told.body)
    assert "Retry-After" in told.headers
    assert server.n_requests == 0


# --- web pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", list(ROUTES), ids=" ".join)
async def test_no_route_serves_a_web_page_of_a_stranger(route: tuple[str, str], spent: Ends) -> None:
    daemon, server = spent
    method, path = route
    path = path.replace("{name}", "disco").replace("{request_id}", "req-0").replace("{digest}", "sha256:0")
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
    ):
        for door in (daemon.session, daemon.controls):
            if door is daemon.controls and "Host" in headers:
                continue  # no name leads a page to the Unix socket
            async with door.request(method, f"{daemon.root}{path}", data=b"{}", headers=headers) as response:
                said = await response.read()
            assert response.status == 403, (headers, said)
            assert "Access-Control-Allow-Origin" not in response.headers
            if path in WITH_BODY:
                assert has_own_shape(path, json.loads(said))
    assert server.n_requests == 0

"""A key on its way by plain http: a name may stand for private addresses only, whenever somebody connects."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest

from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.errors import EndpointError
from disco_daemon.onboarding.asking import goes_nowhere_public
from disco_daemon.types import Finish, GenerationRequest, Usage
from tests.fixtures.upstream import Upstream

NAME = "gpu.lab.example.com"
REQUEST = GenerationRequest("r", ({"role": "user", "content": "x"},))
PUBLIC, HERE = "198.51.100.7", "127.0.0.1"  # of RFC 5737: nobody's


class Names:
    """What NAME stands for, as a test says; all else is looked up as ever."""

    def __init__(self) -> None:
        self.addresses: Sequence[str] = (HERE,)
        self._ask = socket.getaddrinfo

    def getaddrinfo(self, host: Any, port: Any, *args: Any, **more: Any) -> list[Any]:
        if host != NAME:
            return self._ask(host, port, *args, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0)) for address in self.addresses]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    found = Names()
    monkeypatch.setattr(socket, "getaddrinfo", found.getaddrinfo)
    return found


def by_name(upstream: Upstream, key: str = "hush-hush", **more: Any) -> Server:
    return Server(ServerConfig(upstream.url.replace(HERE, NAME), "loopback", key, **more))


async def answered(server: Server) -> bool:
    """Whether it answers; raises what it raises."""
    return any([isinstance(event, Finish) async for event in server.generate(REQUEST, Usage())])


async def test_a_name_of_a_private_network_is_asked_with_the_key(names: Names) -> None:
    async with Upstream() as upstream:
        server = by_name(upstream)
        names.addresses = (PUBLIC, HERE)  # of several only the private ones
        await server.start()
        assert await answered(server)
        assert server.status()["state"] == "configured"
        await server.close()
        assert [e.headers["Authorization"] for e in upstream.exchanges] == ["Bearer hush-hush"]


async def test_a_name_that_stands_for_a_public_address_is_off_with_the_mend(names: Names) -> None:
    names.addresses = (PUBLIC,)
    async with Upstream() as upstream:
        server = by_name(upstream)
        await server.start()
        status = server.status()
        assert status["state"] == "off", "before anybody asks"
        assert server.readiness().down_s > 0
        with pytest.raises(EndpointError) as raised:
            await answered(server)
        await server.close()
        for text in (str(raised.value), status["last_error"]):
            assert "in the clear" in text
            assert "server.insecure" in text
            assert "hush-hush" not in text
        assert raised.value.reason == "insecure"
        assert not upstream.exchanges


async def test_a_name_that_becomes_public_later_is_not_connected_to(names: Names) -> None:
    """DNS rebinding: what was looked up at the start says nothing of the next connection."""
    async with Upstream() as upstream:
        server = by_name(upstream)
        await server.start()
        names.addresses = (PUBLIC,)
        with pytest.raises(EndpointError, match="in the clear"):
            await answered(server)
        assert not upstream.exchanges
        assert server.status()["state"] == "off"
        names.addresses = (HERE,)
        assert await answered(server), "and it is asked again once it is private"
        assert server.status()["state"] == "configured"
        await server.close()


async def test_without_a_key_or_where_it_is_wanted_so_any_address_is_asked(names: Names) -> None:
    async with Upstream() as upstream:
        for server in (by_name(upstream, key=""), by_name(upstream, insecure=True)):
            await server.start()
            assert await answered(server)
            await server.close()
        names.addresses = (PUBLIC,)
        for server in (by_name(upstream, key=""), by_name(upstream, insecure=True)):
            assert not server._confined


async def test_no_proxy_carries_such_a_key(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Upstream() as upstream, Upstream() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        server = by_name(upstream)
        await server.start()
        assert await answered(server)
        await server.close()
        assert (upstream.n_requests, proxy.n_requests) == (1, 0)


def test_setup_asks_by_the_same_rule(names: Names) -> None:
    assert goes_nowhere_public(f"http://{NAME}/v1")
    names.addresses = (HERE, PUBLIC)
    assert not goes_nowhere_public(f"http://{NAME}/v1")

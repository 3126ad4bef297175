"""The HTTP client for servers: what is packed, trusted, kept open and sent by a proxy. Real servers on loopback."""

from __future__ import annotations

import base64
import datetime as dates
import ipaddress
import ssl
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from disco_daemon.endpoints import server_client
from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.endpoints.server_client import MAX_ERROR, ServerClient
from disco_daemon.endpoints.server_errors import StatusError
from disco_daemon.endpoints.stream import Endless
from disco_daemon.errors import EndpointError
from disco_daemon.types import Finish, GenerationRequest, Usage

SAID = b'data: {"choices":[{"index":0,"delta":{"content":"Hello"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
MUCH = 256 * 2**20  # bytes, of a few hundred thousand packed
PATH = "chat/completions"


@dataclass
class Answers:
    """A server that answers everything alike, and what it was asked."""

    body: bytes = SAID
    status: int = 200
    coding: str = ""
    url: str = ""
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: set[int] = field(default_factory=set)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        await request.read()
        assert request.transport is not None
        self.connections.add(request.transport.get_extra_info("peername")[1])
        self.asked.append(request.raw_path)
        self.headers.append(dict(request.headers))
        headers = {"Content-Encoding": self.coding} if self.coding else {}
        return web.Response(body=self.body, status=self.status, headers=headers, content_type="text/event-stream")


@asynccontextmanager
async def serving(answers: Answers, tls: ssl.SSLContext | None = None) -> AsyncIterator[Answers]:
    runner = web.ServerRunner(web.Server(answers.answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    answers.url = f"http{'s' if tls else ''}://127.0.0.1:{port}/v1"
    try:
        yield answers
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(url: str, key: str = "k") -> AsyncIterator[ServerClient]:
    client = ServerClient(url, key, confined=False)
    try:
        yield client
    finally:
        await client.close()


async def said(client: ServerClient) -> bytes:
    async with AsyncExitStack() as stack:
        return b"".join([part async for part in await client.stream(PATH, {"model": "m"}, stack)])


def packed(body: bytes, coding: str) -> bytes:
    packer = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_an_answer_that_is_packed_though_nobody_asked_for_that_is_read(coding: str) -> None:
    long = SAID + b": a comment\n\n" * 20_000
    async with serving(Answers(packed(long, coding), coding=coding)) as server, client_of(server.url) as client:
        assert await said(client) == long
        assert server.headers[0]["Accept-Encoding"] == "identity"


async def test_an_answer_packed_in_another_way_is_garbage() -> None:
    async with serving(Answers(b"...", coding="br")) as server:
        asking = Server(ServerConfig(server.url, "m", "k"))
        await asking.start()
        with pytest.raises(EndpointError, match="packed in a way") as e:
            _ = [event async for event in asking.ask(GenerationRequest("r", ()), Usage())]
        await asking.close()
        assert e.value.reason == "garbage"


async def test_of_a_body_that_unpacks_without_end_a_beginning_is_read() -> None:
    bomb = packed(b"a" * MUCH, "gzip")
    async with serving(Answers(bomb, 500, "gzip")) as server, client_of(server.url) as client:
        with pytest.raises(StatusError) as e:
            await said(client)
        assert (e.value.status, len(str(e.value))) == (500, MAX_ERROR)
        server.status = 200
        with pytest.raises(Endless):
            await client.get(f"{server.url}/models")


async def test_a_connection_is_kept_for_the_next_answer_and_for_that_after_an_error() -> None:
    async with serving(Answers()) as server, client_of(server.url) as client:
        for status in (200, 200, 429, 200):
            server.status = status
            if status == 200:
                assert await said(client) == SAID
            else:
                with pytest.raises(StatusError):
                    await said(client)
        assert len(server.asked) == 4
        assert len(server.connections) == 1


async def test_an_answer_whose_reader_leaves_closes_its_connection() -> None:
    async with serving(Answers(b"a" * MUCH)) as server, client_of(server.url) as client:
        async with AsyncExitStack() as stack:
            assert await anext(await client.stream(PATH, {}, stack))
        server.body = SAID
        assert await said(client) == SAID
        assert len(server.connections) == 2


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy"])
async def test_what_is_for_another_machine_goes_by_the_proxy_with_its_password(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.delenv(other.upper(), raising=False)
    async with serving(Answers()) as proxy:
        monkeypatch.setenv(name, proxy.url.replace("://", "://me:s%40fe@").removesuffix("/v1"))
        async with client_of("http://gpu.example.com/v1") as client:
            assert await said(client) == SAID
        assert proxy.asked == ["http://gpu.example.com/v1/chat/completions"]
        told = base64.b64encode(b"me:s@fe").decode()
        assert proxy.headers[0]["Proxy-Authorization"] == f"Basic {told}"
        async with serving(Answers()) as near, client_of(near.url) as client:
            assert await said(client) == SAID
        assert len(proxy.asked) == 1, "what is for this machine stays here"
        monkeypatch.setenv("no_proxy", "gpu.example.com")
        client = ServerClient("http://gpu.example.com/v1", "k", confined=False)
        assert client._proxy is None
        await client.close()


def certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for 127.0.0.1 that nobody but its file vouches for, and a server's side of it."""
    key, now = ec.generate_private_key(ec.SECP256R1()), dates.datetime.now(dates.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + dates.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    found, secret = folder / "cert.pem", folder / "key.pem"
    found.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    side.load_cert_chain(found, secret)
    return found, side


async def test_a_server_by_https_is_believed_by_the_systems_certificates_or_those_that_a_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, side = certificate(tmp_path)
    async with serving(Answers(), side) as server:
        for cafile in (None, found):
            server_client._tls.cache_clear()
            if cafile is not None:
                monkeypatch.setenv("SSL_CERT_FILE", str(cafile))
            asking = Server(ServerConfig(server.url, "m", "k"))
            await asking.start()
            with nullcontext() if cafile else pytest.raises(EndpointError, match=r"(?i)certificate") as e:
                *_, last = [event async for event in asking.ask(GenerationRequest("r", ()), Usage())]
                assert isinstance(last, Finish)
            assert e is None or e.value.reason == "unreachable"
            await asking.close()
    server_client._tls.cache_clear()
    assert len(server.asked) == 1, "without trust nothing is sent"


async def test_an_organization_is_told_to_openai_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    assert server_client._headers("api.openai.com", "k")["OpenAI-Organization"] == "org-1"
    assert "OpenAI-Organization" not in server_client._headers("notopenai.com", "k")


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (401, b"{}", "unauthorized"), (403, b"{}", "forbidden"), (404, b"{}", "not_found"),
        (402, b"{}", "no_credit"),
        (429, b'{"error": {"message": "You exceeded your current quota"}}', "no_credit"),
        (400, b'[{"error": {"message": "API key not valid. Please pass a valid API key."}}]', "unauthorized"),
        (400, b'{"error": {"message": "Your credit balance is too low to access the API."}}', "no_credit"),
        (400, b'{"error": {"message": "gpt-99 is not a valid model ID"}}', "not_found"),
        (429, b'{"error": {"message": "slow down"}}', "rate_limited"), (500, b"oh", "server_error"),
    ],
)  # fmt: skip
async def test_a_server_fails_by_its_last_reason_until_it_answers(status: int, body: bytes, reason: str) -> None:
    async def ask() -> None:
        async for _ in server.generate(GenerationRequest("r", ({"role": "user", "content": "x"},)), Usage()):
            pass

    async with serving(Answers(body, status)) as upstream:
        server = Server(ServerConfig(upstream.url, "m", "k"))
        await server.start()
        assert (server.status()["tried"], server.status()["failing"]) == (False, None)
        found = []
        for _ in range(2):
            with pytest.raises(EndpointError):
                await ask()
            found.append(server.status()["failing"])
        assert found[0]["reason"] == reason
        assert found[1] == found[0], "since when it fails does not move while it fails alike"
        upstream.body, upstream.status = SAID, 200
        await ask()
        assert (server.status()["tried"], server.status()["failing"]) == (True, None)
        await server.close()


async def test_a_server_that_nobody_listens_at_is_known_to_be_away_before_it_is_asked() -> None:
    async with serving(Answers()) as upstream:
        url = upstream.url
    server = Server(ServerConfig(url, "m", "k"))
    await server.start()
    await server.inquire()
    status = server.status()
    await server.close()
    assert status["failing"]["reason"] == "unreachable"
    assert status["last_error"].endswith(": connection refused: nothing listens there")
    assert "ssl" not in status["last_error"]

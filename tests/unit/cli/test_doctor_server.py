"""What the doctor says of the server, from settings and from what real ones on this machine answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from disco_daemon.cli.doctor import line, server
from disco_daemon.cli.doctor.finding import Finding, Level, ok
from disco_daemon.cli.doctor.server import FoundKey
from disco_daemon.config import pricelist
from disco_daemon.config.schema import Api, Config, NamedServer, ServerSettings
from disco_daemon.endpoints.continuation import Profile, Verdict
from disco_daemon.onboarding import asking
from disco_daemon.onboarding.asking import Reply
from tests.fixtures.upstream import Upstream

OK, WARN, WRONG = Level
CATALOG = pricelist.load()
OPENAI = "https://api.openai.com/v1"
SECRET = "secret-of-the-test"


# --- by the settings alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "level", "word"),
    [
        ("", OK, "this machine answers alone"),
        (OPENAI, OK, f"m at {OPENAI}"),
        ("http://192.168.1.7:8080/v1", OK, "http://192.168.1.7:8080/v1"),
        ("http://llm.example.com/v1", WARN, "no key is sent there"),
        ("https://user:pass@llm.example.com/v1", WARN, "more than an address"),
        ("https://llm.example.com/v1?key=hush", WARN, "more than an address"),
        (f"{OPENAI}/chat/completions", WRONG, "one of its pages"),
        ("http://127.0.0.1:4747/v1", WRONG, "this daemon itself"),
        ("http://127.0.0.1:4748/v1", OK, ""),
    ],
)
def test_addresses(url: str, level: Level, word: str) -> None:
    found = server.address(ServerSettings(base_url=url, model="m"), Api())
    assert found.level is level
    assert word in found.found
    assert not any(secret in found.found + found.mend for secret in ("pass", "hush"))


def test_of_one_of_several_servers_its_own_settings_are_named() -> None:
    box = NamedServer(name="box", base_url="http://127.0.0.1:4747/v1", model="m")
    far = msgspec.structs.replace(box, base_url="http://llm.example.com/v1")
    page = msgspec.structs.replace(box, base_url=f"{OPENAI}/models")
    unheard = Reply(problem="it is away")
    findings = [
        *(server.address(one, Api()) for one in (box, far, page)),
        *(server.models(box, reply, with_key=True) for reply in (unheard, Reply(301), Reply(404), Reply(500))),
        server.models(box, Reply(200, models=("other",)), with_key=True),
        server.key(msgspec.structs.replace(box, base_url=OPENAI), server.read_key(Config(server=box), {}), CATALOG),
    ]
    for found in findings:
        assert found.level is not OK
        assert "server." not in f"{found.found} {found.mend}"
        assert "box" in found.mend


def settings(**values: Any) -> Config:
    return Config(server=ServerSettings(**{"base_url": OPENAI, "model": "gpt-4o-mini"} | values))


def key_of(config: Config, env: dict[str, str]) -> tuple[Level, str]:
    found = server.key(config.server, server.read_key(config, env), CATALOG)
    assert SECRET not in found.found + found.mend
    return found.level, found.found


def test_the_key_comes_from_a_variable_or_a_file_of_ones_own(tmp_path: Path) -> None:
    assert key_of(settings(), {"OPENAI_API_KEY": SECRET}) == (OK, "there, in $OPENAI_API_KEY")
    file = tmp_path / "key"
    in_file = settings(api_key_file=str(file))
    assert key_of(in_file, {})[0] is WRONG  # there is no such file
    file.touch(0o600)
    assert "empty" in key_of(in_file, {})[1]
    file.write_text(f"{SECRET}\n", "utf-8")
    assert key_of(in_file, {}) == (OK, f"there, in {file}")
    assert key_of(in_file, {"OPENAI_API_KEY": SECRET}) == (OK, "there, in $OPENAI_API_KEY")  # it goes first
    file.chmod(0o644)
    level, found = key_of(in_file, {})
    assert level is WRONG
    assert "chmod 600" in found


@pytest.mark.parametrize("odd", [f" {SECRET}", f"{SECRET}\n", f"{SECRET}\nx", "schlüssel"])
def test_a_key_that_no_header_can_carry(odd: str) -> None:
    assert key_of(settings(), {"OPENAI_API_KEY": odd})[0] is WRONG


@pytest.mark.parametrize(
    ("url", "level"),
    [
        (OPENAI, WRONG),  # known to bill
        ("https://llm.example.com/v1", WARN),  # nobody knows
        ("http://127.0.0.1:8080/v1", OK),
        ("http://192.168.1.7:8080/v1", OK),
    ],
)
def test_where_a_key_is_missing(url: str, level: Level) -> None:
    assert key_of(settings(base_url=url), {})[0] is level


@pytest.mark.parametrize("pasted", [f"sk-{SECRET}", "gsk_x1Y2"])
def test_a_key_in_place_of_a_variables_name_is_not_shown(pasted: str) -> None:
    found = server.read_key(settings(api_key_env=pasted), {})
    assert pasted not in found.problem
    assert "not the key" in found.problem


def test_a_key_is_not_in_its_repr() -> None:
    assert SECRET not in repr(FoundKey(SECRET, "$OPENAI_API_KEY"))


def test_prices(tmp_path: Path) -> None:
    known = server.price(settings(), CATALOG, tmp_path)
    assert known.level is OK
    assert known.found.startswith("$0.15 and $0.6 per million input and output tokens (openai: gpt-4o-mini, 20")
    own = server.price(settings(input_usd_per_mtok=1.5, output_usd_per_mtok=0.0), CATALOG, tmp_path)
    assert (own.level, own.found[:11]) == (OK, "$1.5 and $0")
    for half in ({}, {"input_usd_per_mtok": 1.0}):
        unknown = server.price(settings(model="gpt-9", **half), CATALOG, tmp_path)
        assert unknown.level is WARN
        assert "gpt-9" in unknown.found
        assert str(tmp_path / "own.toml") in unknown.mend


def test_what_the_doctor_asks_for_is_a_price_list_once_it_has_figures(tmp_path: Path) -> None:
    mend = server.price(settings(model="gpt-9"), CATALOG, tmp_path).mend
    toml = mend.partition(":\n")[2].replace("…", "2.5")
    (tmp_path / "own.toml").write_text(toml, "utf-8")
    found = server.price(settings(model="gpt-9"), pricelist.load(tmp_path), tmp_path)
    assert (found.level, found.found[:13]) == (OK, "$2.5 and $2.5")


# --- by what it answers -----------------------------------------------------------------------------------------------


def network(url: str, *, unasked: str = "") -> tuple[Level, str]:
    found = server.network("network", url, unasked=unasked)
    return found.level, found.found


def test_a_host_that_is_there_one_that_is_not_and_one_that_is_not_asked() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        level, found = network(f"http://127.0.0.1:{port}/v1")
    assert level is OK
    assert f"127.0.0.1:{port} answered" in found
    level, found = network(f"http://127.0.0.1:{port}/v1")
    assert level is WRONG
    assert "refused" in found
    assert network(f"http://127.0.0.1:{port}/v1", unasked=server.OFFLINE)[0] is OK


def test_a_name_that_nobody_knows_and_a_host_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    assert network("https://llm.example.com/v1") == (
        WRONG,
        "the name llm.example.com is not known: Name or service not known",
    )

    def silent(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    assert network("https://llm.example.com/v1") == (WRONG, "llm.example.com:443 did not answer within 3 s")
    monkeypatch.undo()
    assert network(f"http://{'x' * 70}.example.com/v1")[0] is WRONG  # longer than a label may be


def test_the_proxy_is_asked_where_there_is_one_but_not_for_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class Connection:
        def close(self) -> None:
            pass

    def connect(address: tuple[str, int], **_: object) -> Connection:
        asked.append(address)
        return Connection()

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://user:pass@proxy.example.com:3128"})
    monkeypatch.setattr(urllib.request, "proxy_bypass", lambda host: host == "llm.local")
    assert network(OPENAI)[1].startswith("the proxy proxy.example.com:3128 answered")
    network("https://llm.local/v1")
    network("https://127.0.0.1/v1")
    network("http://llm.example.com/v1")
    hosts = [("proxy.example.com", 3128), ("llm.local", 443), ("127.0.0.1", 443), ("llm.example.com", 80)]
    assert asked == hosts


def verdict(reply: Reply, model: str = "loopback", *, with_key: bool = True) -> tuple[Level, str]:
    found = server.models(ServerSettings(base_url=f"{OPENAI}/", model=model), reply, with_key=with_key)
    return found.level, f"{found.found} -> {found.mend}"


async def test_a_server_that_lists_its_model_is_well() -> None:
    async with Upstream() as upstream:
        reply = await asyncio.to_thread(asking.ask_models, upstream.url, SECRET)
    assert (reply.status, reply.models) == (200, ("loopback",))
    assert reply.skew_s is not None
    assert abs(reply.skew_s) < 120
    assert verdict(reply)[0] is OK
    level, told = verdict(reply, "loopbach")
    assert level is WARN
    assert told.endswith("NAME`: loopback")


@pytest.mark.parametrize(
    ("status", "level", "word"),
    [
        (401, WRONG, "refuses the key"),
        (403, WARN, "not allowed with this key"),
        (404, WARN, "mostly ends with /v1"),
        (429, WARN, "answers 429"),
        (500, WARN, "answers 500"),
    ],
)
async def test_statuses(status: int, level: Level, word: str) -> None:
    async with Upstream() as upstream:
        with upstream.status(status):
            reply = await asyncio.to_thread(asking.ask_models, upstream.url, SECRET)
    assert reply.status == status
    assert verdict(reply)[0] is level
    assert word in verdict(reply)[1]


def test_without_a_key_one_is_wanted() -> None:
    assert verdict(Reply(401), with_key=False)[0] is WRONG
    assert "wants a key" in verdict(Reply(401), with_key=False)[1]
    assert "wants a key" in verdict(Reply(403), with_key=False)[1]


async def test_a_web_page_is_no_list_and_silence_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Upstream() as upstream:
        with upstream.html_200():
            reply = await asyncio.to_thread(asking.ask_models, upstream.url, SECRET)
        assert "no list" in verdict(reply)[1]
        monkeypatch.setattr(asking, "MODELS_TIMEOUT_S", 0.2)
        with upstream.hang():
            reply = await asyncio.to_thread(asking.ask_models, upstream.url, SECRET)
        assert verdict(reply)[0] is WRONG
        assert reply.problem == "no answer within 0.2 s"
        monkeypatch.undo()
        async with upstream.refuse():
            reply = await asyncio.to_thread(asking.ask_models, upstream.url, SECRET)
        assert verdict(reply)[0] is WRONG


@asynccontextmanager
async def saying(response: bytes, heard: list[bytes]) -> AsyncIterator[str]:
    """A server that says this to everybody, and keeps what it was asked."""
    serving: set[asyncio.Task[None] | None] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        with contextlib.suppress(ConnectionError):  # a client that has had enough
            writer.write(response)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/"
        await asyncio.gather(*filter(None, serving))


async def test_a_redirect_is_not_followed_with_the_key() -> None:
    heard: list[bytes] = []
    elsewhere: list[bytes] = []
    async with saying(b"", elsewhere) as other:
        moved = f"HTTP/1.1 302 Found\r\nLocation: {other}models\r\nContent-Length: 0\r\n\r\n".encode()
        async with saying(moved, heard) as url:
            reply = await asyncio.to_thread(asking.ask_models, url, SECRET)
    assert heard[0].startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert f"bearer {SECRET}".encode() in heard[0].lower()
    assert not elsewhere
    assert verdict(reply) == verdict(Reply(302, elsewhere=f"{other}models"))
    assert verdict(reply)[0] is WRONG


@pytest.mark.parametrize(
    ("body", "models"),
    [
        ('{"object": "list", "data": [{"id": "a"}, {"id": "models/b"}, {"id": 7}, {}]}', ("a", "models/b")),
        ('[{"id": "a"}]', ("a",)),  # together.ai
        ('{"models": [{"name": "a"}]}', ("a",)),  # Ollama's own
        ('{"data": 3}', None),
        ('"hello"', None),
        ("[[[", None),
        ('{"data": []}', None),
    ],
)
async def test_lists_of_models(body: str, models: tuple[str, ...] | None) -> None:
    response = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nDate: once upon a time\r\n\r\n{body}".encode()
    async with saying(response, []) as url:
        reply = await asyncio.to_thread(asking.ask_models, url, "")
    assert reply == Reply(200, models, None)


@pytest.mark.parametrize(
    "response", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[]"]
)
async def test_what_is_no_http_is_wrong(response: bytes) -> None:
    async with saying(response, []) as url:
        reply = await asyncio.to_thread(asking.ask_models, url, SECRET)
    assert reply.problem
    assert verdict(reply)[0] is WRONG


async def test_an_endless_list_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "MAX_BYTES", 1000)
    body = '["' + "x" * 100_000
    async with saying(f"HTTP/1.1 200 OK\r\n\r\n{body}".encode(), []) as url:
        assert (await asyncio.to_thread(asking.ask_models, url, "")).models is None


def test_a_client_that_cannot_be_made_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed")

    monkeypatch.setattr(httpx2, "Client", broken)
    assert "SOCKS" in asking.ask_models(OPENAI, SECRET).problem


@pytest.mark.parametrize("name", ["Gemini-Pro", "models/gemini-pro", "gemini-pro"])
def test_names_of_models_are_compared_without_case_and_googles_prefix(name: str) -> None:
    assert verdict(Reply(200, ("models/gemini-pro",)), name)[0] is OK


def test_a_key_that_is_another_server_s_or_would_travel_in_the_clear_turns_the_server_off() -> None:
    env = {"OPENAI_API_KEY": SECRET}
    for wrong in (settings(key_origin="https://llm.example.com"), settings(base_url="http://8.8.8.8/v1")):
        key = server.read_key(wrong, env)
        found = server.key(wrong.server, key, CATALOG)
        assert (found.level, key.value) == (WRONG, "")
        assert "the server is off" in found.found
        assert "disco setup" in found.mend
        assert SECRET not in found.found + found.mend
        assert not server.may_ask(wrong.server, key)
    open_way = settings(base_url="http://8.8.8.8/v1", insecure=True)
    assert key_of(open_way, env)[0] is OK
    assert server.may_ask(open_way.server, server.read_key(open_way, env))
    assert "can read key and prompts" in server.address(open_way.server, Api()).found
    assert not server.may_ask(settings(base_url="http://llm.example.com/v1").server, FoundKey(SECRET))


# --- the key file, and going on with half an answer -------------------------------------------------------------------


def test_the_key_file_is_to_be_the_owners_alone_also_where_a_variable_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "key"
    named = settings(api_key_file=str(file)).server
    env = {"OPENAI_API_KEY": SECRET}
    assert server.key_file(settings().server, {}) is None
    assert seen(server.key_file(named, {}))[0] is WRONG
    assert seen(server.key_file(named, env))[0] is WARN
    file.write_text(SECRET, "utf-8")
    file.chmod(0o640)
    level, told = seen(server.key_file(named, env))
    assert level is WRONG
    assert "mode 640" in told
    file.chmod(0o600)
    assert seen(server.key_file(named, {})) == (OK, f"{file}, yours alone (mode 600)")
    file.unlink()
    os.mkfifo(file, 0o600)
    assert seen(server.key_file(named, {}))[0] is WRONG


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_user_s_key_file_is_wrong_for_it_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    os.chown(file, 65534, 65534)
    level, told = seen(server.key_file(settings(api_key_file=str(file)).server, {}))
    assert level is WRONG
    assert "another user" in told


def seen(finding: Finding | None) -> tuple[Level, str]:
    assert finding is not None
    assert SECRET not in finding.found + finding.mend
    return finding.level, finding.found


PROFILE = Profile(f"{OPENAI} gpt-4o-mini", 1.7e9, "prefix", "prefix", False, 200, {"prefix": Verdict("echoes")})


@pytest.mark.parametrize(
    ("changes", "profile", "level", "words"),
    [
        ({}, None, OK, "none, known of this host"),
        ({"base_url": "http://127.0.0.1:8080/v1"}, None, OK, "not known yet"),
        ({"base_url": "http://127.0.0.1:8080/v1", "probe": False}, None, WARN, "server.probe is off"),
        ({"base_url": "http://127.0.0.1:8080/v1"}, PROFILE, OK, "prefix, found by the probe, checked where"),
        (
            {"base_url": "http://127.0.0.1:8080/v1"},
            replace(PROFILE, method="none", fallback="none"),
            OK,
            "none, found by",
        ),
        ({"continuation": "assistant"}, PROFILE, OK, "assistant, as you have set it"),
        ({"continuation": "none"}, None, OK, "none, as you have set it"),
        ({"continuation": "instruct"}, None, OK, "instruct, as you have set it, checked where"),
    ],
)
def test_the_way_to_continue_is_told_with_its_source(
    changes: dict[str, Any], profile: Profile | None, level: Level, words: str
) -> None:
    found = server.continuation(settings(**changes).server, profile)
    assert found.level is level
    assert words in found.found
    assert level is OK or found.mend


def test_how_the_running_daemons_last_question_failed_is_found() -> None:
    side = {"model": "m", "state": "configured", "tried": True, "last_error": "the server refused the API key with 401"}
    ill = server.answers({"endpoints": {"server": side | {"failing": {"reason": "unauthorized", "since": 0.0}}}})
    assert ill is not None
    assert (ill.level, ill.mend) == (WARN, "`disco setup` sets it up anew")
    assert ill.found.startswith("key refused since ")
    assert ill.found.endswith("with 401")
    assert server.answers({"endpoints": {"server": side | {"failing": None}}}) is None
    shut = side | {"failing": None, "down_s": 9.0, "breaker": {"state": "open", "why": "rate_limited", "until_s": 0.0}}
    left = server.answers({"endpoints": {"server": shut}})
    assert left is not None
    assert left.found.startswith("open (rate-limited): the server is left alone until ")
    assert left.mend == "it is asked again by itself"
    assert server.answers({"endpoints": {}}) is server.answers(None) is None


def test_each_of_several_servers_that_is_left_alone_is_found() -> None:
    def one(state: str, until_s: float | None = None) -> dict[str, Any]:
        breaker = {"state": state, "why": "unauthorized", "until_s": until_s}
        return {"servers": [{"name": "a", "model": "m"}, {"name": "b", "model": "m", "breaker": breaker}]}

    assert server.left_alone(one("open"), "a") is server.left_alone(one("closed"), "b") is None
    assert server.left_alone(None, "b") is None
    for state, until_s, mend in (
        ("open", None, "disco config reload"), ("open", 9.0, "by itself"), ("half_open", None, "by itself"),
    ):  # fmt: skip
        ill = server.left_alone(one(state, until_s), "b")
        assert ill is not None
        assert (ill.name, ill.level) == ("answers", WARN)
        assert "key refused" in ill.found
        assert mend in ill.mend


def test_only_what_mends_a_setting_of_a_server_names_its_entry() -> None:
    race, file = "`disco config set policy.unequal race` lets both race", "write it, or unset api_key_file"
    assert server.of_named(ok("grades", "x", race), "box").mend == race
    assert server.of_named(ok("key file", "x", file), "box").mend == f"{file} (in [[servers]] box)"
    assert server.of_named(ok("x", "y", "`disco config set server.probe true`"), "box").mend == (
        "`probe = true` (in [[servers]] box)"
    )


def test_a_long_name_of_a_check_does_not_run_into_what_was_found() -> None:
    assert " there" in line(ok("other: server key", "there"))

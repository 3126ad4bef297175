"""Desktop apps and pages that the settings name may ask and read; no web page gets what it could use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.api.app import make_app
from disco_daemon.api.http.connections import Runner
from disco_daemon.api.http.cross_origin import MAX_NAMES, lets_in
from disco_daemon.api.http.guard import ApiConfig
from disco_daemon.config.schema import Api

DEFAULT = frozenset(Api().origins)
FRIEND, TAURI_ON_WINDOWS = "https://chat.example", "http://tauri.localhost"
MODELS = "/v1/models"
APPS = [
    "app://obsidian.md", "tauri://localhost", "vscode-webview://1a2b3c", "vscode-file://vscode-app",
]  # fmt: skip
STRANGERS = [
    "https://evil.example", "http://evil.example:4747", "https://app", "https://obsidian.md", "http://127.0.0.1.evil.example",
    "chrome-extension://abcdefghijklmnop", "moz-extension://0f", "safari-web-extension://0F", "null", "app:", "app:/x",
    "app://x, https://evil.example", "app://x/y", "APP://x", "xapp://x", "https://evil.example/app://x", "data:", "blob:app://x",
    "file://", "file:///home/ann/x.html", "file://localhost", "about:blank", "*", "", "evil://localhost", "file://127.0.0.1",
    "ftp://localhost", "ws://localhost:4747", "evil://127.0.0.1:4747", "http://localhost@evil.example",
    "http:localhost",
    "http://127.0.0.1.nip.io", "http://localhost.evil.example", "http://[::1", "//localhost", "localhost", "http://",
    "http://localhost:99999", "javascript://localhost/%0aalert(1)", "http://0.0.0.0:4747", "http://2130706433",
    "http://[::ffff:127.0.0.1.evil.example]", "resource://localhost", "chrome://localhost", "content://localhost",
]  # fmt: skip
ASKED = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
Serve = Callable[..., Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """The whole application over nothing; its address."""
    runners = []

    async def serve(key: str = "", origins: frozenset[str] = DEFAULT, **more: Any) -> str:
        context = SimpleNamespace(private=False, endpoints={}, servers=None)
        nothing: Any = SimpleNamespace(endpoints={}, context=context, local=None)
        counter: Any = SimpleNamespace(count_request=lambda *_: None)
        app = make_app(nothing, nothing, ApiConfig("127.0.0.1", key, origins=origins, **more), counter)
        runner = Runner(app, None, shutdown_timeout=1)
        runners.append(runner)
        await runner.setup()
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield serve
    for runner in runners:
        await runner.cleanup()


async def asked(
    url: str, path: str = MODELS, method: str = "GET", **headers: str
) -> tuple[int, Mapping[str, str], dict[str, str]]:
    """Status, headers, and those of CORS, as a browser's page asks."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.request(method, url + path, headers=sent) as response:
        cors = {n.lower(): v for n, v in response.headers.items() if n.lower().startswith("access-control")}
        return response.status, response.headers, cors


# --- who ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", APPS)
async def test_desktop_apps_may_ask_and_read_the_answers_by_default(origin: str, serve: Serve) -> None:
    url = await serve()
    status, headers, cors = await asked(url, Origin=origin, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")
    assert status == 200
    assert cors["access-control-allow-origin"] == origin
    assert "access-control-allow-credentials" not in cors
    assert headers["Vary"] == "Origin"
    status, _, cors = await asked(url, method="OPTIONS", Origin=origin, Sec_Fetch_Site="cross-site", **ASKED)
    assert status == 204
    assert cors["access-control-allow-origin"] == origin
    assert cors["access-control-allow-methods"] == "GET, POST"
    assert cors["access-control-allow-headers"] == ASKED["Access-Control-Request-Headers"]


@pytest.mark.parametrize("origin", STRANGERS)
async def test_web_pages_and_extensions_get_neither_an_answer_nor_a_grant(origin: str, serve: Serve) -> None:
    url = await serve()
    for method, more in (("GET", {}), ("OPTIONS", ASKED)):
        status, headers, cors = await asked(
            url, method=method, Origin=origin, Sec_Fetch_Site="cross-site",
            Access_Control_Request_Private_Network="true", **more,
        )  # fmt: skip
        assert (status, cors) == (403, {}), method
        assert headers["Vary"] == "Origin", "no cache gives it another one's"


REBOUND = [
    "evil.example:11434", "localhost.evil.example", "127.0.0.1.evil.example:11434", "127.0.0.1@evil.example",
    "0x7f000001", "2130706433:11434", "127.1", "0.0.0.0:11434", "[::]:11434", "[::ffff:127.0.0.1]:11434",
    "localhost:99999", "localhost:11434x", "localhost:-1", "localhost,evil.example", "localhost evil.example", "ollama",
    "host.docker.internal:11434", "localhost.:11434", "127.0.0.256", "xn--localhost-", "local\u017fhost", "127.0.0.1:",
]  # fmt: skip
OLLAMAS = [("GET", "/api/tags"), ("POST", "/api/chat"), ("DELETE", "/api/delete"), ("HEAD", "/api/version")]


@pytest.mark.parametrize("host", REBOUND)
async def test_ollamas_routes_are_asked_by_a_name_of_this_machine_alone(host: str, serve: Serve) -> None:
    url = await serve(origins=DEFAULT | {FRIEND})
    for method, path in OLLAMAS:
        for more in ({}, {"Origin": FRIEND}, {"Origin": "app://x"}, {"Sec_Fetch_Site": "same-origin"}):
            status, _, cors = await asked(url, path, method, Host=host, **more)
            assert (status in (400, 403), cors) == (True, {}), (method, more)


@pytest.mark.parametrize("origin", STRANGERS)
async def test_ollamas_routes_have_nothing_for_a_strangers_page(origin: str, serve: Serve) -> None:
    url = await serve()
    for method, path in OLLAMAS:
        for question in ({}, ASKED | {"Access_Control_Request_Private_Network": "true"}):
            found = await asked(url, path, "OPTIONS" if question else method, Origin=origin, **question)
            assert (found[0], found[2]) == (403, {}), (method, path)


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
        "text/plain; application/json", "text/json", "application/jsonp", "application/json5", "application/ld+json",
        "application/json/x", "json", "",
        "text/plain, application/json", "text/plain;charset=application/json", "application", "*/*", "application/*",
    ],
)  # fmt: skip
@pytest.mark.parametrize("told", [{"Origin": "http://localhost:3000"}, {"Sec-Fetch-Site": "same-origin"}], ids=str)
async def test_a_pages_simple_post_is_no_request_to_ollama(kind: str, told: dict[str, str], serve: Serve) -> None:
    url = await serve()
    headers = told | {"Content-Type": kind}
    async with aiohttp.ClientSession() as session:
        for path in ("/api/chat", "/api/generate", "/api/embed", "/api/show", "/api/pull"):
            async with session.post(url + path, data=b'{"model": "disco"}', headers=headers) as response:
                assert response.status == 415, path


async def test_a_rebound_name_is_no_way_in_whatever_the_origin(serve: Serve) -> None:
    url = await serve()
    for method, more in (("GET", {}), ("OPTIONS", ASKED)):
        found = await asked(url, method=method, Host="evil.example:4747", Origin="app://obsidian.md", **more)
        assert (found[0], found[2]) == (403, {})


async def test_named_pages_and_extensions_are_let_in_and_only_they(serve: Serve) -> None:
    extension = "chrome-extension://abcdefghijklmnop"
    url = await serve(origins=frozenset({FRIEND, TAURI_ON_WINDOWS, extension}))
    for origin in (FRIEND, TAURI_ON_WINDOWS, extension):
        status, _, cors = await asked(url, Origin=origin, Sec_Fetch_Site="cross-site")
        assert (status, cors["access-control-allow-origin"]) == (200, origin)
    for origin in (f"{FRIEND}.evil.example", f"{FRIEND}:8443", "http://chat.example", f"{extension}q", *APPS[:2]):
        assert (await asked(url, Origin=origin, Sec_Fetch_Site="cross-site"))[0] == 403


async def test_tauri_under_windows_has_to_be_named(serve: Serve) -> None:
    url = await serve()
    assert (await asked(url, Origin=TAURI_ON_WINDOWS, Sec_Fetch_Site="cross-site"))[0] == 403
    status, _, cors = await asked(url, method="OPTIONS", Origin=TAURI_ON_WINDOWS, **ASKED)
    assert status >= 400
    assert cors == {}


async def test_a_page_of_another_port_here_may_not_read_although_a_program_with_its_origin_may_ask(
    serve: Serve,
) -> None:
    url = await serve()
    status, _, cors = await asked(url, Origin="http://localhost:3000")
    assert (status, cors) == (200, {})
    assert (await asked(url, Origin="http://localhost:3000", Sec_Fetch_Site="same-site"))[0] == 403
    status, _, cors = await asked(url, method="OPTIONS", Origin="http://localhost:3000", **ASKED)
    assert status >= 400
    assert cors == {}


# --- a page without an origin: a local file, or a frame of any web page ---------------------------------------------


@pytest.mark.parametrize("origin", ["null", "file://", "file:///home/ann/page.html"])
async def test_null_needs_a_key_that_is_shown(origin: str, serve: Serve) -> None:
    without = await serve()
    for method, more in (("GET", {}), ("OPTIONS", ASKED)):
        found = await asked(without, method=method, Origin=origin, Authorization="Bearer x", **more)
        assert (found[0], found[2]) == (403, {})
    url = await serve("hush")
    for shown in ({"Authorization": "Bearer hush"}, {"X_Api_Key": "hush"}):
        status, _, cors = await asked(url, Origin=origin, Sec_Fetch_Site="cross-site", **shown)
        assert (status, cors["access-control-allow-origin"]) == (200, origin)
    for shown in ({}, {"Authorization": "Bearer wrong"}, {"X_Api_Key": "wrong"}):
        found = await asked(url, Origin=origin, Sec_Fetch_Site="cross-site", **shown)
        assert (found[0], found[2]) == (403, {})
    status, _, cors = await asked(url, method="OPTIONS", Origin=origin, **ASKED)
    assert (status, cors["access-control-allow-origin"]) == (204, origin), "a preflight cannot show a key"


@pytest.mark.parametrize("origin", ["null", "file://"])
async def test_null_is_out_where_files_are(origin: str, serve: Serve) -> None:
    url = await serve("hush", origins=frozenset({"app://"}))
    found = await asked(url, Origin=origin, Authorization="Bearer hush")
    assert (found[0], found[2]) == (403, {})


# --- what ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/disco/v1/state", "/disco/v1/settings", "/disco/v1/answers/x", "/health", "/metrics", "/"]
)
@pytest.mark.parametrize("origin", ["app://obsidian.md", FRIEND])
async def test_only_answers_may_be_read_from_another_origin(path: str, origin: str, serve: Serve) -> None:
    url = await serve("hush", origins=DEFAULT | {FRIEND})
    for method, more in (("GET", {}), ("OPTIONS", ASKED)):
        status, _, cors = await asked(url, path, method, Origin=origin, Authorization="Bearer hush", **more)
        assert cors == {}, method
        assert status == 403 or origin == FRIEND, "a scheme is let in where answers are"
        assert method == "GET" or status >= 400


async def test_an_app_may_read_an_error_and_our_headers(serve: Serve) -> None:
    url = await serve("hush")
    status, _, cors = await asked(url, Origin="app://obsidian.md", Authorization="Bearer wrong")
    assert (status, cors["access-control-allow-origin"]) == (401, "app://obsidian.md")
    status, _, cors = await asked(url, "/v1/nothing", Origin="app://obsidian.md", Authorization="Bearer hush")
    assert (status, cors["access-control-allow-origin"]) == (404, "app://obsidian.md")


async def test_a_preflight_needs_no_key_and_starts_nothing(serve: Serve) -> None:
    url = await serve("hush")
    status, _, cors = await asked(url, "/v1/chat/completions", "OPTIONS", Origin="app://obsidian.md", **ASKED)
    assert status == 204
    assert cors["access-control-max-age"] == "600"
    assert "access-control-allow-private-network" not in cors
    found = await asked(
        url, "/v1/chat/completions", "OPTIONS", Origin="app://obsidian.md",
        Access_Control_Request_Private_Network="true", **ASKED,
    )  # fmt: skip
    assert found[2]["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("names", ["a b", "a,,b", "a;b", "x" * (MAX_NAMES + 1), "a: b", '"'])
async def test_header_names_that_are_none_are_not_granted(names: str, serve: Serve) -> None:
    url = await serve()
    headers = ASKED | {"Access-Control-Request-Headers": names}
    status, _, cors = await asked(url, method="OPTIONS", Origin="app://x", **headers)
    assert status == 204
    assert "access-control-allow-headers" not in cors


async def test_options_without_a_question_is_a_method_like_others(serve: Serve) -> None:
    assert (await asked(await serve(), method="OPTIONS", Origin="app://x"))[0] == 405


async def test_who_asks_without_an_origin_gets_no_grant(serve: Serve) -> None:
    status, headers, cors = await asked(await serve())
    assert (status, headers["Vary"], cors) == (200, "Origin", {})


# --- keys and probes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        ({"X_Api_Key": "hush"}, 200), ({"Authorization": "Bearer hush"}, 200), ({"X_Api_Key": "hush2"}, 401),
        ({"X_Api_Key": ""}, 401), ({"X_Api_Key": "Bearer hush"}, 401), ({"Authorization": "hush"}, 401),
        ({"X_Api_Key": "hush", "Authorization": "Bearer none"}, 200),
        ({"X_Api_Key": "none", "Authorization": "Bearer hush"}, 200),
    ],
)  # fmt: skip
async def test_a_key_may_be_shown_as_anthropics_clients_do(shown: dict[str, str], status: int, serve: Serve) -> None:
    assert (await asked(await serve("hush"), **shown))[0] == status


async def test_x_api_key_opens_the_controls_as_bearer_does(serve: Serve) -> None:
    url = await serve("hush", control_key="owner")
    assert (await asked(url, "/disco/v1/nothing", X_Api_Key="owner"))[0] == 404
    assert (await asked(url, "/disco/v1/history", X_Api_Key="hush"))[0] == 403


async def test_the_head_of_the_root_says_that_somebody_is_here(serve: Serve) -> None:
    for url in (await serve(), await serve("hush")):
        for method in ("HEAD", "GET"):
            assert (await asked(url, "/", method))[0] == 200
        assert (await asked(url, "/", "HEAD", Origin="https://evil.example"))[0] == 403
        assert (await asked(url, "/", "HEAD", Host="evil.example"))[0] == 403


@given(st.text(max_size=40), st.text(max_size=20))
def test_no_text_passes_for_an_origin_by_holding_one(before: str, after: str) -> None:
    for scheme in DEFAULT:
        origin = f"{before}{scheme}{after}"
        if lets_in(origin, DEFAULT):
            assert before == ""
            assert not set(after) & set(" \t\r\n/,*")

"""Keys with names at a real daemon: made and revoked over the control door, shown by unmodified clients."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import APIError, AsyncOpenAI, AuthenticationError, PermissionDeniedError, RateLimitError

from disco_daemon.api.doors import FOR_KEYS, ROUTES, ForKey
from disco_daemon.bench.child import child_env
from tests.fixtures.daemon import PRICES, DaemonProcess, ask, running
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO: list[Any] = [{"role": "user", "content": "one two"}]
FEW: dict[str, Any] = {"model": "disco", "messages": HELLO, "max_tokens": 3}


def disco(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a verb beside the daemon of that folder."""
    env = child_env(folder) | {"DISCO_CONFIG": str(folder / "config.toml")}
    argv = [sys.executable, "-P", "-m", "disco_daemon.cli.main", *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


async def verb(daemon: DaemonProcess, *words: str) -> Any:
    done = await asyncio.to_thread(disco, daemon.folder, *words, "--url", daemon.root, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def control(daemon: DaemonProcess, path: str, **body: Any) -> dict[str, Any]:
    """What the verbs ask, by the same door."""
    async with daemon.controls.post(f"{daemon.root}/disco/v1/{path}", json=body) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def made(daemon: DaemonProcess, name: str, **terms: Any) -> str:
    key: str = (await control(daemon, "keys", name=name, **terms))["key"]
    return key


@asynccontextmanager
async def client_of(daemon: DaemonProcess, key: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=daemon.url, api_key=key, max_retries=0, timeout=60) as client:
        yield client


async def told(
    daemon: DaemonProcess,
    key: str,
    method: str,
    path: str,
    body: Any = None,
    *,
    x_api_key: bool = False,
    by: Any = None,
) -> tuple[int, dict[str, Any], dict[str, str]]:
    headers = {"x-api-key": key} if x_api_key else {"Authorization": f"Bearer {key}"}
    async with (by or daemon.session).request(method, daemon.root + path, json=body, headers=headers) as response:
        said = await response.text()
        return response.status, json.loads(said) if said.startswith("{") else {}, dict(response.headers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ends(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[DaemonProcess, Upstream]]:
    """A daemon with a server and the embedded model."""
    folder = tmp_path_factory.mktemp("keys")
    settings = {"api": {"aliases": {"gpt-*": "disco"}}}
    async with Upstream(tokens=4) as upstream, running(folder, server=upstream.url, settings=settings) as daemon:
        await daemon.device_ready()
        yield daemon, upstream


Ends = tuple[DaemonProcess, Upstream]


async def test_two_keys_ask_and_each_has_its_own_usage(ends: Ends) -> None:
    daemon, _ = ends
    anna, bert = (await verb(daemon, "keys", "add", "anna"))["key"], await made(daemon, "bert", usd_per_day=5)
    usage: dict[str, list[Any]] = {"anna": [], "bert": []}
    for name, key, n in (("anna", anna, 2), ("bert", bert, 1)):
        async with client_of(daemon, key) as client:
            for _ in range(n):
                answer = await client.chat.completions.create(model="disco", messages=HELLO, max_tokens=4)
                usage[name].append(answer.usage)
    rows = {row["key"]: row for row in await verb(daemon, "usage", "--by", "key")}
    for name, heard in usage.items():
        row = rows[name]
        assert row["requests"] == len(heard)
        assert row["prompt_tokens"] == sum(one.prompt_tokens for one in heard), "as the clients were told"
        assert row["completion_tokens"] == sum(one.completion_tokens for one in heard)
        assert set(row) == {"key", "requests", "prompt_tokens", "completion_tokens", "usd", "wh"}
    assert rows["anna"]["usd"] + rows["bert"]["usd"] + rows["anna"]["wh"] > 0
    assert {row["key"] for row in await daemon.history()} >= {"anna", "bert"}
    async with daemon.session.get(f"{daemon.root}/metrics") as response:
        metrics = await response.text()
    assert 'disco_key_requests_total{key="anna"} 2.0' in metrics
    listed = {key["name"]: key for key in await verb(daemon, "keys", "list")}
    assert listed["bert"]["usd_per_day"] == 5
    assert listed["bert"]["usd_today"] == pytest.approx(rows["bert"]["usd"])
    assert anna not in json.dumps([listed]), "a key is shown once"
    status, own, _ = await told(daemon, bert, "GET", "/disco/v1/usage/own?days=2")
    assert (status, own["name"], own["usd_per_day"]) == (200, "bert", 5)
    assert own["usd_today"] == listed["bert"]["usd_today"]
    (day,) = own["data"]
    assert {**day, "key": "bert"} == {**rows["bert"], "day": day["day"]}, "of itself alone"
    status, said, _ = await told(daemon, "no-key-of-ours", "GET", "/disco/v1/usage/own")
    assert (status, "keys with names" in json.dumps(said)) == (400, True)
    state = await daemon.state()
    assert {key["name"] for key in state["keys"]} >= {"anna", "bert"}
    assert "bert" in (await told(daemon, "no-key-of-ours", "GET", "/disco/v1/state"))[1]["keys"][1]["name"]
    assert "keys" not in (await told(daemon, bert, "GET", "/disco/v1/state"))[1]


async def test_what_is_kept_is_a_hash_that_others_cannot_read(ends: Ends) -> None:
    daemon, _ = ends
    key = await made(daemon, "kept")
    path = daemon.folder / "keys.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = key.rpartition("-")[2] if "_" not in key else key[-20:]
    assert secret not in path.read_text()
    assert key not in daemon.log


APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/v1/completions": {"prompt": "one two", "max_tokens": 3},
    "/v1/responses": {"input": "one two", "max_output_tokens": 3},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/api/chat": {"messages": HELLO, "stream": False, "options": {"num_predict": 3}},
    "/api/embed": {"input": "a lamp"},
    "/v1/embeddings": {"input": "a lamp"},
    "/v1/rerank": {"query": "a lamp", "documents": ["a light"]},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 3},
}


async def test_a_key_holds_in_every_api_and_at_both_doors_until_it_is_revoked(ends: Ends) -> None:
    daemon, _ = ends
    key = await made(daemon, "everywhere", models=["disco"])
    doors = (daemon.session, daemon.controls)
    for path, body in APIS.items():
        for door in doors:
            x_api_key = "messages" in path
            status, said, _ = await told(
                daemon, key, "POST", path, {"model": "disco"} | body, x_api_key=x_api_key, by=door
            )
            assert status in ((200, 400) if path in ("/v1/rerank", "/infill") else (200,)), (path, said)
            other = {"model": "disco/device"} | body
            status, said, _ = await told(daemon, key, "POST", path, other, x_api_key=x_api_key, by=door)
            assert status == 403, (path, said)
            assert "may not ask for the model 'disco/device'" in json.dumps(said)
    rows = {row["key"]: row["requests"] for row in await verb(daemon, "usage")}
    assert rows["everywhere"] >= 2 * 7
    assert await verb(daemon, "keys", "revoke", "everywhere") == {"revoked": "everywhere", "ended": 0}
    for path, body in APIS.items():
        for door in doors:
            status, _, _ = await told(daemon, key, "POST", path, {"model": "disco"} | body, by=door)
            assert status == 401, path
    assert (await told(daemon, "no-key-of-ours", "GET", "/v1/models"))[0] == 200, (
        "without api.key any other text will do"
    )


async def test_a_key_with_a_name_opens_no_control_at_either_door(ends: Ends) -> None:
    daemon, _ = ends
    key = await made(daemon, "curious")
    refused = [("GET", "/disco/v1/keys"), ("GET", "/disco/v1/usage"), ("GET", "/disco/v1/history"),
               ("GET", "/disco/v1/settings"), ("GET", "/metrics"), ("POST", "/api/pull")]  # fmt: skip
    for door in (daemon.session, daemon.controls):
        for method, path in refused:
            status, said, _ = await told(
                daemon, key, method, path, {"model": "x"} if method == "POST" else None, by=door
            )
            assert status == 403, path
            assert "curious" in json.dumps(said)
    assert (await told(daemon, key, "GET", "/disco/v1/state"))[0] == 200


async def test_each_route_shows_a_key_what_the_table_says_and_nothing_of_others(ends: Ends) -> None:
    """Route by route, at both doors; what another key and the owner have asked stands in none of the replies."""
    daemon, _ = ends
    nosy, other = await made(daemon, "nosy"), await made(daemon, "somebody-else")
    own = (await told(daemon, nosy, "POST", "/v1/chat/completions", FEW))[2]["X-Disco-Request-Id"]
    others = [
        (await told(daemon, key, "POST", "/v1/chat/completions", FEW))[2]["X-Disco-Request-Id"]
        for key in (other, "no-key-of-ours")
    ]
    for door in (daemon.session, daemon.controls):
        for route in ROUTES:
            method, path = route
            body: dict[str, Any] | None = None if method == "GET" else {}
            for request_id in (own, "latest", *others) if "{request_id}" in path else ("",):
                at = path.replace("{request_id}", request_id).replace("{name}", "disco").replace("{digest}", "x")
                headers = {"Authorization": f"Bearer {nosy}"}
                async with door.request(method, daemon.root + at, json=body, headers=headers) as response:
                    status, said = response.status, await response.text()
                if (what := FOR_KEYS.get(route)) is None:
                    assert status == 403, route
                    assert "nosy" in said, route
                    continue
                assert status not in (401, 403), (route, said)
                assert "somebody-else" not in said, route
                if what is ForKey.OWN:
                    found = 200 if request_id in (own, "latest") else 404
                    assert status == (found if method == "GET" else 400), (route, said)
                    assert not [one for one in others if one in said and one != request_id], route
                else:
                    assert not [one for one in others if one in said], route
                if what is ForKey.PART:
                    assert set(json.loads(said)) == {"version", "uptime_s", "policy", "private", "endpoints"}
    for request_id in others:
        status, _, _ = await told(daemon, nosy, "POST", f"/disco/v1/answers/{request_id}", {"pace_tps": 5})
        assert status == 404
        redo = FEW | {"disco": {"redo_of": request_id}}
        assert (await told(daemon, nosy, "POST", "/v1/chat/completions", redo))[0] == 200
    redo = FEW | {"disco": {"redo_of": own}}
    assert (await told(daemon, nosy, "POST", "/v1/chat/completions", redo))[0] == 200
    rows = {row["request_id"]: row["followed"] for row in await daemon.history()}
    assert [rows[one] for one in (own, *others)] == ["redone", None, None], "nobody judges another one's answer"


async def test_a_running_answer_is_paced_by_its_own_key(ends: Ends) -> None:
    daemon, upstream = ends
    go_on = asyncio.Event()
    nosy, own = await made(daemon, "pacer"), await made(daemon, "paced")
    with upstream.held_until(go_on, 2):
        async with daemon.session.post(
            f"{daemon.url}/chat/completions",
            json=FEW | {"model": "disco/server", "stream": True},
            headers={"Authorization": f"Bearer {own}"},
        ) as response:
            await response.content.readline()
            path = f"/disco/v1/answers/{response.headers['X-Disco-Request-Id']}"
            assert (await told(daemon, nosy, "POST", path, {"pace_tps": 5}))[0] == 404
            running_ = (await told(daemon, nosy, "GET", path.replace("answers", "trace")))[1]
            assert "still running" not in json.dumps(running_)
            assert (await told(daemon, own, "POST", path, {"pace_tps": 50}))[0] == 200
            go_on.set()
            await response.read()


async def test_models_are_listed_and_asked_for_as_the_key_may(ends: Ends) -> None:
    daemon, _ = ends
    async with client_of(daemon, await made(daemon, "narrow", models=["gpt-*", "disco/device"])) as client:
        names = [model.id async for model in client.models.list()]
        assert set(names) == {"gpt-*", "disco/device"}
        assert (await client.chat.completions.create(**FEW | {"model": "gpt-4o"})).choices
        with pytest.raises(PermissionDeniedError, match="may not ask for the model 'disco/server'"):
            await client.chat.completions.create(**FEW | {"model": "disco/server"})


async def test_no_field_of_a_request_gets_a_key_another_model_at_a_server(ends: Ends) -> None:
    daemon, upstream = ends
    body = FEW | {"model": "disco/server"}
    key = await made(daemon, "routed", models=["disco/server", "cheap-*"])
    before = upstream.n_requests
    more: dict[str, Any]
    for more in ({"models": ["cheap-1", "o1-pro"], "route": "fallback"}, {"provider": {"model": "o1-pro"}}):
        status, said, _ = await told(daemon, key, "POST", "/v1/chat/completions", body | more)
        assert status == 403, more
        assert "may not ask for the model 'o1-pro'" in json.dumps(said)
    assert upstream.n_requests == before
    more = {"models": ["cheap-1"], "plugins": [{"id": "web"}], "preset": "dear", "Model": "o1-pro", "top_a": 0.1}
    status, said, headers = await told(daemon, key, "POST", "/v1/chat/completions", body | more)
    assert status == 200, said
    sent = upstream.exchanges[-1].body
    assert (sent["models"], sent["top_a"]) == (["cheap-1"], 0.1)
    assert not sent.keys() & {"plugins", "preset", "Model"}
    assert {"plugins", "preset", "Model"} <= set(headers["X-Disco-Ignored"].split(", "))
    status, said, _ = await told(daemon, await made(daemon, "wide"), "POST", "/v1/chat/completions", body | more)
    assert status == 200, said
    assert upstream.exchanges[-1].body["preset"] == "dear", "a key for all models says what the owner may say"


async def test_a_private_key_asks_no_server(ends: Ends) -> None:
    daemon, upstream = ends
    before = upstream.n_requests
    key = await made(daemon, "quiet", private=True)
    async with client_of(daemon, key) as client:
        answer = await client.chat.completions.create(**FEW)
        assert answer.model_extra is not None
        assert (answer.model_extra["disco"]["winner"], answer.model_extra["disco"]["reason"]) == ("device", "private")
        with pytest.raises(PermissionDeniedError, match="stays on this machine"):
            await client.chat.completions.create(**FEW | {"model": "disco/server"})
        assert "loopback" in [m.id async for m in daemon.client.models.list()]
        assert "loopback" not in [m.id async for m in client.models.list()]
    assert upstream.n_requests == before


async def test_beyond_its_rate_a_key_gets_429_with_when_to_come_again(ends: Ends) -> None:
    daemon, _ = ends
    key = await made(daemon, "hasty", requests_per_minute=2, models=["disco/device"])
    body = FEW | {"model": "disco/device"}
    heard = [await told(daemon, key, "POST", "/v1/chat/completions", body) for _ in range(3)]
    assert [status for status, *_ in heard] == [200, 200, 429]
    _, said, headers = heard[2]
    assert 0 < int(headers["Retry-After"]) <= 60
    assert said["error"]["code"] == "rate_limit_exceeded"
    await verb(daemon, "keys", "change", "hasty", "--requests-per-minute", "none")
    assert (await told(daemon, key, "POST", "/v1/chat/completions", body))[0] == 200, "at once"


async def test_a_key_with_a_cap_asks_for_nothing_that_cannot_be_held(ends: Ends) -> None:
    daemon, upstream = ends
    key, body = await made(daemon, "thrifty", usd_per_day=1.0), FEW | {"model": "disco/server"}
    speech = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}]
    n_before = upstream.n_requests
    costly: dict[str, Any] = {"service_tier": "priority", "web_search_options": {}, "messages": speech}
    for name, value in costly.items():
        status, said, _ = await told(daemon, key, "POST", "/v1/chat/completions", body | {name: value})
        assert (status, said["error"]["code"], said["error"]["param"]) == (403, "field_not_allowed", name)
        assert "disco keys change thrifty" in said["error"]["message"]
    assert upstream.n_requests == n_before
    more: dict[str, Any] = {"service_tier": "default", "top_k": 7, "unheard_of": 1}
    status, said, _ = await told(daemon, key, "POST", "/v1/chat/completions", body | more)
    assert (status, said["disco"]["ignored"]) == (200, ["unheard_of"])
    assert upstream.exchanges[-1].body["top_k"] == 7
    assert "unheard_of" not in upstream.exchanges[-1].body
    free = await made(daemon, "free")
    assert (await told(daemon, free, "POST", "/v1/chat/completions", body | {"service_tier": "priority"}))[0] == 200


async def test_a_cap_closes_the_server_for_its_key_and_no_other(ends: Ends) -> None:
    daemon, upstream = ends
    poor = await made(daemon, "poor", usd_per_day=1e-7)
    async with client_of(daemon, poor) as client:
        assert (await client.chat.completions.create(**FEW | {"model": "disco/server"})).choices, (
            "the one that reaches it"
        )
        with pytest.raises(RateLimitError) as refused:
            await client.chat.completions.create(**FEW | {"model": "disco/server"})
        assert refused.value.code == "cap_reached"
        assert "usd_per_day = 1e-07 $ of the key 'poor' is reached" in str(refused.value)
        assert "disco keys change poor" in str(refused.value)
        assert int(refused.value.response.headers["Retry-After"]) > 0
        n_before = upstream.n_requests
        answer = await client.chat.completions.create(**FEW)
        assert answer.model_extra is not None
        assert answer.model_extra["disco"]["winner"] == "device", "as [caps] do, it leaves this machine's own model"
        assert upstream.n_requests == n_before
    assert (await ask(daemon, "one two", model="disco/server")).text, "the owner's caps are others"
    await control(daemon, "keys/revoke", name="poor")
    again = await made(daemon, "poor", usd_per_day=1e-7)
    assert (await told(daemon, again, "POST", "/v1/chat/completions", FEW | {"model": "disco/server"}))[0] == 429, (
        "another key of that name has what the first one has spent"
    )


async def test_a_running_answer_of_a_revoked_key_ends_and_those_of_others_do_not(tmp_path: Path) -> None:
    """And what was held for it is free again, in the caps of the whole and in those of its name."""
    settings = {"caps": {"usd_per_day": 100.0}}
    limit = 1000 * PRICES["output_usd_per_mtok"] / 1e6  # more than the answer costs, and less than is held for it
    async with (
        Upstream(tokens=400, interval_s=0.02) as upstream,
        running(tmp_path, server=upstream.url, device=False, settings=settings) as daemon,
        client_of(daemon, await made(daemon, "gone", usd_per_day=limit)) as of_gone,
        client_of(daemon, await made(daemon, "stays")) as of_other,
    ):
        streams = [
            await client.chat.completions.create(model="disco", messages=HELLO, stream=True)
            for client in (of_gone, of_other)
        ]
        for stream in streams:
            await anext(aiter(stream))
        (whole,) = (await daemon.state())["money"]["caps"].values()
        assert whole["reserved"] > 2 * limit
        with pytest.raises(RateLimitError, match="held for answers that run"):
            await of_gone.chat.completions.create(**FEW)
        assert await verb(daemon, "keys", "revoke", "gone") == {"revoked": "gone", "ended": 1}
        with pytest.raises(APIError, match="was revoked"):
            async for _ in streams[0]:
                pass
        await upstream.wait_closed(0)
        assert (await anext(aiter(streams[1]))).choices
        with pytest.raises(AuthenticationError):
            await of_gone.chat.completions.create(**FEW)
        await streams[1].close()
        (whole,) = (await daemon.until(lambda s: not s["in_flight"]))["money"]["caps"].values()
        assert (whole["limit"], whole["reserved"]) == (100.0, 0)
        async with client_of(daemon, await made(daemon, "gone", usd_per_day=limit)) as again:
            assert (await again.chat.completions.create(**FEW)).choices, "nothing is held in the name's caps either"


async def test_the_verbs_work_without_a_daemon_and_the_next_one_knows_the_keys(tmp_path: Path) -> None:
    """A key is enough to listen for other machines, and the sums of its cap outlive the daemon."""
    made_ = disco(tmp_path, "keys", "add", "early", "--usd-per-day", "0.0000001", "--json")
    assert made_.returncode == 0, made_.stderr
    key = json.loads(made_.stdout)["key"]
    again = disco(tmp_path, "keys", "add", "early")
    assert again.returncode == 1
    assert "disco keys revoke early" in again.stderr
    assert disco(tmp_path, "keys", "list", "--json").stdout.count("early") == 1
    assert json.loads(disco(tmp_path, "usage", "--json").stdout) == []
    settings = {"api": {"host": "0.0.0.0"}}
    for n in range(2):
        async with (
            Upstream(tokens=4) as upstream,
            running(tmp_path, server=upstream.url, device=False, settings=settings) as daemon,
        ):
            url = f"{daemon.root.replace('0.0.0.0', '127.0.0.1')}/v1/chat/completions"
            async with daemon.session.post(url, json=FEW) as response:
                assert response.status == 401, "nobody gets in without a key"
            async with daemon.session.post(url, json=FEW, headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == (200, 429)[n], "what it has spent is known after a restart"
    assert disco(tmp_path, "keys", "revoke", "early").returncode == 0
    up = disco(tmp_path, "up", "--host", "0.0.0.0", "--port", "0")
    assert up.returncode == 1
    assert "disco keys add NAME" in up.stderr

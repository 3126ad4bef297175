"""A provider's key goes to the server that it was given for, and to nobody else: what a process here might try."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from disco_daemon.bench.child import child_env, start
from disco_daemon.config.layers import load, set_values
from disco_daemon.models.default import default_model_path
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.upstream import Upstream

HUSH = {"Authorization": "Bearer hush"}
API = {"api": {"key": "hush"}}


async def told(daemon: DaemonProcess, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    """A request of somebody who may use the controls."""
    url = f"{daemon.root}{path}"
    async with daemon.session.request(method, url, json=body, headers=HUSH) as response:
        found: dict[str, Any] = await response.json()
        return response.status, found


async def chat(daemon: DaemonProcess, model: str = "disco") -> tuple[int, dict[str, Any]]:
    """One short answer, whoever gives it."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    return await told(daemon, "POST", "/v1/chat/completions", body)


@asynccontextmanager
async def guarded(folder: Path, server: str, **more: Any) -> AsyncIterator[DaemonProcess]:
    settings: dict[str, Mapping[str, Any]] = API | more.pop("settings", {})
    async with running(folder, server=server, settings=settings, **more) as daemon:
        yield daemon


# --- settings over HTTP -----------------------------------------------------------------------------------------------


NOT_LIVE = [
    ("server.base_url", "http://127.0.0.1:9/v1", "disco setup"),
    ("server.api_key_file", "~/.ssh/id_ed25519", "disco setup"),
    ("server.api_key_env", "AWS_SECRET_ACCESS_KEY", "disco setup"),
    ("server.key_origin", "http://127.0.0.1:9", "disco setup"),
    ("server.insecure", True, "disco setup"),
    ("history.path", "~/.bashrc", "disco config set history.path"),
    ("history.keep_text", True, "disco config set history.keep_text"),
    ("device.model", "/dev/zero", "disco config set device.model"),
    ("device.chat_template", "/dev/zero", "disco config set device.chat_template"),
    ("api.key", "mine", "disco config set api.key"),
]


async def test_only_what_a_running_daemon_takes_up_is_changed_over_http(
    settled: tuple[DaemonProcess, Upstream],
) -> None:
    daemon, _ = settled
    before = (daemon.folder / "config.toml").read_text()
    for key, value, way in NOT_LIVE:
        for changes in ({key: value}, {"policy.budget": 0.5, key: value}):
            status, said = await told(daemon, "PATCH", "/disco/v1/settings", changes)
            assert (status, said["error"]["param"]) == (403, key)
            assert key in said["error"]["message"]
            assert way in said["error"]["message"], "it says how it is done"
    assert (daemon.folder / "config.toml").read_text() == before


async def test_a_model_is_set_by_name_and_no_other_file_is_taken(settled: tuple[DaemonProcess, Upstream]) -> None:
    daemon, _ = settled
    models = daemon.folder / "disco" / "models"
    models.mkdir(parents=True)
    (models / "small.gguf").write_bytes(b"GGUF")
    before = (daemon.folder / "config.toml").read_text()
    status, said = await told(daemon, "PUT", "/disco/v1/device", {"model": "/dev/zero"})
    assert (status, said["error"]["param"]) == (400, "model")
    assert "disco setup --local" in said["error"]["message"]
    assert (daemon.folder / "config.toml").read_text() == before
    for model in ("small.gguf", str(models / "small.gguf")):
        status, said = await told(daemon, "PUT", "/disco/v1/device", {"model": model})
        assert (status, said["saved"]) == (200, ["device.model"])
    assert load(daemon.folder / "config.toml", {}).device.model == str(models / "small.gguf")
    (models / "other.gguf").write_bytes(b"GGUF")
    await told(daemon, "PUT", "/disco/v1/device", {"model": "other.gguf"})
    assert (await told(daemon, "GET", "/disco/v1/providers"))[1]["device"]["previous"] == "small.gguf"
    status, said = await told(daemon, "PUT", "/disco/v1/device", {"model": "previous"})
    assert (status, said["saved"]) == (200, ["device.model"])
    assert (await told(daemon, "GET", "/disco/v1/providers"))[1]["device"]["previous"] == "other.gguf"
    (models / "other.gguf").unlink()
    assert (await told(daemon, "GET", "/disco/v1/providers"))[1]["device"]["previous"] == ""
    status, said = await told(daemon, "PUT", "/disco/v1/device", {"model": "previous"})
    assert status == 400
    assert "no longer there" in said["error"]["message"]
    set_values(daemon.folder / "config.toml", {"device.base_url": "http://127.0.0.1:9/v1", "device.grade": 3})
    status, said = await told(daemon, "PUT", "/disco/v1/device", {"model": "small.gguf"})
    assert (status, said["saved"]) == (200, ["device.base_url", "device.grade", "device.model"])
    assert len(said["notes"]) == 2
    device = load(daemon.folder / "config.toml", {}).device
    assert (device.base_url, device.model, device.grade) == ("", str(models / "small.gguf"), None)


@pytest.fixture
async def settled(tmp_path: Path) -> AsyncIterator[tuple[DaemonProcess, Upstream]]:
    async with Upstream() as upstream, guarded(tmp_path, upstream.url, device=False) as daemon:
        yield daemon, upstream


# --- whose the key is -------------------------------------------------------------------------------------------------


def sent(*upstreams: Upstream) -> list[list[str]]:
    """The keys that each of them was shown."""
    return [[e.headers.get("Authorization", "") for e in upstream.exchanges] for upstream in upstreams]


def rewritten(daemon: DaemonProcess, **server: Any) -> None:
    """As somebody edits config.toml."""
    path = daemon.folder / "config.toml"
    document = tomlkit.parse(path.read_text())
    document["server"].update(server)
    path.write_text(tomlkit.dumps(document))


async def test_the_first_start_binds_the_key_and_another_origin_turns_the_server_off(tmp_path: Path) -> None:
    async with Upstream() as first, Upstream() as second:
        async with guarded(tmp_path, first.url) as daemon:
            written = load(tmp_path / "config.toml", {}).server.key_origin
            assert written == first.url.removesuffix("/v1")
            assert f"the server's API key is for {written} from now on (server.key_origin" in daemon.log
            assert (await chat(daemon, "disco/server"))[0] == 200
            rewritten(daemon, base_url=second.url)
            assert (await told(daemon, "POST", "/disco/v1/reload"))[0] == 200
            await is_off(daemon)
            rewritten(daemon, key_origin=second.url)
            await told(daemon, "POST", "/disco/v1/reload")
            assert (await chat(daemon, "disco/server"))[0] == 200, "the mend mends it"
        assert sent(first, second) == [["Bearer secret-of-the-test"]] * 2


async def is_off(daemon: DaemonProcess) -> None:
    """The server is, the daemon is not: the device answers, and what is wrong stands wherever one looks."""
    status, said = await chat(daemon)
    assert (status, said["disco"]["winner"]) == (200, "device")
    status, said = await chat(daemon, "disco/server")
    assert status in (400, 502, 503)
    _, state = await told(daemon, "GET", "/disco/v1/state")
    assert state["endpoints"]["server"]["state"] == "off"
    for text in (said["error"]["message"], state["endpoints"]["server"]["last_error"], daemon.log):
        assert "disco setup" in text
        assert "server.key_origin" in text or "server.insecure" in text


async def test_a_key_that_is_bound_goes_nowhere_else_after_a_restart(tmp_path: Path) -> None:
    """F1: another base_url, another key file and another variable, all of them written by somebody else."""
    prey = tmp_path / "prey"
    prey.touch(0o600)
    prey.write_text("hunter2")
    async with Upstream() as provider, Upstream() as attacker:
        origin = {"key_origin": provider.url}
        for server in (
            origin,
            origin | {"api_key_env": "", "api_key_file": str(prey)},
            origin | {"api_key_env": "PATH"},
        ):
            settings = API | {"server": server}
            async with running(tmp_path, server=attacker.url, settings=settings) as daemon:
                await is_off(daemon)
        assert sent(provider, attacker) == [[], []]


async def test_a_server_without_a_key_is_bound_to_nothing(tmp_path: Path) -> None:
    async with Upstream() as first, Upstream() as second:
        settings = {"server": {"api_key_env": "NOT_SET_ANYWHERE"}}
        async with guarded(tmp_path, first.url, settings=settings, device=False) as daemon:
            assert (await chat(daemon))[0] == 200
            assert load(tmp_path / "config.toml", {}).server.key_origin == ""
            rewritten(daemon, base_url=second.url)
            await told(daemon, "POST", "/disco/v1/reload")
            assert (await chat(daemon))[0] == 200


async def test_a_binding_that_cannot_be_written_holds_for_the_process(tmp_path: Path) -> None:
    """As in a container whose configuration cannot be written."""
    async with Upstream() as first, Upstream() as second:
        async with guarded(tmp_path, first.url) as daemon:
            rewritten(daemon, base_url=second.url, key_origin="")
            await told(daemon, "POST", "/disco/v1/reload")
            await is_off(daemon)
            assert load(tmp_path / "config.toml", {}).server.key_origin == "", "a reload binds nothing anew"
        assert sent(second) == [[]]


async def test_the_route_that_sets_a_server_gives_a_stored_key_to_nobody_else(tmp_path: Path) -> None:
    async with Upstream() as first, Upstream() as second, guarded(tmp_path, first.url, device=False) as daemon:
        body = {"base_url": second.url, "model": "loopback"}
        assert (await told(daemon, "PUT", "/disco/v1/server", body))[0] == 200
        await chat(daemon)
        assert (await told(daemon, "PUT", "/disco/v1/server", body | {"api_key": "of-the-second"}))[0] == 200
        assert load(tmp_path / "config.toml", {}).server.key_origin == second.url.removesuffix("/v1")
        await chat(daemon)
        back = {"base_url": first.url, "model": "loopback"}
        assert (await told(daemon, "PUT", "/disco/v1/server", back))[0] == 200
        await chat(daemon)
        assert sent(first, second) == [["Bearer none"], ["Bearer none", "Bearer of-the-second"]]


async def test_a_key_does_not_go_by_plain_http_to_a_public_address(tmp_path: Path) -> None:
    """RFC 5737's addresses belong to nobody: nothing of this leaves the machine even if it is not refused."""
    async with guarded(tmp_path, "http://198.51.100.7/v1") as daemon:
        await is_off(daemon)


# --- files that settings name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", ["pipe", "/dev/zero"])
@pytest.mark.parametrize("setting", ["server.api_key_file", "device.chat_template", "device.draft_model"])
async def test_a_named_file_that_is_none_is_an_error_at_once(setting: str, special: str, tmp_path: Path) -> None:
    """F13: a daemon that read on in there came to an end by a full memory, or not at all."""
    named = tmp_path / "named"
    if special == "pipe":
        os.mkfifo(named, 0o600)
    else:
        named.symlink_to(special)
    env = {"DISCO_" + setting.replace(".", "_").upper(): str(named), "OPENAI_API_KEY": ""}
    env |= {"DISCO_SERVER_BASE_URL": "http://127.0.0.1:9/v1", "DISCO_SERVER_MODEL": "m"}
    argv = [sys.executable, "-P", "-m", "disco_daemon.cli.main", "up", "--port", "0", "--json"]
    argv += ["--model", str(default_model_path()), "--history", str(tmp_path / "history.sqlite")]
    process = await start(argv, child_env(tmp_path) | env, tmp_path / "log")
    async with asyncio.timeout(60):
        await process.communicate()
    said = (tmp_path / "log").read_text()
    assert process.returncode == 1
    assert setting in said
    assert "not a regular file" in said

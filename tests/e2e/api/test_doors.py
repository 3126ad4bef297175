"""The two doors of a real daemon: what is served where, and that nobody else gets at the controls or at our words."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from disco_daemon.api.doors import ROUTES, At
from disco_daemon.bench.child import child_env
from disco_daemon.client import listeners
from disco_daemon.client import once as client
from disco_daemon.client.once import NOT_OURS, DaemonError
from disco_daemon.client.stream import Link
from disco_daemon.system import socketfile
from tests.fixtures.daemon import DaemonProcess, ask, by_socket, running, socket_of
from tests.fixtures.ports import free_port
from tests.fixtures.upstream import Upstream

PATIENCE_S = 60.0
CONTROLS = [route for route, where in ROUTES.items() if where is At.CONTROL]
CONTROL, CALLER = "key-of-the-owner", "key-in-an-editor"


async def asked(
    session: aiohttp.ClientSession, daemon: DaemonProcess, method: str, path: str, key: str = ""
) -> tuple[int, dict[str, Any]]:
    """Status and error of an empty request for a route."""
    path = path.replace("{name}", "disco").replace("{request_id}", "req-0")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body: dict[str, Any] | None = None if method == "GET" else {}
    async with session.request(method, f"{daemon.root}{path}", json=body, headers=headers) as response:
        said = await response.text()
        return response.status, json.loads(said).get("error", {}) if said.startswith("{") else {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    """Without a key, as it comes."""
    folder = tmp_path_factory.mktemp("d")
    async with Upstream(tokens=4) as upstream, running(folder, server=upstream.url, device=False) as found:
        await ask(found, "one two")
        yield found


# --- what is served where -----------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("route", list(ROUTES), ids=" ".join)
async def test_each_route_is_served_at_the_doors_that_the_table_says(
    route: tuple[str, str], daemon: DaemonProcess
) -> None:
    status, error = await asked(daemon.session, daemon, *route)
    if ROUTES[route] is At.CONTROL:
        is_ollamas = route[1].startswith("/api/")  # whose errors are a sentence, without a code
        assert (status, "control" if is_ollamas else error["code"]) == (403, "control")
        said = str(error) if is_ollamas else error["message"]
        assert str(socket_of(daemon.url)) in said, "it says where the door is"
        assert "api.key" in said
    else:
        assert status not in (401, 403)
    status, error = await asked(daemon.controls, daemon, *route)
    assert status not in (401, 403), error


@pytest.mark.asyncio(loop_scope="module")
async def test_over_tcp_nothing_tells_a_path_or_where_a_key_is(daemon: DaemonProcess) -> None:
    told = {}
    for door in (daemon.session, daemon.controls):
        for name in ("state", "providers", "trace/latest"):
            async with door.get(f"{daemon.root}/disco/v1/{name}") as response:
                assert response.status == 200
                told[door is daemon.session, name] = await response.json()
    assert told[False, "state"]["history"]["path"] == str(daemon.folder / "history.sqlite")
    assert told[True, "state"]["history"]["path"] == "history.sqlite"
    own = {p["name"]: p["key"] for p in told[False, "providers"]["providers"]}
    public = {p["name"]: p["key"] for p in told[True, "providers"]["providers"]}
    assert (own["openai"], public["openai"]) == ("$OPENAI_API_KEY", "set")
    for name in ("state", "providers", "trace/latest"):
        assert str(daemon.folder) not in json.dumps(told[True, name])


@pytest.mark.asyncio(loop_scope="module")
async def test_the_socket_carries_everything_chat_too(daemon: DaemonProcess) -> None:
    async with Link(daemon.root) as link:
        async with aclosing(link.chat([{"role": "user", "content": "one two"}])) as pieces:
            assert "".join([piece.text async for piece in pieces]) == "one two one two "
        assert (await link.change({"delivery.pace_tps": 7.5}))["changed"] == ["delivery.pace_tps"]
        assert (await link.settings())["settings"]["delivery"]["pace_tps"] == 7.5
        assert await link.history(5)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_socket_is_this_users_alone(daemon: DaemonProcess) -> None:
    path = socket_of(daemon.url)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_uid == os.geteuid()


# --- the attack that took the provider's key ----------------------------------------------------------------------


async def test_a_process_without_a_key_gets_neither_the_settings_nor_the_providers_key(tmp_path: Path) -> None:
    async with (
        Upstream(tokens=4) as upstream, Upstream(tokens=4) as attacker,
        running(tmp_path, server=upstream.url, device=False) as daemon,
    ):  # fmt: skip
        before = (tmp_path / "config.toml").read_text()
        attacks: list[tuple[str, str, Any]] = [
            ("PATCH", "settings", {"server.base_url": attacker.url}),
            ("PATCH", "settings", {"server.api_key_file": "~/.netrc", "server.api_key_env": "HOME"}),
            ("PATCH", "settings", {"history.path": "~/.bashrc"}),
            ("PATCH", "settings", {"policy.private": False}),
            ("PUT", "server", {"base_url": attacker.url, "model": "loopback"}),
            ("POST", "server/check", {"base_url": attacker.url, "model": "loopback"}),
            ("POST", "reload", None),
            ("GET", "settings", None),
            ("GET", "history", None),
            ("HEAD", "settings", None),
        ]
        for method, path, body in attacks:
            url = f"{daemon.root}/disco/v1/{path}"
            async with daemon.session.request(method, url, json=body) as response:
                assert response.status == 403, (method, path)
        assert (await ask(daemon, "one two")).text == "one two one two "
        assert attacker.n_requests == 0
        assert (tmp_path / "config.toml").read_text() == before


# --- keys ---------------------------------------------------------------------------------------------------------


async def test_a_key_opens_the_controls_over_tcp_and_a_control_key_takes_them_from_it(tmp_path: Path) -> None:
    async with Upstream(tokens=4) as upstream:
        keys: list[tuple[Mapping[str, str], dict[str, tuple[int, int]]]] = [
            ({"key": CALLER}, {"": (401, 401), "wrong": (401, 401), CALLER: (200, 200)}),
            (
                {"key": CALLER, "control_key": CONTROL},
                {"": (401, 401), CALLER: (200, 403), CONTROL: (200, 200)},
            ),
            ({"control_key": CONTROL}, {"": (200, 403), CALLER: (200, 403), CONTROL: (200, 200)}),
        ]
        for i, (api, expected) in enumerate(keys):
            folder, settings = tmp_path / str(i), {"api": api}
            async with running(folder, server=upstream.url, device=False, settings=settings) as daemon:
                for key, (caller, control) in expected.items():
                    models, _ = await asked(daemon.session, daemon, "GET", "/v1/models", key)
                    history, error = await asked(daemon.session, daemon, "GET", "/disco/v1/history", key)
                    assert (models, history) == (caller, control), (api, key)
                    if control == 403:
                        assert "api.control_key" in error["message"]
                assert (await asked(daemon.controls, daemon, "GET", "/disco/v1/history"))[0] == 200
                async with daemon.controls.get(f"{daemon.root}/disco/v1/settings") as response:
                    shown = await response.text()
                    assert CALLER not in shown
                    assert CONTROL not in shown


# --- who has the port first ---------------------------------------------------------------------------------------

SQUATTER = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
with socket.create_server(("127.0.0.1", 0)) as squatting:
    print(squatting.getsockname()[1], flush=True)
    while True:
        there, _ = squatting.accept()
        there.settimeout(5)
        print("heard", there.recv(65536), flush=True)
        there.close()
"""
NOBODY = 65534


@asynccontextmanager
async def squatter() -> AsyncIterator[int]:
    """The port that another user's program has; it must hear nothing."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SQUATTER, str(NOBODY), stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        port = int(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S))
        yield port
    finally:
        process.kill()
        heard = await process.stdout.read()
        await process.wait()
        assert heard == b"", "nothing was sent there"


async def test_another_users_program_on_the_port_gets_neither_key_nor_prompt(tmp_path: Path) -> None:
    async with squatter() as port:
        root = f"http://127.0.0.1:{port}"
        for address in (root, f"http://localhost:{port}"):
            async with Link(address, "my-own-key") as link:
                with pytest.raises(DaemonError, match="nothing was sent there") as raised:
                    await link.check_server("https://api.example.com/v1", "sk-the-providers-key", "m")
                assert raised.value.code == NOT_OURS
                with pytest.raises(DaemonError, match="is no daemon of yours"):
                    async with aclosing(link.chat([{"role": "user", "content": "a secret"}])) as pieces:
                        await anext(pieces)
        with pytest.raises(DaemonError, match="is no daemon of yours"):
            await asyncio.to_thread(client.get, root, "/disco/v1/state", "my-own-key")
        for words in (["chat", "a secret", "--url", root], ["status", "--url", root], ["config", "reload"]):
            code, said = await disco(tmp_path, *words, DISCO_API_PORT=str(port), DISCO_API_KEY="my-own-key")
            assert code == 1
            assert "no daemon of yours" in said


async def disco(folder: Path, *words: str, **env: str) -> tuple[int, str]:
    """Exit code and what a verb prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "disco_daemon.cli.main", *words, env=child_env(folder) | env,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return process.returncode or 0, said.decode()


async def test_a_listener_of_another_user_is_refused_by_what_the_kernel_says_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatting:
        port = squatting.getsockname()[1]
        table = tmp_path / "tcp"
        row = f"0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 54321 0 41 1 0\n"
        table.write_text("  sl  local_address rem_address   st\n" + row)
        monkeypatch.setattr(listeners, "TABLES", (table,))
        monkeypatch.setattr(sys, "platform", "linux")
        async with Link(f"http://127.0.0.1:{port}", "hush") as link:
            with pytest.raises(DaemonError, match="the user 54321"):
                await link.state()
        squatting.settimeout(0)
        with pytest.raises(BlockingIOError):
            squatting.accept()


# --- life and death of the socket ---------------------------------------------------------------------------------


async def test_a_killed_daemons_socket_makes_room_and_goes_with_the_next_ones_end(tmp_path: Path) -> None:
    port = free_port()
    async with Upstream(tokens=4) as upstream:
        more = ("--port", str(port))
        async with running(tmp_path, server=upstream.url, device=False, more=more) as daemon:
            path = socket_of(daemon.url)
            os.kill((await daemon.state())["pid"], signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                while socketfile.found(port) is not None:
                    await asyncio.sleep(0.01)  # the other process has no event to wait for
            assert path.exists(), "it had no time to remove it"
        async with running(tmp_path, server=upstream.url, device=False, more=more) as daemon:
            assert socket_of(daemon.url) == path
            assert (await ask(daemon, "one two")).text == "one two one two "
        assert not path.exists()


async def test_without_a_place_for_a_socket_the_daemon_serves_and_says_so(tmp_path: Path) -> None:
    closed = tmp_path / ("x" * 110)
    closed.mkdir()
    env = {"XDG_RUNTIME_DIR": str(closed), "XDG_STATE_HOME": str(closed)}
    with handed(tmp_path, (), env, "--port", "0", "--no-device", server="http://127.0.0.1:9/v1") as process:
        assert process.stdout is not None
        url = json.loads(await asyncio.to_thread(process.stdout.readline))["url"]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/models") as response:
                assert response.status == 200
            async with session.post(f"{url.removesuffix('/v1')}/disco/v1/reload") as response:
                assert (response.status, "socket" in await response.text()) == (403, False)
    assert "longer than the 103 bytes" in (tmp_path / "daemon.log").read_text()


# --- sockets of a service manager ---------------------------------------------------------------------------------

START = """
import os, sys
n = int(sys.argv[1])
fds = [int(fd) for fd in sys.argv[2 : 2 + n]]
for i, fd in enumerate([os.dup(fd) for fd in fds]):
    os.dup2(fd, 100 + i)
for i in range(n):
    os.dup2(100 + i, 3 + i, inheritable=True)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(n)}
os.execv(sys.executable, [sys.executable, "-P", "-m", "disco_daemon.cli.main", *sys.argv[2 + n :]])
"""


class handed:  # noqa: N801 - used as a function
    """`disco up` as a service manager starts it, with listening sockets; ended afterwards."""

    def __init__(
        self, folder: Path, sockets: Sequence[socket.socket], env: Mapping[str, str], *words: str, server: str
    ) -> None:
        config = folder / "config.toml"
        config.write_text(f'[server]\nbase_url = "{server}"\nmodel = "loopback"\nprobe = false\n')
        fds = [str(s.fileno()) for s in sockets]
        up = ["up", "--json", "--config", str(config), "--history", str(folder / "history.sqlite"), *words]
        self._log = (folder / "daemon.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(len(fds)), *fds, *up], pass_fds=[s.fileno() for s in sockets],
            env=child_env(folder) | dict(env), stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=PATIENCE_S)
        self._log.close()


def listening_at(path: Path, mode: int = 0o600) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    made.bind(str(path))
    path.chmod(mode)
    made.listen()
    return made


async def test_sockets_of_a_service_manager_are_told_apart_by_family(tmp_path: Path, runtime_folder: str) -> None:
    async with Upstream(tokens=4) as upstream:
        with socket.create_server(("127.0.0.1", 0)) as tcp:
            port = tcp.getsockname()[1]
            path = Path(runtime_folder) / "disco" / f"{port}.sock"
            for given in (True, False):  # by today's unit, and by one of an older version
                unix = listening_at(path) if given else None
                sockets = [s for s in (unix, tcp) if s is not None]
                with handed(tmp_path, sockets, {}, "--no-device", server=upstream.url) as process:
                    assert process.stdout is not None
                    url = json.loads(await asyncio.to_thread(process.stdout.readline))["url"]
                    assert url == f"http://127.0.0.1:{port}/v1"
                    async with by_socket(url) as controls, controls.post(f"{url[:-3]}/disco/v1/reload") as response:
                        assert response.status == 200
                    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai:
                        assert [model.id async for model in openai.models.list()]
                assert path.exists() is given, "what the manager made stays, what we made goes"
                if unix is not None:
                    unix.close()
                    path.unlink()


async def test_a_socket_that_is_open_to_others_is_not_served_without_a_key(tmp_path: Path) -> None:
    async def refused(given: socket.socket, **env: str) -> str:
        words = ("--no-device", "--port", "0")  # the port that is one's own without a word may be in use here
        with given, handed(tmp_path, [given], env, *words, server="http://127.0.0.1:9/v1") as process:
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 1
        return (tmp_path / "daemon.log").read_text()

    said = await refused(socket.create_server(("0.0.0.0", 0)))
    assert "0.0.0.0" in said
    assert "disco service install" in said
    assert "api.key" in said
    said = await refused(listening_at(tmp_path / "open.sock", 0o666))
    assert "which others may use" in said

"""A daemon that is told to end: answers are ended or told, none is cut; the books are kept; systemd is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tomlkit

from disco_daemon.bench.child import child_env, start
from disco_daemon.models.default import default_model_path
from disco_daemon.store import History
from tests.fixtures.daemon import by_socket, socket_of
from tests.fixtures.upstream import Upstream

PATIENCE_S = 60.0


class Daemon:
    """`disco up` as a service manager starts it, with the engine and a server."""

    def __init__(self, folder: Path, server: str, **api: Any) -> None:
        self.folder, self.history = folder, folder / "history.sqlite"
        self.config = folder / "config.toml"
        self.configure(tomlkit.dumps({
            "api": {"port": 0} | api,
            "server": {"base_url": server, "model": "loopback", "probe": False, "input_usd_per_mtok": 1.0,
                       "output_usd_per_mtok": 2.0, "token_timeout_s": PATIENCE_S},
            "device": {"autotune": False, "watts": 15.0, "model": str(default_model_path()), "n_threads": 1},
            "handoff": {"for_cost": False},
            "policy": {"shadow": False},
        }))  # fmt: skip
        self.url = ""

    def configure(self, text: str) -> None:
        """Replace the configuration at once: a daemon that reads it meanwhile finds the one before or this one."""
        new = self.config.with_suffix(".new")
        new.write_text(text)
        new.replace(self.config)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    async def stopping(self) -> None:
        """Wait until it has been told to end: the log says so just before it takes no more requests."""
        async with asyncio.timeout(PATIENCE_S):
            while "stopping" not in (self.folder / "daemon.log").read_text():
                await asyncio.sleep(0.01)  # the other process has no event to wait for

    async def start(self, log_name: str = "daemon.log", *more: str, **env: str) -> None:
        argv = [
            sys.executable, "-P", "-m", "disco_daemon.cli.main", "up", "--config", str(self.config), "--history",
            str(self.history), "--json", "--service", *more,
        ]  # fmt: skip
        log = self.folder / log_name
        self.process = await start(argv, child_env(self.folder) | {"OPENAI_API_KEY": "secret"} | env, log)
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            self.url = json.loads(await self.process.stdout.readline())["url"]

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)


async def hear(session: aiohttp.ClientSession, url: str, model: str, begun: asyncio.Event) -> tuple[str, str]:
    """One answer to its end: what ended it (`whole`, the code of an in-band error, or `cut`), and its text."""
    question = f"Tell of {model.replace('/', '')}"  # words that nobody can take for two tokens
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": 150, "stream": True, "temperature": 0}
    text = ""
    async with session.post(f"{url}/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                return "whole", text
            if line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return str(chunk["error"]["code"]), text
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                if text:
                    begun.set()
    return "cut", text


async def ten(session: aiohttp.ClientSession, url: str) -> list[asyncio.Task[tuple[str, str]]]:
    """Five answers on each side, all of them under way."""
    begun = [asyncio.Event() for _ in range(10)]
    models = ["disco/device", "disco/server"] * 5
    tasks = [asyncio.create_task(hear(session, url, m, e)) for m, e in zip(models, begun, strict=True)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(event.wait() for event in begun))
    return tasks


def balanced(history: Path) -> tuple[int, float, float]:
    """Requests on record, what their rows cost, and what the days cost, $."""
    kept = History(history)
    kept.open()
    try:
        rows = kept.recent(100)
        return len(rows), sum(row["server_usd"] for row in rows), sum(day["server_usd"] for day in kept.days(2))
    finally:
        kept.close()


@pytest.mark.slow
async def test_sigterm_lets_ten_running_answers_end_and_refuses_new_ones(tmp_path: Path) -> None:
    async with Upstream(tokens=150) as upstream, aiohttp.ClientSession() as session:
        daemon = Daemon(tmp_path, upstream.url, drain_s=PATIENCE_S)
        await daemon.start()
        go_on = asyncio.Event()
        with upstream.held_until(go_on, 20):
            tasks = await ten(session, daemon.url)
        daemon.signal(signal.SIGTERM)
        await daemon.stopping()
        refused = {"model": "disco", "messages": [{"role": "user", "content": "late"}]}
        async with session.post(f"{daemon.url}/chat/completions", json=refused) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert (await response.json())["error"]["code"] == "stopping"
        go_on.set()
        endings = await asyncio.gather(*tasks)
        assert [end for end, _ in endings] == ["whole"] * 10
        assert await daemon.ended() == 0
        n, rows, days = balanced(daemon.history)
        assert n == 10
        assert rows == pytest.approx(days)
        assert rows > 0


@pytest.mark.slow
async def test_who_is_not_whole_in_time_is_told_and_nobody_is_cut(tmp_path: Path) -> None:
    async with Upstream(tokens=150, interval_s=0.5) as upstream, aiohttp.ClientSession() as session:
        daemon = Daemon(tmp_path, upstream.url, drain_s=1.0)
        await daemon.start()
        tasks = await ten(session, daemon.url)
        daemon.signal(signal.SIGTERM)
        endings = await asyncio.gather(*tasks)
        assert {end for end, _ in endings} <= {"whole", "stopping"}
        assert [end for end, _ in endings[1::2]] == ["stopping"] * 5, "75 s of a server's words do not fit into 1 s"
        assert await daemon.ended() == 0
        n, rows, days = balanced(daemon.history)
        assert n == 10
        assert rows == pytest.approx(days)


@pytest.mark.slow
async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with Upstream(tokens=150, interval_s=0.2) as upstream, aiohttp.ClientSession() as session:
        daemon = Daemon(tmp_path, upstream.url)
        await daemon.start()
        begun = asyncio.Event()
        task = asyncio.create_task(hear(session, daemon.url, "disco/server", begun))
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        daemon.signal(signal.SIGTERM)
        await daemon.stopping()
        daemon.signal(signal.SIGTERM)
        assert await daemon.ended() == 128 + signal.SIGTERM
        with suppress(aiohttp.ClientError):  # the connection may break before or after the last line
            assert (await task)[0] == "cut"


async def test_systemd_hears_ready_watchdog_and_stopping(tmp_path: Path) -> None:
    address = str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address)
        listening.setblocking(False)

        async def heard(name: str) -> dict[str, str]:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    said = await asyncio.get_running_loop().sock_recv(listening, 4096)
                    told = dict(line.partition("=")[::2] for line in said.decode().splitlines())
                    if name in told:
                        return told

        async with Upstream() as upstream:
            daemon = Daemon(tmp_path, upstream.url)
            await daemon.start(NOTIFY_SOCKET=address, WATCHDOG_USEC="300000")
            ready = await heard("READY")
            assert ready["MAINPID"] == str(daemon.process.pid)
            assert daemon.url in ready["STATUS"]
            for _ in range(3):
                assert (await heard("WATCHDOG"))["WATCHDOG"] == "1"
            daemon.signal(signal.SIGTERM)
            assert (await heard("STOPPING"))["STOPPING"] == "1"
            assert await daemon.ended() == 0
    for line in (tmp_path / "daemon.log").read_text().splitlines():
        assert set(json.loads(line)) >= {"time", "level", "logger", "message"}, "under a service a line is JSON"


async def test_a_parent_that_lets_go_and_sends_a_signal_means_it_once(tmp_path: Path) -> None:
    async with Upstream(tokens=100) as upstream, aiohttp.ClientSession() as session:
        daemon = Daemon(tmp_path, upstream.url)
        await daemon.start("daemon.log", "--until-eof", "--no-device")
        path, begun, go_on = socket_of(daemon.url), asyncio.Event(), asyncio.Event()
        with upstream.held_until(go_on, 20):
            task = asyncio.create_task(hear(session, daemon.url, "disco/server", begun))
            await asyncio.wait_for(begun.wait(), PATIENCE_S)
        assert daemon.process.stdin is not None
        daemon.process.stdin.close()
        await daemon.stopping()
        daemon.signal(signal.SIGTERM)
        go_on.set()
        assert (await task)[0] == "whole"
        assert await daemon.ended() == 0
        assert not path.exists(), "it took its socket with it"


# --- the configuration read again ---------------------------------------------------------------------------------


async def reloaded(url: str) -> tuple[int, dict[str, Any]]:
    async with by_socket(url) as controls, controls.post(f"{url.removesuffix('/v1')}/disco/v1/reload") as response:
        return response.status, await response.json()


async def state(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url.removesuffix('/v1')}/disco/v1/state") as response:
        found: dict[str, Any] = await response.json()
        return found


@pytest.mark.slow
async def test_a_reload_under_load_drops_nothing_and_the_next_request_goes_to_the_new_server(tmp_path: Path) -> None:
    async with (
        Upstream(tokens=100, interval_s=0.02) as old, Upstream(tokens=5) as new, aiohttp.ClientSession() as session,
    ):  # fmt: skip
        daemon = Daemon(tmp_path, old.url)
        await daemon.start()
        try:
            tasks = await ten(session, daemon.url)
            pid = (await state(session, daemon.url))["endpoints"]["device"]["pid"]
            roots = old.url.removesuffix("/v1"), new.url.removesuffix("/v1")  # the key's origin is among them
            daemon.configure(daemon.config.read_text().replace(*roots))
            status, said = await reloaded(daemon.url)
            assert (status, said) == (200, {"changed": ["server.base_url", "server.key_origin"], "needs_restart": []})
            n_old = len(old.exchanges)
            end, text = await hear(session, daemon.url, "disco/server", asyncio.Event())
            assert end == "whole"
            assert len(text.split()) == 5
            assert len(old.exchanges) == n_old, "the old server gets no new request"
            endings = await asyncio.gather(*tasks)
            assert [end for end, _ in endings] == ["whole"] * 10
            assert len(endings[1][1].split()) == 100, "an answer under way stays with its server"
            assert (await state(session, daemon.url))["endpoints"]["device"]["pid"] == pid, "the model stays in memory"
        finally:
            daemon.signal(signal.SIGTERM)
            assert await daemon.ended() == 0


@pytest.mark.slow
async def test_another_model_is_loaded_when_the_last_answer_of_the_old_one_has_ended(tmp_path: Path) -> None:
    async with Upstream() as upstream, aiohttp.ClientSession() as session:
        daemon = Daemon(tmp_path, upstream.url)
        await daemon.start()
        try:
            begun = asyncio.Event()
            task = asyncio.create_task(hear(session, daemon.url, "disco/device", begun))
            await asyncio.wait_for(begun.wait(), PATIENCE_S)
            pid = (await state(session, daemon.url))["endpoints"]["device"]["pid"]
            text = daemon.config.read_text()
            daemon.configure(text.replace("[device]", "[device]\nn_ctx = 1024"))
            assert (await reloaded(daemon.url))[1]["changed"] == ["device.n_ctx"]
            late = asyncio.create_task(hear(session, daemon.url, "disco/device", asyncio.Event()))
            assert (await task)[0] == "whole"
            assert (await late)[0] == "whole", "it waited for the new model"
            device = (await state(session, daemon.url))["endpoints"]["device"]
            assert device["n_ctx"] == 1024
            assert device["pid"] != pid
        finally:
            daemon.signal(signal.SIGTERM)
            assert await daemon.ended() == 0


async def test_the_budget_s_account_goes_on_when_the_configuration_is_read_again(tmp_path: Path) -> None:
    async with Upstream(tokens=5) as upstream, aiohttp.ClientSession() as session:
        daemon = Daemon(tmp_path, upstream.url)
        await daemon.start()
        try:
            for _ in range(3):
                assert (await hear(session, daemon.url, "disco", asyncio.Event()))[0] == "whole"
            before = (await state(session, daemon.url))["learned"]["realised"]
            assert before["requests"] == 3
            assert (await reloaded(daemon.url))[0] == 200
            assert (await state(session, daemon.url))["learned"]["realised"] == before
        finally:
            daemon.signal(signal.SIGTERM)
            assert await daemon.ended() == 0


async def test_a_wrong_configuration_is_refused_with_its_line_and_the_old_one_stays(tmp_path: Path) -> None:
    async with Upstream() as upstream, aiohttp.ClientSession() as session:
        daemon = Daemon(tmp_path, upstream.url)
        await daemon.start()
        try:
            good = daemon.config.read_text()
            for wrong, why in (
                (good.replace("watts = 15.0", 'watts = "many"'), "watts"),
                (good + "\n[policy\n", "line"),
                (good.replace("[device]", "[device]\nno_such = 1"), "no_such"),
            ):
                daemon.configure(wrong)
                status, said = await reloaded(daemon.url)
                assert status == 400
                message = said["error"]["message"]
                assert why in message, message
                assert "line " in message, message
                daemon.signal(signal.SIGHUP)
            end, _ = await hear(session, daemon.url, "disco/server", asyncio.Event())
            assert end == "whole", "the old configuration is in force"
            daemon.configure(good.replace("usd_per_mtok = 2.0", "usd_per_mtok = 3.0"))
            daemon.signal(signal.SIGHUP)
            async with asyncio.timeout(PATIENCE_S):
                while (await state(session, daemon.url))["money"]["server_price"]["output_usd_per_mtok"] != 3.0:
                    await asyncio.sleep(0.01)  # the other process has no event to wait for
        finally:
            daemon.signal(signal.SIGTERM)
            assert await daemon.ended() == 0
        assert "was not taken up" in (tmp_path / "daemon.log").read_text()


async def test_another_key_in_the_same_file_is_read_again(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("first-key")
    async with Upstream() as upstream, aiohttp.ClientSession() as session:
        daemon = Daemon(tmp_path, upstream.url)
        named = f'[server]\napi_key_env = ""\napi_key_file = "{key}"'
        daemon.configure(daemon.config.read_text().replace("[server]", named))
        await daemon.start()
        try:
            assert (await hear(session, daemon.url, "disco/server", asyncio.Event()))[0] == "whole"
            key.write_text("second-key")
            assert await reloaded(daemon.url) == (200, {"changed": [], "needs_restart": []})
            assert (await hear(session, daemon.url, "disco/server", asyncio.Event()))[0] == "whole"
        finally:
            daemon.signal(signal.SIGTERM)
            assert await daemon.ended() == 0
        sent = [exchange.headers["Authorization"] for exchange in upstream.exchanges]
        assert sent == ["Bearer first-key", "Bearer second-key"]


async def test_a_second_daemon_on_the_same_history_is_refused_and_says_who_has_it(tmp_path: Path) -> None:
    async with Upstream() as upstream, aiohttp.ClientSession() as session:
        first = Daemon(tmp_path, upstream.url)
        await first.start()
        try:
            second = Daemon(tmp_path, upstream.url)
            with pytest.raises(json.JSONDecodeError):  # it ends without a word on stdout
                await second.start("second.log")
            assert await second.ended() == 1
            said = (tmp_path / "second.log").read_text()
            assert str(first.process.pid) in said
            assert "--history" in said
            assert (await hear(session, first.url, "disco/server", asyncio.Event()))[0] == "whole"
        finally:
            first.signal(signal.SIGKILL)
            await first.ended()
        third = Daemon(tmp_path, upstream.url)
        await third.start()
        third.signal(signal.SIGTERM)
        assert await third.ended() == 0

"""Settings are read again while answers and embeddings run: none of them loses what it works with, and nothing is left.

Real daemons and engines; the device is slowed down, so that an answer lasts for some reloads.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import tomlkit

from disco_daemon.models.default import default_model_path
from tests.e2e.conductor.test_handoff import FORCED, STORY, done, moved, pair
from tests.e2e.conductor.test_private import trap
from tests.e2e.daemon.test_money import change
from tests.fixtures.daemon import DaemonProcess, Heard, ask, running
from tests.fixtures.upstream import Upstream

SLOW = ("--shape-tps", "15")
PATIENCE_S = 60.0
Begun = tuple[asyncio.Task[Heard], Heard]


async def reloaded(daemon: DaemonProcess, **settings: Any) -> list[str]:
    """Write settings into the file, by `section__key`, and have it read again; what has changed."""
    path = daemon.folder / "config.toml"
    document = tomlkit.parse(path.read_text())
    for name, value in settings.items():
        section, _, key = name.partition("__")
        document.setdefault(section, tomlkit.table())[key] = value
    path.write_text(tomlkit.dumps(document))
    async with daemon.controls.post(f"{daemon.root}/disco/v1/reload") as response:
        assert response.status == 200, await response.text()
        changed: list[str] = (await response.json())["changed"]
    return changed


async def begun(daemon: DaemonProcess, prompt: str = STORY, **more: Any) -> Begun:
    """An answer that has its first words."""
    started, heard = asyncio.Event(), Heard()
    task = asyncio.create_task(ask(daemon, prompt, heard=heard, on_piece=lambda _: started.set(), **more))
    waiting = asyncio.create_task(started.wait())
    done, _ = await asyncio.wait([waiting, task], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert waiting in done, "it was over before it began, or never began"
    return task, heard


def engines(state: dict[str, Any]) -> list[int]:
    """The process ids of all engines of a daemon."""
    children = psutil.Process(state["pid"]).children(recursive=True)
    return [child.pid for child in children if "disco_daemon.engine.worker" in child.cmdline()]


async def test_an_answer_keeps_its_device_over_many_reloads_and_only_one_model_is_ever_in_memory(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, policy="all-device", more=SLOW) as daemon:
        first = (await daemon.device_ready())["endpoints"]["device"]["pid"]
        task, _ = await begun(daemon, max_tokens=60)
        assert await reloaded(daemon) == [], "the device stays, the stage is another one"
        assert await reloaded(daemon, device__n_ctx=1024) == ["device.n_ctx"]
        assert await reloaded(daemon, device__n_ctx=2048) == ["device.n_ctx"]
        late = asyncio.create_task(ask(daemon, STORY, max_tokens=2))  # waits for the last model
        async with daemon.controls.get(f"{daemon.root}/disco/v1/plan?tokens=40") as response:
            wait_s = (await response.json())["readiness"]["device"]["load_s"]
        assert wait_s > 3.0, "planned with the rest of that answer, and a load"
        assert engines(await daemon.state()) == [first]
        heard = await task
        assert heard.finish_reason == "length"
        assert sum(heard.disco["tokens"].values()) == 60
        assert (await late).finish_reason == "length"
        state = await daemon.until(
            lambda s: s["endpoints"]["device"]["n_ctx"] == 2048 and s["endpoints"]["device"]["state"] == "ready"
        )
        assert engines(state) == [state["endpoints"]["device"]["pid"]] != [first]


async def test_an_old_answer_starts_no_server_once_nothing_may_leave(tmp_path: Path) -> None:
    """Its stage is the one before last, and its device is killed: the server would go on with all of it."""
    settings: dict[str, Any] = {"server": {"continuation": "continue_final_message"}, "handoff": {"stall_s": 60.0}}
    async with (
        trap() as (url, callers),
        running(tmp_path, server=url, policy="all-device", settings=settings) as daemon,
    ):
        pid = (await daemon.device_ready())["endpoints"]["device"]["pid"]
        task, _ = await begun(daemon, max_tokens=200)
        os.kill(pid, signal.SIGSTOP)
        assert await reloaded(daemon) == []
        assert await reloaded(daemon, server__token_timeout_s=14.0) == ["server.token_timeout_s"]
        await change(daemon, policy__private=True)
        os.kill(pid, signal.SIGKILL)
        heard = await task
        assert heard.finish_reason in ("stop", "length"), "the engine that was started again has gone on with it"
        assert {name.partition("#")[0] for name in heard.disco["endpoints"]} == {"device"}
        assert callers == []


async def test_a_reload_turns_the_switch_for_the_answers_that_are_running_too(tmp_path: Path) -> None:
    """As above, by the file and a reload that puts everything on anew; and off again."""
    settings: dict[str, Any] = {"server": {"continuation": "continue_final_message"}, "handoff": {"stall_s": 60.0}}
    async with (
        trap() as (url, callers),
        running(tmp_path, server=url, policy="all-device", settings=settings) as daemon,
    ):
        pid = (await daemon.device_ready())["endpoints"]["device"]["pid"]
        task, _ = await begun(daemon, max_tokens=200)
        os.kill(pid, signal.SIGSTOP)
        changed = await reloaded(daemon, policy__private=True, server__token_timeout_s=14.0)
        assert changed == ["policy.private", "server.token_timeout_s"]
        os.kill(pid, signal.SIGKILL)
        assert (await task).finish_reason in ("stop", "length")
        assert callers == []
        await reloaded(daemon, policy__private=False, server__token_timeout_s=15.0)
        assert (await daemon.state())["private"] is False
        with suppress(openai.APIError):
            await ask(daemon, STORY, model="disco/server")
        assert callers


async def test_what_the_server_was_asked_and_has_not_begun_is_taken_back(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, policy="all-server") as daemon:
        await daemon.device_ready()
        with upstream.hang():
            task = asyncio.create_task(ask(daemon, STORY, max_tokens=4))
            await upstream.wait_request(0)
            await change(daemon, policy__private=True)
            await upstream.wait_closed(0)
        assert (await task).disco["winner"] == "device"
        assert upstream.n_requests == 1


async def test_after_a_reload_the_server_is_given_token_ids_by_the_device_in_use(tmp_path: Path) -> None:
    async with pair(tmp_path, "all-device", "token_ids", *FORCED) as daemon:
        whole = await ask(daemon, STORY, model="disco/device", max_tokens=120)
        pid = (await daemon.state())["endpoints"]["device"]["pid"]
        assert await reloaded(daemon) == []
        assert (await daemon.state())["endpoints"]["device"]["pid"] == pid
        heard = await moved(daemon, max_tokens=120)
        (move,) = done(heard.disco)
        assert (move["source"], move["target"]) == ("device", "server")
        assert heard.text == whole.text


async def test_embeddings_under_way_keep_their_device_over_a_reload(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        pid = (await daemon.device_ready())["endpoints"]["device"]["pid"]
        texts = [f"{i} {STORY}" for i in range(3)]
        os.kill(pid, signal.SIGSTOP)  # they last as long as we like
        task = asyncio.create_task(daemon.client.embeddings.create(model="disco", input=texts))
        await daemon.until(lambda s: s["in_flight"] == 1)
        await reloaded(daemon, device__n_ctx=1024)
        assert not task.done()
        os.kill(pid, signal.SIGCONT)
        assert len((await task).data) == len(texts)
        state = await daemon.until(lambda s: s["endpoints"]["device"]["n_ctx"] == 1024)
        assert len(engines(state)) == 1
        assert [row["error"] for row in await daemon.history()] == [None]


async def test_a_daemon_that_ends_waits_for_embeddings_and_takes_no_more(tmp_path: Path) -> None:
    async with running(tmp_path, settings={"api": {"drain_s": PATIENCE_S}}) as daemon:
        state = await daemon.device_ready()
        engine = state["endpoints"]["device"]["pid"]
        texts = [f"{i} {STORY}" for i in range(3)]
        os.kill(engine, signal.SIGSTOP)  # they last as long as we like
        task = asyncio.create_task(daemon.client.embeddings.create(model="disco", input=texts))
        await daemon.until(lambda s: s["in_flight"] == 1)
        os.kill(state["pid"], signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while "stopping" not in daemon.log:  # the signal is on its way
                await asyncio.sleep(0.01)
        with pytest.raises(openai.InternalServerError) as refused:
            await daemon.client.embeddings.create(model="disco", input="late")
        assert (refused.value.status_code, refused.value.code) == (503, "stopping")
        assert int(refused.value.response.headers["Retry-After"]) > 0
        assert not task.done()
        os.kill(engine, signal.SIGCONT)
        assert len((await task).data) == len(texts)


async def test_the_new_server_is_not_probed_for_an_answer_of_the_old_one(tmp_path: Path) -> None:
    async with (
        Upstream() as old,
        Upstream() as new,
        running(tmp_path, server=old.url, policy="all-server", settings={"server": {"probe": True}}) as daemon,
    ):
        await daemon.device_ready()
        go_on = asyncio.Event()
        with old.held_until(go_on):
            task = asyncio.create_task(ask(daemon, STORY, model="disco/server", max_tokens=4))
            await old.wait_request(0)
        assert "server.base_url" in await reloaded(
            daemon, server__base_url=new.url, server__key_origin=new.url.removesuffix("/v1")
        )
        go_on.set()
        assert (await task).disco["winner"] == "server"
        await ask(daemon, STORY, model="disco/device", max_tokens=2)  # whatever that has begun had time
        assert new.n_requests == 0
        assert (await ask(daemon, STORY, model="disco/server", max_tokens=4)).disco["winner"] == "server"
        await new.wait_request(1)  # its own answer starts the probe


async def test_a_prompt_that_was_estimated_while_the_model_loads_is_on_record_as_it_was_read(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        first = await ask(daemon, STORY, max_tokens=2)
        known = await ask(daemon, STORY, max_tokens=2)
        rows = await daemon.history()
    assert first.disco["prompt_tokens"] == known.disco["prompt_tokens"] > len(STORY) // 4 + 10
    assert {row["prompt_tokens"] for row in rows} == {known.disco["prompt_tokens"]}


async def test_a_reload_that_is_refused_does_not_lift_the_caps(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"caps": {"usd_per_day": 0.0}, "device": {"model": str(default_model_path())}}
    async with (
        Upstream() as upstream,
        running(tmp_path, server=upstream.url, device=None, policy="all-server", settings=settings) as daemon,
    ):
        path = daemon.folder / "config.toml"
        document: Any = tomlkit.parse(path.read_text())
        document["caps"]["usd_per_day"] = 1000.0
        document["device"]["model"] = str(tmp_path / "none.gguf")
        path.write_text(tomlkit.dumps(document))
        os.kill((await daemon.state())["pid"], signal.SIGHUP)
        async with asyncio.timeout(PATIENCE_S):
            while "was not taken up" not in daemon.log:
                await asyncio.sleep(0.01)  # a log has no event to wait for
        for _ in range(3):
            with pytest.raises(openai.RateLimitError):
                await ask(daemon, STORY, model="disco/server")
        assert (await daemon.state())["money"]["caps"]["usd_per_day"]["limit"] == 0.0
        assert upstream.n_requests == 0
        document["device"]["model"] = str(default_model_path())
        path.write_text(tomlkit.dumps(document))
        await reloaded(daemon)
        await ask(daemon, STORY, model="disco/server", max_tokens=4)
        assert upstream.n_requests == 1

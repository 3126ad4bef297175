"""Several models of one machine, by name: real daemons, and an engine process for each; the models are copies."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomlkit
from openai import APIStatusError, NotFoundError

from disco_daemon.models.default import default_model_path
from tests.fixtures.daemon import DaemonProcess, Heard, ask, running

ONE = 0.62  # GiB: the device of the race, and one of two others; each takes 0.25 with 512 tokens of context
SMALL = {"device": {"n_ctx": 512}}
LONG = 160  # tokens of an answer that goes on while others ask


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """A folder with models of three names."""
    for name in ("alpha", "beta", "gamma"):
        shutil.copy(default_model_path(), tmp_path / f"{name}.gguf")
    yield tmp_path
    for name in ("alpha", "beta", "gamma"):
        (tmp_path / f"{name}.gguf").unlink()


def listed(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [{"name": n, "model": str(folder / f"{n}.gguf"), "n_ctx": 512, "use": f"for {n}"} for n in names]


async def states(daemon: DaemonProcess) -> dict[str, str]:
    return {model["name"]: model["state"] for model in (await daemon.state())["models"]}


async def cards(daemon: DaemonProcess) -> dict[str, dict[str, Any]]:
    async with daemon.session.get(f"{daemon.url}/models") as response:
        return {card["id"]: card for card in (await response.json())["data"]}


async def post(daemon: DaemonProcess, path: str, **body: Any) -> dict[str, Any]:
    async with daemon.session.post(f"{daemon.root}{path}", json=body) as response:
        found: dict[str, Any] = await response.json()
        assert response.status == 200, found
        return found


async def post_list(daemon: DaemonProcess, path: str) -> set[str]:
    async with daemon.session.get(f"{daemon.root}{path}") as response:
        return {model["name"] for model in (await response.json())["models"]}


async def reload(daemon: DaemonProcess, models: Sequence[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    path = daemon.folder / "config.toml"
    values = tomlkit.parse(path.read_text()).unwrap()
    path.write_text(tomlkit.dumps(values | {"models": models}))
    async with daemon.controls.post(f"{daemon.root}/disco/v1/reload") as response:
        return response.status, await response.json()


def engine_of(model: Path) -> psutil.Process | None:
    """The process that has a model's file in memory; None if there is none."""
    for process in psutil.process_iter():
        try:
            if str(model) in {m.path for m in process.memory_maps()}:
                return process
        except psutil.Error:  # it has just ended, or is somebody else's
            continue
    return None


def writing(daemon: DaemonProcess, model: str) -> tuple[asyncio.Task[Heard], asyncio.Event]:
    """A long answer that is being written, and what says that its first words are there."""
    begun = asyncio.Event()
    answer = ask(daemon, "Tell a long story of the sea.", model=model, max_tokens=LONG, on_piece=lambda _: begun.set())
    return asyncio.create_task(answer), begun


async def test_a_model_is_loaded_when_it_is_asked_for_by_name_in_all_apis(files: Path) -> None:
    settings = SMALL | {"api": {"aliases": {"gpt-4o": "disco/beta", "claude-*": "disco/alpha"}}}
    models = listed(files, "alpha", "beta")
    async with running(files / "d", settings=settings, models=models) as daemon:
        before = await daemon.device_ready()
        assert [m["state"] for m in before["models"]] == ["unloaded", "unloaded"]
        assert [m["memory_bytes"] for m in before["models"]] == [0, 0]
        assert (await cards(daemon))["disco/alpha"]["state"] == "unloaded"

        first = await ask(daemon, "Say hello.", model="disco/alpha", max_tokens=8)
        assert first.text
        assert first.disco["endpoints"].keys() == {"device"}, "answered by this model alone"
        assert first.disco["endpoints"]["device"]["model"] == "alpha"
        assert await states(daemon) == {"alpha": "ready", "beta": "unloaded"}

        response = await daemon.client.responses.create(model="claude-x", input="Say hello.", max_output_tokens=16)
        assert response.output_text
        message = await post(
            daemon, "/v1/messages", model="disco/alpha", max_tokens=8, messages=[{"role": "user", "content": "Hello"}]
        )
        assert message["content"][0]["text"]
        chat = await post(
            daemon, "/api/chat", model="disco/beta:latest", stream=False, options={"num_predict": 8},
            messages=[{"role": "user", "content": "Say hello."}],
        )  # fmt: skip
        assert chat["message"]["content"]
        text = await post(daemon, "/v1/completions", model="gpt-4o", prompt="Once upon", max_tokens=8)
        assert text["choices"][0]["text"]
        vector = await post(daemon, "/v1/embeddings", model="disco/beta", input="a text")
        assert len(vector["data"][0]["embedding"]) == 576

        known = await cards(daemon)
        card = known["gpt-4o"]
        assert (card["state"], card["context_length"], card["use"]) == ("ready", 512, "for beta")
        assert card["capabilities"]["json_schema"] is True
        in_memory = await post_list(daemon, "/api/ps")
        assert {"disco/alpha:latest", "disco/beta:latest"} <= in_memory
        state = await daemon.state()
        assert all(m["memory_bytes"] > 90e6 and m["expected_per_hour"] > 0 for m in state["models"])
        assert state["learned"]["prompts"]["n"] == 0, "what the device of the race knows is its own"

        with pytest.raises(NotFoundError, match="disco/alpha"):
            await ask(daemon, "Hello", model="disco/alpah")
        with pytest.raises(NotFoundError, match="It is one of"):
            await ask(daemon, "Hello", model="disco/\x01🙂")
        rows = await daemon.recorded(5)
        assert {row["model"] for row in rows} >= {"disco/alpha", "gpt-4o"}


async def test_one_leaves_for_another_but_never_while_it_answers(files: Path) -> None:
    models, settings = listed(files, "alpha", "beta"), {"device": {"n_ctx": 512, "models_gib": ONE}}
    async with running(files / "d", settings=settings, models=models) as daemon:
        await daemon.device_ready()
        alone = await ask(daemon, "Tell a long story of the sea.", model="disco/alpha", max_tokens=LONG)
        answer, begun = writing(daemon, "disco/alpha")
        await begun.wait()
        queue = [asyncio.create_task(ask(daemon, "Hello", model="disco/beta", max_tokens=4)) for _ in range(3)]
        seen = await daemon.until(lambda s: s["models"][1]["state"] == "waiting")
        assert seen["models"][0]["state"] == "ready"
        queue[0].cancel()  # a client that leaves while its model waits for a place
        with pytest.raises(asyncio.CancelledError):
            await queue[0]
        assert not answer.done()
        assert (await answer).text == alone.text, "it was not disturbed"
        assert all(heard.text for heard in await asyncio.gather(*queue[1:]))
        assert await states(daemon) == {"alpha": "unloaded", "beta": "ready"}
        again = await ask(daemon, "Hello", model="disco/alpha", max_tokens=4)
        assert again.finish_reason == "length"
        assert engine_of(files / "beta.gguf") is None, "its process has ended, and alpha has the memory"


async def test_one_who_leaves_while_the_model_waits_or_loads_leaves_nothing_behind(files: Path) -> None:
    models, settings = listed(files, "alpha", "beta"), {"device": {"n_ctx": 512, "models_gib": ONE}}
    async with running(files / "d", settings=settings, models=models) as daemon:
        await daemon.device_ready()
        first = asyncio.create_task(ask(daemon, "Hello", model="disco/alpha"))
        await daemon.until(lambda s: s["models"][0]["state"] == "loading")
        first.cancel()
        await daemon.until(lambda s: s["in_flight"] == 0 and s["models"][0]["state"] == "ready")
        answer, begun = writing(daemon, "disco/alpha")
        await begun.wait()
        second = asyncio.create_task(ask(daemon, "Hello", model="disco/beta"))
        await daemon.until(lambda s: s["models"][1]["state"] == "waiting")
        second.cancel()
        await daemon.until(lambda s: s["models"][1]["state"] == "unloaded")
        assert (await answer).finish_reason == "length"
        assert await states(daemon) == {"alpha": "ready", "beta": "unloaded"}, "nobody wants beta any more"


async def test_an_engine_that_is_killed_ends_its_own_answers_only_and_is_started_again(files: Path) -> None:
    async with running(files / "d", settings=SMALL, models=listed(files, "alpha", "beta")) as daemon:
        await ask(daemon, "Hello", model="disco/beta", max_tokens=4)
        answer, begun = writing(daemon, "disco/alpha")
        await begun.wait()
        other, other_begun = writing(daemon, "disco/beta")
        await other_begun.wait()
        engine = engine_of(files / "alpha.gguf")
        assert engine is not None
        engine.kill()
        with pytest.raises(Exception, match="engine"):
            await answer
        assert (await other).finish_reason == "length"
        assert (await ask(daemon, "Hello", model="disco/alpha", max_tokens=4)).finish_reason == "length"


async def test_a_reload_adds_and_removes_models_and_a_running_answer_ends_as_it_began(files: Path) -> None:
    async with running(files / "d", settings=SMALL, models=listed(files, "alpha", "beta")) as daemon:
        answer, begun = writing(daemon, "disco/beta")
        await begun.wait()
        wrong = [*listed(files, "alpha"), {"name": "lost", "model": str(files / "lost.gguf")}]
        status, said = await reload(daemon, wrong)
        assert status == 400, said
        assert "lost" in said["error"]["message"]
        assert (await states(daemon)).keys() == {"alpha", "beta"}, "nothing has changed"

        status, said = await reload(daemon, listed(files, "alpha", "gamma"))
        assert (status, said["changed"]) == (200, ["models"])
        assert (await states(daemon)).keys() == {"alpha", "gamma"}
        with pytest.raises(NotFoundError, match="disco/gamma"):
            await ask(daemon, "Hello", model="disco/beta")
        assert (await answer).finish_reason == "length"
        assert (await ask(daemon, "Hello", model="disco/gamma", max_tokens=4)).text
        async with asyncio.timeout(30):
            while engine_of(files / "beta.gguf") is not None:
                await asyncio.sleep(0.1)  # the engine's end is no event here

        status, _ = await reload(daemon, [])
        assert (status, (await daemon.state())["models"]) == (200, [])
        assert (await ask(daemon, "Hello", max_tokens=4)).text, "the race goes on"


async def test_a_model_in_use_is_back_behind_a_restart_before_anybody_asks_for_it(files: Path) -> None:
    models = listed(files, "alpha", "beta")
    async with running(files / "d", settings=SMALL, models=models) as daemon:
        await ask(daemon, "Hello", model="disco/beta", max_tokens=4)
    async with running(files / "d", settings=SMALL, models=models) as daemon:
        seen = await daemon.until(lambda s: s["models"][1]["state"] == "ready")
        assert [m["last_used_s"] for m in seen["models"]] == [None, None], "nobody has asked for either"
        assert seen["models"][0]["state"] == "unloaded", "nobody ever has asked for alpha"


async def test_a_model_that_can_never_fit_is_refused_with_the_setting_to_change(files: Path) -> None:
    settings = {"device": {"n_ctx": 512, "models_gib": 0.15}}
    async with running(files / "d", settings=settings, models=listed(files, "alpha")) as daemon:
        with pytest.raises(APIStatusError, match=r"device\.models_gib") as caught:
            await ask(daemon, "Hello", model="disco/alpha")
        assert caught.value.status_code >= 500
        assert (await ask(daemon, "Hello", max_tokens=4)).text
        assert await states(daemon) == {"alpha": "unloaded"}

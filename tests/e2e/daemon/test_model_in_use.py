"""From F5 to a fetched model that answers: a real daemon and its engine, the terminal UI, and a hub on loopback.

The real model is a copy of the embedded one under another name.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from disco_daemon.config.layers import load, set_values
from disco_daemon.models.default import default_model_path
from disco_tui.screens.setup import SetupScreen
from tests.fixtures.daemon import ask, running
from tests.fixtures.hub import Fault, HubServer, Repo
from tests.fixtures.tui import screen_text, shown, until

LOADED_S = 240.0  # a fetch, the end of the answer that runs, and a load, on a busy machine
LONG = "Tell me all that you know of the sea."
FILE = "real-model.Q4_1.gguf"
LISTED = """
[[models]]
names = ["real"]
parameters = 0.135
quality = 99.0

[[models.files]]
name = "real"
title = "The real one"
repo = "maker/tiny-GGUF"
file = "real-model.Q4_1.gguf"
packing = "Q4_1"
bytes = {size}
licence = "Apache-2.0"
architecture = "llama"
layers = 30
hidden = 576
vocab = 49152
kv_heads = 3
head_dim = 64
context = 8192
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(default_model_path(), models)
    return tmp_path


def before(folder: Path, hub: HubServer, **more: str) -> str:
    """What the daemon is told: where models are, and which hub; nothing is measured."""
    told = {"DISCO_MODELS_DIR": str(folder / "models"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"} | more
    return (
        f"import os\nos.environ |= {told}\nfrom disco_daemon.machines import model_offers\nmodel_offers.QUICK_S = 0.01"
    )


@pytest.mark.slow
async def test_three_keys_from_a_fresh_install_to_a_model_that_answers_over_a_line_that_is_cut_five_times(
    folder: Path,
) -> None:
    content = default_model_path().read_bytes()
    (folder / "models.toml").write_text(LISTED.format(size=len(content)))
    with HubServer(Repo(files={FILE: content})) as hub:
        async with running(folder, device=None, before=before(folder, hub)) as daemon:
            state = await daemon.device_ready()
            assert state["stand_in"] == "135M"
            alone = await ask(daemon, LONG, max_tokens=300)
            hub.repo.faults = [Fault(after=12_000_000, reset=n % 2 == 1) for n in range(5)]
            async with shown(daemon.root) as (app, pilot):
                await until(pilot, lambda: "Answers come from a 135M stand-in. F5" in screen_text(app))
                await pilot.press("f5")
                await until(pilot, lambda: "A real model for this machine" in screen_text(app))
                await pilot.press("enter")
                await until(pilot, lambda: "The real one" in screen_text(app))
                assert "Apache-2.0" in screen_text(app)
                assert hub.repo.asked == [], "nothing is fetched without a yes"
                running_answer = asyncio.create_task(ask(daemon, LONG, max_tokens=300))
                await pilot.press("enter")
                await daemon.until(lambda state: (state["fetch"] or {}).get("state") == "done", LOADED_S, 0.5)
                await until(pilot, lambda: not isinstance(app.screen, SetupScreen))
                await until(pilot, lambda: "The real one is in use" in screen_text(app))
            answer = await running_answer
            assert (answer.text, answer.finish_reason) == (alone.text, alone.finish_reason), "it was not disturbed"
            begins = [request.begin for request in hub.repo.asked]
            assert len(begins) == 6
            assert begins == sorted(set(begins)), "each goes on where the last one was cut"
            assert (folder / "models" / FILE).read_bytes() == content
            after = await daemon.device_ready()
            assert (after["pid"], after["stand_in"]) == (state["pid"], "")
            assert after["endpoints"]["device"]["model"] == FILE.removesuffix(".gguf")
            answered = await ask(daemon, "Say hello.", max_tokens=8)
            assert answered.text
            assert FILE in (folder / "config.toml").read_text()


@pytest.mark.slow
async def test_a_model_that_cannot_be_loaded_leaves_the_one_before_in_use(folder: Path) -> None:
    whole = default_model_path().read_bytes()
    content = whole[: len(whole) // 2]
    theirs = {"DISCO_DEVICE_GRADE": "4"}  # goes before what is taken out, and names no model
    (folder / "models.toml").write_text(LISTED.format(size=len(content)))
    with HubServer(Repo(files={FILE: content})) as hub:
        async with running(folder, device=None, before=before(folder, hub, **theirs)) as daemon:
            await daemon.device_ready()
            set_values(folder / "config.toml", {"device.grade": 3})
            async with daemon.controls.post(f"{daemon.root}/disco/v1/fetch", json={"model": "real"}) as response:
                assert response.status == 200, await response.text()
            failed = await daemon.until(lambda state: (state["fetch"] or {}).get("state") == "failed", LOADED_S, 0.5)
            assert "the model before is in use again" in failed["fetch"]["message"]
            kept = load(folder / "config.toml", {}).device
            assert (kept.model, kept.grade) == ("", 3), "with all that was said of it"
            assert (await daemon.device_ready())["stand_in"] == "135M"
            assert (await ask(daemon, "Say hello.", max_tokens=8)).text

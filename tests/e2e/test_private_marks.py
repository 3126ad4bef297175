"""Of a private request nothing is written down: its words are looked for in all files, in the log and in the traces."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.test_money import change
from tests.fixtures.daemon import DaemonProcess, running

OPEN, SECRET = "Kolibri-47110815", "Zaunkoenig-08154711"
KEEPING: dict[str, Any] = {
    "history": {"keep_text": True},
    "device": {"spill_gib": 0.1, "spill_after_s": 0.0},
}


def places(folder: Path, word: str) -> set[str]:
    """The files under a folder that hold a word, by name; data, state, cache and log of a test's daemon are there."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.name for path in files if word.encode() in path.read_bytes()}


async def said(daemon: DaemonProcess, word: str, *, private: bool) -> None:
    """A chat, a raw completion, a schema that cannot be obeyed, and embeddings, all of that word."""
    body: dict[str, Any] = {"disco": {"private": True}} if private else {}
    messages: Any = [{"role": "user", "content": f"Say {word}. " * 8}]
    client = daemon.client
    await client.chat.completions.create(model="disco", messages=messages, max_tokens=4, extra_body=body)
    await client.completions.create(model="disco", prompt=f"{word} is " * 8, max_tokens=4, extra_body=body)
    schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": f"#/definitions/{word}"}}}
    with pytest.raises(openai.APIStatusError):
        await client.chat.completions.create(
            model="disco", messages=messages, max_tokens=4, response_format=schema, extra_body=body
        )
    await client.embeddings.create(model="disco", input=[f"a {word}"])


async def traces(daemon: DaemonProcess) -> str:
    async with daemon.controls.get(f"{daemon.root}/disco/v1/trace/latest") as response:
        return await response.text()


@pytest.mark.parametrize("switch", [False, True], ids=["asked for by the request", "policy.private"])
async def test_nothing_of_a_private_request_is_in_any_file_the_log_or_a_trace(tmp_path: Path, switch: bool) -> None:
    async with running(tmp_path, settings=KEEPING, more=("--log-level", "debug")) as daemon:
        await daemon.device_ready()
        if switch:
            await change(daemon, policy__private=True)
        await said(daemon, SECRET, private=not switch)
        assert SECRET not in await traces(daemon)
        rows = await daemon.history()
        assert len([row for row in rows if row["policy"] != "embedding"]) == 3, "that it was is on record"
    assert places(tmp_path, SECRET) == set()
    assert list(tmp_path.rglob("*.kv")) == [], "nor what the model made of it"


async def test_without_the_wish_for_privacy_the_same_words_are_kept_where_the_settings_say_so(tmp_path: Path) -> None:
    """Else the test above would pass with a history that keeps nothing."""
    async with running(tmp_path, settings=KEEPING, more=("--log-level", "debug")) as daemon:
        await daemon.device_ready()
        await said(daemon, OPEN, private=False)
        async with asyncio.timeout(60):
            while not list(tmp_path.rglob("*.kv")):
                await asyncio.sleep(0.01)  # the engine writes when it is idle
    found = places(tmp_path, OPEN)
    assert any(name.startswith("history.sqlite") for name in found)

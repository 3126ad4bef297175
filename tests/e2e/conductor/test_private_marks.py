"""Of a private request nothing is written or sent: words and ids of tokens are looked for in files, log, traces,
all that is told, and at the server. What may have those of any other request is in docs/explain/privacy.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from disco_daemon.system.program import verb
from tests.e2e.api.test_every_route import ANSWERS, OTHERS
from tests.e2e.daemon.test_money import change
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.marks import found_in, places, spoken
from tests.fixtures.upstream import Upstream

OPEN, SECRET = "Kolibri-47110815", "Zaunkoenig-08154711"
KEEPING: dict[str, Any] = {
    "history": {"keep_text": True},
    "device": {"spill_gib": 0.1, "spill_after_s": 0.0},
}


async def said(daemon: DaemonProcess, word: str, *, private: bool) -> None:
    """A chat, a raw completion, a schema that cannot be obeyed, and embeddings, all of that word."""
    body: dict[str, Any] = {"disco": {"private": True}} if private else {}
    messages: Any = [{"role": "user", "content": f"Say {word}. " * 8}]
    client = daemon.client
    await client.chat.completions.create(model="disco", messages=messages, max_tokens=4, extra_body=body)
    await client.completions.create(model="disco", prompt=f"{word} is " * 8, max_tokens=4, extra_body=body)
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "n", "strict": True, "schema": {"$ref": f"#/definitions/{word}"}},
    }
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
        assert not found_in((await traces(daemon)).encode(), SECRET)
        rows = await daemon.history()
        assert len([row for row in rows if row["policy"] != "embedding"]) == 3, "that it was is on record"
    assert not places(tmp_path, SECRET)
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
    kept = {name.partition(".")[2] for name in found}
    assert kept <= {"sqlite", "sqlite-wal", "kv"}, "all that docs/explain/privacy.md names"
    assert any(name.startswith("history.sqlite") and "text" in forms for name, forms in found.items())
    assert any(name.endswith(".kv") and "ids of 4 bytes" in forms for name, forms in found.items()), found


# --- any requests, in any order, whatever becomes of them -------------------------------------------------------------

ROUTES = ANSWERS | OTHERS
TOOL = {"type": "object", "properties": {"WORD": {"type": "string", "description": "WORD"}}}
# What a request may hold besides its text, with the word of the request in place of WORD.
EXTRAS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"stop": ["WORD"]}, {"user": "WORD"}, {"metadata": {"WORD": "WORD"}}, {"no_such_field": "WORD"}, {"n": 3},
        {"tools": [{"type": "function", "function": {"name": "WORD", "description": "WORD", "parameters": TOOL}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "WORD", "schema": TOOL}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"pattern": "(WORD"}}}},
        {"messages": [{"role": "system", "content": "WORD " * 12_000}, {"role": "user", "content": "WORD"}]},
        {"messages": [{"role": "WORD", "content": "WORD"}]}, {"messages": [{"role": "user", "content": {"WORD": 1}}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:WORD"}}]}]},
        {"temperature": "WORD"}, {"guided_regex": "(WORD"}, {"logprobs": True}, {"disco": {"private": True, "WORD": 1}},
    ],
    "/v1/completions": [{"echo": True}, {"suffix": "WORD"}, {"prompt": ["WORD", "WORD"]}, {"best_of": "WORD"}],
    "/v1/messages": [{"system": "WORD"}, {"stop_sequences": ["WORD"]}, {"messages": [{"role": "user", "content": 5}]}],
    "/v1/responses": [{"instructions": "WORD"}, {"previous_response_id": "WORD"}, {"input": [{"type": "WORD"}]}],
    "/api/chat": [{"format": TOOL}, {"options": {"stop": ["WORD"], "num_predict": 3}}, {"stream": True}],
    "/v1/embeddings": [{"input": ["WORD"] * 3}, {"dimensions": "WORD"}, {"input": "WORD " * 12_000}],
}  # fmt: skip


def with_word(value: Any, word: str) -> Any:
    """A body whose texts hold a word."""
    return json.loads(
        json.dumps(value).replace("WORD", word).replace("lighthouses", word).replace("a lamp", f"a {word}")
    )


async def any_request(daemon: DaemonProcess, rng: random.Random, word: str, *, private: bool) -> None:
    """Ask on any route, with anything in the body, whole or streamed, and leave at any moment."""
    route = rng.choice(sorted(ROUTES))
    path = route.partition(",")[0]
    body = with_word(ROUTES[route] | rng.choice([{}, *EXTRAS.get(path, [])]), word)
    body |= {"model": "disco", "stream": rng.random() < 0.5} if path not in OTHERS else {"model": "disco"}
    if private:
        body["disco"] = {"private": True} | body.get("disco", {})
    if rng.random() < 0.2 and "max_tokens" in body:
        body["max_tokens"] = 200
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(rng.choice([0.02, 0.3, 60, 60, 60])):
            async with daemon.session.post(f"{daemon.root}{path}", json=body) as response:
                await response.read()


def engine_of(folder: Path) -> Iterator[int]:
    """The engine's process of the daemon whose history is in this folder."""
    for one in psutil.process_iter(["cmdline"]):
        if str(folder / "history.sqlite") in (one.info["cmdline"] or []):
            yield from (child.pid for child in one.children() if "disco_daemon.engine" in " ".join(child.cmdline()))


async def output_of(*argv: str, folder: Path) -> str:
    """What a verb prints about the daemon, on both streams."""
    process = await asyncio.create_subprocess_exec(
        *verb(*argv), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=os.environ
        | {"DISCO_CONFIG": str(folder / "config.toml"), "DISCO_HISTORY_PATH": str(folder / "history.sqlite")},
    )  # fmt: skip
    return (await process.communicate())[0].decode()


async def test_whatever_is_asked_of_whom_nothing_private_is_written_or_sent(tmp_path: Path) -> None:
    """Beside open requests, with a server that is preferred, texts that are kept, and an engine that crashes."""
    rng = random.Random(1)
    async with (
        Upstream(tokens=3) as server,
        running(
            tmp_path, server=server.url, policy="all-server", settings=KEEPING, more=("--log-level", "debug")
        ) as daemon,
    ):
        await daemon.device_ready()
        asked_openly = {"model": "disco", "messages": [{"role": "user", "content": OPEN}]}  # by somebody who stays
        async with daemon.session.post(f"{daemon.root}/v1/chat/completions", json=asked_openly) as response:
            assert response.status == 200
        for step in range(40):
            private = rng.random() < 0.7
            asked = any_request(daemon, rng, SECRET if private else OPEN, private=private)
            if step in (15, 30):  # in the middle of a private answer
                running_one = asyncio.create_task(any_request(daemon, rng, SECRET, private=True))
                for pid in (engines := [*engine_of(tmp_path)]):
                    os.kill(pid, signal.SIGSEGV)
                assert engines
                await running_one
            await asked
        await daemon.device_ready()
        told = [await traces(daemon), json.dumps(await daemon.state()), json.dumps(await daemon.history())]
        for path in ("/metrics", "/health", "/v1/models", "/api/ps"):
            async with daemon.controls.get(f"{daemon.root}{path}") as response:
                told.append(await response.text())
        url = ("--url", daemon.root)
        told += [await output_of("status", "--json", *url, folder=tmp_path), await output_of("doctor", folder=tmp_path)]
        sent = json.dumps([exchange.body for exchange in server.exchanges])
    assert not found_in(sent.encode(), SECRET)
    assert OPEN in sent, "else nothing is shown"
    assert not [*spoken(told, SECRET)]
    assert all(text for text in told)
    assert not places(tmp_path, SECRET)
    assert not places(Path(os.environ["XDG_RUNTIME_DIR"]), SECRET)
    assert any(name.startswith("history.sqlite") for name in places(tmp_path, OPEN))

"""`/v1/completions`: the device's model without a chat template; and how a running answer is steered and measured."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.upstream import Upstream

PROMPT = "The lighthouse keeper climbed the stairs every evening. The lighthouse keeper"
HELLO: list[Any] = [{"role": "user", "content": "Tell me about the sea."}]
ASKED = {"model": "disco", "temperature": 0, "seed": 1}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def device(tmp_path_factory: pytest.TempPathFactory) -> Any:
    async with running(tmp_path_factory.mktemp("d"), settings={"device": {"n_ctx": 512}}) as daemon:
        await daemon.device_ready()
        yield daemon


async def complete(daemon: DaemonProcess, **more: Any) -> dict[str, Any]:
    async with daemon.session.post(f"{daemon.url}/completions", json=ASKED | more) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def measured(daemon: DaemonProcess) -> dict[tuple[str, ...], float]:
    """Every sample of /metrics by its name and its labels' values."""
    async with daemon.session.get(f"{daemon.root}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        families = text_string_to_metric_families(await response.text())
        return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_is_gone_on_with_and_streamed_as_it_is_whole(device: DaemonProcess) -> None:
    whole = await device.client.completions.create(model="disco", prompt=PROMPT, temperature=0, max_tokens=12)
    assert whole.object == "text_completion"
    assert whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    stream = await device.client.completions.create(
        model="disco/device",
        prompt=PROMPT,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1, "it was asked before"
    assert (chunks[-1].model_extra or {})["disco"]["winner"] == "device"


@pytest.mark.asyncio(loop_scope="module")
async def test_without_a_limit_sixteen_tokens_come(device: DaemonProcess) -> None:
    assert (await complete(device, prompt=PROMPT))["usage"]["completion_tokens"] == 16


@pytest.mark.asyncio(loop_scope="module")
async def test_token_ids_go_round(device: DaemonProcess) -> None:
    """What came back as ids is a prompt: the answer goes on as if it had never been cut."""
    whole = await complete(device, prompt=[28, 506, 260], max_tokens=12, return_token_ids=True)
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == 12
    for cut in (1, 6, 11):
        rest = await complete(device, prompt=[28, 506, 260, *ids[:cut]], max_tokens=12 - cut, return_token_ids=True)
        assert rest["choices"][0]["token_ids"] == ids[cut:]
        assert whole["choices"][0]["text"].endswith(rest["choices"][0]["text"])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_tells_its_token_ids_when_asked(device: DaemonProcess) -> None:
    whole = await device.client.chat.completions.create(
        model="disco", messages=HELLO, temperature=0, max_tokens=8, extra_body={"return_token_ids": True}
    )
    known = (whole.choices[0].model_extra or {})["token_ids"]
    assert len(known) == 8
    stream = await device.client.chat.completions.create(
        model="disco", messages=HELLO, temperature=0, max_tokens=8, stream=True, extra_body={"return_token_ids": True}
    )
    streamed: list[int] = []
    async for chunk in stream:
        for choice in chunk.choices:
            streamed += (choice.model_extra or {}).get("token_ids", [])
    assert streamed == known
    plain = await device.client.chat.completions.create(model="disco", messages=HELLO, temperature=0, max_tokens=8)
    assert "token_ids" not in (plain.choices[0].model_extra or {})


@pytest.mark.asyncio(loop_scope="module")
async def test_control_tokens_spelled_in_a_prompt_are_only_text(device: DaemonProcess) -> None:
    spelled = await complete(device, prompt="Hi<|im_end|>", max_tokens=1)
    assert spelled["usage"]["prompt_tokens"] > 3


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "disco": {"route": "server"}}, "disco"),
        ({"prompt": "a", "disco": {"pace_tps": -1}}, "disco.pace_tps"),
        ({"prompt": [2**31 - 1]}, None),
        ({"prompt": "word " * 600}, "prompt"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
        ({"prompt": "a", "top_k": "many"}, "top_k"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(more: Any, param: str | None, device: DaemonProcess) -> None:
    async with device.session.post(f"{device.url}/completions", json=ASKED | more) as response:
        assert response.status == 400, await response.text()
        error = (await response.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.asyncio(loop_scope="module")
async def test_prefix_continues_the_last_message(device: DaemonProcess) -> None:
    whole = await ask(device, HELLO[0]["content"], max_tokens=10)
    begun, rest = "".join(whole.pieces[:4]), "".join(whole.pieces[4:])
    messages = [*HELLO, {"role": "assistant", "content": begun, "prefix": True}]
    found = await device.client.chat.completions.create(model="disco", messages=messages, temperature=0, max_tokens=6)
    assert found.choices[0].message.content == rest


@pytest.mark.asyncio(loop_scope="module")
async def test_metrics_count_what_was_answered(device: DaemonProcess) -> None:
    before = await measured(device)
    await complete(device, prompt=PROMPT, max_tokens=5)
    after = await measured(device)
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown[("disco_answers_total", "device", "length", "none")] == 1
    assert grown[("disco_tokens_total", "delivered", "device")] == 5
    assert grown[("disco_ttft_seconds_count", "device")] == 1
    assert grown[("disco_tbt_seconds_count", "device")] == 4
    assert after[("disco_answers_in_flight",)] == 0


async def adjust(daemon: DaemonProcess, request_id: str, **wish: Any) -> int:
    url = f"{daemon.root}/disco/v1/answers/{request_id}"
    async with daemon.session.post(url, json=wish) as response:
        return response.status


@pytest.mark.asyncio(loop_scope="module")
async def test_a_running_answer_can_be_hurried(device: DaemonProcess) -> None:
    """At 0.1 token/s it would take five minutes."""
    stream = await device.client.chat.completions.with_raw_response.create(
        model="disco",
        messages=HELLO,
        temperature=0,
        max_tokens=30,
        stream=True,
        extra_body={"disco": {"delivery": "paced", "pace_tps": 0.1}},
    )
    request_id = stream.headers["X-Disco-Request-Id"]
    async with asyncio.timeout(60):
        assert await adjust(device, request_id) == 400
        assert await adjust(device, request_id, pace_tps=0) == 400
        assert await adjust(device, request_id, pace_tps=300.0) == 200
        assert await adjust(device, request_id, delivery="off") == 200
        parts = [choice.delta.content or "" async for chunk in stream.parse() for choice in chunk.choices]
    whole = await ask(device, HELLO[0]["content"], max_tokens=30)
    assert "".join(parts) == whole.text
    assert await adjust(device, request_id, delivery="off") == 404


@pytest.mark.asyncio(loop_scope="module")
async def test_the_answers_door_is_guarded_as_the_others(device: DaemonProcess) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        url = f"{device.root}/disco/v1/answers/req-1"
        async with device.session.post(url, json={"delivery": "off"}, headers=headers) as response:
            assert response.status == 403
        async with device.session.get(f"{device.root}/metrics", headers=headers) as response:
            assert response.status == 403


async def chat(daemon: DaemonProcess, *args: str, terminal: bool) -> str:
    """`disco chat` with its output on a terminal or in a pipe; how the daemon delivered the answer."""
    n_rows = len(await daemon.history())
    watcher, shown = os.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "disco_daemon.cli.main", "chat", "one two", "--url", daemon.url, *args,
            env={**os.environ, "HOME": str(daemon.folder), "DISCO_CONFIG": str(daemon.folder / "none.toml")},
            stdin=asyncio.subprocess.DEVNULL, stdout=shown if terminal else asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        os.close(watcher)
        os.close(shown)
    newest: str = (await daemon.recorded(n_rows + 1))[0]["delivery"]
    return newest


async def test_chat_comes_as_it_is_set_where_somebody_reads_along(tmp_path: Path) -> None:
    async with Upstream(tokens=4) as upstream, running(tmp_path, server=upstream.url, device=False) as daemon:
        assert await chat(daemon, terminal=True) == "reserve"
        assert await chat(daemon, terminal=False) == "off"
        assert await chat(daemon, "--json", terminal=True) == "off"
        assert await chat(daemon, "--delivery", "paced", terminal=True) == "paced"
        assert await chat(daemon, "--pace", "100", terminal=False) == "paced"
        rows = await daemon.history()
        assert all(row["moves"] == [] and row["qoe"] is not None for row in rows)


async def test_a_daemon_without_a_device_says_so(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, device=False) as daemon:
        for model in ("disco", "disco/server"):
            with pytest.raises(openai.BadRequestError, match="Text completions are served by the device only"):
                await daemon.client.completions.create(model=model, prompt="Once")
        assert not upstream.exchanges


async def test_a_device_that_is_a_server_refuses_raw_prompts(tmp_path: Path) -> None:
    """Its vocabulary is unknown, and so is what it would do with a prompt."""
    async with Upstream() as upstream:
        settings = {"device": {"base_url": upstream.url, "model": "loopback"}}
        async with running(tmp_path, device=None, settings=settings) as daemon:
            with pytest.raises(openai.BadRequestError):
                await daemon.client.completions.create(model="disco", prompt="Once")
        assert not upstream.exchanges


async def test_metrics_ask_for_the_key(tmp_path: Path) -> None:
    async with Upstream() as upstream:
        settings = {"api": {"key": "hush"}}
        async with (
            running(tmp_path, server=upstream.url, device=False, settings=settings) as daemon,
            aiohttp.ClientSession() as stranger,
        ):
            async with stranger.get(f"{daemon.root}/metrics") as response:
                assert response.status == 401
            shown = {"Authorization": "Bearer hush"}
            async with stranger.get(f"{daemon.root}/metrics", headers=shown) as response:
                assert response.status == 200

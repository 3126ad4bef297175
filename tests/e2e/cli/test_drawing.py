"""The fields that say how tokens are drawn do so on a real device, and what nobody heeds is named."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
STORY = [{"role": "user", "content": "Tell me a story about the sea."}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def device(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    async with running(tmp_path_factory.mktemp("d"), settings={"device": {"n_ctx": 512}}) as daemon:
        await daemon.device_ready()
        yield daemon


async def asked(daemon: DaemonProcess, status: int = 200, path: str = "chat/completions", **more: Any) -> Any:
    body = {"model": "disco", "messages": STORY, "temperature": 0, "max_tokens": 12} | more
    async with daemon.session.post(f"{daemon.url}/{path}", json=body) as response:
        assert response.status == status, await response.text()
        found = await response.json()
        return found | {"header": response.headers.get("X-Disco-Ignored")}


async def said(daemon: DaemonProcess, **more: Any) -> str:
    text: str = (await asked(daemon, **more))["choices"][0]["message"]["content"]
    return text


async def test_the_likeliest_token_alone_is_the_greedy_answer_however_hot_it_is(device: DaemonProcess) -> None:
    greedy = await said(device)
    assert await said(device, temperature=2, top_k=1, seed=1) == greedy
    assert await said(device, temperature=2, min_p=1, seed=1) == greedy
    assert await said(device, temperature=2, seed=1) != greedy


async def test_tokens_are_banned_and_forced_and_end_an_answer(device: DaemonProcess) -> None:
    whole = (await asked(device, return_token_ids=True))["choices"][0]
    ids = whole["token_ids"]
    assert len(ids) == 12
    banned = (await asked(device, return_token_ids=True, logit_bias={str(ids[0]): -100}))["choices"][0]
    assert banned["token_ids"][0] != ids[0]
    forced = (await asked(device, return_token_ids=True, logit_bias={str(ids[0]): 100}))["choices"][0]
    assert set(forced["token_ids"]) == {ids[0]}
    fourth = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    ended = (await asked(device, return_token_ids=True, stop_token_ids=[ids[fourth]]))["choices"][0]
    assert (ended["token_ids"], ended["finish_reason"]) == (ids[:fourth], "stop")
    later = (await asked(device, return_token_ids=True, stop_token_ids=[ids[fourth]], min_tokens=10))["choices"][0]
    assert len(later["token_ids"]) >= 10
    assert ids[fourth] not in later["token_ids"][:10]


@pytest.mark.parametrize("more", [{"min_tokens": 40}, {"ignore_eos": True}])
async def test_an_answer_does_not_end_before_it_may(device: DaemonProcess, more: dict[str, Any]) -> None:
    yes = [{"role": "user", "content": "Answer with one word: what colour is grass?"}]
    short = await asked(device, messages=yes, max_tokens=60)
    long = await asked(device, messages=yes, max_tokens=60, **more)
    assert short["usage"]["completion_tokens"] < 40 <= long["usage"]["completion_tokens"]


async def gone_on(daemon: DaemonProcess, prompt: str, **more: Any) -> str:
    """What follows a raw prompt: a text that all machines go on with alike, where a chat's answer is its model's."""
    text: str = (await asked(daemon, path="completions", prompt=prompt, **more))["choices"][0]["text"]
    return text


async def test_repetitions_are_less_likely(device: DaemonProcess) -> None:
    again = " ".join(["red"] * 9)
    usual = (await gone_on(device, again, max_tokens=6)).count(" red")
    assert usual >= 4
    names: tuple[dict[str, Any], ...] = (
        {"repeat_penalty": 1.8}, {"repetition_penalty": 1.8}, {"dry_multiplier": 3.0},
        {"frequency_penalty": 2}, {"presence_penalty": 2},
    )  # fmt: skip
    for more in names:
        assert (await gone_on(device, again, max_tokens=6, **more)).count(" red") < usual, more


async def test_chance_leaves_the_likeliest_out(device: DaemonProcess) -> None:
    begun = "Once upon a time"
    usual = await gone_on(device, begun, max_tokens=30)
    names: tuple[dict[str, Any], ...] = (
        {"xtc_probability": 1.0, "xtc_threshold": 0.05}, {"temperature": 1.0, "mirostat": 2, "seed": 3},
    )  # fmt: skip
    for more in names:
        assert await gone_on(device, begun, max_tokens=30, **more) != usual, more


async def test_an_answer_is_one_of_the_texts_to_choose_from(device: DaemonProcess) -> None:
    texts = ["sea fog", "lamp"]
    assert await said(device, guided_choice=texts) in texts
    assert await said(device, structured_outputs={"choice": texts}) in texts
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    names: list[dict[str, Any]] = [
        {"json_schema": schema}, {"guided_json": schema}, {"structured_outputs": {"json": schema}},
    ]  # fmt: skip
    for more in names:
        assert isinstance(json.loads(await said(device, max_tokens=40, **more))["x"], int)


async def test_a_raw_prompt_is_gone_on_with_by_the_same_rules(device: DaemonProcess) -> None:
    raw: dict[str, Any] = {"path": "completions", "prompt": "Once upon a time", "return_token_ids": True}
    ids = (await asked(device, **raw))["choices"][0]["token_ids"]
    forced = (await asked(device, **raw, logit_bias={str(ids[1]): 100}))["choices"][0]["token_ids"]
    assert set(forced) == {ids[1]}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"stop_token_ids": [9999999]}, "stop_token_ids"),
        ({"guided_choice": ["a\0b"]}, "guided_choice"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
async def test_what_the_device_cannot_keep_is_an_error_that_names_the_field(
    device: DaemonProcess, more: dict[str, Any], param: str
) -> None:
    error = (await asked(device, 400, **more))["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


async def test_what_nobody_heeds_is_named_in_body_chunk_and_header(device: DaemonProcess) -> None:
    more: dict[str, Any] = {"brand_new": 1, "timeout": 3, "user": "me", "top_k": 3}
    whole = await asked(device, **more)
    assert (whole["disco"]["ignored"], whole["header"]) == (["brand_new", "timeout"], "brand_new, timeout")
    assert (await asked(device))["disco"]["ignored"] == []
    body = {"model": "disco", "messages": STORY, "max_tokens": 2, "stream": True} | more
    async with device.session.post(f"{device.url}/chat/completions", json=body) as response:
        assert response.headers["X-Disco-Ignored"] == "brand_new, timeout"
        events = [line for line in (await response.text()).split("\n\n") if line.startswith("data: {")]
    assert json.loads(events[-1].removeprefix("data: "))["disco"]["ignored"] == ["brand_new", "timeout"]


async def test_an_unknown_field_is_the_servers_until_that_fails(tmp_path: Path) -> None:
    async with (
        Upstream(tokens=6) as upstream,
        running(tmp_path, server=upstream.url, policy="all-device") as daemon,
    ):
        await daemon.device_ready()
        assert (await asked(daemon))["disco"]["winner"] == "device"
        found = await asked(daemon, brand_new={"a": 1}, timeout=3)
        assert found["disco"]["winner"] == "server"
        assert found["disco"]["ignored"] == ["timeout"]
        assert upstream.exchanges[-1].body["brand_new"] == {"a": 1}
        assert (await asked(daemon, logit_bias={"1": 1}))["disco"]["winner"] == "server"
        with upstream.status(500):
            found = await asked(daemon, brand_new={"a": 1})
        assert found["disco"]["winner"] == "device"
        assert found["disco"]["ignored"] == ["brand_new"]
        parts = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
        bill = {
            "prompt_tokens": 9,
            "completion_tokens": 6,
            "cost": 0.5,
            "prompt_tokens_details": {"cache_write_tokens": 4},
        }
        with upstream.billing(bill):
            found = await asked(daemon, model="disco/server", messages=[{"role": "user", "content": parts}])
        assert upstream.exchanges[-1].body["messages"][0]["content"] == parts
        assert (found["usage"]["cost"], found["usage"]["prompt_tokens_details"]["cache_write_tokens"]) == (0.5, 4)

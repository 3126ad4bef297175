"""Filling in the middle at a daemon: `suffix`, `/infill`, marks in raw prompts; and clients that leave."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.gguf import fim_model
from tests.fixtures.upstream import Upstream

GAP = {"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n\n\nprint(add(1, 2))\n"}
DRAWN = {"temperature": 0, "seed": 1}
SIDES = {"prompt": GAP["input_prefix"], "suffix": GAP["input_suffix"]}
MARKED = "<repo_name>myproject\n<file_sep>filename\n<gh_stars>{prompt}<issue_start>{suffix}<issue_comment>".format(
    **SIDES
)
PATIENCE_S = 60.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("fim")
    model, settings = fim_model(folder / "fim.gguf"), {"device": {"n_ctx": 1024}}
    async with running(folder / "d", model=model, settings=settings) as found:
        await found.device_ready()
        yield found


async def post(daemon: DaemonProcess, path: str, body: Any) -> tuple[int, Any]:
    async with daemon.session.post(f"{daemon.root}{path}", json=body) as response:
        return response.status, await response.json()


async def test_a_suffix_infill_and_marks_written_out_are_one_prompt(daemon: DaemonProcess) -> None:
    _, whole = await post(daemon, "/infill", GAP | DRAWN | {"n_predict": 8, "return_tokens": True})
    assert whole["tokens_predicted"] == 8
    assert (whole["stop"], whole["stop_type"]) == (True, "limit")
    for asked in (SIDES, {"prompt": MARKED}):
        status, found = await post(daemon, "/v1/completions", {"model": "disco", "max_tokens": 8} | asked | DRAWN)
        assert status == 200, found
        assert found["choices"][0]["text"] == whole["content"]
        assert found["usage"]["prompt_tokens"] == whole["tokens_evaluated"]
    _, models = await post_get(daemon, "/v1/models")
    assert models["data"][0]["capabilities"]["fim"] is True


async def post_get(daemon: DaemonProcess, path: str) -> tuple[int, Any]:
    async with daemon.session.get(f"{daemon.root}{path}") as response:
        return response.status, await response.json()


async def test_a_stream_is_as_the_whole_answer(daemon: DaemonProcess) -> None:
    asked = GAP | DRAWN | {"n_predict": 12}
    _, whole = await post(daemon, "/infill", asked)
    async with daemon.session.post(f"{daemon.root}/infill", json=asked | {"stream": True}) as response:
        data = (await response.read()).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in data.splitlines() if line.startswith("data: ")]
    assert "[DONE]" not in data
    assert "".join(one["content"] for one in events) == whole["content"]
    assert [one["stop"] for one in events[-2:]] == [False, True]
    assert events[-1]["tokens_evaluated"] == whole["tokens_evaluated"]


async def test_an_answer_ends_at_a_line_that_is_indented_less(daemon: DaemonProcess) -> None:
    asked = GAP | DRAWN | {"n_predict": 60, "logit_bias": {"198": 100}}  # a line feed
    _, free = await post(daemon, "/infill", asked | {"n_predict": 3})
    assert free["content"] == "\n\n\n"
    _, found = await post(daemon, "/infill", asked | {"n_indent": 4})
    assert (found["content"], found["stop_type"]) == ("\n", "limit")
    _, found = await post(daemon, "/infill", asked | {"t_max_predict_ms": 1})
    assert 1 <= found["tokens_predicted"] < 60
    assert found["stop_type"] == "limit"


async def test_bad_bodies_get_llama_servers_errors(daemon: DaemonProcess) -> None:
    values: list[Any] = [None, 5, [], {}, [5], True, -1.5, "\ud800".encode("utf-8", "surrogatepass").hex(), {"a": [1]}]
    names = ("input_prefix", "input_suffix", "input_extra", "prompt", "n_predict", "n_indent", "stop", "top_k", "seed",
             "t_max_predict_ms", "logit_bias", "stream_options", "disco", "model", "temperature")  # fmt: skip
    bad = [GAP | {"n_predict": 1, name: value} for name in names for value in values]
    n_refused = 0
    for body in [{}, {"input_prefix": "a"}, *bad]:
        status, told = await post(daemon, "/infill", body)
        if status == 200:
            assert told["stop"]
            continue
        n_refused += 1
        assert 400 <= status < 500, (body, told)
        assert told["error"].keys() == {"code", "message", "type"}
        assert told["error"]["code"] == status
    assert n_refused > 100


async def settled(daemon: DaemonProcess) -> float:
    """Wait until the engine has no request; return how long that took, s."""
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(PATIENCE_S):
        while (await post_get(daemon, "/disco/v1/state"))[1]["endpoints"]["device"]["in_flight"]:
            await asyncio.sleep(0.002)  # another process has no event to wait for
    return asyncio.get_running_loop().time() - began


ROUTES: dict[str, dict[str, Any]] = {
    "/infill": GAP | {"n_predict": 400, "ignore_eos": True},
    "/v1/completions": {"model": "disco", "prompt": "Once", "max_tokens": 400, "ignore_eos": True},
    "/v1/chat/completions": {
        "model": "disco", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "ignore_eos": True,
    },
    "/v1/responses": {"model": "disco", "input": "Hi", "max_output_tokens": 400, "ignore_eos": True},
    "/v1/messages": {
        "model": "disco", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "ignore_eos": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_requests_whose_clients_have_gone_stop_in_the_queue_too(
    path: str, stream: bool, daemon: DaemonProcess
) -> None:
    """Twenty-four at once are more than the engine computes side by side."""
    body = ROUTES[path] | {"stream": stream}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as leaving:

        async def ask() -> None:
            async with leaving.post(f"{daemon.root}{path}", json=body) as response:
                await response.read()

        asks = [asyncio.create_task(ask()) for _ in range(24)]
        async with asyncio.timeout(PATIENCE_S):
            while (await post_get(daemon, "/disco/v1/state"))[1]["endpoints"]["device"]["in_flight"] < len(asks):
                await asyncio.sleep(0.002)  # another process has no event to wait for
        for one in asks:
            one.cancel()
        for one in asks:
            with suppress(asyncio.CancelledError):
                await one
    took_s = await settled(daemon)
    print(f"{path} stream={stream}: {took_s * 1000:.1f} ms until the engine had none of 24")
    assert took_s < 5.0  # whole they take many times as long; what it takes alone is measured by hand


async def test_a_model_without_such_tokens_says_which_have_them(tmp_path: Path) -> None:
    settings = {"device": {"n_ctx": 256}}
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, settings=settings) as found:
        await found.device_ready()
        with pytest.raises(openai.BadRequestError, match=r"Qwen2\.5-Coder.*server\.capabilities"):
            await found.client.completions.create(model="disco", prompt="a", suffix="b")
        status, told = await post(found, "/infill", GAP)
        assert (status, told["error"]["type"]) == (400, "invalid_request_error")
        assert "StarCoder2" in told["error"]["message"]
        assert not upstream.exchanges

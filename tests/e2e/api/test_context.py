"""Near the end of the device's context, and with an answer that the client has begun: a real engine, a real server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.fixtures.daemon import DaemonProcess, Heard, ask, running
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
N_CTX = 512
FILLER = "The old lighthouse keeper climbed the winding stairs every single evening to light the lamp. "
STORY = "Tell me a long story about a fox who finds a lantern, with many details."
SETTINGS: dict[str, dict[str, Any]] = {
    "device": {"n_ctx": N_CTX},
    "server": {"continuation": "continue_final_message"},
    "policy": {"shadow": False},
}
BEGUN = "Once upon a time, there lived an old clockmaker who"


def padded(n: int) -> str:
    return FILLER * n + STORY


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One daemon, device first, for all tests; answers here have been short so far."""
    async with (
        Upstream(tokens=8) as upstream,
        running(tmp_path_factory.mktemp("d"), server=upstream.url, policy="all-device", settings=SETTINGS) as daemon,
    ):
        await daemon.device_ready()
        for _ in range(12):
            await ask(daemon, "red green blue", model="disco/server")
        yield upstream, daemon


async def test_a_prompt_that_leaves_too_little_room_is_the_servers(both: tuple[Upstream, DaemonProcess]) -> None:
    _, daemon = both
    for _ in range(5):  # a machine that is busy for 50 ms has the prompt's length estimated
        heard = await ask(daemon, padded(26), max_tokens=None)
        if heard.disco["prompt_tokens"] > N_CTX - 96:
            break
    assert N_CTX - 96 < heard.disco["prompt_tokens"] < N_CTX, heard.disco["prompt_tokens"]
    assert heard.disco["winner"] == "server"
    assert set(heard.disco["endpoints"]) == {"server"}
    assert heard.finish_reason == "stop"
    short = await ask(daemon, padded(26), max_tokens=4)
    assert short.disco["winner"] == "device", "for so few tokens there is room"


async def test_an_answer_that_fills_the_devices_context_goes_on_at_the_server(
    both: tuple[Upstream, DaemonProcess],
) -> None:
    upstream, daemon = both
    heard = await ask(daemon, padded(19), max_tokens=None)
    assert heard.disco["winner"] == "device"
    (move,) = heard.disco["moves"]
    assert (move["reason"], move["source"], move["target"], move["dropped"]) == ("context", "device", "server", None)
    assert move["at"] + heard.disco["prompt_tokens"] >= N_CTX - 8
    assert heard.text.endswith("".join(upstream.exchanges[-1].tokens))
    assert heard.finish_reason == "stop"


async def test_with_the_device_alone_the_end_of_its_context_is_a_length(both: tuple[Upstream, DaemonProcess]) -> None:
    _, daemon = both
    heard = await ask(daemon, padded(19), model="disco/device", max_tokens=None)
    assert heard.finish_reason == "length"
    assert heard.disco["moves"] == []


@pytest.mark.parametrize("begins", ["device", "server"])
async def test_a_dead_server_and_a_full_device_are_an_error_that_says_so(
    begins: str, both: tuple[Upstream, DaemonProcess]
) -> None:
    upstream, daemon = both
    heard = Heard()
    n = 19 if begins == "device" else 26
    texts = [] if begins == "device" else ["There once was a fox, "]
    with (
        pytest.raises(openai.APIError, match="fills the context of the device") as failed,
        upstream.chunks(*texts, reason=None),
    ):
        await ask(daemon, padded(n), max_tokens=None, heard=heard)
    assert "server" in str(failed.value)
    assert failed.value.code == "context_full"
    assert heard.finish_reason is None
    assert heard.text.startswith("".join(texts))
    assert len(heard.pieces) > 10, "what there was room for was shown"


@pytest.mark.parametrize("manner", ["continue_final_message", "prefix"])
async def test_a_half_answer_of_the_client_is_not_doubled_by_a_server_that_echoes(manner: str, tmp_path: Any) -> None:
    settings: dict[str, dict[str, Any]] = {"server": {"continuation": "auto"}, "policy": {"shadow": False}}
    begun: dict[str, Any] = {"role": "assistant", "content": BEGUN}
    messages = [{"role": "user", "content": STORY}, begun | ({"prefix": True} if manner == "prefix" else {})]
    more = {"continue_final_message": True, "add_generation_prompt": False} if manner != "prefix" else {}
    async with (
        Upstream() as upstream,
        running(tmp_path, server=upstream.url, device=False, settings=settings) as daemon,
    ):
        client: Any = daemon.client
        with upstream.answering(BEGUN + " mended time."):
            answer = await client.chat.completions.create(model="disco", messages=messages, extra_body=more)
        assert answer.choices[0].message.content == " mended time."
        assert upstream.exchanges[0].body["messages"][-1]["content"] == BEGUN


async def test_a_half_answer_goes_to_the_device_while_nobody_knows_how_the_server_continues(tmp_path: Any) -> None:
    async with (
        Upstream() as upstream,
        running(tmp_path, server=upstream.url, policy="all-server", settings={"policy": {"shadow": False}}) as daemon,
    ):
        await daemon.device_ready()
        client: Any = daemon.client
        messages = [{"role": "user", "content": STORY}, {"role": "assistant", "content": BEGUN, "prefix": True}]
        answer = await client.chat.completions.create(model="disco", messages=messages, max_tokens=8)
        assert answer.model_extra["disco"]["winner"] == "device"
        assert upstream.n_requests == 0

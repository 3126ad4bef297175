# mypy: disable-error-code="arg-type, union-attr, attr-defined, unused-ignore"
"""A side that says the same again and again is stopped: no server bills on, no other side goes on with it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import pytest_asyncio

from tests.fixtures.daemon import PRICES, DaemonProcess, running
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
Ends = tuple[Upstream, DaemonProcess]
SENTENCE = ("I ", "am ", "a ", "stranger ", "in ", "this ", "town. ")
MOST = 100  # tokens of these sentences until it is certain
PROMPT = "Write a very long poem about fruits."  # with it the embedded model gets into a loop
MESSAGES = [{"role": "user", "content": "Who are you?"}]
# The way in each API, what is asked there, and how its own clients learn that the answer is not whole.
DIALECTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any], Any]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES},
        lambda told: told["choices"][0]["finish_reason"],
        "length",
    ),
    "responses": (
        "/v1/responses",
        {"input": "Who are you?"},
        lambda told: (told["status"], told["incomplete_details"]["reason"]),
        ("incomplete", "max_output_tokens"),
    ),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 4000},
        lambda told: told["stop_reason"],
        "max_tokens",
    ),
    "ollama": ("/api/chat", {"messages": MESSAGES, "stream": False}, lambda told: told["done_reason"], "length"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ends(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ends]:
    """A daemon before a server."""
    async with (
        Upstream() as upstream,
        running(tmp_path_factory.mktemp("d"), server=upstream.url, device=False) as daemon,
    ):
        yield upstream, daemon


def looping(upstream: Upstream) -> AbstractContextManager[None]:
    """Let the server say the same for ever."""
    return upstream.chunks(*SENTENCE, endless=True, interval_s=0.001)


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_server_in_a_loop_is_closed_and_each_api_says_so_in_its_words(name: str, ends: Ends) -> None:
    upstream, daemon = ends
    path, asked, told, word = DIALECTS[name]
    i = upstream.n_requests
    with looping(upstream):
        async with daemon.session.post(f"{daemon.root}{path}", json={"model": "disco"} | asked) as response:
            assert response.status == 200
            answer = await response.json()
    await upstream.wait_closed(i)
    assert told(answer) == word
    assert answer["disco"]["stopped"] == "repetition"
    assert upstream.n_requests == i + 1
    (row,) = (await daemon.history())[:1]
    assert (row["finish_reason"], row["stopped"]) == ("length", "repetition")
    assert row["server_tokens"] <= MOST
    assert row["server_usd"] < 3 * MOST * PRICES["output_usd_per_mtok"] / 1e6


async def asked(daemon: DaemonProcess, **fields: Any) -> Any:
    """Ask OpenAI's client, whose types know nothing of `disco`."""
    client: Any = daemon.client
    return await client.chat.completions.create(model="disco", **fields)


async def test_a_stream_ends_there_and_its_trace_says_why(ends: Ends) -> None:
    upstream, daemon = ends
    body = {"model": "disco", "messages": MESSAGES, "stream": True}
    with looping(upstream):
        async with daemon.session.post(f"{daemon.url}/chat/completions", json=body) as response:
            lines = [line.removeprefix("data: ") for line in (await response.text()).splitlines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    text = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    assert "".join(SENTENCE) * 3 in text
    assert len(text) < 8 * len("".join(SENTENCE))
    async with daemon.controls.get(f"{daemon.root}/disco/v1/trace/latest") as response:
        trace = await response.json()
    assert (trace["finish_reason"], trace["disco"]["stopped"]) == ("length", "repetition")


async def test_whoever_wants_the_same_again_and_again_gets_it(ends: Ends) -> None:
    upstream, daemon = ends
    with looping(upstream):
        wish = {"disco": {"stop_repetition": False}}
        answer = await asked(daemon, messages=MESSAGES, max_tokens=3 * MOST, extra_body=wish)
    assert answer.usage.completion_tokens == 3 * MOST
    assert "stopped" not in answer.disco


async def test_a_server_that_stops_a_loop_itself_has_answered(ends: Ends) -> None:
    upstream, daemon = ends
    i = upstream.n_requests
    with upstream.chunks("na ", "na ", "na", reason="repetition", times=1):
        answer = await asked(daemon, messages=MESSAGES)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "na na na"
    assert answer.disco["stopped"] == "repetition"
    assert upstream.n_requests == i + 1


async def test_a_device_in_a_loop_is_stopped_and_the_paid_server_is_not_asked(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    settings = {"handoff": {"for_cost": True, "stall_s": 60.0}}  # on a busy machine it is silent for seconds
    async with (
        Upstream() as upstream,
        running(tmp_path_factory.mktemp("d"), server=upstream.url, policy="all-device", settings=settings) as daemon,
    ):
        await daemon.device_ready()
        question, wish = [{"role": "user", "content": PROMPT}], {"disco": {"stop_repetition": True}}
        answer = await asked(daemon, messages=question, temperature=0, extra_body=wish)
        assert upstream.n_requests == 0
    assert answer.choices[0].finish_reason == "length"
    assert answer.disco["stopped"] == "repetition"
    assert (answer.disco["moves"], answer.disco["server_usd"]) == ([], 0)
    assert 30 < answer.disco["tokens"]["device"] < 300

"""Tokens are counted, not chunks: limits, usage, lengths and pace hold at a server that sends several in one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.stopwatch import least_of_three
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
SETTINGS: dict[str, dict[str, Any]] = {
    "server": {"continuation": "continue_final_message"},
    "policy": {"shadow": False},
}
QUESTION: Any = [{"role": "user", "content": "Count with me."}]


def words(n: int, start: int = 0) -> str:
    return "".join(f"w{i} " for i in range(start, start + n))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One daemon, server first, for all tests."""
    async with (
        Upstream() as upstream,
        running(tmp_path_factory.mktemp("d"), server=upstream.url, policy="all-server", settings=SETTINGS) as daemon,
    ):
        await daemon.device_ready()
        yield upstream, daemon


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(("chunk", "n"), [(1, 6), (20, 6), (20, 50)])
async def test_a_server_that_ignores_max_tokens_is_cut_at_the_number(
    limit: str, chunk: int, n: int, both: tuple[Upstream, DaemonProcess]
) -> None:
    upstream, daemon = both
    i = upstream.n_requests
    with upstream.chunks(words(chunk), endless=True):
        stream = await daemon.client.chat.completions.create(
            model="disco",
            messages=QUESTION,
            stream=True,
            stream_options={"include_usage": True},
            **{limit: n},  # type: ignore[call-overload]
        )
        text, reasons, usages = "", [], []
        async for part in stream:
            usages += [part.usage] if part.usage else []
            text += "".join(choice.delta.content or "" for choice in part.choices)
            reasons += [choice.finish_reason for choice in part.choices if choice.finish_reason]
        await upstream.wait_closed(i)
    assert text == "".join(f"w{i % chunk} " for i in range(n))
    assert reasons == ["length"]
    assert [usage.completion_tokens for usage in usages] == [n]


async def test_an_answer_in_one_body_is_cut_at_the_number_too(both: tuple[Upstream, DaemonProcess]) -> None:
    upstream, daemon = both
    with upstream.chunks(words(1), endless=True):
        answer = await daemon.client.chat.completions.create(model="disco", messages=QUESTION, max_tokens=7)
    assert answer.choices[0].message.content == words(1) * 7
    assert answer.choices[0].finish_reason == "length"


async def test_a_server_that_keeps_to_max_tokens_ends_its_answer_itself(both: tuple[Upstream, DaemonProcess]) -> None:
    """It has the last word, since it tells what it bills."""
    upstream, daemon = both
    i = upstream.n_requests
    heard = await ask(daemon, "red green blue", max_tokens=5)
    assert (heard.text, heard.finish_reason) == ("red green blue red green ", "length")
    assert heard.disco["endpoints"]["server"]["prompt_tokens"] == 3, "by the server's own usage block"
    assert upstream.exchanges[i].closed_at is None


async def test_usage_is_the_servers_own_count_with_hidden_thoughts(both: tuple[Upstream, DaemonProcess]) -> None:
    upstream, daemon = both
    usage = {
        "prompt_tokens": 11,
        "completion_tokens": 30,
        "total_tokens": 41,
        "completion_tokens_details": {"reasoning_tokens": 12},
    }
    with upstream.chunks(words(8), words(8), words(2), usage=usage):
        answer = await daemon.client.chat.completions.create(model="disco", messages=QUESTION)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == 41
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 12
    disco = (answer.model_extra or {})["disco"]
    assert disco["tokens"] == {"server": 30, "device": 0}
    assert disco["endpoints"]["server"]["completion_tokens"] == 30
    assert disco["cost_usd"] == pytest.approx((11 * 0.15 + 30 * 0.60) / 1e6)


async def test_without_usage_tokens_are_estimated_from_the_text(both: tuple[Upstream, DaemonProcess]) -> None:
    upstream, daemon = both
    story = "Once upon a time, there lived an old clockmaker who mended time. "  # 15 tokens of GPT-4's vocabulary
    with upstream.chunks(story, story):
        answer = await daemon.client.chat.completions.create(model="disco", messages=QUESTION)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == pytest.approx(30, rel=0.1)


async def test_the_limit_holds_in_tokens_across_a_handoff(both: tuple[Upstream, DaemonProcess]) -> None:
    upstream, daemon = both
    with upstream.chunks(*(words(10, 10 * i) for i in range(3)), reason=None):
        heard = await ask(daemon, "Tell me a long story about a fox.", max_tokens=40)
    assert heard.text.startswith(words(30))
    assert heard.disco["handoffs"] == 1
    assert heard.disco["tokens"]["server"] == 30
    assert 0 < heard.disco["tokens"]["device"] <= 10


async def test_the_readers_pace_holds_for_chunks_of_twenty(both: tuple[Upstream, DaemonProcess]) -> None:
    upstream, daemon = both
    made_s = 3 * 0.3  # from the first chunk to the last; what is left then is flushed
    body = {"model": "disco", "messages": QUESTION, "stream": True, "disco": {"delivery": "paced", "pace_tps": 40}}

    async def off_pace_s() -> float:
        """How far what the reader had before the last chunk was from the pace, s; a machine that is held up is."""
        times, n_rows = [], len(await daemon.history())
        with upstream.chunks(*(words(20, 20 * i) for i in range(4)), interval_s=0.3):
            async with daemon.session.post(f"{daemon.url}/chat/completions", json=body) as response:
                async for line in response.content:
                    if b'"content":"w' in line:
                        times.append(asyncio.get_running_loop().time())
        assert len(times) == 80
        row = (await daemon.recorded(n_rows + 1))[0]
        paced = sum(t < times[0] + made_s - 0.1 for t in times)
        return 0.0 if 10 < paced <= 40 * made_s + 2 and row["qoe"] > 0.9 else float("inf")

    assert await least_of_three(off_pace_s, 1.0) == 0.0


@pytest.mark.parametrize("size", [1, 3])
async def test_a_server_that_streams_letters_is_heard_to_its_own_end(
    size: int, both: tuple[Upstream, DaemonProcess]
) -> None:
    upstream, daemon = both
    text = "Donaudampfschifffahrt, (that is) nothing's new. " * 4
    usage = {"prompt_tokens": 11, "completion_tokens": 60, "total_tokens": 71}
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    with upstream.chunks(*pieces, usage=usage, reason="length"):
        heard = await ask(daemon, "Say it.", max_tokens=60)
    assert (heard.text, heard.finish_reason) == (text, "length")
    assert heard.disco["endpoints"]["server"]["completion_tokens"] == 60

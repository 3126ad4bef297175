"""Daemons with a model whose state cannot be cut: others' cancels, long prompts and handoffs change no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.conductor.test_handoff import FORCED, done
from tests.fixtures.daemon import DaemonProcess, Heard, ask, running
from tests.fixtures.tiny_models import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = "sea fir elm oak " * 250


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("d")
    model = tiny_model(folder / "tiny.gguf", "hybrid")
    async with running(folder, model=model, policy="all-device", more=("--threads", "2")) as started:
        await started.device_ready()
        yield started


async def leave(daemon: DaemonProcess, prompt: str) -> None:
    """Ask, and leave at the first piece of the answer."""

    def end(_: Heard) -> None:
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        await ask(daemon, prompt, max_tokens=300, on_piece=end)


async def test_clients_that_leave_end_nobody_elses_answer(daemon: DaemonProcess) -> None:
    alone = await ask(daemon, "Tell me about rivers.", max_tokens=120)
    staying = asyncio.create_task(ask(daemon, "Tell me about rivers.", max_tokens=120))
    n_left = 0
    while not staying.done():
        await leave(daemon, f"Tell me about the number {n_left}.")
        n_left += 1
    assert n_left
    heard = await staying
    assert (heard.text, heard.finish_reason) == (alone.text, alone.finish_reason)


async def test_a_request_that_comes_while_a_long_prompt_is_read_changes_neither_answer(daemon: DaemonProcess) -> None:
    alone = [await ask(daemon, prompt, max_tokens=12) for prompt in (LONG, "Tell me about lamps.")]
    for _ in range(3):
        long = asyncio.create_task(ask(daemon, LONG, max_tokens=12))
        await daemon.until(lambda s: s["endpoints"]["device"]["in_flight"] == 1)
        short = await ask(daemon, "Tell me about lamps.", max_tokens=12)
        assert [(await long).text, short.text] == [heard.text for heard in alone]


async def test_an_answer_that_moves_to_a_device_with_a_hybrid_model_stays_the_same(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny.gguf", "hybrid")
    settings = {"server": {"model": "disco/device", "continuation": "token_ids", "stream_usage": True}}
    slow = ("--shape-tps", "30")
    async with (
        running(tmp_path / "server", model=model, policy="all-device", more=slow) as server,
        running(
            tmp_path / "d", model=model, server=server.url, policy="all-server", settings=settings, more=FORCED
        ) as daemon,
    ):
        await server.device_ready()
        await daemon.device_ready()
        whole = await ask(daemon, "Tell me about rivers.", model="disco/device", max_tokens=60)
        heard = [
            await ask(daemon, "Tell me about rivers.", max_tokens=60) for _ in range(3)
        ]  # one may end before it has moved
        assert {one.text for one in heard} == {whole.text}
        assert any(done(one.disco) for one in heard), "no answer has moved"

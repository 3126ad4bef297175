"""At temperature 0 all APIs give one text for a prompt, in one piece and streamed.

A few prompts; `python -m benchmarks.faults.routes --only texts` asks a hundred.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.faults.route_texts import PROMPTS, text_of, texts_of
from disco_daemon.bench.relay_apis import APIS
from tests.fixtures.daemon import DaemonProcess, ask, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_TOKENS = 8
FEW = PROMPTS[4::18]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    async with running(tmp_path_factory.mktemp("d")) as started:
        await started.device_ready()
        yield started


@pytest.mark.parametrize("prompt", FEW)
async def test_all_apis_give_the_same_text_streamed_and_whole(prompt: str, daemon: DaemonProcess) -> None:
    texts = await texts_of(daemon.root, daemon.session, prompt, MAX_TOKENS)
    assert len(texts) == 2 * len(APIS)
    assert set(texts.values()) == {(await ask(daemon, prompt, max_tokens=MAX_TOKENS)).text}, texts


async def test_one_after_the_other_is_as_all_at_once(daemon: DaemonProcess) -> None:
    """Nothing is from a cache, nor is any beside it: the text of a prompt is its own."""
    prompt = "Say something about " + FEW[0]
    alone = [
        await text_of(daemon.root, daemon.session, name, prompt, MAX_TOKENS, stream=stream)
        for name in APIS for stream in (False, True)
    ]  # fmt: skip
    assert len(set(alone)) == 1
    assert set((await texts_of(daemon.root, daemon.session, prompt, MAX_TOKENS)).values()) == set(alone)

"""Requests whose clients have gone: nothing is computed for them any more, wherever they were by then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from disco_daemon.bench.relay_apis import APIS
from disco_daemon.engine import wire
from disco_daemon.engine.inbox import ReplyInbox
from disco_daemon.engine.requests import count_message
from disco_daemon.engine.supervisor import Engine
from disco_daemon.store.recorded_outcomes import outcomes
from disco_daemon.types import Drawing, GenerationRequest
from tests.e2e.engine.test_engine import loaded, question, told
from tests.fixtures.daemon import DaemonProcess, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATIENCE_S = 60.0
LONG = "sea fir " * 2000  # some milliseconds to make tokens of, and more of them than the context has


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    async with loaded() as engine:
        await engine.ready(60)
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    async with running(tmp_path_factory.mktemp("d")) as started:
        await started.device_ready()
        yield started


@contextmanager
def counting(engine: Engine, n: int) -> Iterator[list[ReplyInbox]]:
    """Where the lengths of `n` long prompts will come."""
    with ExitStack() as stack:
        inboxes = []
        for number in range(n):
            request_id, inbox = stack.enter_context(engine._channel.inbox())
            engine._channel.write(count_message(request_id, question(f"{number} {id(stack)} {LONG}"), ids=False))
            inboxes.append(inbox)
        yield inboxes


def endless(text: str) -> GenerationRequest:
    """A request whose answer does not end by itself while it is of interest."""
    return replace(question(text, 1000), drawing=Drawing(ignore_eos=True))


async def test_a_cancelled_request_overtakes_those_that_are_made_tokens_of(engine: Engine) -> None:
    with counting(engine, 8) as inboxes:
        answer = engine.open(question("Hi"))
        await answer.close()
        assert answer.done is not None
        assert (answer.done.reason, answer.done.n_prompt, answer.done.n_completion) == ("cancelled", 0, 0)
        assert inboxes[-1].replies.empty(), "it was over only when all before it had been looked at"
        async with asyncio.timeout(PATIENCE_S):
            assert isinstance(await inboxes[-1].replies.get(), wire.Counted)


async def test_a_prompt_whose_client_has_gone_is_not_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, deliver = list[str](), engine._channel.deliver

    def heard(message: wire.Reply) -> None:
        counted.append(message.id)
        deliver(message)

    monkeypatch.setattr(engine._channel, "deliver", heard)
    with counting(engine, 6):
        gone = asyncio.create_task(engine.count(question("Hi")))
        await asyncio.sleep(0)  # it has asked
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        with counting(engine, 1) as last:
            async with asyncio.timeout(PATIENCE_S):
                await last[0].replies.get()
    assert len(counted) == 7


async def test_an_answer_that_was_refused_while_it_was_cancelled_is_told_of_once(engine: Engine) -> None:
    with counting(engine, 2):
        answer = engine.open(question(LONG))
        await answer.close()
    assert answer.done is not None
    async with asyncio.timeout(PATIENCE_S):  # the engine goes on; a count that a busy machine makes too late is None
        while await engine.count(question("Hi there, once more")) is None:
            pass
    assert engine.in_flight == 0


async def test_nothing_is_computed_for_a_cancelled_request(engine: Engine) -> None:
    """In each state, and at all places in the queue: the engine's counters are what the ends of all answers say."""

    async def rested(n_completion: int) -> wire.Stats:
        async with asyncio.timeout(PATIENCE_S):
            while (
                (stats := engine.stats) is None
                or stats.completion_tokens < n_completion
                or stats.running + stats.paused + stats.waiting + stats.swapped
            ):
                await asyncio.sleep(0.01)  # the stats have no event
        return stats

    _, first = await told(engine.open(question("Name three colours.", 4)))
    before = await rested(first.n_completion)
    written = engine.open(endless("Tell me about a fox."))
    while not isinstance(await anext(written), wire.TextPiece):
        pass
    asked = [
        engine.open(endless(f"{i} " + f"{word} " * 300)) for i, word in enumerate(("sea", "fir", "elm", "oak") * 2)
    ]
    for _ in range(5):
        await anext(written)  # beside it, prompts are being read
    ends = []
    for answer in (asked[0], asked[7], written, *asked[1:7]):
        await answer.close()
        assert answer.done is not None
        assert answer.done.reason == "cancelled"
        ends.append(answer.done)
    ends.append((await told(engine.open(question("Name three birds.", 4))))[1])
    n_completion = sum(done.n_completion for done in ends)
    after = await rested(before.completion_tokens + n_completion)
    assert after.completion_tokens - before.completion_tokens == n_completion
    assert after.prompt_tokens - before.prompt_tokens == sum(done.n_prompt for done in ends)
    assert sum(done.n_prompt for done in ends) < 8 * 300, "they were cancelled before they had been read"


@pytest.mark.parametrize("name", APIS)
async def test_a_client_that_goes_while_prompts_are_read_leaves_nothing_behind(
    name: str, daemon: DaemonProcess
) -> None:
    api, n_before = APIS[name], len(await daemon.history())

    async def ask(number: int) -> None:
        body = api.body(f"{name} {number}: " + "lamp " * 1500, 16)
        async with daemon.session.post(f"{daemon.root}{api.path}", data=body) as response:
            await response.read()

    def n_answers(state: dict[str, Any]) -> int:
        """How many the engine has, by its stats; those that are still counted are none."""
        stats = state["endpoints"]["device"]["engine"] or {}
        return sum(stats.get(key, 0) for key in ("running", "paused", "swapped", "waiting"))

    clients = [asyncio.create_task(ask(number)) for number in range(3)]
    await daemon.until(lambda state: n_answers(state) == len(clients))
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await daemon.until(lambda state: state["endpoints"]["device"]["in_flight"] == 0)
    rows = await daemon.recorded(n_before + len(clients))
    assert {row["finish_reason"] for row in rows} == {"cancelled"}
    rests = await daemon.until(lambda state: n_answers(state) == 0)
    stats = rests["endpoints"]["device"]["engine"]
    assert stats["completion_tokens"] == 0
    n_read = sum(
        attempt.usage.prompt_tokens for row in outcomes(daemon.folder / "history.sqlite") for attempt in row.attempts
    )
    assert stats["prompt_tokens"] == n_read

"""A second request to the same server, on a real wire: who wins, who fails, and that both are closed and accounted for.

`admit` is called just before the second request is sent: what is opened there befalls only that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from disco_daemon.endpoints.base import Controls
from disco_daemon.endpoints.hedge import Hedge
from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.endpoints.server_errors import UNHEDGED_S
from disco_daemon.errors import EndpointError
from disco_daemon.types import Finish, GenerationRequest, Sampling, Token, Usage
from tests.fixtures.clock import StoppedClock
from tests.fixtures.upstream import PATIENCE_S, Upstream

REQUEST = GenerationRequest("r", ({"role": "user", "content": "one two three"},), Sampling(max_tokens=3))
WHOLE = "one two three "
AFTER_S = 0.4  # the first request is to have arrived by then, also on a busy machine


@dataclass
class Asking:
    """One answer of a server that may be asked twice; `second` is opened when the second request goes."""

    upstream: Upstream
    server: Server
    second: Callable[[], AbstractContextManager[None]] | None = None
    admitted: bool = True
    usage: Usage = field(default_factory=Usage)
    text: str = ""
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.hedge = Hedge(AFTER_S, self._admit)

    def _admit(self) -> bool:
        if self.admitted and self.second is not None:
            self._stack.enter_context(self.second())
        return self.admitted

    async def run(self, request: GenerationRequest = REQUEST) -> str:
        with self._stack:
            async with aclosing(self.server.generate(request, self.usage, Controls(hedge=self.hedge))) as events:
                async for event in events:
                    if isinstance(event, Token):
                        self.text += event.text
                    else:
                        assert isinstance(event, Finish)
        return self.text

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await asyncio.sleep(0.001)  # an account has no event to wait for


@asynccontextmanager
async def asking() -> AsyncIterator[Asking]:
    """A real server, and nothing that is left of the requests in the end."""
    before = asyncio.all_tasks()
    async with Upstream() as upstream:
        server = Server(ServerConfig(upstream.url, "m", "k"))
        await server.start()
        try:
            yield Asking(upstream, server)
            ours = [task.get_name() for task in asyncio.all_tasks() - before if "request" in task.get_name()]
            assert ours == []
        finally:
            await server.close()


async def test_a_second_request_answers_where_the_first_is_silent_and_the_first_is_closed() -> None:
    async with asking() as one:
        with one.upstream.held_until(asyncio.Event(), None, times=1):
            assert await one.run() == WHOLE
            await one.upstream.wait_closed(0)
        first, second = one.upstream.exchanges
        assert first.body == second.body, "the very same request"
        hedge = one.hedge
        assert hedge.won
        assert (one.usage.prompt_tokens, one.usage.completion_tokens, one.usage.told) == (3, 3, True)
        assert hedge.second.usage == one.usage
        assert hedge.first.usage == Usage()
        assert hedge.sent_at is not None
        assert hedge.first.over_at is not None
        assert hedge.first.over_at >= hedge.sent_at


async def test_the_first_request_may_still_win_and_the_second_is_closed() -> None:
    async with asking() as one:
        go, never, asked = asyncio.Event(), asyncio.Event(), asyncio.Event()
        one.second = lambda: one.upstream.held_until(never, reached=asked)
        with one.upstream.held_until(go, times=1):
            answer = asyncio.create_task(one.run())
            await asked.wait()
            go.set()
            assert await answer == WHOLE
        await one.upstream.wait_closed(1)
        assert not one.hedge.won
        assert one.hedge.second.usage == Usage()
        assert one.usage.completion_tokens == 3


async def test_a_server_that_is_not_silent_is_asked_once() -> None:
    async with asking() as one:
        one.hedge.after_s = PATIENCE_S
        assert await one.run() == WHOLE
        assert (one.upstream.n_requests, one.hedge.sent_at) == (1, None)


async def test_without_leave_nothing_is_sent() -> None:
    async with asking() as one:
        go, asked = asyncio.Event(), asyncio.Event()
        one.admitted = False
        admit, one.hedge.admit = one.hedge.admit, lambda: asked.set() or admit()  # type: ignore[func-returns-value]
        with one.upstream.held_until(go, times=1):
            answer = asyncio.create_task(one.run())
            await asked.wait()
            go.set()
            assert await answer == WHOLE
        assert (one.upstream.n_requests, one.hedge.sent_at) == (1, None)


@pytest.mark.parametrize(("status", "reason"), [(429, "rate_limited"), (500, "server_error"), (503, "overloaded")])
async def test_a_second_request_that_fails_is_no_error_of_the_answer(status: int, reason: str) -> None:
    async with asking() as one:
        go = asyncio.Event()
        one.second = lambda: one.upstream.status(status)
        with one.upstream.held_until(go, times=1):
            answer = asyncio.create_task(one.run())
            await one.until(lambda: one.hedge.second.error is not None)
            go.set()
            assert await answer == WHOLE
        assert (one.hedge.won, one.hedge.second.error, one.hedge.first.error) == (False, reason, None)
        assert one.server.readiness().hedgeable is (status != 429)


async def test_a_second_request_answers_where_the_first_fails_after_it_was_sent() -> None:
    async with asking() as one:
        go, second = asyncio.Event(), asyncio.Event()
        one.second = lambda: one.upstream.held_until(second)
        with one.upstream.held_until(go, None, times=1), one.upstream.status(500, times=1):
            answer = asyncio.create_task(one.run())
            await one.upstream.wait_request(1)
            go.set()
            await one.until(lambda: one.hedge.first.error is not None)
            second.set()
            assert await answer == WHOLE
        assert (one.hedge.won, one.hedge.first.error) == (True, "server_error")


async def test_a_second_request_that_is_cut_before_its_first_token_is_no_error_of_the_answer() -> None:
    async with asking() as one:
        go = asyncio.Event()
        one.second = lambda: one.upstream.cut_after(0)
        with one.upstream.held_until(go, times=1):
            answer = asyncio.create_task(one.run())
            await one.until(lambda: one.hedge.second.error is not None)
            go.set()
            assert await answer == WHOLE
        assert one.hedge.second.error == "cut"


async def test_where_both_fail_the_first_ones_error_is_the_answers() -> None:
    async with asking() as one:
        go = asyncio.Event()
        one.second = lambda: one.upstream.status(503)
        with one.upstream.held_until(go, None, times=1), one.upstream.status(500, times=1):
            answer = asyncio.create_task(one.run())
            await one.until(lambda: one.hedge.second.error is not None)
            go.set()
            with pytest.raises(EndpointError) as failed:
                await answer
        assert failed.value.reason == "server_error"
        assert (one.hedge.first.error, one.hedge.second.error) == ("server_error", "overloaded")


async def test_a_first_request_that_fails_before_a_second_one_is_sent_fails_at_once() -> None:
    async with asking() as one:
        one.hedge.after_s = PATIENCE_S
        with one.upstream.status(500), pytest.raises(EndpointError):
            await one.run()
        assert one.upstream.n_requests == 1


async def test_a_client_that_leaves_takes_both_requests_with_it() -> None:
    async with asking() as one:
        with one.upstream.held_until(asyncio.Event()):
            answer = asyncio.create_task(one.run())
            await one.upstream.wait_request(1)
            answer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await answer
            for i in (0, 1):
                await one.upstream.wait_closed(i)
        assert one.hedge.first.over_at is not None
        assert one.hedge.second.over_at is not None


async def test_a_server_that_looks_things_up_for_a_fee_is_asked_once() -> None:
    async with asking() as one:
        asked = replace(REQUEST, extra={"web_search_options": {}})
        one.hedge.after_s = 0.0
        assert await one.run(asked) == WHOLE
        assert one.upstream.n_requests == 1


async def test_a_server_that_has_said_429_is_not_asked_twice_for_a_day() -> None:
    clock = StoppedClock()
    async with Upstream() as upstream:
        server = Server(ServerConfig(upstream.url, "m", "k"), clock=clock)
        await server.start()
        try:
            assert server.readiness().hedgeable
            with upstream.status(429), pytest.raises(EndpointError):
                async with aclosing(server.generate(REQUEST, Usage())) as events:
                    await anext(events)
            clock.at += UNHEDGED_S - 1
            assert not server.readiness().hedgeable
            assert server.readiness().down_s == 0
            clock.at += 1
            assert server.readiness().hedgeable
        finally:
            await server.close()

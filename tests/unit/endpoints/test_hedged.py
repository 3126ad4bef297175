"""Two requests for one answer: what their tasks raise is looked at, whoever lets go of them, and when."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.endpoints.hedge import Hedge, ServerEvents, hedged
from disco_daemon.errors import EndpointError
from disco_daemon.system.tasks import all_ended
from disco_daemon.types import Finish, Side, Usage


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("after_s", [0.0, 9.0])
async def test_no_error_is_left_unseen_where_the_reader_leaves_as_a_request_fails(after_s: float, fails: bool) -> None:
    unseen, go, loop = list[dict[str, Any]](), asyncio.Event(), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    readers = list[asyncio.Task[None]]()

    async def ask(usage: Usage) -> ServerEvents:
        del usage
        await go.wait()
        loop.call_soon(readers[0].cancel)  # before whoever waits for the first event hears of it
        if fails:
            raise EndpointError(Side.SERVER, "cut", "it broke")
        yield Finish("stop")

    async def read() -> None:
        async for _ in hedged(ask, Usage(), Hedge(after_s, lambda: True), SystemClock()):
            pass

    readers.append(asyncio.create_task(read()))
    await asyncio.sleep(0.01)
    go.set()
    (left,) = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(left, asyncio.CancelledError)
    readers.clear()
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []


@pytest.mark.parametrize("after_s", [0.0, 9.0])
async def test_nothing_of_requests_that_fail_waits_for_the_collector(after_s: float) -> None:
    """What many answers of a broken server hold would grow the daemon until the collector comes."""

    async def ask(usage: Usage) -> ServerEvents:
        del usage
        await asyncio.sleep(0.01)  # both have begun, where there are two
        if after_s >= 0:  # always: what yields nothing is no generator
            raise EndpointError(Side.SERVER, "cut", "it broke")
        yield Finish("stop")

    async def read() -> None:
        async for _ in hedged(ask, Usage(), Hedge(after_s, lambda: True), SystemClock()):
            pass

    assert await kept_after(read, EndpointError) == set()


async def test_nothing_of_an_end_that_is_cancelled_waits_for_the_collector() -> None:
    async def end() -> None:
        closing = asyncio.create_task(asyncio.sleep(0.02))
        waiting = asyncio.create_task(all_ended(closing))
        await asyncio.sleep(0)
        waiting.cancel()
        await waiting

    assert await kept_after(end, asyncio.CancelledError) == set()


async def kept_after(do: Callable[[], Coroutine[Any, Any, None]], raised: type[BaseException]) -> set[str]:
    """Return the types of this package, and the errors, that only the collector frees after what `do` raises."""
    gc.collect()
    gc.disable()
    try:
        try:
            await do()
        except raised:
            pass
        else:
            pytest.fail(f"{raised} was to be raised")
        await asyncio.sleep(0)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return {
            type(one).__name__
            for one in gc.garbage
            if isinstance(one, BaseException) or type(one).__module__.startswith("disco_daemon")
        }
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

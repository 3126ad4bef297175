"""Two requests for one answer: what their tasks raise is looked at, whoever lets go of them, and when."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.endpoints.hedge import Hedge, ServerEvents, hedged
from disco_daemon.errors import EndpointError
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

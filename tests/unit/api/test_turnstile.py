"""New requests go on one in each turn of the event loop."""

from __future__ import annotations

import asyncio

from disco_daemon.api.answering import Turnstile


async def test_one_request_goes_on_in_each_turn_and_the_first_at_once() -> None:
    turnstile, loop, turn, passed_in = Turnstile(), asyncio.get_running_loop(), 0, list[int]()

    def count() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    async def enter() -> None:
        await turnstile.enter()
        passed_in.append(turn)

    count()
    await enter()
    assert passed_in == [turn]
    await asyncio.gather(*(enter() for _ in range(5)))
    assert len(set(passed_in)) == 6
    assert max(passed_in) - min(passed_in) <= 7  # and none is left empty while somebody waits

"""One timer for many waits: late ones end, others cost none, and a cancellation from outside stays one."""

from __future__ import annotations

import asyncio
import math

import pytest

from disco_daemon.clock import Deadline, Deadlines


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_wait_that_takes_too_long_is_a_time_out() -> None:
    deadline, began = Deadline(), now()
    with pytest.raises(TimeoutError), deadline.at(began + 0.02):
        await asyncio.Event().wait()
    assert now() - began >= 0.02
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_many_waits_share_one_timer() -> None:
    deadline, made = Deadline(), 0
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def counted(*args: object, **kw: object) -> asyncio.TimerHandle:
        nonlocal made
        made += 1
        return call_at(*args, **kw)  # type: ignore[arg-type]

    loop.call_at = counted  # type: ignore[method-assign]
    try:
        for _ in range(100):
            with deadline.at(now() + 10):
                await asyncio.sleep(0)
    finally:
        loop.call_at = call_at  # type: ignore[method-assign]
        deadline.close()
    assert made == 1


async def test_works_one_after_the_other_share_one_timer_and_those_at_once_have_one_each() -> None:
    deadlines, loop = Deadlines(2), asyncio.get_running_loop()
    timers = set[asyncio.TimerHandle]()
    call_at = loop.call_at

    def noted(*args: object, **kw: object) -> asyncio.TimerHandle:
        timers.add(timer := call_at(*args, **kw))  # type: ignore[arg-type]
        return timer

    async def work() -> None:
        deadline = deadlines.take()
        with deadline.at(now() + 10):
            await asyncio.sleep(0)
        deadlines.give(deadline)

    loop.call_at = noted  # type: ignore[method-assign]
    try:
        for _ in range(50):
            await work()
        assert len(timers) == 1
        await asyncio.gather(*(work() for _ in range(5)))
        assert len(timers) == 5
    finally:
        loop.call_at = call_at  # type: ignore[method-assign]
    assert sum(not timer.cancelled() for timer in timers) == 2
    deadlines.close()
    assert all(timer.cancelled() for timer in timers)


async def test_a_deadline_that_was_used_ends_the_next_work_in_time() -> None:
    """Its timer may be for later, or for before: neither ends a work too early or too late."""
    deadlines = Deadlines()
    for first_s in (10.0, 0.01):
        deadline = deadlines.take()
        with deadline.at(now() + first_s):
            await asyncio.sleep(0)
        deadlines.give(deadline)
        again, began = deadlines.take(), now()
        assert again is deadline
        with pytest.raises(TimeoutError), again.at(began + 0.05):
            await asyncio.Event().wait()
        assert now() - began >= 0.05
        deadlines.give(again)
    deadlines.close()


async def test_a_later_end_moves_the_timer_on_and_an_earlier_one_is_kept() -> None:
    deadline, began = Deadline(), now()
    with deadline.at(began + 0.5):  # long enough for a busy machine to come to the end of this wait
        await asyncio.sleep(0)
    with deadline.at(began + 60):
        await asyncio.sleep(0.6)
    with pytest.raises(TimeoutError), deadline.at(now() + 0.02):
        await asyncio.Event().wait()
    assert now() - began < 30


async def test_between_two_waits_nobody_is_cancelled() -> None:
    deadline = Deadline()
    with deadline.at(now() + 0.5):
        await asyncio.sleep(0)
    await asyncio.sleep(0.6)
    with pytest.raises(TimeoutError), deadline.at(now() + 0.01):
        await asyncio.Event().wait()


async def test_a_wait_whose_end_is_past_is_a_time_out_unless_it_need_not_wait() -> None:
    deadline = Deadline()
    with deadline.at(now() - 1):
        pass
    with pytest.raises(TimeoutError), deadline.at(now() - 1):
        await asyncio.Event().wait()


async def test_a_cancellation_from_outside_is_no_time_out() -> None:
    deadline, waiting = Deadline(), asyncio.Event()

    async def wait() -> None:
        with deadline.at(now() + 30):
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(wait())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    deadline.close()


async def test_what_is_wrong_otherwise_comes_through() -> None:
    deadline = Deadline()
    with pytest.raises(ValueError, match="wrong"), deadline.at(now() + 30):
        raise ValueError("wrong")
    with deadline.at(math.inf):
        await asyncio.sleep(0)
    deadline.close()

"""Looks for unreachable circles of objects while nobody waits, and gives free memory back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable

COLLECT_S = 1.0  # between two looks whether a full collection is due
COLLECT_FROM = 5_000  # new objects; fewer are no reason for a collection
COLLECT_AT_LATEST_S = 30.0  # from one collection to the next, though readers have to wait for it
COLLECT_SHARE = 1 / 2000  # of the time may go into them at most: where one takes longer, the next one comes later
OBJECT_S = 1e-6  # to look at a new object, about; measured with 180,000 of them on a server's core


async def collect_at_leisure(n_waiting: Callable[[], int]) -> None:
    """Look for unreachable circles while nobody waits, or else seldom, until cancelled.

    With 500 streams that takes a fifth of a second. The interpreter by itself would do so every few seconds, and walk
    the young objects several times a second: 10 ms each, since each token under way has new ones. All for next to
    nothing: an answer that has ended is in no circle, and goes at once.
    """
    was_enabled, last, took_s = gc.isenabled(), time.monotonic(), 0.0
    give_back = free_memory_returner()
    gc.disable()
    try:
        while True:
            await asyncio.sleep(COLLECT_S)
            n_new, began = gc.get_count()[0], time.monotonic()
            if n_new < COLLECT_FROM:
                continue
            if not n_waiting() or began - last >= longest_wait_s(n_new, took_s):
                cpu_began = time.thread_time()
                gc.collect()
                give_back()
                # By the processor's time: on a busy machine the clock's made garbage wait ever longer.
                took_s = time.thread_time() - cpu_began
                last = time.monotonic()
    finally:
        if was_enabled:
            gc.enable()


def longest_wait_s(n_new: int, took_s: float) -> float:
    """Return how long a collection may wait for readers, s, with `n_new` objects since the last one, of `took_s`.

    The next one takes as long as the last, or as its new objects do: the first one of a crowd has nothing to go by.
    """
    return max(COLLECT_AT_LATEST_S, max(took_s, n_new * OBJECT_S) / COLLECT_SHARE)


def free_memory_returner() -> Callable[[], None]:
    """Return the function that gives what is free between blocks in use back to the system, in some milliseconds.

    glibc by itself gives back only what is free at the end of its heap: under steady load the daemon seems to grow for
    hours, though what it uses stays the same. Other C libraries have no such call, and the function does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return lambda: None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int

    def give_back() -> None:
        trim(0)

    return give_back

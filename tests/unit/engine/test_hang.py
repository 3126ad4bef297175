"""An engine is killed when it hangs, not when the machine leaves it no processor."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine import wire
from disco_daemon.engine.hang import CHUNKS, HANG_S, LOOK_S, MOST_LOOK_S, UNMEASURED_S, HangWatch, HeldUp, look_at

PATIENCE_S = 30.0


def info(prefill_tps: float) -> wire.Loaded:
    return wire.Loaded(
        model="m", n_ctx=1024, n_cells=1024, n_seqs=4, bytes_per_token=1, load_s=1.0, prefill_tps=prefill_tps
    )


def first_hang_s(share: float, loaded: wire.Loaded | None = None, looks: int = 200) -> float | None:
    """When an engine that says nothing from 0 on, and waits for a processor for this share of the time, hangs, s."""
    watch = HangWatch()
    for look in range(looks):
        now = LOOK_S * look
        if watch.hangs(now, now, HeldUp(share * now), loaded):
            return now
    return None


def test_an_engine_that_could_run_and_says_nothing_hangs() -> None:
    found = first_hang_s(0.0)
    assert found is not None
    assert HANG_S < found <= HANG_S + LOOK_S


def test_an_engine_that_waits_for_a_processor_does_not_hang() -> None:
    assert first_hang_s(0.95) is None


@given(st.floats(0.0, 0.8))
def test_what_it_has_waited_for_a_processor_does_not_count(share: float) -> None:
    found = first_hang_s(share)
    assert found is not None
    assert HANG_S / (1 - share) - 1e-6 <= found <= HANG_S / (1 - share) + 2 * LOOK_S


def test_a_slow_processor_has_longer_for_a_chunk() -> None:
    tps = 64.0
    found = first_hang_s(0.0, info(tps))
    assert found is not None
    assert found > CHUNKS * wire.SINGLE_PROMPT_CHUNK / tps


def test_before_its_speed_is_measured_a_processor_counts_as_a_slow_one() -> None:
    found = first_hang_s(0.0, info(0.0))
    assert found is not None
    assert UNMEASURED_S < found <= UNMEASURED_S + LOOK_S


def test_an_engine_that_waits_for_the_disk_does_not_hang() -> None:
    watch = HangWatch()
    assert not any(watch.hangs(float(at), float(at), HeldUp(by_disk=True), None) for at in range(100))
    found = [watch.hangs(float(at), float(at), HeldUp(), None) for at in range(100, 120)]
    assert found.index(True) == int(HANG_S), "and from then on all counts"


def test_a_machine_that_stood_still_has_one_look_counted() -> None:
    watch = HangWatch()
    assert not watch.hangs(0.0, 0.0, HeldUp(), None)
    assert not watch.hangs(1000.0, 1000.0, HeldUp(), None)
    assert watch.silent_s == MOST_LOOK_S


def test_a_sign_of_life_begins_anew() -> None:
    watch = HangWatch()
    for at in range(15):
        assert not watch.hangs(float(at), float(at), HeldUp(), None)
    assert not watch.hangs(15.0, 0.2, HeldUp(), None)
    assert watch.silent_s == pytest.approx(0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not say how long a process waits")
async def test_the_kernel_says_how_long_a_process_waits_for_a_processor() -> None:
    core = min(os.sched_getaffinity(0))
    loop = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    both = [await asyncio.create_subprocess_exec(sys.executable, "-c", loop) for _ in range(2)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while min(look_at(process.pid).waited_s for process in both) < 0.1:
                await asyncio.sleep(0.01)  # two on one core: each waits for the other; no event tells of it
    finally:
        for process in both:
            process.kill()
            await process.wait()
    assert look_at(both[0].pid) == HeldUp(), "it has gone"

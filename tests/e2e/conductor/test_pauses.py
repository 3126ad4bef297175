"""On a crowded device some answers wait for others, and the endpoint says so while they do."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from disco_daemon.clock import SystemClock
from disco_daemon.endpoints.device import Device
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine
from disco_daemon.models.default import default_model_path
from disco_daemon.types import Finish, GenerationRequest, Paused, Sampling, Token, Usage

N_ANSWERS = 5
N_TOKENS = 120


async def heard(device: Device, i: int) -> list[Token | Paused | Finish]:
    messages = ({"role": "user", "content": f"Write a story about a fox who finds a lantern, number {i}."},)
    request = GenerationRequest(f"r{i}", messages, Sampling(N_TOKENS, 0), pace_tps=4.8)
    async with aclosing(device.generate(request, Usage())) as events:
        return [event async for event in events if isinstance(event, Token | Paused | Finish)]


async def test_an_answer_that_waits_for_others_is_told_to_wait_and_to_go_on() -> None:
    """There are cells for two or three of five."""
    device = Device(
        Engine(wire.Load(model_path=str(default_model_path()), n_ctx=256, n_threads=1, n_cells=512), SystemClock())
    )
    await device.start()
    try:
        await device.engine.ready(60)
        answers = await asyncio.gather(*(heard(device, i) for i in range(N_ANSWERS)))
    finally:
        await device.close()
    waits = 0
    for events in answers:
        assert isinstance(events[-1], Finish)
        paused = False
        for event in events:
            if isinstance(event, Paused):
                assert event.paused is not paused, "told when it changes"
                paused = event.paused
                waits += paused
            elif isinstance(event, Token):
                assert not paused, "who waits says nothing"
    assert waits

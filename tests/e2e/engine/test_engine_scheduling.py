"""The engine as it runs is scheduled by QoE: a reader's pace and patience go all the way from the request to Andes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine
from disco_daemon.models.default import default_model_path
from disco_daemon.types import Drawing, GenerationRequest, Sampling

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")

N_CTX = 256
LONG_S = 300.0


def asks(text: str, n: int, ttft_s: float | None, pace_tps: float | None = 5.0) -> GenerationRequest:
    return GenerationRequest(
        "r",
        ({"role": "user", "content": text * 30},),
        Sampling(max_tokens=n, temperature=0),
        pace_tps=pace_tps,
        expected_ttft_s=ttft_s,
        drawing=Drawing(ignore_eos=True),
    )


async def test_of_two_readers_that_wait_for_the_device_the_impatient_one_is_first() -> None:
    engine = Engine(
        wire.Load(model_path=str(default_model_path()), n_ctx=N_CTX, n_threads=1, n_cells=N_CTX), SystemClock()
    )
    engine.start()
    ended = list[str]()

    async def read(name: str, request: GenerationRequest, begun: asyncio.Event | None = None) -> None:
        async for message in engine.open(request):
            if begun is not None and isinstance(message, wire.TextPiece):
                begun.set()
            if isinstance(message, wire.Done):
                ended.append(name)
                return

    try:
        async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
            await engine.ready(LONG_S)
            begun = asyncio.Event()
            group.create_task(read("runs", asks("four small grey stones ", 60, 1.0, None), begun))
            await begun.wait()  # no two of them have room at the same time
            group.create_task(read("patient", asks("seven small red birds ", 4, 1000.0)))
            await asyncio.sleep(0)
            group.create_task(read("impatient", replace(asks("nine small blue doors ", 4, 0.1))))
        assert ended == ["runs", "impatient", "patient"]
    finally:
        await engine.close()

"""A schema that allows too many readings of an answer at once does not take the others' answers with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from disco_daemon.engine.hang import HANG_S
from tests.e2e.engine.test_bounds import refused
from tests.fixtures.daemon import DaemonProcess, running
from tests.unit.engine.test_grammar import schema
from tests.unit.engine.test_readings import LIST, held

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def device(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    async with running(tmp_path_factory.mktemp("d"), settings={"device": {"n_ctx": 512}}) as daemon:
        await daemon.device_ready()
        yield daemon


class Neighbour:
    """Somebody whose short answers are being streamed, one after the other; `ends` says how they ended."""

    def __init__(self, device: DaemonProcess) -> None:
        self._device = device
        self.ends: list[str | None] = []
        self.begun, self.enough = asyncio.Event(), False

    async def listens(self) -> None:
        """Until it is enough."""
        messages: Any = [{"role": "user", "content": "Tell me a long story."}]
        while not self.enough:
            stream = await self._device.client.chat.completions.create(
                model="disco/device", messages=messages, stream=True, max_tokens=24
            )
            end = None
            async with stream:
                async for chunk in stream:
                    self.begun.set()
                    end = chunk.choices[0].finish_reason or end if chunk.choices else end
            self.ends.append(end)


@pytest_asyncio.fixture(loop_scope="module")
async def neighbour(device: DaemonProcess) -> AsyncIterator[Neighbour]:
    """Who streams all the while, from an engine that stays the same."""
    pid = (await device.state())["endpoints"]["device"]["pid"]
    neighbour = Neighbour(device)
    hears = asyncio.create_task(neighbour.listens())
    await neighbour.begun.wait()
    yield neighbour
    neighbour.enough = True
    await hears  # raises what an answer that was cut raises
    assert neighbour.ends
    assert set(neighbour.ends) <= {"stop", "length"}, "each was whole"
    state = (await device.state())["endpoints"]["device"]
    assert (state["pid"], state["restarts"]) == (pid, 0)


async def streamed(device: DaemonProcess, wanted: Any) -> None:
    stream = await device.client.chat.completions.create(
        model="disco/device",
        messages=[{"role": "user", "content": "Hi"}],
        response_format=wanted,
        max_tokens=60,
        stream=True,
    )
    async for _ in stream:
        pass


async def test_ten_alternatives_that_hold_themselves_are_refused_at_once(
    device: DaemonProcess, neighbour: Neighbour
) -> None:
    wanted: Any = schema(held(*[LIST | {"maxItems": 50 + i} for i in range(10)]))
    found = [await refused(device, response_format=wanted) for _ in range(3)]
    for error, _ in found:
        assert error["param"] == "response_format"
        assert "too many readings" in error["message"]
    assert min(took_s for _, took_s in found) < HANG_S / 3  # a busy machine may hold one of them up


def deep(n: int) -> dict[str, Any]:
    """Lists within each other, so many; each may be one of four, which begin alike."""
    levels: dict[str, Any] = {f"l{n}": {"const": 1}}
    for i in range(n):
        one = {"type": "array", "items": {"$ref": f"#/$defs/l{i + 1}"}, "minItems": 1}
        levels[f"l{i}"] = {"anyOf": [one | {"maxItems": 50 + j} for j in range(4)]}
    return {"type": "object", "properties": {"n": {"$ref": "#/$defs/l0"}}, "required": ["n"], "$defs": levels}


async def test_an_answer_whose_readings_multiply_ends_alone(device: DaemonProcess, neighbour: Neighbour) -> None:
    wanted: Any = schema(deep(20))  # within the bounds, and nothing but [ is allowed
    error, took_s = await refused(device, response_format=wanted, max_tokens=60)
    assert error["param"] == "response_format"
    assert "takes too long" in error["message"]
    began = asyncio.get_running_loop().time()
    with pytest.raises(openai.APIError, match="takes too long"):
        await streamed(device, wanted)
    streamed_s = asyncio.get_running_loop().time() - began
    assert min(took_s, streamed_s) < HANG_S  # a busy machine may hold one of them up

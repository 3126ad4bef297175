"""What an answer held goes when it ends, however it ends: nothing of it waits for the collector of circles."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fixtures.daemon import Heard, ask, running
from tests.fixtures.upstream import Upstream

PATIENCE_S = 60.0
STORY = "Write a long story about a fox who finds a lantern. Part"
# Runs in the daemon: at SIGUSR2 it writes down which of our objects only the collector has found since the last one.
LOOKER = """
import collections, gc, os, signal, sys

def look(*_):
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    kinds = collections.Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.garbage)
    gc.garbage.clear()
    ours = {name: n for name, n in kinds.items() if name.startswith("disco_daemon.")}
    with open(os.path.join(FOLDER, "found.new"), "w") as file:
        __import__("json").dump(ours, file)
    os.replace(file.name, os.path.join(FOLDER, "found"))

if "up" in sys.orig_argv:
    FOLDER = os.path.dirname(__file__)
    signal.signal(signal.SIGUSR2, look)
    with open(os.path.join(FOLDER, "pid"), "w") as file:
        file.write(str(os.getpid()))
"""


async def looked(folder: Path) -> dict[str, int]:
    """Have the daemon look, and return what it found, by type."""
    found = folder / "found"
    found.unlink(missing_ok=True)
    os.kill(int((folder / "pid").read_text()), signal.SIGUSR2)
    async with asyncio.timeout(PATIENCE_S):
        while not found.exists():
            await asyncio.sleep(0.01)  # a file of another process has no event to wait for
    kinds: dict[str, int] = json.loads(found.read_text())
    return kinds


async def test_no_answer_waits_for_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looker = tmp_path / "looker"
    looker.mkdir()
    (looker / "sitecustomize.py").write_text(LOOKER)
    monkeypatch.setenv("PYTHONPATH", str(looker))
    async with Upstream(tokens=40, interval_s=0.01) as upstream, running(tmp_path, server=upstream.url) as daemon:
        engine = (await daemon.device_ready())["endpoints"]["device"]["pid"]
        await looked(looker)
        for side in ("server", "device"):
            asking: list[asyncio.Task[Heard]] = []

            def leave(heard: Heard, asking: list[asyncio.Task[Heard]] = asking) -> None:
                asking[0].cancel()

            await ask(daemon, "Whole.", model=f"disco/{side}")
            await daemon.client.embeddings.create(model="disco", input="nothing else")
            asking.append(asyncio.create_task(ask(daemon, "Left.", model=f"disco/{side}", on_piece=leave)))
            await asyncio.wait(asking)
            with pytest.raises(openai.BadRequestError):
                await ask(daemon, "Wrong.", model=f"disco/{side}", max_tokens=-5)
        await cut(daemon, upstream)
        await killed(daemon, engine)
        await daemon.until(lambda state: state["in_flight"] == 0 and state["endpoints"]["device"]["in_flight"] == 0)
        assert await looked(looker) == {}


async def test_no_answer_of_several_servers_waits_for_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looker = tmp_path / "looker"
    looker.mkdir()
    (looker / "sitecustomize.py").write_text(LOOKER)
    monkeypatch.setenv("PYTHONPATH", str(looker))
    async with Upstream(tokens=8) as a, Upstream(tokens=8) as b:
        servers = [
            {"name": name, "base_url": one.url, "model": "loopback", "probe": False, "input_usd_per_mtok": 0.0,
             "output_usd_per_mtok": 0.0, "continuation": "continue_final_message"}
            for name, one in (("a", a), ("b", b))
        ]  # fmt: skip
        async with running(tmp_path / "d", device=False, servers=servers) as daemon:
            await looked(looker)
            with b.delay(0.2):
                while len(a.exchanges) < 30:  # enough of the quick one to know what silence is
                    await ask(daemon, "Whole.")
            n_b = len(b.exchanges)
            with a.hang():
                while len(b.exchanges) == n_b:
                    await ask(daemon, "Silent at the first one.")
            with a.cut_after(3), b.cut_after(3):
                for name in ("disco", "a/loopback", "b/loopback"):
                    with suppress(openai.APIError):
                        await ask(daemon, "Cut.", model=name)
            await daemon.until(lambda state: state["in_flight"] == 0)
            assert await looked(looker) == {}


async def cut(daemon: Any, upstream: Upstream) -> None:
    """Have the server break one answer off, and refuse one."""
    with upstream.cut_after(3), pytest.raises(openai.APIError):
        await ask(daemon, "Cut.", model="disco/server")
    with upstream.status(500), pytest.raises(openai.APIError):
        await ask(daemon, "Refused.", model="disco/server")


async def killed(daemon: Any, engine: int) -> None:
    """Kill the engine under several answers at once."""
    begun = [asyncio.Event() for _ in range(3)]

    def tell(one: asyncio.Event) -> Callable[[Heard], None]:
        return lambda heard: one.set()

    asking = [
        asyncio.create_task(ask(daemon, f"{STORY} {i}", model="disco/device", max_tokens=900, on_piece=tell(one)))
        for i, one in enumerate(begun)
    ]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(one.wait() for one in begun))
    os.kill(engine, signal.SIGKILL)
    await asyncio.wait(asking)
    assert all(isinstance(task.exception(), openai.APIError) for task in asking)
    await daemon.until(lambda state: state["endpoints"]["device"]["state"] == "ready")

"""What a request costs with many servers of hundreds of models each, against one `[server]`, by processor time."""

from __future__ import annotations

import os
import platform
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import tomlkit

from disco_daemon.bench.child import child
from disco_daemon.bench.relay import AskedWay, cpu_s_of, daemon_argv, door, rate
from disco_daemon.system.program import command

WARMUP, ROUNDS, N = 200, 24, 60  # requests before; rounds; requests of each round
SAMPLES = 2000  # of the bootstrap


async def compare(n_servers: int, n_models: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Ask both daemons in turns. Raises BenchError."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-servers-")))
        argv = command("disco_daemon.bench.loopback", "--port", "0", "--tokens", "8")
        urls = [
            await stack.enter_async_context(child(argv, folder, f"server {i}")) for i in range(2)
        ]  # more of them would take the processor, and a daemon knows servers by their names
        ways = {}
        for name in ("one", "many"):
            (own := folder / name).mkdir()
            words = daemon_argv(urls[0], own)
            _set_servers(own / "config.toml", urls, n_servers if name == "many" else 0, n_models)
            url = await stack.enter_async_context(child(words, own, "daemon"))
            ways[name] = AskedWay(name, await stack.enter_async_context(door(name, url)))
        for way in ways.values():
            for _ in range(WARMUP):
                await rate(way, 1, 1)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(ROUNDS):
            for name in list(ways)[:: 1 if i % 2 else -1]:
                before = await cpu_s_of(ways[name].target)
                for _ in range(N):
                    await rate(ways[name], 1, 1)
                taken[name].append((await cpu_s_of(ways[name].target) - before) * 1e6 / N)
            progress(f"round {i + 1} of {ROUNDS}")
    added = [many - one for one, many in zip(taken["one"], taken["many"], strict=True)]
    return {
        "servers": n_servers, "models": n_models, "n": ROUNDS * N,
        "cpu_us": {name: round(statistics.median(found), 1) for name, found in taken.items()},
        "added_us": round(statistics.median(added), 1), "added_us_95": _interval(added),
        "host": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
    }  # fmt: skip


def _set_servers(config: Path, urls: Sequence[str], n_servers: int, n_models: int) -> None:
    """Put that many in place of the one: each answers `disco`, and names its models. The one costs money as well."""
    settings = tomlkit.parse(config.read_text("utf-8")).unwrap()
    settings["server"] |= {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0}
    if n_servers:
        plain = settings.pop("server")
        settings["servers"] = [
            plain
            | {
                "name": f"s{i}", "base_url": urls[i % len(urls)], "probe": False,
                "models": ["loopback", *(f"model-{k}" for k in range(n_models - 1))],
                "input_usd_per_mtok": 1.0 + i / 10,
            }
            for i in range(n_servers)
        ]  # fmt: skip
    config.write_text(tomlkit.dumps(settings), encoding="utf-8")


def _interval(added: Sequence[float]) -> list[float]:
    """Return the interval of 95 % of the median, by the bootstrap over rounds."""
    draw = random.Random(0).choices
    found = statistics.quantiles(
        [statistics.median(draw(added, k=len(added))) for _ in range(SAMPLES)], n=40, method="inclusive"
    )
    return [round(found[0], 1), round(found[-1], 1)]

"""The same by a real daemon: four tiny models with random weights, of which two fit, and the end of the simulated days.

All requests before have taught the daemon, by a file as it writes it itself; the models that it then loads are the ones
that every rule begins with. Requests come `--faster` times as fast as in that day, and so does time in what decides
which models stay. Loads and answers take what they take here. Other rules play the very requests, taught by the same
ones, with the loads and answers as they were measured here, in the simulation.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import tomlkit

from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.command import progress
from disco_daemon.scheduler.expected_use import ExpectedUse
from disco_daemon.store import History
from tests.fixtures.daemon import by_socket
from tests.fixtures.tiny_models import tiny_model

from . import fast_daemon
from .days import Model, Request
from .keeping import Count, Expected, LeastRecent, Rule, play

KIND = "sliding-window"  # of the tiny models: 60 MB each
MAX_TOKENS = 8
N_FIT, FIT = 2, 2.5  # models, and how much memory there is by the size of the largest: any two fit, and no three
LOOK_S = 0.1  # between two looks at memory
PATIENCE_S = 120.0  # for an answer on a busy machine
EXPECTED_S = 15.0  # until the daemon has loaded what it expects
COUNTS_S = (1e9, 14_400.0, 3600.0, 1200.0)  # memories of the rules by count
LOADED = re.compile(r"model (\S+) is loaded( ahead)?")


@dataclass(slots=True)
class Live:
    """What happened to `n` requests; `failures` are answers that were none."""

    n: int = 0
    begins_with: list[str] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    cold: int = 0
    ahead: int = 0
    most_bytes: int = 0
    most_rss: int = 0

    def figures(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "cold": self.cold, "loads_ahead": self.ahead, "failed": len(self.failures), "failures": self.failures[:3],
            "most_bytes": self.most_bytes, "most_rss": self.most_rss, "begins_with": self.begins_with,
            "answer_s": round(statistics.median(self.answers_s), 3), "slowest_s": round(max(self.answers_s), 3),
        }  # fmt: skip


async def measure(
    models: Sequence[Model], days: Mapping[int, Sequence[Request]], n: int, faster: float
) -> dict[str, Any]:
    """Ask a daemon the last `n` requests of each seed's days, and play them by the other rules. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="disco-several-") as name:
        folder = Path(name)
        files = {m.name: tiny_model(folder / f"{m.name}.gguf", KIND, seed=i) for i, m in enumerate(models)}
        device = tiny_model(folder / "device.gguf", KIND, seed=9)
        sizes, loads_s, device_bytes = await _calibrated(folder, device, files)
        limit = int(FIT * max(sizes.values()))
        progress(f"each model takes some {max(sizes.values()) / 2**20:.0f} MiB and loads in {loads_s} s")
        alike = [replace(m, n_bytes=sizes[m.name], load_s=loads_s[m.name] * faster) for m in models]
        found = {}
        for seed, asked in days.items():
            (own := folder / str(seed)).mkdir()
            live = await _asked(own, device, files, asked, n, faster, (device_bytes + limit) / 2**30)
            found[seed] = live.figures() | {"simulated": _simulated(live, alike, asked, limit, faster)}
            progress(f"seed {seed}: {found[seed]}")
    one_each = list(found.values())
    cold = sum(one["cold"] for one in one_each)
    others = {rule: sum(one["simulated"][rule] for one in one_each) for rule in one_each[0]["simulated"]}
    count = min((rule for rule in others if rule.startswith(Count.prefix)), key=lambda rule: others[rule])
    most = max(one["most_bytes"] for one in one_each)
    return {
        "requests": n * len(days), "faster": faster, "load_s": loads_s, "limit_bytes": limit,
        "over_limit": most > limit, "failed": sum(one["failed"] for one in one_each), "cold": cold,
        "simulated": others, "best_count": count,
        "fewer_than_least_recently_used": _fewer(cold, others[LeastRecent.name]),
        "fewer_than_count": _fewer(cold, others[count]), "by_seed": found,
    }  # fmt: skip


def _fewer(cold: int, other: int) -> float:
    return round(1 - cold / max(1, other), 3)


def _simulated(
    live: Live, models: Sequence[Model], asked: Sequence[Request], limit: int, faster: float
) -> dict[str, int]:
    """Return the cold starts of each rule with the same requests, taught as the daemon was, from the same memory on."""
    takes_s = statistics.median(live.answers_s) * faster
    same = [replace(one, takes_s=takes_s) for one in asked[-live.n :]]
    rules: list[Rule] = [LeastRecent(), *(Count(s) for s in COUNTS_S), Expected(models)]
    for rule in rules:
        for one in asked[: -live.n]:
            rule.observe(one.model, one.at)
    return {r.name: play(r, models, same, limit, same[0].at, here=live.begins_with).cold for r in rules}


def _argv(
    folder: Path, name: str, device: Path, files: Mapping[str, Path], gib: float, faster: float = 1.0
) -> Sequence[str]:
    settings = {
        "device": {"n_ctx": 512, "watts": 15.0, "autotune": False, "models_gib": gib},
        "models": [{"name": n, "model": str(path), "n_ctx": 512} for n, path in files.items()],
    }
    (config := folder / f"{name}.toml").write_text(tomlkit.dumps(settings))
    return [
        sys.executable, "-P", "-m", fast_daemon.__name__, str(faster), "up", "--port", "0", "--json", "--until-eof",
        "--config", str(config), "--history", str(folder / f"{name}.sqlite"), "--threads", "1", "--model", str(device),
    ]  # fmt: skip


async def _ask(root: str, session: aiohttp.ClientSession, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me."}], "max_tokens": MAX_TOKENS}
    async with asyncio.timeout(PATIENCE_S), session.post(f"{root}/v1/chat/completions", json=body) as response:
        if response.status != 200 or not (await response.json())["choices"][0]["message"]["content"]:
            raise BenchError(f"{model}: {response.status} {(await response.text())[:200]}")


async def _calibrated(
    folder: Path, device: Path, files: Mapping[str, Path]
) -> tuple[dict[str, int], dict[str, float], int]:
    """Return what each model takes, bytes, and how long its load makes a request wait, s; and the device's bytes."""
    loads_s = {}
    async with child(_argv(folder, "calibration", device, files, 0.0), folder, "calibration") as url:
        root = url.removesuffix("/v1")
        async with aiohttp.ClientSession() as session, by_socket(url) as controls:
            await _ask(root, session, "disco/device")
            for name in files:
                began = time.monotonic()
                await _ask(root, session, f"disco/{name}")
                loaded = time.monotonic()
                await _ask(root, session, f"disco/{name}")
                loads_s[name] = round(max(0.05, 2 * loaded - began - time.monotonic()), 2)
            await asyncio.sleep(6.0)  # the daemon looks at what its models take every 5 s
            state = await _state(controls, root)
    sizes = {m["name"]: int(m["memory_bytes"]) for m in state["models"]}
    return sizes, loads_s, max(sizes.values())  # the device's file is of the same shape


async def _state(controls: aiohttp.ClientSession, root: str) -> dict[str, Any]:
    async with controls.get(f"{root}/disco/v1/state") as response:
        found: dict[str, Any] = await response.json()
        return found


async def _asked(
    folder: Path, device: Path, files: Mapping[str, Path], asked: Sequence[Request], n: int, faster: float, gib: float
) -> Live:
    """Ask the last `n` of the requests as they come, of a daemon that all before have taught."""
    live, begin = Live(n), asked[-n].at
    argv = _argv(folder, "live", device, files, gib, faster)
    _teach(folder / "live.sqlite", files, asked[:-n], begin)
    async with child(argv, folder, "live") as url:
        root = url.removesuffix("/v1")
        async with aiohttp.ClientSession() as session, by_socket(url) as controls:
            await _ask(root, session, "disco/device")
            live.begins_with = await _loaded_by_itself(controls, root)
            n_before = len(LOADED.findall((folder / "live.log").read_text(encoding="utf-8")))
            watching = asyncio.create_task(_watch(controls, root, live))
            start = time.monotonic()

            async def one(request: Request) -> None:
                await asyncio.sleep(max(0.0, start + (request.at - begin) / faster - time.monotonic()))
                began = time.monotonic()
                try:
                    await _ask(root, session, f"disco/{request.model}")
                except (BenchError, aiohttp.ClientError, TimeoutError) as e:
                    live.failures.append(f"{request.model}: {e!r}")
                live.answers_s.append(time.monotonic() - began)

            async with asyncio.TaskGroup() as group:
                for request in asked[-n:]:
                    group.create_task(one(request))
            watching.cancel()
    loads = LOADED.findall((folder / "live.log").read_text(encoding="utf-8"))[n_before:]
    live.ahead = sum(bool(ahead) for _, ahead in loads)
    live.cold = len(loads) - live.ahead
    return live


async def _loaded_by_itself(controls: aiohttp.ClientSession, root: str) -> list[str]:
    """Return the models that the daemon has loaded by itself within EXPECTED_S; of an evening it may be one."""
    here: list[str] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(EXPECTED_S):
            while len(here) < N_FIT:
                here = [m["name"] for m in (await _state(controls, root))["models"] if m["state"] == "ready"]
                await asyncio.sleep(LOOK_S)  # another process, which has no event to wait for
    return here


def _teach(history: Path, files: Mapping[str, Path], learned: Sequence[Request], begin: float) -> None:
    """Let the daemon know of the requests before, as if it had lived through them."""
    now = time.time()
    with History(history) as kept:
        for name in files:
            use = ExpectedUse(now - begin)
            for one in learned:
                if one.model == name:
                    use.observe(now - begin + one.at)
            kept.save_learned(f"use | {name}", now, use.to_json())
        kept.flush(10.0)


async def _watch(controls: aiohttp.ClientSession, root: str, live: Live) -> None:
    """Keep the most memory that the models had, by the daemon's word and by their processes, until it is cancelled."""
    while True:
        state = await _state(controls, root)
        live.most_bytes = max(live.most_bytes, sum(m["memory_bytes"] for m in state["models"]))
        live.most_rss = max(live.most_rss, _rss(state.get("pid")))
        await asyncio.sleep(LOOK_S)  # another process, which has no event to wait for


def _rss(pid: int | None) -> int:
    try:
        return 0 if pid is None else sum(p.memory_info().rss for p in psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return 0

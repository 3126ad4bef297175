"""The same by a real daemon: four tiny models with random weights, of which two fit, and a part of one day.

That is a busy hour of the office, or a recorded day behind its first ten hours. Time is compressed: requests come
`--faster` times as fast as in it, and what a rule has learned before is as
fast. Loads and answers take what they take here, so that a load is long against the gaps. Other rules play the very
requests, with the loads and answers as they were measured here, in the simulation.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
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

from .days import DAY_S, DAYS, HOUR_S, Model, Request, hours, requests
from .keeping import Count, Expected, LeastRecent, Played, Rule, play
from .recorded import OPENS_H, recorded

KIND = "sliding-window"  # of the tiny models: 60 MB each
MAX_TOKENS = 8
N_DAYS = 12  # of which a record is made, as in the simulation
LEARNED_H = 10  # hours like the one that counts, before it
FIT = 2.5  # models, by the size of the largest: any two fit, and no three
LOOK_S = 0.1  # between two looks at memory
PATIENCE_S = 120.0  # for an answer on a busy machine
LOADED = re.compile(r"model (\S+) is loaded( ahead)?")


@dataclass(slots=True)
class Live:
    """What happened; `failures` are answers that were none."""

    n: int = 0
    answers_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    most_bytes: int = 0
    most_rss: int = 0


def busy_hour(n: int, faster: float, seed: int) -> tuple[tuple[Model, ...], list[Request]]:
    """Return the office's models, each asked for as in its busiest hour, and their requests with time compressed."""
    models = tuple(replace(m, by_hour=hours(h0_24=max(m.by_hour))) for m in DAYS["office"])
    rates = [max(m.by_hour) * m.per_session for m in DAYS["office"]]
    per_day = 2000.0 * 24 * sum(rates) / sum(sum(m.by_hour) * m.per_session for m in DAYS["office"])
    return models, _part(requests(models, 1, seed, per_day), n, faster)


def recorded_day(folder: Path, n: int, faster: float, seed: int) -> tuple[tuple[Model, ...], list[Request]]:
    """Return the office's models, and the requests of the first recorded day. Raises ConfigError."""
    opens = OPENS_H * HOUR_S
    day = [replace(one, at=one.at - opens) for one in recorded(folder, N_DAYS, seed) if one.at < DAY_S]
    return DAYS["office"], _part(day, n, faster)


def _part(asked: Sequence[Request], n: int, faster: float) -> list[Request]:
    """Return the first LEARNED_H hours and the `n` requests behind them, with time compressed."""
    begin = next(i for i, one in enumerate(asked) if one.at >= LEARNED_H * HOUR_S)
    return [replace(one, at=one.at / faster) for one in asked[: begin + n]]


async def measure(models: Sequence[Model], asked: Sequence[Request], n: int, faster: float) -> dict[str, Any]:
    """Ask a daemon the last `n` requests, and play them by the other rules. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="disco-several-") as name:
        folder = Path(name)
        files = {m.name: tiny_model(folder / f"{m.name}.gguf", KIND, seed=i) for i, m in enumerate(models)}
        device = tiny_model(folder / "device.gguf", KIND, seed=9)
        sizes, loads_s, device_bytes = await _calibrated(folder, device, files)
        limit = int(FIT * max(sizes.values()))
        progress(f"each model takes some {max(sizes.values()) / 2**20:.0f} MiB and loads in {loads_s} s")
        live, cold, ahead = await _asked(folder, device, files, asked, n, device_bytes + limit, limit)
    took_s = statistics.median(live.answers_s)
    alike = [replace(m, n_bytes=sizes[m.name], load_s=loads_s[m.name]) for m in models]
    same = [replace(one, takes_s=took_s) for one in asked]
    rules: list[Rule] = [LeastRecent(), *(Count(s / faster) for s in (1e9, 14_400.0, 3600.0, 1200.0)), Expected(alike)]
    played = [play(rule, alike, same, limit, asked[-n].at) for rule in rules]
    count = min((p for p in played if p.name.startswith(Count.prefix)), key=lambda p: p.cold)
    others = {"least recently used": played[0].cold, "best by count": count.cold, "ours, simulated": played[-1].cold}
    return {
        "requests": n, "faster": faster, "cold": cold, "loads_ahead": ahead, "failed": len(live.failures),
        "failures": live.failures[:3], "limit_bytes": limit, "most_bytes": live.most_bytes, "most_rss": live.most_rss,
        "over_limit": live.most_bytes > limit, "load_s": loads_s, "answer_s": round(took_s, 3), "simulated": others,
        "fewer_than_least_recently_used": _fewer(cold, played[0]), "fewer_than_count": _fewer(cold, count),
    }  # fmt: skip


def _fewer(cold: int, other: Played) -> float:
    return round(1 - cold / max(1, other.cold), 3)


def _argv(folder: Path, name: str, device: Path, files: Mapping[str, Path], gib: float) -> Sequence[str]:
    settings = {
        "device": {"n_ctx": 512, "watts": 15.0, "autotune": False, "models_gib": gib},
        "models": [{"name": n, "model": str(path), "n_ctx": 512} for n, path in files.items()],
    }
    (config := folder / f"{name}.toml").write_text(tomlkit.dumps(settings))
    return [
        sys.executable, "-P", "-m", "disco_daemon.cli.main", "up", "--port", "0", "--json", "--until-eof", "--config",
        str(config), "--history", str(folder / f"{name}.sqlite"), "--threads", "1", "--model", str(device),
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
    folder: Path, device: Path, files: Mapping[str, Path], asked: Sequence[Request], n: int, whole: int, limit: int
) -> tuple[Live, int, int]:
    """Ask the last `n` of the requests as they come; return that, the loads that were waited for, and those ahead."""
    live, begin = Live(n), asked[-n].at
    argv = _argv(folder, "live", device, files, whole / 2**30)
    _teach(folder / "live.sqlite", files, asked[:-n], begin)
    async with child(argv, folder, "live") as url:
        root = url.removesuffix("/v1")
        async with aiohttp.ClientSession() as session, by_socket(url) as controls:
            await _ask(root, session, "disco/device")
            for name in _last_two(asked[:-n]):  # which any rule would have in memory by then
                await _ask(root, session, f"disco/{name}")
            n_before = len(LOADED.findall((folder / "live.log").read_text(encoding="utf-8")))
            watching = asyncio.create_task(_watch(controls, root, live))
            start = time.monotonic()

            async def one(request: Request) -> None:
                await asyncio.sleep(max(0.0, start + request.at - begin - time.monotonic()))
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
    return live, sum(not ahead for _, ahead in loads), sum(bool(ahead) for _, ahead in loads)


def _last_two(before: Sequence[Request]) -> list[str]:
    """Return the two models that were asked for last, the later one last."""
    names = list(dict.fromkeys(one.model for one in reversed(before)))
    return names[1::-1]


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

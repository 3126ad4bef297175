"""What `benchmarks.handoff` starts and asks: a daemon with a device and a server, and that server."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import tomlkit

from disco_daemon.bench.child import LOG_TAIL, BenchError, child
from disco_daemon.bench.demo import PASSAGE
from disco_daemon.system.control_groups import n_processors
from disco_daemon.system.program import verb

from .. import llama_server
from .seams import Heard

# Of the hosted model that the server stands for (gpt-4o-mini), and of a laptop that computes.
PRICES = {"input_usd_per_mtok": 0.15, "output_usd_per_mtok": 0.60}
WATTS = 15.0
OWN, LLAMA = "disco", "llama-server"  # servers that the benchmark starts itself
N_PROMPTS = 40
CUTS = (3, 12)  # tokens after which an answer is moved
CONCURRENT = 1  # several at once change how tokens are batched, and with it roundings
SERVER_TPS = 60.0  # of our own server, as hosted models have it: an engine beside another has as much as it has cores
# The server stands for another machine: what it computes must not keep the daemon and the reader off their cores. Its
# engine lowers itself by 5 more; at the very bottom it would get nothing at all beside two other busy processes.
ELSEWHERE = ("nice", "-n", "5")
PATIENCE_S = 120.0  # for a token, on a machine that has other work
LIVE_ANSWERS = 12  # of each run whose ledger shows the saving


@dataclass(frozen=True, slots=True)
class Setup:
    """The measurement: `count` handoffs each way, by `method`, with a `server`: our own, llama-server, or a URL.

    `server_model` is another GGUF for the first two; `trace` replays TTFTs at our own. `live` answers show the saving;
    with `pause` only those, and what it is worth that the source rests.
    """

    count: int = 100
    method: str = "token_ids"
    server: str = OWN
    server_model: Path | None = None
    trace: Path | None = None
    concurrent: int = CONCURRENT
    delivery: str = "paced"
    live: int = LIVE_ANSWERS
    ways: tuple[str, ...] = ("to_device", "to_server")
    pause: bool = False

    @property
    def same_model(self) -> bool:
        """Whether both sides run the same weights, so that one unbroken answer is the reference."""
        return self.server_model is None


# --- processes ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(folder: Path, setup: Setup, model: Path) -> AsyncIterator[str]:
    """The other side: what the user runs, llama.cpp's server, or ours behind the shaper."""
    if setup.server not in (OWN, LLAMA):
        yield setup.server
        return
    if setup.server == LLAMA:
        argv = llama_server.argv(setup.server_model or model)
    else:
        shape = ["--shape-tps", str(SERVER_TPS), *(["--shape-ttft", str(setup.trace)] if setup.trace else [])]
        settings = {"device": {"rounding": "exact"}}
        argv = _up(
            folder, "server", settings, setup.server_model or model, "--policy", "all-device", "--device-only", *shape
        )
    async with child([*ELSEWHERE, *argv], folder, "server") as url:
        yield url


def daemon_argv(
    folder: Path,
    name: str,
    setup: Setup,
    server: str,
    model: Path,
    policy: str,
    *,
    force: bool,
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[str]:
    """Return how to start the daemon; with `force` it moves each answer. `changes` are settings by section."""
    settings: dict[str, Any] = {
        "server": {"base_url": server, "model": "disco/device", "continuation": setup.method, "probe": False}
        | {"first_token_timeout_s": PATIENCE_S, "token_timeout_s": PATIENCE_S}
        | PRICES,
        "device": {"watts": WATTS},
        "handoff": {"for_cost": True},
        "policy": {"shadow": False},
    }
    for key, value in changes.items():
        settings[key] = settings.get(key, {}) | dict(value)
    forced = ["--force-handoff", f"{CUTS[0]}-{CUTS[1]}"] if force else []
    return _up(folder, name, settings, model, "--policy", policy, *forced)


def _up(folder: Path, name: str, settings: dict[str, Any], model: Path, *more: str) -> list[str]:
    config = folder / f"{name}.toml"
    config.write_text(tomlkit.dumps(settings), encoding="utf-8")
    threads = max(1, n_processors() // 2)  # two engines compute at once: half of the cores each
    return [
        *verb("up"), "--port", "0", "--json", "--until-eof", "--config", str(config),
        "--history", str(folder / f"{name}.sqlite"), "--model", str(model), "--threads", str(threads),
        "--log-level", "warning", *more,
    ]  # fmt: skip


# --- one answer ---------------------------------------------------------------------------------------------------


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Heard:
    """Stream one answer; the times are those of the pieces' arrival here."""
    heard = Heard()
    asked = body | {"stream": True, "temperature": 0}
    async with session.post(f"{url}/chat/completions", json=asked, allow_redirects=False) as response:
        if response.status != 200:
            msg = f"{body['model']} answered {response.status}: {(await response.text())[:LOG_TAIL]}"
            raise BenchError(msg)
        async for line in response.content:
            now = time.perf_counter()
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                msg = f"{body['model']}: the stream carried an error: {chunk['error']}"
                raise BenchError(msg)
            for choice in chunk["choices"]:
                heard.finish = choice["finish_reason"] or heard.finish
                if text := choice["delta"].get("content"):
                    heard.text += text
                    heard.times.append(now)
            heard.disco = chunk.get("disco", heard.disco)
    return heard


def prompts() -> list[str]:
    """Short and middling questions, each of its own words: a few sentences of a passage at a time."""
    words = PASSAGE.split()
    asks = ("Write a story that begins like this:", "Explain what this is about:", "Go on with this text:", "Rewrite:")
    return [f"{asks[i % 4]} {' '.join(words[5 * i : 5 * i + 8 + 5 * (i % 3)])}" for i in range(N_PROMPTS)]


def body_of(prompt: str, model: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, **more}

"""How long a daemon takes until it is of use, and how much memory it holds, against the code of another checkout.

    git worktree add --detach ../before COMMIT
    python -m benchmarks.relay.start_up [../before] [--runs 7] [--json]

Each run starts a daemon in front of a scripted server, asks it once, and then one with the embedded model as its
device; the checkouts take turns. `listens` is from the start of the process until it prints its URL, `answers` until
the first answer of the server has come through; `ready` is from the start of a daemon until its engine can serve.
Memory is what is resident, the engine's with its model file, which other processes share. All are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import psutil

import disco_daemon
from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.models.default import default_model_path
from disco_daemon.system.program import command, verb

from ..command import run_script
from .against import packages

GOALS = {"listens_s": 0.5, "daemon_mb": 90.0, "ready_s": 1.0}
LABELS = {
    "listens_s": "listens, s",
    "answers_s": "the server's first answer is there, s",
    "cpu_s": "CPU time up to then, s",
    "daemon_mb": "memory of a daemon without an engine, MB",
    "ready_s": "its engine can serve, s",
    "engine_mb": "memory of the engine, MB",
}
PATIENCE_S = 60.0
HOMES = ("CONFIG", "DATA", "CACHE")
ASKED = {"model": "disco", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def _mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 1e6


def _argv(folder: Path, *more: str) -> list[str]:
    config = folder / "config.toml"
    config.write_text("[device]\nautotune = false\nn_ctx = 1024\n")
    up = ("--port", "0", "--json", "--until-eof", "--config", str(config), "--history", str(folder / "h.sqlite"))
    return verb("up", *up, *more)


async def _alone(server_url: str, env: dict[str, str], folder: Path) -> dict[str, float]:
    """Start a daemon that has a server only, and ask it once."""
    config = folder / "config.toml"
    argv = _argv(folder, "--no-device", "--policy", "all-server")
    with config.open("a") as file:
        file.write(f'[server]\nbase_url = "{server_url}"\nmodel = "loopback"\n')
    began = time.monotonic()
    async with child(argv, folder, "daemon", env) as url, aiohttp.ClientSession() as session:
        listens = time.monotonic()
        async with session.post(f"{url}/chat/completions", json=ASKED) as response:
            if response.status != 200:
                raise BenchError(await response.text())
            await response.read()
        answers = time.monotonic()
        async with session.get(f"{url.removesuffix('/v1')}/disco/v1/state") as response:
            pid = (await response.json())["pid"]
        times = psutil.Process(pid).cpu_times()
        return {
            "listens_s": listens - began, "answers_s": answers - began, "cpu_s": times.user + times.system,
            "daemon_mb": _mb(pid),
        }  # fmt: skip


async def _with_engine(env: dict[str, str], folder: Path) -> dict[str, float]:
    """Start a daemon that has a device only."""
    argv = _argv(folder, "--device-only", "--threads", "1", "--model", str(default_model_path()))
    began = time.monotonic()
    async with child(argv, folder, "daemon", env) as url, aiohttp.ClientSession() as session:
        while time.monotonic() < began + PATIENCE_S:
            async with session.get(f"{url.removesuffix('/v1')}/disco/v1/state") as response:
                device = (await response.json())["endpoints"]["device"]
            if device["state"] == "ready":
                return {"ready_s": time.monotonic() - began, "engine_mb": _mb(device["pid"])}
            await asyncio.sleep(0.005)  # a starting engine has no event that another process could wait for
    raise BenchError("the engine was not ready in time")


async def measure(checkouts: dict[str, Path], n_runs: int) -> dict[str, Any]:
    """Start all of them again and again, in turn. Raises BenchError."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-bench-")))
        argv = command("disco_daemon.bench.loopback", "--port", "0", "--tokens", "1")
        server_url = await stack.enter_async_context(child(argv, folder, "loopback server"))
        # As an installed program: its modules are compiled, whatever this environment says of that.
        compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
        code = {name: str(packages(path, folder / name)) for name, path in checkouts.items()}
        for i in range(n_runs + 1):  # the first one reads its modules from disk and is not counted
            for name in checkouts:
                own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-bench-")))
                env = compiled | {"PYTHONPATH": code[name]} | {f"XDG_{k}_HOME": str(own) for k in HOMES}
                found = await _alone(server_url, env, own) | await _with_engine(env, own)
                if i:
                    rows[name].append(found)
            progress(f"{i + 1} of {n_runs + 1} rounds")
    medians = {
        name: {key: round(statistics.median(row[key] for row in found), 3) for key in LABELS}
        for name, found in rows.items()
    }
    return {
        "medians": medians,
        "goals": GOALS,
        "n_runs": n_runs,
        "host": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures as rows."""
    medians = figures["medians"]
    lines = [f"{'':<42}" + "".join(f"{name:>10}" for name in medians) + f"{'wanted':>10}"]
    for key, label in LABELS.items():
        goal = f"< {figures['goals'][key]:g}" if key in figures["goals"] else ""
        lines.append(f"{label:<42}" + "".join(f"{found[key]:>10.2f}" for found in medians.values()) + f"{goal:>10}")
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    """Measure and print; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", help="another checkout's folder, to compare with")
    parser.add_argument("--runs", type=at_least(1), default=7, help="starts of each (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    checkouts = {"this": Path(disco_daemon.__file__).parent.parent}
    if args.checkout is not None:
        checkouts["that"] = args.checkout.resolve()
    return print_figures(run_measurement(measure(checkouts, args.runs)), table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

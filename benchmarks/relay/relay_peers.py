"""What relays add to the answers of one server: this daemon, LiteLLM's proxy, and nothing between.

    python -m benchmarks.relay.relay_peers [--n 200] [--streams 50] [--tokens 200] [--json]

One scripted server. Daemon and proxy run on one core, server and client on another one (Linux; elsewhere where the
system puts them). Each round asks by all three ways in an order by chance. LiteLLM's proxy is the field's relay in
Python; it is installed from a lock file into .venv-peers, and runs as its own pages advise for production: one worker,
on uvloop, without database, telemetry, callbacks and logs, its list of prices from its own files.

Throughput counts only where the server alone gives twice as much: `direct` says so. The delay of a token is from the
moment when the server has written it until the client has it, of streams that a reader could follow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from disco_daemon.bench.child import BenchError, child, child_env, end, start
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.bench.loopback import LoopbackServer
from disco_daemon.bench.relay import (
    PAIR_TOKENS,
    ROUNDS,
    AskedWay,
    Question,
    Target,
    check_status,
    daemon_argv,
    door,
    rate,
    state_of,
    ttfts,
)  # fmt: skip
from disco_daemon.bench.script import Exchange, text_of
from tests.fixtures.installing import install_python

from ..command import run_script

HERE = Path(__file__).parent.parent
VENV = HERE.parent / ".venv-peers"
WARMUP = 20  # rounds
READY_S = 90.0  # until LiteLLM answers; its import takes a while
PACED_TPS, PACED_TOKENS = 20.0, 100  # of the streams whose delay is measured
PEER_CORE, CLIENT_CORE = 0, 1
GOALS = {"added_ms": 0.1, "token_s": 30.0, "cpu_us_per_token": 1 / 30}  # disco's, as a ratio to LiteLLM's
P99_MS = 2.0  # of the added delay of a token
QUIET = {
    "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_TELEMETRY": "False", "DISABLE_ADMIN_UI": "True",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # a key would be looked up for each request
}  # fmt: skip


def pinned(argv: Sequence[str], core: int) -> list[str]:
    """Return the command of a process that runs on one core only, where the system has that."""
    if not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) <= core:
        return list(argv)
    program = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", program, *argv]


@asynccontextmanager
async def litellm(server_url: str, folder: Path) -> AsyncIterator[tuple[str, int]]:
    """Run LiteLLM's proxy in front of a server; its URL and process. Raises BenchError."""
    if why := await asyncio.to_thread(install_python, HERE / "peers" / "requirements.lock", VENV):
        msg = f"LiteLLM cannot be installed: {why}"
        raise BenchError(msg)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "litellm.yaml"
    params = {"model": "openai/loopback", "api_base": server_url, "api_key": "loopback"}
    document = {
        "model_list": [{"model_name": "disco", "litellm_params": params}],
        "litellm_settings": {"telemetry": False, "set_verbose": False, "callbacks": [], "request_timeout": 600},
        "general_settings": {"disable_spend_logs": True, "disable_error_logs": True},
    }
    config.write_text(json.dumps(document))  # JSON is YAML
    argv = [str(VENV / "bin/litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    env = {name: value for name, value in child_env(folder).items() if name != "PYTHONPATH"} | QUIET
    process = await start(pinned([*argv, "--num_workers", "1"], PEER_CORE), env, folder / "litellm.log")
    assert process.stdout is not None
    drained = asyncio.create_task(process.stdout.read())  # a full pipe would block it
    try:
        async with aiohttp.ClientSession() as session:
            until = time.monotonic() + READY_S
            while not await _is_live(session, f"http://127.0.0.1:{port}/health/liveliness"):
                if process.returncode is not None or time.monotonic() > until:
                    msg = f"LiteLLM's proxy did not start:\n{(folder / 'litellm.log').read_text()[-2000:]}"
                    raise BenchError(msg)
                await asyncio.sleep(0.1)  # another program's start has no event
        yield f"http://127.0.0.1:{port}/v1", process.pid
    finally:
        drained.cancel()
        await asyncio.gather(drained, return_exceptions=True)
        await end(process)


async def _is_live(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def _cpu_s(pid: int) -> float:
    """Return the CPU time that a process and its children have used, s."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


class TimedServer(LoopbackServer):
    """Notes when it has written each token, by the prompt, s."""

    def __init__(self) -> None:
        super().__init__(tokens=PACED_TOKENS, interval_s=1 / PACED_TPS)
        self.written: dict[str, list[float]] = defaultdict(list)

    async def write(self, response: web.StreamResponse, exchange: Exchange, event: bytes) -> None:
        """Write one event."""
        await super().write(response, exchange, event)
        if b'"content":"' in event:
            self.written[text_of(exchange.body["messages"][-1])].append(time.perf_counter())


async def delays(server: TimedServer, way: AskedWay, streams: int) -> list[float]:
    """Return how long each token of paced streams was on its way, s."""
    questions = [Question(f"{way.name}{i}", PACED_TOKENS) for i in range(streams)]

    async def ask(question: Question) -> list[float]:
        times, lines = [], []
        async with way.target.post(question.body(way.api), way.api) as response:
            await check_status(response, way.target)
            async for line in response.content:
                lines.append(line)
                if way.api.has_text(line):
                    times.append(time.perf_counter())
        question.check(lines, way)
        written = server.written.pop(question.prompt)
        if len(times) != len(written):
            msg = f"{way.name} made {len(times)} chunks of {len(written)}: there is no delay of a token"
            raise BenchError(msg)
        return [there - here for here, there in zip(written, times, strict=True)]

    found = await asyncio.gather(*(ask(question) for question in questions))
    return [one for each in found for one in each]


async def measure(n: int, streams: int, tokens: int) -> dict[str, Any]:
    """Ask by all ways. Raises BenchError."""
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > CLIENT_CORE:
        os.sched_setaffinity(0, {CLIENT_CORE})
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-bench-")))
        argv = [sys.executable, "-m", "benchmarks.relay.quick_server", "--tokens", str(max(tokens, PAIR_TOKENS))]
        env = {"PYTHONPATH": str(HERE.parent)}
        server_url = await stack.enter_async_context(child(pinned(argv, CLIENT_CORE), folder, "scripted server", env))
        async with AsyncExitStack() as relays:
            figures = await _by_all(relays, folder, server_url, n, streams, tokens)
        async with AsyncExitStack() as relays:
            paced = await relays.enter_async_context(TimedServer())
            doors, _ = await _doors(relays, folder, paced.url)
            delayed = {door.name: await delays(paced, AskedWay(door.name, door), streams) for door in doors}
    p99 = {name: statistics.quantiles(each, n=100, method="inclusive")[98] * 1e3 for name, each in delayed.items()}
    figures["delay_p99_ms"] = {name: round(value, 3) for name, value in p99.items()}
    figures["added_delay_p99_ms"] = round(p99["disco"] - p99["direct"], 3)
    return figures | {
        "n": n, "streams": streams, "tokens_per_stream": tokens,
        "host": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
    }  # fmt: skip


async def _doors(stack: AsyncExitStack, folder: Path, server_url: str) -> tuple[list[Target], dict[str, int]]:
    """Start both relays in front of a server; the doors to it, and the relays' processes."""
    argv = pinned(daemon_argv(server_url, folder), PEER_CORE)
    daemon_url = await stack.enter_async_context(child(argv, folder, "daemon"))
    peer_url, peer_pid = await stack.enter_async_context(litellm(server_url, folder))
    doors = [
        await stack.enter_async_context(door(name, url, daemon=name == "disco"))
        for name, url in (("direct", server_url), ("disco", daemon_url), ("litellm", peer_url))
    ]
    return doors, {"disco": int((await state_of(doors[1]))["pid"]), "litellm": peer_pid}


async def _by_all(
    stack: AsyncExitStack, folder: Path, server_url: str, n: int, streams: int, tokens: int
) -> dict[str, Any]:
    """Measure first tokens, throughput and CPU time."""
    doors, pids = await _doors(stack, folder, server_url)
    ways = [AskedWay(door.name, door) for door in doors]
    try:
        times = await ttfts(ways, n, WARMUP, progress)
        rated: dict[str, list[float]] = {way.name: [] for way in ways}
        cpu: dict[str, list[float]] = {name: [] for name in pids}
        for i in range(ROUNDS):
            for way in ways:
                before = _cpu_s(pids[way.name]) if way.name in pids else 0.0
                rated[way.name].append(await rate(way, streams, tokens))
                if way.name in pids:
                    cpu[way.name].append((_cpu_s(pids[way.name]) - before) / (streams * tokens))
                progress(f"throughput: round {i + 1} of {ROUNDS}, {way.name} {rated[way.name][-1]:,.0f} token/s")
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        msg = f"the measurement broke off: {error!r}"
        raise BenchError(msg) from error
    added = {
        name: statistics.median(d - s for s, d in zip(times["direct"], times[name], strict=True)) * 1e3 for name in pids
    }
    token_s = {name: statistics.median(each) for name, each in rated.items()}
    cpu_us = {name: statistics.median(each) * 1e6 for name, each in cpu.items()}
    return {
        "added_ms": {name: round(value, 3) for name, value in added.items()},
        "token_s": {name: round(value, 1) for name, value in token_s.items()},
        "cpu_us_per_token": {name: round(value, 2) for name, value in cpu_us.items()},
        "ratios": {
            "added_ms": round(added["disco"] / added["litellm"], 4),
            "token_s": round(token_s["disco"] / token_s["litellm"], 2),
            "cpu_us_per_token": round(cpu_us["disco"] / cpu_us["litellm"], 4),
        },
        "judged": token_s["direct"] >= 2 * token_s["disco"],
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures as rows."""
    lines = [f"{'':<38}{'direct':>10}{'disco':>10}{'litellm':>10}{'ratio':>10}{'wanted':>10}"]
    labels = {
        "added_ms": "added to the first token, ms", "token_s": "token/s of all streams",
        "cpu_us_per_token": "CPU time of a token, us",
    }  # fmt: skip
    for key, label in labels.items():
        cells = (
            f"{figures[key][name]:,.1f}" if name in figures[key] else "" for name in ("direct", "disco", "litellm")
        )
        wanted = f"{'>=' if key == 'token_s' else '<='} {GOALS[key]:.3g}"
        lines.append(f"{label:<38}" + "".join(f"{c:>10}" for c in cells) + f"{figures['ratios'][key]:>10}{wanted:>10}")
    p99, added = figures["delay_p99_ms"], figures["added_delay_p99_ms"]
    delays_ms = "".join(f"{p99[name]:>10.2f}" for name in ("direct", "disco", "litellm"))
    lines.append(f"{'delay of a token at 20/s, p99, ms':<38}{delays_ms}")
    lines.append(f"{'of which disco adds':<38}{'':>10}{added:>10.2f}{'':>20}{f'< {P99_MS:g}':>10}")
    if not figures["judged"]:
        lines.append("The server alone gives less than twice as much: the throughput is not judged.")
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    """Measure and print; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=at_least(20), default=200, help="rounds of first tokens (default: %(default)s)")
    parser.add_argument("--streams", type=at_least(1), default=50, help="concurrent streams (default: %(default)s)")
    parser.add_argument("--tokens", type=at_least(1), default=200, help="tokens of each (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    figures = run_measurement(measure(args.n, args.streams, args.tokens))
    return print_figures(figures, table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

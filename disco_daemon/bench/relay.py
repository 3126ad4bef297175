"""The time that the daemon adds: the same scripted server, asked directly and through a daemon; all are processes."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ..plain import reason_of
from ..system.program import command, verb
from .child import LOG_TAIL, BenchError, child
from .relay_apis import APIS, CHAT, StreamApi
from .script import script

REQUEST_S = 120.0  # one answer, s; 50 streams of 200 tokens take a few on a slow machine
PAIR_TOKENS = 8  # of the answers timed for TTFT: short, so that the rest of one answer is not in the way of the next
ROUNDS = 3  # of concurrent streams, by each way in turn; the median counts

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """One door to the same answers; `url` ends in /v1. A `daemon` tells its own CPU time."""

    name: str
    url: str
    session: aiohttp.ClientSession
    daemon: bool = True

    @property
    def root(self) -> str:
        """The address without /v1."""
        return self.url.removesuffix("/v1")

    def post(self, body: bytes, api: StreamApi = CHAT) -> Any:
        """Start one request."""
        return self.session.post(self.root + api.path, data=body, allow_redirects=False)


@dataclass(frozen=True, slots=True)
class AskedWay:
    """One way to the same answers: a door, and the API that is spoken there."""

    name: str
    target: Target
    api: StreamApi = CHAT


@dataclass(frozen=True, slots=True)
class Question:
    """A streaming request whose answer is known: `tokens` tokens that no other `name` gets."""

    name: str
    tokens: int

    @property
    def prompt(self) -> str:
        """Words of this question alone, each one token: the daemon cuts an answer at `max_tokens`."""
        return " ".join(f"{self.name}{word}" for word in ("the", "quick", "brown", "fox", "jumps"))

    def body(self, api: StreamApi) -> bytes:
        """The request."""
        return api.body(self.prompt, self.tokens)

    def check(self, lines: Sequence[bytes], way: AskedWay) -> None:
        """Raise unless the stream is this question's answer, whole and ended as it should."""
        text = way.api.text(lines)
        if text != "".join(script(self.prompt, self.tokens)):
            msg = f"{way.name}: question {self.name} got an answer that is not its own or not whole: …{text[-80:]!r}"
            raise BenchError(msg)
        if not way.api.is_whole(lines):
            raise BenchError(f"{way.name}: the answer to question {self.name} was not ended as its API has it")


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput by one way, token/s, and the CPU time that the daemon took for a token, s; 0 of what is no daemon."""

    tokens_per_s: float
    cpu_s: float


async def bench_relay(
    *, n: int = 200, warmup: int = 20, streams: int = 50, tokens: int = 200, shapes: bool = False, progress: Progress
) -> dict[str, Any]:
    """Measure the daemon's added TTFT in ms over `n` >= 2 pairs of requests, and its throughput in token/s.

    Throughput: `streams` concurrent answers of `tokens` tokens each, every one checked to be whole and its own. With
    `shapes` both in each API that the daemon has as well.
    """
    if n < 2 or warmup < 0 or streams < 1 or tokens < 1:
        raise BenchError("a measurement needs n >= 2, warmup >= 0, streams >= 1 and tokens >= 1")
    try:
        async with targets(max(tokens, PAIR_TOKENS), progress) as (direct, daemon):
            ways = [AskedWay("direct", direct), AskedWay("daemon", daemon)]
            times = await ttfts(ways, n, warmup, progress)
            cpu_s = await request_cpu_s(ways[1], n)
            rated = await rates(ways, streams, tokens, progress)
            lag_ms = (await state_of(daemon))["loop_lag_ms"]["p99"]
            found = await shape_figures(direct, daemon, (n, warmup), (streams, tokens), progress) if shapes else {}
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        msg = f"the measurement broke off: {reason_of(error)}"
        raise BenchError(msg) from error
    added_ms = [(d - s) * 1e3 for s, d in zip(times["direct"], times["daemon"], strict=True)]
    return {
        "direct_ttft_ms_p50": round(statistics.median(times["direct"]) * 1e3, 3),
        "added_ttft_ms_p50": round(statistics.median(added_ms), 3),
        "added_ttft_ms_p99": round(statistics.quantiles(added_ms, n=100, method="inclusive")[98], 3),
        "daemon_ms_per_request": round(cpu_s * 1e3, 3),
        "streams": streams,
        "tokens_per_s": round(rated["daemon"].tokens_per_s, 1),
        "direct_tokens_per_s": round(rated["direct"].tokens_per_s, 1),
        "throughput_ratio": round(rated["daemon"].tokens_per_s / rated["direct"].tokens_per_s, 4),
        "daemon_us_per_token": round(rated["daemon"].cpu_s * 1e6, 2),
        "loop_lag_ms_p99": lag_ms,
        "tokens_per_stream": tokens,
        "n": n,
        "host": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
    } | ({"shapes": found} if shapes else {})


async def shape_figures(
    direct: Target, daemon: Target, pairs: tuple[int, int], streams: tuple[int, int], progress: Progress
) -> dict[str, dict[str, float]]:
    """Measure each API that the daemon has: what it adds to the first token, ms, and its CPU time for a token, us.

    `pairs` are the rounds and those before them, `streams` how many, and the tokens of each.
    """
    ways = [AskedWay(name, daemon, api) for name, api in APIS.items() if await has_route(daemon, api)]
    times = await ttfts([AskedWay("direct", direct), *ways], *pairs, progress)
    rated = await rates(ways, *streams, progress)
    return {
        way.name: {
            "ttft_added_ms": round(
                statistics.median(d - s for s, d in zip(times["direct"], times[way.name], strict=True)) * 1e3, 3
            ),
            "us_per_token": round(rated[way.name].cpu_s * 1e6, 2),
        }
        for way in ways
    }


async def has_route(daemon: Target, api: StreamApi) -> bool:
    """Whether the daemon speaks an API: what it does not know is a 404, an empty request to what it knows is not."""
    async with daemon.post(b"{}", api) as response:
        return bool(response.status != 404)


# The processes.


@asynccontextmanager
async def targets(tokens: int, progress: Progress) -> AsyncIterator[tuple[Target, Target]]:
    """Run the scripted server and the daemon in front of it; the direct door and the daemon's."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-bench-")))
        server_argv = command("disco_daemon.bench.loopback", "--port", "0", "--tokens", str(tokens))
        server_url = await stack.enter_async_context(child(server_argv, folder, "loopback server"))
        progress(f"loopback server: {server_url}")
        daemon_url = await stack.enter_async_context(child(daemon_argv(server_url, folder), folder, "daemon"))
        progress(f"daemon: {daemon_url}")
        direct = await stack.enter_async_context(door("direct", server_url, daemon=False))
        yield direct, await stack.enter_async_context(door("daemon", daemon_url))


@asynccontextmanager
async def door(name: str, url: str, *, daemon: bool = True) -> AsyncIterator[Target]:
    """Open a client's session for one server."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=REQUEST_S),
        headers={"Content-Type": "application/json", "Authorization": "Bearer loopback"},
        read_bufsize=2**20,
    ) as session:
        yield Target(name, url, session, daemon)


def daemon_argv(server_url: str, folder: Path) -> list[str]:
    """Write the daemon's configuration; the command that starts it."""
    config = folder / "config.toml"
    text = f"""\
[server]
base_url = {json.dumps(server_url)}
model = "loopback"
[policy]
name = "all-server"
[history]
path = {json.dumps(str(folder / "history.sqlite"))}
"""
    config.write_text(text, encoding="utf-8")
    up = ["up", "--port", "0", "--json", "--until-eof", "--no-device", "--config", str(config)]
    return verb(*up)


# The measurements.


async def ttfts(ways: Sequence[AskedWay], n: int, warmup: int, progress: Progress) -> dict[str, list[float]]:
    """Time the first token by each way, one right after the other, `n` times; s. The order changes with every round."""
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    order, shuffle = list(ways), random.Random(0).shuffle
    for i in range(-warmup, n):
        question = Question(f"p{i + warmup}", PAIR_TOKENS)
        shuffle(order)
        taken = {way.name: await ttft(way, question) for way in order}
        if i >= 0:
            for name, taken_s in taken.items():
                times[name].append(taken_s)
        if i >= 0 and (i + 1) % 50 == 0:
            progress(f"TTFT: {i + 1} of {n} rounds")
    return times


async def ttft(way: AskedWay, question: Question) -> float:
    """Ask one question; s from just before the request is sent to the first chunk with content."""
    body, first, lines = question.body(way.api), 0.0, []
    sent = time.perf_counter()
    async with way.target.post(body, way.api) as response:
        await check_status(response, way.target)
        async for line in response.content:
            now = time.perf_counter()
            lines.append(line)
            if not first and way.api.has_text(line):
                first = now - sent
    question.check(lines, way)
    return first


async def request_cpu_s(way: AskedWay, n: int) -> float:
    """Ask `n` short questions, one after the other; the CPU time that the daemon took for each, s.

    It does not depend on what else the machine does, as times to a first token do.
    """
    before = await cpu_s_of(way.target)
    for i in range(n):
        await ttft(way, Question(f"c{i}", PAIR_TOKENS))
    return (await cpu_s_of(way.target) - before) / n


async def rates(ways: Sequence[AskedWay], streams: int, tokens: int, progress: Progress) -> dict[str, Rate]:
    """Measure the throughput by each way in turn, medians of `ROUNDS`."""
    found: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    for i in range(ROUNDS):
        for way in ways:
            before = await cpu_s_of(way.target)
            tokens_per_s = await rate(way, streams, tokens)
            found[way.name].append((tokens_per_s, (await cpu_s_of(way.target) - before) / (streams * tokens)))
            progress(f"throughput: round {i + 1} of {ROUNDS}, {way.name} {tokens_per_s:,.0f} token/s")
    return {name: Rate(*map(statistics.median, zip(*each, strict=True))) for name, each in found.items()}


async def rate(way: AskedWay, streams: int, tokens: int) -> float:
    """Ask `streams` questions at once; token/s of all together. Reads raw bytes and looks at them afterwards."""
    questions = [Question(f"s{i}", tokens) for i in range(streams)]

    async def ask(body: bytes) -> bytes:
        async with way.target.post(body, way.api) as response:
            await check_status(response, way.target)
            raw: bytes = await response.read()
            return raw

    bodies = [question.body(way.api) for question in questions]
    start_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(ask(body)) for body in bodies]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    taken_s = time.perf_counter() - start_s
    for question, answer in zip(questions, answers, strict=True):
        question.check(answer.result().splitlines(), way)
    return streams * tokens / taken_s


async def cpu_s_of(target: Target) -> float:
    """Return the CPU time that a daemon has used, s; 0 of what is no daemon."""
    return float((await state_of(target))["cpu_s"]) if target.daemon else 0.0


async def state_of(daemon: Target) -> dict[str, Any]:
    """Ask the daemon how it is: how late its event loop was over the last minute, how much CPU time it has used."""
    async with daemon.session.get(f"{daemon.root}/disco/v1/state") as response:
        state: dict[str, Any] = await response.json()
    return state


async def check_status(response: aiohttp.ClientResponse, target: Target) -> None:
    """Raise unless the answer is a 200."""
    if response.status != 200:
        raise BenchError(f"{target.name} answered {response.status}: {(await response.text())[:LOG_TAIL]}")

"""The time that the daemon adds: the same scripted server, asked directly and through a daemon; all are processes."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ..program import command, verb
from .child import LOG_TAIL, BenchError, child
from .script import script

REQUEST_S = 120.0  # one answer, s; 50 streams of 200 tokens take a few on a slow machine
PAIR_TOKENS = 8  # of the answers timed for TTFT: short, so that the rest of one answer is not in the way of the next
ROUNDS = 3  # of concurrent streams, direct and daemon in turn; the median counts
MODEL = "disco"  # the daemon decides, and its policy leaves it one choice; the loopback server takes any name

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """One door to the same answers."""

    name: str
    url: str
    session: aiohttp.ClientSession

    def post(self, body: bytes) -> Any:
        """Start one chat request."""
        return self.session.post(f"{self.url}/chat/completions", data=body, allow_redirects=False)


@dataclass(frozen=True, slots=True)
class Question:
    """A streaming request whose answer is known: `tokens` tokens that no other `name` gets."""

    name: str
    tokens: int

    @property
    def prompt(self) -> str:
        """Words of this question alone, each one token: the daemon cuts an answer at `max_tokens`."""
        return " ".join(f"{self.name}{word}" for word in ("the", "quick", "brown", "fox", "jumps"))

    @property
    def body(self) -> bytes:
        """The request."""
        messages = [{"role": "user", "content": self.prompt}]
        return json.dumps({"model": MODEL, "messages": messages, "stream": True, "max_tokens": self.tokens}).encode()

    def check(self, lines: Sequence[bytes], target: Target) -> None:
        """Raise unless the stream is this question's answer, whole and ended as it should."""
        choices = [choice for line in lines if (choice := choice_of(line)) is not None]
        text = "".join(choice.get("delta", {}).get("content") or "" for choice in choices)
        if text != "".join(script(self.prompt, self.tokens)):
            msg = f"{target.name}: question {self.name} got an answer that is not its own or not whole: …{text[-80:]!r}"
            raise BenchError(msg)
        if not any(choice.get("finish_reason") for choice in choices) or b"data: [DONE]" not in map(bytes.strip, lines):
            msg = f"{target.name}: the answer to question {self.name} was not ended with finish_reason and [DONE]"
            raise BenchError(msg)


def choice_of(line: bytes) -> dict[str, Any] | None:
    """Return the first choice in a line of a stream; None if there is none."""
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return None
    document = json.loads(data)
    if "error" in document:
        msg = f"the stream carried an error: {document['error']}"
        raise BenchError(msg)
    choices = document.get("choices") or [None]
    first: dict[str, Any] | None = choices[0]
    return first


async def bench_relay(
    *, n: int = 200, warmup: int = 20, streams: int = 50, tokens: int = 200, progress: Progress
) -> dict[str, Any]:
    """Measure the daemon's added TTFT in ms over `n` >= 2 pairs of requests, and its throughput in token/s.

    Throughput: `streams` concurrent answers of `tokens` tokens each, every one checked to be whole and its own.
    """
    if n < 2 or warmup < 0 or streams < 1 or tokens < 1:
        raise BenchError("a measurement needs n >= 2, warmup >= 0, streams >= 1 and tokens >= 1")
    try:
        async with targets(max(tokens, PAIR_TOKENS), progress) as (direct, daemon):
            pairs = await paired_ttfts(direct, daemon, n, warmup, progress)
            rates = await paired_rates(direct, daemon, streams, tokens, progress)
            lag_ms = (await state_of(daemon))["loop_lag_ms"]["p99"]
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        msg = f"the measurement broke off: {error!r}"
        raise BenchError(msg) from error
    added_ms = [(d - s) * 1e3 for s, d in pairs]
    return {
        "direct_ttft_ms_p50": round(statistics.median(s for s, _ in pairs) * 1e3, 3),
        "added_ttft_ms_p50": round(statistics.median(added_ms), 3),
        "added_ttft_ms_p99": round(statistics.quantiles(added_ms, n=100, method="inclusive")[98], 3),
        "streams": streams,
        "tokens_per_s": round(rates[1], 1),
        "direct_tokens_per_s": round(rates[0], 1),
        "throughput_ratio": round(rates[1] / rates[0], 4),
        "daemon_us_per_token": round(rates[2] * 1e6, 2),
        "loop_lag_ms_p99": lag_ms,
        "tokens_per_stream": tokens,
        "n": n,
        "host": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
    }


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
        doors = []
        for name, url in (("direct", server_url), ("daemon", daemon_url)):
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=REQUEST_S),
                headers={"Content-Type": "application/json", "Authorization": "Bearer loopback"},
                read_bufsize=2**20,
            )
            doors.append(Target(name, url, await stack.enter_async_context(session)))
        yield doors[0], doors[1]


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


async def paired_ttfts(
    direct: Target, daemon: Target, n: int, warmup: int, progress: Progress
) -> list[tuple[float, float]]:
    """Time the first token at both doors, one right after the other; s. The order changes with every pair."""
    pairs = []
    for i in range(-warmup, n):
        question = Question(f"p{i + warmup}", PAIR_TOKENS)
        order = (direct, daemon) if i % 2 else (daemon, direct)
        taken = {target.name: await ttft(target, question) for target in order}
        if i >= 0:
            pairs.append((taken["direct"], taken["daemon"]))
        if i >= 0 and (i + 1) % 50 == 0:
            progress(f"TTFT: {i + 1} of {n} pairs")
    return pairs


async def ttft(target: Target, question: Question) -> float:
    """Ask one question; s from just before the request is sent to the first chunk with content."""
    body, first, lines = question.body, 0.0, []
    sent = time.perf_counter()
    async with target.post(body) as response:
        await check_status(response, target)
        async for line in response.content:
            now = time.perf_counter()
            lines.append(line)
            if not first and ((choice_of(line) or {}).get("delta") or {}).get("content"):
                first = now - sent
    question.check(lines, target)
    return first


async def paired_rates(
    direct: Target, daemon: Target, streams: int, tokens: int, progress: Progress
) -> tuple[float, float, float]:
    """Measure the throughput at both doors in turn, the limit first; token/s, medians of `ROUNDS`.

    The third figure is the CPU time that the daemon took for a token, s.
    """
    rates: dict[str, list[float]] = {"direct": [], "daemon": []}
    cpu_s: list[float] = []
    for i in range(ROUNDS):
        for target in (direct, daemon):
            before = (await state_of(target))["cpu_s"] if target is daemon else 0.0
            rates[target.name].append(await rate(target, streams, tokens))
            if target is daemon:
                cpu_s.append(((await state_of(target))["cpu_s"] - before) / (streams * tokens))
            progress(f"throughput: round {i + 1} of {ROUNDS}, {target.name} {rates[target.name][-1]:,.0f} token/s")
    return statistics.median(rates["direct"]), statistics.median(rates["daemon"]), statistics.median(cpu_s)


async def rate(target: Target, streams: int, tokens: int) -> float:
    """Ask `streams` questions at once; token/s of all together. Reads raw bytes and looks at them afterwards."""
    questions = [Question(f"s{i}", tokens) for i in range(streams)]

    async def ask(body: bytes) -> bytes:
        async with target.post(body) as response:
            await check_status(response, target)
            raw: bytes = await response.read()
            return raw

    bodies = [question.body for question in questions]
    start_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(ask(body)) for body in bodies]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    taken_s = time.perf_counter() - start_s
    for question, answer in zip(questions, answers, strict=True):
        question.check(answer.result().splitlines(), target)
    return streams * tokens / taken_s


async def state_of(daemon: Target) -> dict[str, Any]:
    """Ask the daemon how it is: how late its event loop was over the last minute, how much CPU time it has used."""
    async with daemon.session.get(daemon.url.removesuffix("/v1") + "/disco/v1/state") as response:
        state: dict[str, Any] = await response.json()
    return state


async def check_status(response: aiohttp.ClientResponse, target: Target) -> None:
    """Raise unless the answer is a 200."""
    if response.status != 200:
        msg = f"{target.name} answered {response.status}: {(await response.text())[:LOG_TAIL]}"
        raise BenchError(msg)

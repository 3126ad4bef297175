"""One streamed answer as a client hears it, and what the times of its pieces say."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

from .child import LOG_TAIL, BenchError

MODEL = "disco/device"  # llama-server takes any name
SETTLED = 8  # pieces after which an answer counts as running
MIN_TOGETHER = 0.25  # share of the tokens that must come while all answers run, or their rate says nothing
REST_S, LOOK_S = 5.0, 0.1  # for an engine's last counters after its last answer, and how often to look, s

Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Door:
    """One of the two servers; `url` ends in /v1, and `pid` is its process, 0 where that is not known."""

    name: str
    url: str
    session: aiohttp.ClientSession
    pid: int = 0

    @property
    def root(self) -> str:
        """The address without /v1."""
        return self.url.removesuffix("/v1")

    def cpu_s(self) -> float | None:
        """Return the processor time that its process and all below it have taken, s; None if that is not known."""
        if not self.pid:
            return None
        process = psutil.Process(self.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


@dataclass(slots=True)
class StreamedAnswer:
    """One streamed answer as it came here; times in s of `time.perf_counter`.

    `settled` is set once it runs: after SETTLED pieces, or at its end.
    """

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    ended: float = 0.0
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def first(self) -> float:
        """When the first piece came; an answer without text has its end for that."""
        return self.times[0] if self.times else self.ended

    @property
    def ttft(self) -> float:
        """From just before the request was sent to the first piece, s."""
        return self.first - self.sent

    @property
    def n_tokens(self) -> int:
        """Tokens really generated, as the server counts them."""
        return int(self.usage["completion_tokens"])

    @property
    def prompt(self) -> dict[str, Any]:
        """Tokens of the prompt, and how many of them were in the KV cache already, as far as the server tells."""
        details = self.usage.get("prompt_tokens_details") or {}
        return {"prompt_tokens": self.usage.get("prompt_tokens"), "cached_tokens": details.get("cached_tokens")}

    def n_between(self, begin: float, end: float) -> float:
        """Tokens that came in (begin, end]; where a piece has several, each piece counts as the mean of them."""
        return sum(begin < t <= end for t in self.times) * self.n_tokens / max(1, len(self.times))


async def ask(door: Door, chat: Chat, max_tokens: int, heard: StreamedAnswer | None = None) -> StreamedAnswer:
    """Stream one greedy answer; into `heard` while it comes, if that is given. Raises BenchError."""
    heard = heard or StreamedAnswer()
    body = {
        "model": MODEL, "messages": chat, "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    heard.sent = time.perf_counter()
    async with door.session.post(f"{door.url}/chat/completions", json=body, allow_redirects=False) as response:
        if response.status != 200:
            raise BenchError(f"{door.name} answered {response.status}: {(await response.text())[:LOG_TAIL]}")
        async for line in response.content:
            now = time.perf_counter()
            if line.startswith(b"data: {"):
                _take(heard, json.loads(line[6:]), now, door)
    heard.settled.set()
    if heard.finish is None or "completion_tokens" not in heard.usage:
        raise BenchError(f"{door.name}: an answer ended without a finish_reason or without its usage")
    return heard


def _take(heard: StreamedAnswer, chunk: dict[str, Any], now: float, door: Door) -> None:
    if "error" in chunk:
        raise BenchError(f"{door.name}: the stream carried an error: {chunk['error']}")
    heard.usage = chunk.get("usage") or heard.usage
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            heard.text += text
            heard.times.append(now)
            if len(heard.times) == SETTLED:
                heard.settled.set()
        if choice["finish_reason"]:
            heard.finish, heard.ended = choice["finish_reason"], now


async def state_of(door: Door) -> dict[str, Any]:
    """The daemon's state. Raises aiohttp.ClientError."""
    async with door.session.get(f"{door.root}/disco/v1/state") as response:
        response.raise_for_status()
        state: dict[str, Any] = await response.json()
    return state


def device_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `GET /disco/v1/state` has about the device and its engine."""
    device = state.get("endpoints", {}).get("device", {})
    return dict(device) | dict(device.get("engine") or {}) | dict(state.get("device") or {})


async def at_rest(door: Door) -> dict[str, Any]:
    """Return the daemon's state once its engine has sent its last counters, or after REST_S. Raises ClientError."""
    until = time.perf_counter() + REST_S
    while True:
        state = await state_of(door)
        engine = device_state(state)
        busy = sum(engine.get(key) or 0 for key in ("running", "paused", "swapped", "waiting"))
        if not busy or time.perf_counter() > until:
            return state
        await asyncio.sleep(LOOK_S)


# --- what the times say ----------------------------------------------------------------------------------------------


def rate_together(answers: Sequence[StreamedAnswer]) -> float | None:
    """Token/s of all answers while all of them run: from the last one's first piece to the first one's last.

    Pure decoding. None where too few tokens came in that time, as when some had to wait for others to end.
    """
    begin, end = max(a.first for a in answers), min(a.times[-1] if a.times else a.ended for a in answers)
    n = sum(a.n_between(begin, end) for a in answers)
    return n / (end - begin) if n > MIN_TOGETHER * sum(a.n_tokens for a in answers) else None


def rate_whole(answers: Sequence[StreamedAnswer]) -> float:
    """Token/s of all answers from the first request to the end of the last answer: with prefill and waiting."""
    return sum(a.n_tokens for a in answers) / (max(a.ended for a in answers) - min(a.sent for a in answers))


def worst_gap(times: Sequence[float], begin: float, end: float) -> float:
    """Longest time between two pieces that overlaps [begin, end], s; 0 if there is none."""
    return max((b - a for a, b in itertools.pairwise(times) if b > begin and a < end), default=0.0)

"""Measures the server: the way there, the time to the first token, and how it continues a partial answer.

Costs what it asks: short streams, and a probe of some 200 tokens where its way to continue is unknown.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from statistics import median
from urllib.parse import urlsplit

import numpy as np
from msgspec.structs import replace

from ..clock import Clock
from ..endpoints.probe import probe
from ..endpoints.server import Server
from ..errors import EndpointError
from ..estimation.prefill_curve import mean95
from ..plain import reason_of
from ..system.net import without_credentials
from ..types import GenerationRequest, Sampling, Usage
from .device import Steps
from .saved import ServerFigures

N_QUICK, N_FULL = 5, 20  # streams
N_RTT = 5
CONNECT_S = 5.0  # one connection, of which the round trip is timed
MAX_TOKENS = 8  # of an answer: its first token is what is wanted
MAX_FAILED = 3  # in a row: then the server is left alone
QUESTIONS = ("Name a colour.", "Name a river.", "Name a fruit.", "Name a planet.", "Name a bird.")


async def measure_server(server: Server, clock: Clock, steps: Steps, *, n: int, may_probe: bool) -> ServerFigures:
    """Return the figures of `n` streams; a server that fails is no error. It was not started yet, and is closed.

    `may_probe`: the user lets an unknown server be asked how it continues answers; best while the device is up, whose
    tokens it may understand.
    """
    steps.expect(n + 2)
    wrong: list[str] = []
    await server.start()
    try:
        rtts = await _rtts(server.config.base_url, clock, steps, wrong)
        ttfts, n_failed, tokens = await _ttfts(server, clock, steps, n, wrong)
        probed = await _probe(server, clock, steps) if ttfts and may_probe and server.should_probe else 0
    finally:
        await server.close()
    found = ServerFigures(
        base_url=without_credentials(server.config.base_url),
        model=server.model,
        n=len(ttfts),
        n_failed=n_failed,
        tokens=tokens + probed,
        continuation="untried" if server.should_probe else server.status()["continuation"],
        probed=server.profile is not None,
        rtt_s=median(rtts) if rtts else None,
        error=wrong[-1] if wrong else "",
    )
    return _with_ttfts(found, ttfts) if ttfts else found


def _with_ttfts(found: ServerFigures, ttfts: list[float]) -> ServerFigures:
    mean, interval = mean95(ttfts)
    p50, p90 = (float(p) for p in np.quantile(ttfts, (0.5, 0.9)))
    return replace(
        found,
        ttft_mean_s=mean,
        ttft_interval=interval,
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_max_s=max(ttfts),
        samples=ttfts,
    )


async def _rtts(url: str, clock: Clock, steps: Steps, wrong: list[str]) -> list[float]:
    """Return the times of TCP connects, s: one round trip. The first one, which may look the name up, is left out."""
    steps.begin("connecting to the server")
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    taken = []
    try:
        for _ in range(1 + N_RTT):
            started = clock.now()
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(parts.hostname, port)
            taken.append(clock.now() - started)
            writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await writer.wait_closed()
    except (OSError, TimeoutError) as e:
        # Not the end: behind a proxy this machine reaches the server in no other way.
        wrong.append(f"cannot connect to {parts.hostname}:{port}: {reason_of(e)}")
    steps.end()
    return taken[1:]


async def _ttfts(server: Server, clock: Clock, steps: Steps, n: int, wrong: list[str]) -> tuple[list[float], int, int]:
    """TTFTs of short streams, s; how many gave none; tokens processed."""
    ttfts: list[float] = []
    n_failed = in_a_row = tokens = 0
    for i in range(n):
        if in_a_row == MAX_FAILED:
            break
        steps.begin(f"asking the server: {i + 1} of {n}")
        usage = Usage()
        message = {"role": "user", "content": f"{QUESTIONS[i % len(QUESTIONS)]} ({i + 1})"}
        request = GenerationRequest(f"profile-server-{i}", (message,), Sampling(max_tokens=MAX_TOKENS))
        try:
            ttfts.append(await _ttft(server, request, usage, clock))
            in_a_row = 0
        except EndpointError as e:
            wrong.append(str(e))
            n_failed, in_a_row = n_failed + 1, in_a_row + 1
        tokens += usage.prompt_tokens + usage.completion_tokens
        steps.end()
    return ttfts, n_failed, tokens


async def _ttft(server: Server, request: GenerationRequest, usage: Usage, clock: Clock) -> float:
    """Ends within the server's own time-outs. Raises EndpointError."""
    started, first = clock.now(), None
    async with aclosing(server.generate(request, usage)) as events:
        async for _ in events:
            first = first or clock.now()
    assert first is not None, "every answer has an end"
    return first - started


async def _probe(server: Server, clock: Clock, steps: Steps) -> int:
    """Find out how it continues answers, as the daemon would; tokens that it took."""
    steps.begin("finding out how the server continues answers")
    profile = await probe(server, clock)
    if profile is not None:
        server.adopt(profile)
    steps.end()
    return 0 if profile is None else profile.tokens

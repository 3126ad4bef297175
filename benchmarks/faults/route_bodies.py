"""How soon a bad body is refused on each route that takes one, and whether in the shape of that route's API."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import tomlkit

from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.loopback import LoopbackServer
from disco_daemon.system.program import verb

from .fuzz_http import REAL, mutate, scramble

BODIES = {path: body for method, path, body in REAL if method == "POST" and body is not None}
ROUTES = [path for path in BODIES if not path.startswith("/disco/") and path != "/api/pull"]
MOST = 15  # bodies tried for each bad one: a mutated one may be a good one


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a bad body came to."""

    sent: bytes
    status: int
    said: bytes
    took_s: float

    def fault(self, path: str) -> str | None:
        """Return what is wrong with a refusal on a route; None if nothing is."""
        if self.status >= 500:
            return f"{self.status}: {self.said!r} to {self.sent!r}"
        return None if has_own_shape(path, json.loads(self.said)) else f"{self.said!r} to {self.sent!r}"


def has_own_shape(path: str, told: Any) -> bool:
    """Whether an error is in the shape of this path's API."""
    if path.startswith("/api/"):
        return isinstance(told["error"], str) and told.keys() <= {"error", "code"}
    if path.startswith("/v1/messages"):
        return bool(told["type"] == "error" and told["error"].keys() <= {"type", "message", "code"})
    if path == "/infill":
        return set(told["error"]) == {"message", "type", "code"} and isinstance(told["error"]["code"], int)
    return set(told["error"]) == {"message", "type", "param", "code"}


async def refusals(root: str, session: aiohttp.ClientSession, path: str, n: int) -> AsyncIterator[Refusal]:
    """Send mutated bodies to a route until `n` of them are refused. Raises BenchError if too few are."""
    rng, n_refused = random.Random(path), 0
    for _ in range(MOST * n):
        body = json.dumps(mutate(BODIES[path], rng)).encode()
        sent = scramble(body, rng) if rng.random() < 0.5 else body
        began = time.perf_counter()
        async with session.post(f"{root}{path}", data=sent) as response:
            said = await response.read()
        if response.status >= 400:
            yield Refusal(sent, response.status, said, time.perf_counter() - began)
            n_refused += 1
            if n_refused == n:
                return
    msg = f"{path}: only {n_refused} of {MOST * n} bodies were bad"
    raise BenchError(msg)


@asynccontextmanager
async def _relay(folder: Path) -> AsyncIterator[str]:
    """Start a daemon with a server that answers at once with one token; its address without `/v1`."""
    async with LoopbackServer(tokens=1) as server:
        config = folder / "bodies.toml"
        config.write_text(tomlkit.dumps({"server": {"base_url": server.url, "model": "loopback", "probe": False}}))
        argv = verb("up", "--port", "0", "--json", "--until-eof", "--no-device", "--config", str(config))
        async with child([*argv, "--history", str(folder / "bodies.sqlite")], folder, "bodies") as url:
            yield url.removesuffix("/v1")


async def measure(n: int) -> dict[str, Any]:
    """Return median and worst time of `n` refusals on each route, ms, and what is wrong with some."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="disco-bodies-") as folder:
        async with _relay(Path(folder)) as root, aiohttp.ClientSession() as session:
            for path in ROUTES:
                told = [refusal async for refusal in refusals(root, session, path, n)]
                found[path] = {
                    "n": n,
                    "median_ms": round(1e3 * statistics.median(one.took_s for one in told), 1),
                    "worst_ms": round(1e3 * max(one.took_s for one in told), 1),
                    "faults": [fault for one in told if (fault := one.fault(path))],
                }
    return found


def table(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = [f"{'refusals of bad bodies':28} {'number':>6} {'faults':>6} {'median':>9} {'worst':>9}"]
    for path, told in found.items():
        times = f"{told['median_ms']:6.1f} ms {told['worst_ms']:6.1f} ms"
        lines += [f"{path:28} {told['n']:6} {len(told['faults']):6} {times}", *told["faults"][:3]]
    return "\n".join(lines)

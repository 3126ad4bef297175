"""Measures what the daemon adds to each token of many slow streams: the same load directly, then through the daemon.

`python -m benchmarks.relay.streams [--streams 500] [--tokens 400] [--arrivals 25] [--rounds 1] [--json]`; the last line
is JSON, delays in ms, memory in MiB. A scripted server makes 10 token/s for each stream; streams begin at random times,
so many a second that by the numbers above the last one comes in the middle of the first one's 40 s: all are there at
once for 20 s. A token's text is the time when it was sent, so its delay is known when it comes. Server and reader are
one process on one core; the daemon has another one to itself (where the system lets a process choose; macOS does not).

`added_ms_p99` is the 99th percentile of the delay through the daemon less that of the direct one; `worst_added_ms_p99`
takes the direct one's median from every token instead, as if all that is slow were the daemon's. `all_at_once_ms` are
the delays of the tokens that were sent while all streams were under way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.loopback import SSE_HEADERS, LoopbackServer
from disco_daemon.bench.relay import daemon_argv
from disco_daemon.bench.relay_apis import MODEL, choice_of
from disco_daemon.bench.script import DONE, Exchange

TPS = 10.0  # of each stream, token/s
ARRIVALS_PER_S = 25.0  # of new streams: as many as end, where 500 are under way that take 20 s each
SPARE_S = 60.0  # for an answer beyond its own time; only a failure needs it
LOOK_S = 0.1  # between two looks at the daemon's memory
MOST_ADDED_MS = 10.0
MOST_RSS_MIB = 400.0
FILES_EACH = 4  # descriptors a stream takes here, at most: reader and server, asked directly or by the daemon
_LETTERS = str.maketrans("0123456789", "abcdefghij")
_DIGITS = str.maketrans("abcdefghij", "0123456789")


def stamp() -> str:
    """Now as a word of one token, to the microsecond."""
    return f"{str(time.monotonic_ns() // 1000).translate(_LETTERS)} "


def sent_at_s(word: str) -> float:
    """Return the time at which a token was sent, s."""
    return int(word.translate(_DIGITS)) / 1e6


class Paced(LoopbackServer):
    """Writes each token when it is due by the stream's own beginning, with the time at which it leaves."""

    n_open_most = 0

    def on_request(self, exchange: Exchange) -> None:
        self.n_open_most = max(self.n_open_most, self.open_streams + 1)

    async def stream(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE_HEADERS)
        await response.prepare(request)
        head = json.dumps(exchange.envelope("chat.completion.chunk"), separators=(",", ":"))
        before = f'data: {head[:-1]},"choices":[{{"index":0,"delta":{{"content":"'
        after = '"},"logprobs":null,"finish_reason":null}]}\n\n'
        began, now = time.monotonic(), time.monotonic
        for i in range(len(exchange.tokens)):
            await asyncio.sleep(max(0.0, began + i * self.interval_s - now()))
            await response.write(f"{before}{stamp()}{after}".encode())
        await response.write(exchange.last_events() + DONE)
        await response.write_eof()
        return response


@dataclass(slots=True)
class Load:
    """The result of one load: the delay of each token, s, those of the first ones apart, and the whole streams."""

    delays: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)  # of tokens sent while all streams were under way
    completed: int = 0
    errors: list[str] = field(default_factory=list)
    rss: int = 0
    cpu_s: float = 0.0
    took_s: float = 0.0

    def add(self, other: Load) -> None:
        """Another round of the same."""
        self.delays += other.delays
        self.firsts += other.firsts
        self.full += other.full
        self.completed += other.completed
        self.errors += other.errors
        self.rss = max(self.rss, other.rss)
        self.cpu_s += other.cpu_s
        self.took_s += other.took_s

    def of(self, pieces: list[tuple[float, bytes]], tokens: int) -> list[tuple[float, float]]:
        """Take what one stream was sent, and when each piece came; returns when each token was sent and came."""
        words, came, ended, rest = [], [], False, b""
        for at, piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                choice = choice_of(line)
                found = ((choice or {}).get("delta") or {}).get("content", "").split()
                words += found
                came += [at] * len(found)
                ended |= bool((choice or {}).get("finish_reason"))
        whole = b"".join(piece for _, piece in pieces).endswith(DONE)
        if len(words) != tokens or not ended or not whole:
            msg = f"{len(words)} of {tokens} tokens, finish_reason {ended}, [DONE] {whole}"
            raise BenchError(msg)
        times = [(sent_at_s(word), at) for at, word in zip(came, words, strict=True)]
        delays = [at - sent for sent, at in times]
        self.firsts.append(delays[0])
        self.delays += delays
        self.completed += 1
        return times

    def of_all(self, streams: list[list[tuple[float, float]]]) -> None:
        """Take the tokens that were sent while all of these streams were under way."""
        if streams:
            begin, end = max(times[0][0] for times in streams), min(times[-1][0] for times in streams)
            self.full += [at - sent for times in streams for sent, at in times if begin <= sent <= end]


async def run_load(url: str, streams: int, tokens: int, per_s: float, seed: int) -> Load:
    """Stream `streams` answers at the same time, and judge them when all have come."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What time is it?"}],
            "stream": True,
            "max_tokens": tokens,
        }
    ).encode()
    rng, load, now = random.Random(seed), Load(), time.monotonic
    headers = {"Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=SPARE_S + streams / per_s + tokens / TPS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:

        async def ask(after_s: float) -> list[tuple[float, bytes]]:
            await asyncio.sleep(after_s)
            async with session.post(f"{url}/chat/completions", data=body, allow_redirects=False) as response:
                if response.status != 200:
                    msg = f"{response.status}: {(await response.text())[:200]}"
                    raise BenchError(msg)
                return [(now(), piece) async for piece in response.content.iter_any()]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(catch(ask(rng.uniform(0, streams / per_s)))) for _ in range(streams)]
    whole = []
    for task in tasks:
        try:
            if isinstance(found := task.result(), Exception):
                raise found
            whole.append(load.of(found, tokens))
        except (BenchError, aiohttp.ClientError, TimeoutError, ValueError) as e:
            load.errors.append(f"{type(e).__name__}: {e}")
    load.of_all(whole)
    return load


async def catch(asking: Any) -> Any:
    """Return the result, or the error that ended it: one stream's end is not the others'."""
    try:
        return await asking
    except (BenchError, aiohttp.ClientError, TimeoutError) as e:
        return e


async def watch(process: psutil.Process | None, load: Any) -> Load:
    """Return a load, with the daemon's memory and CPU time meanwhile."""
    task, most = asyncio.ensure_future(load), 0
    began, before = time.monotonic(), sum(process.cpu_times()[:2]) if process else 0.0
    while not task.done():
        most = max(most, process.memory_info().rss if process else 0)
        await asyncio.wait([task], timeout=LOOK_S)
    found: Load = task.result()
    found.rss, found.took_s = most, time.monotonic() - began
    found.cpu_s = sum(process.cpu_times()[:2]) - before if process else 0.0
    return found


@contextlib.contextmanager
def on_core(i: int) -> Iterator[int | None]:
    """Be on one core, the `i`th of those that there are; None where no process may choose, or where one is all."""
    if not hasattr(os, "sched_setaffinity") or len(cores := sorted(os.sched_getaffinity(0))) <= i:
        yield None
        return
    os.sched_setaffinity(0, {cores[i]})
    try:
        yield cores[i]
    finally:
        os.sched_setaffinity(0, cores)


async def measure(streams: int, tokens: int, per_s: float, rounds: int) -> dict[str, Any]:
    """Run both loads in turn, the limit first."""
    loads = {"direct": Load(), "daemon": Load()}
    with tempfile.TemporaryDirectory(prefix="disco-bench-") as name:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(Paced(tokens=tokens, interval_s=1 / TPS))
            with on_core(1) as theirs:  # a child is where its parent was
                argv = daemon_argv(server.url, Path(name))
                daemon_url = await stack.enter_async_context(child(argv, Path(name), "daemon"))
            ours = stack.enter_context(on_core(0))
            process = await daemon_process(daemon_url)
            for i in range(rounds):
                for kind, url in (("direct", server.url), ("daemon", daemon_url)):
                    gc.collect()
                    gc.disable()  # a pause of the instrument's own would count as a delay
                    found = await watch(process if kind == "daemon" else None, run_load(url, streams, tokens, per_s, i))
                    loads[kind].add(found)
                    print(f"round {i + 1} of {rounds}, {kind}: {row(found)}", file=sys.stderr)
            n_most = server.n_open_most
    return figures(loads["direct"], loads["daemon"], streams, tokens, rounds) | {
        "arrivals_per_s": per_s,
        "most_at_once": n_most,
        "cores": {"reader_and_server": ours, "daemon": theirs},
    }


async def daemon_process(url: str) -> psutil.Process:
    """The daemon's process."""
    state_url = f"{url.removesuffix('/v1')}/disco/v1/state"
    async with aiohttp.ClientSession() as session, session.get(state_url) as response:
        return psutil.Process((await response.json())["pid"])


def quantile(values: list[float], q: int) -> float:
    """A percentile, ms."""
    if len(values) < 2:
        return float("nan")
    return round(statistics.quantiles(values, n=100, method="inclusive")[q - 1] * 1e3, 3)


def row(load: Load) -> str:
    """One load in words."""
    return f"{load.completed} whole, delay p50 {quantile(load.delays, 50)} ms, p99 {quantile(load.delays, 99)} ms"


def figures(direct: Load, daemon: Load, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the figures, and whether they keep the promise."""
    added = round(quantile(daemon.delays, 99) - quantile(direct.delays, 99), 3)
    rss_mib = round(daemon.rss / 2**20, 1)
    completed = {"direct": direct.completed, "daemon": daemon.completed}
    return {
        "ok": set(completed.values()) == {streams * rounds} and added < MOST_ADDED_MS and rss_mib < MOST_RSS_MIB,
        "completed": completed,
        "of": streams * rounds,
        "direct_ms": {f"p{q}": quantile(direct.delays, q) for q in (50, 99)},
        "daemon_ms": {f"p{q}": quantile(daemon.delays, q) for q in (50, 99)},
        "added_ms_p50": round(quantile(daemon.delays, 50) - quantile(direct.delays, 50), 3),
        "added_ms_p99": added,
        "worst_added_ms_p99": round(quantile(daemon.delays, 99) - quantile(direct.delays, 50), 3),
        "first_token_ms_p99": {"direct": quantile(direct.firsts, 99), "daemon": quantile(daemon.firsts, 99)},
        "rss_mib": rss_mib,
        "daemon_us_per_token": round(daemon.cpu_s / max(1, len(daemon.delays)) * 1e6, 1),
        "daemon_core_share": round(daemon.cpu_s / daemon.took_s, 3),
        "all_at_once_ms": {
            kind: {f"p{q}": quantile(load.full, q) for q in (50, 99)} | {"n": len(load.full)}
            for kind, load in (("direct", direct), ("daemon", daemon))
        },
        "streams": streams,
        "tokens": tokens,
        "tps": TPS,
        "errors": (direct.errors + daemon.errors)[:3],
        "host": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
    }


def summary(found: dict[str, Any]) -> str:
    """Return the figures as text, the limit first."""
    rows = [
        f"limit: p99 of what is added to a token < {MOST_ADDED_MS:g} ms, memory < {MOST_RSS_MIB:g} MiB, all whole",
        f"{found['streams']} streams at {TPS:g} token/s, {found['most_at_once']} at once",
    ]
    for name, kind in (("directly", "direct"), ("through the daemon", "daemon")):
        n, delays = found["completed"][kind], found[f"{kind}_ms"]
        rows.append(f"{name:18} {n:6} whole   p50 {delays['p50']:8} ms   p99 {delays['p99']:8} ms")
    full = found["all_at_once_ms"]
    if full["daemon"]["n"]:
        p99 = f"directly p99 {full['direct']['p99']} ms, through the daemon {full['daemon']['p99']} ms"
        rows.append(f"while all were there ({full['daemon']['n']} tokens): {p99}")
    worst, us, share = found["worst_added_ms_p99"], found["daemon_us_per_token"], found["daemon_core_share"]
    rows.append(
        f"added: p50 {found['added_ms_p50']} ms, p99 {found['added_ms_p99']} ms; to the direct median {worst} ms"
    )
    rows.append(f"the daemon: {found['rss_mib']} MiB, {us} us of CPU a token, {share:.0%} of a core")
    return "\n".join([*rows, *found["errors"]])


def main() -> int:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--arrivals", type=float, default=ARRIVALS_PER_S, help="new streams a second")
    parser.add_argument("--rounds", type=int, default=1, help="of both loads in turn")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    if args.streams < 1 or args.tokens < 1 or args.rounds < 1 or not args.arrivals > 0:
        parser.error("--streams, --tokens and --rounds are at least 1, --arrivals more than 0")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 256 + FILES_EACH * args.streams
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        found = asyncio.run(measure(args.streams, args.tokens, args.arrivals, args.rounds))
    except BenchError as e:
        print(e, file=sys.stderr)
        return 1
    if not args.json:
        print(summary(found))
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

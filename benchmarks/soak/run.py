"""Many clients and a fault every two seconds: every promise holds, and nothing is left behind.

The server is another daemon with the same model behind a proxy that breaks its connections, so that every answer has
one text: whoever makes it, however often it moves, the reader gets that text, or a beginning of it and the word that it
is not whole. Beside the proxy's faults engines are killed and stopped, settings are read again, crowds come and go.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import tomlkit

from disco_daemon.bench.child import BenchError, child
from disco_daemon.models.default import fetch_default_model
from disco_daemon.system.program import verb

from .clients import KEY, PRIVATE, Clients, SoakVerdict
from .proxy import Proxy

FAULT_S = 2.0  # from one fault to the next
STALL_S = 3.0  # longer than a source may say nothing (`handoff.stall_s`)
STOP_S = 1.5  # an engine is stopped for
WARM_S = 10.0  # of traffic without faults, before the counts that have to come back
EARLY_SHARE, EARLY_S = 1 / 6, 300.0  # memory is compared with that after five minutes, or a sixth of a shorter run
SAMPLE_S = 5.0  # between two looks at memory and history
QUIET_S = 90.0  # until all is at rest again: an idle connection to a server is kept for some seconds
# asyncio's pool, which is filled as it is needed, and kept. Python counts the machine's processors for it, so we do.
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
HISTORY_ROWS = 1000  # the most that one question to the daemon gets
# Asked for between two samples, where some 40 requests end: an answer that grew with the run would count as its memory.
HISTORY_ROWS_SAMPLED = 200
OK_200 = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
BODY = b'{"error":{"message":"injected","type":"server_error","code":null,"param":null}}'

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SoakSetup:
    """`minutes` of `clients` at a time, seeded; a fault every `fault_s`, s."""

    minutes: float = 30.0
    clients: int = 5
    fault_s: float = FAULT_S
    seed: int = 1


@dataclass(slots=True)
class Soak:
    """The daemon under test at `url`, its process, and what is between it and its server."""

    setup: SoakSetup
    url: str
    process: psutil.Process
    proxy: Proxy
    clients: Clients
    session: aiohttp.ClientSession
    drawn: random.Random
    n_faults: Counter[str] = field(default_factory=Counter)
    rss: list[tuple[float, int]] = field(default_factory=list)
    bills: dict[str, float] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """The daemon's address without /v1."""
        return self.url.removesuffix("/v1")

    async def document(self, path: str) -> Any:
        """One of the daemon's JSON documents. Raises aiohttp.ClientError, TimeoutError."""
        async with self.session.get(f"{self.root}{path}") as response:
            response.raise_for_status()
            return await response.json()

    # --- the run ---------------------------------------------------------------------------------------------------

    async def run(self, progress: Progress) -> dict[str, Any]:
        """Warm up, count, break things, let all come to rest, count again."""
        async with self._clients():
            await asyncio.sleep(WARM_S)
        before = await self._at_rest(lambda counts: True)
        progress(f"at rest after {WARM_S:g} s without faults: {before}")
        began, length_s = time.monotonic(), 60 * self.setup.minutes
        async with self._clients(), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._break(progress)), group.create_task(self._sample())]
            await asyncio.sleep(length_s)
            for task in tasks:
                task.cancel()
        after = await self._at_rest(lambda counts: all(counts[n] <= before[n] for n in before if n != "threads"))
        await self._take_bills()
        state = await self.document("/disco/v1/state")
        return self._figures(before, after, state, time.monotonic() - began)

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.clients.ask_for_ever(i)) for i in range(self.setup.clients)]
        try:
            yield
        finally:
            self.clients.stop()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            for failed in done:
                if isinstance(failed, BaseException) and not isinstance(failed, asyncio.CancelledError):
                    self.clients.verdict.broken.append(f"a client ended: {failed!r}")

    async def _sample(self) -> None:
        while True:
            self.rss.append((time.monotonic(), self.process.memory_info().rss))
            with suppress(aiohttp.ClientError, TimeoutError):
                await self._take_bills(HISTORY_ROWS_SAMPLED)
            await asyncio.sleep(SAMPLE_S)

    async def _take_bills(self, n_rows: int = HISTORY_ROWS) -> None:
        rows = (await self.document(f"/disco/v1/history?limit={n_rows}"))["data"]
        self.bills |= {f"{row['request_id']} {row['created']}": row["server_usd"] for row in rows}

    async def _at_rest(self, enough: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Return what the daemon holds once nothing runs; wait until that is `enough`, or until the time is over."""
        counts: dict[str, int] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                while not counts or counts["running"] or not enough(counts):
                    state = await self.document("/disco/v1/state")
                    counts = self._counts(state)
                    await asyncio.sleep(0.5)  # another process has no event to wait for
        return counts

    def _counts(self, state: dict[str, Any]) -> dict[str, int]:
        device = state["endpoints"]["device"]
        engine = device["engine"] or {}
        busy = sum(engine.get(name, 0) for name in ("running", "paused", "swapped", "waiting"))
        loading = int(device["state"] not in ("ready", "unloaded"))
        return {
            "running": state["in_flight"] + device["in_flight"] + loading,
            "cells": busy,
            "tasks": state["tasks"],
            "fds": self.process.num_fds(),
            "threads": self.process.num_threads(),
            "children": len(self.process.children(recursive=True)),
        }

    def _figures(
        self, before: dict[str, int], after: dict[str, int], state: dict[str, Any], took_s: float
    ) -> dict[str, Any]:
        verdict = self.clients.verdict
        if self.proxy.seen:
            verdict.broken.append("a private question went to the server")
        grown = {name: after[name] - before[name] for name in before}
        grown["threads"] -= POOL_THREADS
        left = {name: max(0, n) for name, n in grown.items()}
        return {
            "minutes": round(took_s / 60, 2),
            "requests": sum(verdict.kinds.values()),
            "faults": sum(self.n_faults.values()),
            "broken": len(verdict.broken),
            "rss_growth": self._growth(),
            "rss_mib": self._by_minute(),
            "fds_left": left["fds"],
            "tasks_left": left["tasks"],
            "cells_left": left["cells"],
            "lag_ms_p99": state["loop_lag_ms"]["p99"],
            "ledger_gap_usd": sum(self.bills.values()),
            "threads_left": left["threads"],
            "children_left": left["children"],
            "running_left": left["running"],
            "whole": verdict.n_whole,
            "told_broken_off": verdict.n_told,
            "moved": verdict.n_moved,
            "kinds": dict(verdict.kinds),
            "fault_kinds": dict(self.n_faults),
            "what_broke": verdict.broken[:20],
            "restarts": state["endpoints"]["device"]["restarts"],
            "host": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
        }

    def _growth(self) -> float | None:
        """Of the daemon's memory: the median of the last samples over that after the first minutes, less 1."""
        if len(self.rss) < 4:
            return None
        first, last = self.rss[0][0], self.rss[-1][0]
        early_at = first + min(EARLY_S, EARLY_SHARE * (last - first))
        window_s = max(3 * SAMPLE_S, 0.05 * (last - first))
        early = [rss for at, rss in self.rss if early_at <= at <= early_at + window_s]
        late = [rss for at, rss in self.rss if at >= last - window_s]
        return round(statistics.median(late) / statistics.median(early) - 1, 4) if early and late else None

    def _by_minute(self) -> list[float]:
        """Return the daemon's memory of each minute, the median of its samples, MiB."""
        minutes: dict[int, list[int]] = {}
        for at, rss in self.rss:
            minutes.setdefault(int((at - self.rss[0][0]) / 60), []).append(rss)
        return [round(statistics.median(found) / 2**20, 1) for found in minutes.values()]

    # --- the faults ------------------------------------------------------------------------------------------------

    async def _break(self, progress: Progress) -> None:
        """One fault after the other; each ends before the next begins, or is over at once."""
        faults: dict[str, Callable[[], Awaitable[None]]] = {
            "cut": self._cut, "cut later": self._cut_later, "stall": self._stall, "refuse": self._refuse,
            "trickle": self._trickle, "429": self._limit, "500": self._fail, "web page": self._page,
            "nothing": self._nothing, "reload": self._reload, "crowd": self._crowd, "engine killed": self._kill,
            "engine stopped": self._stop_engine,
        }  # fmt: skip
        while True:
            due = time.monotonic() + self.setup.fault_s
            name = self.drawn.choice(list(faults))
            self.n_faults[name] += 1
            with suppress(aiohttp.ClientError, TimeoutError, psutil.Error, ProcessLookupError):
                await faults[name]()
            if sum(self.n_faults.values()) % 30 == 0:
                verdict = self.clients.verdict
                counts = f"{sum(verdict.kinds.values())} requests, {len(verdict.broken)} broken promises"
                progress(f"{sum(self.n_faults.values())} faults, {counts}")
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _cut(self) -> None:
        self.proxy.cut()

    async def _cut_later(self) -> None:
        self.proxy.cut_after = self.drawn.randint(200, 8000)

    async def _stall(self) -> None:
        async with self.proxy.stalled():
            await asyncio.sleep(STALL_S)

    async def _refuse(self) -> None:
        self.proxy.refusing = True
        self.proxy.cut()
        try:
            await asyncio.sleep(self.setup.fault_s)
        finally:
            self.proxy.refusing = False

    async def _trickle(self) -> None:
        self.proxy.trickling = True
        try:
            await asyncio.sleep(self.setup.fault_s)
        finally:
            self.proxy.trickling = False

    async def _limit(self) -> None:
        head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
        self._instead(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY), 2)

    async def _fail(self) -> None:
        head = b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self._instead(head + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY), 2)

    async def _page(self) -> None:
        page = b"<html>Sign in to this network</html>"
        self._instead(OK_200 % (b"text/html", len(page), page), 2)

    async def _nothing(self) -> None:
        self._instead(OK_200 % (b"text/event-stream", 0, b""), 2)

    def _instead(self, response: bytes, n: int) -> None:
        """Answer the server's next connections with this; those that are kept open are closed first."""
        self.proxy.instead, self.proxy.n_instead = response, n
        self.proxy.cut()

    async def _reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    async def _crowd(self) -> None:
        await self.clients.crowd()

    async def _kill(self) -> None:
        os.kill(await self._engine(), signal.SIGKILL)

    async def _stop_engine(self) -> None:
        pid = await self._engine()
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOP_S)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _engine(self) -> int:
        """The engine's process number. Raises ProcessLookupError while there is none."""
        pid = (await self.document("/disco/v1/state"))["endpoints"]["device"]["pid"]
        if pid is None:
            raise ProcessLookupError
        return int(pid)


async def bench_soak(setup: SoakSetup, progress: Progress) -> dict[str, Any]:
    """Run it all. Raises BenchError."""
    model = await asyncio.to_thread(fetch_default_model, progress)
    drawn = random.Random(setup.seed)
    try:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-soak-")))
            server = {"device": {"rounding": "exact", "autotune": False}}
            behind = await stack.enter_async_context(child(_up(folder, "server", server, model), folder, "server"))
            proxy = await stack.enter_async_context(Proxy(int(behind.split(":")[2].split("/")[0]), PRIVATE.encode()))
            argv = _up(folder, "daemon", _settings(proxy.port), model, "--policy", "race")
            url = await stack.enter_async_context(child(argv, folder, "daemon"))
            timeout = aiohttp.ClientTimeout(total=120.0)
            head = {"Authorization": f"Bearer {KEY}"}
            # A connection for each request: those that a client keeps are not what the daemon has left behind.
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=connector, timeout=timeout, headers=head)
            )
            clients = Clients(session, url, drawn, SoakVerdict())
            progress("asking the server what each answer is")
            await clients.learn(behind)
            process = _process_of(folder)
            soak = Soak(setup, url, process, proxy, clients, session, drawn)
            figures = await soak.run(progress)
            ledger = (await soak.document("/disco/v1/ledger?days=2"))["data"]
            figures["ledger_gap_usd"] = abs(sum(day["server_usd"] for day in ledger) - figures["ledger_gap_usd"])
            return figures
    except (TimeoutError, aiohttp.ClientError, ValueError, psutil.Error) as error:
        msg = f"the measurement broke off: {error!r}"
        raise BenchError(msg) from error


def _settings(port: int) -> dict[str, Any]:
    return {
        "api": {"key": KEY},
        "server": {
            "base_url": f"http://127.0.0.1:{port}/v1", "model": "disco/device", "continuation": "token_ids",
            "probe": False, "first_token_timeout_s": 6.0, "token_timeout_s": 6.0,
            "input_usd_per_mtok": 0.15, "output_usd_per_mtok": 0.6,
        },
        "device": {"rounding": "exact", "autotune": False, "watts": 15.0},
    }  # fmt: skip


def _up(folder: Path, name: str, settings: dict[str, Any], model: Path, *more: str) -> list[str]:
    config = folder / f"{name}.toml"
    config.write_text(tomlkit.dumps(settings), encoding="utf-8")
    return [
        *verb("up"), "--port", "0", "--json", "--until-eof", "--config", str(config),
        "--history", str(folder / f"{name}.sqlite"), "--model", str(model), "--threads", "1",
        "--log-level", "warning", *more,
    ]  # fmt: skip


def _process_of(folder: Path) -> psutil.Process:
    """The daemon under test, among our children."""
    config = str(folder / "daemon.toml")
    return next(p for p in psutil.Process().children() if config in p.cmdline())


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    growth = figures["rss_growth"]
    left = ", ".join(f"{figures[f'{name}_left']} {name}" for name in ("fds", "tasks", "threads", "cells", "children"))
    rows = [
        ("soak", f"{figures['minutes']:g} minutes, {figures['requests']} requests, {figures['faults']} faults"),
        (
            "answers",
            f"{figures['whole']} whole, {figures['moved']} moved, {figures['told_broken_off']} told that they end",
        ),
        ("broken", f"{figures['broken']} promises"),
        ("memory", "too short to say" if growth is None else f"{100 * growth:+.1f} % after the first minutes"),
        ("left", left),
        ("loop", f"p99 {figures['lag_ms_p99']} ms late"),
        ("ledger", f"${figures['ledger_gap_usd']:.9f} apart from the rows"),
    ]
    return "\n".join(f"{name:9} {said}" for name, said in rows + [("", what) for what in figures["what_broke"]])

"""Whether the ledger is right: against a server's own meter, under a cap with many clients at once, after kill -9.

    python -m benchmarks.eval.money [--requests 1000] [--clients 20] [--kills 20] [--json]

The server is the loopback server, which counts what it makes and stops when a stream is closed; its meter is what a
provider would bill. The daemon runs without a device, so that the server has to serve everything. Prices are those of
gpt-4o, so that a cent is some 4 % of what is billed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import tomlkit

from disco_daemon.bench.child import LOG_TAIL, BenchError, child, child_env, start
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.bench.loopback import LoopbackServer
from disco_daemon.bench.script import Exchange, text_of
from disco_daemon.system.program import verb

from ..command import run_script

INPUT_USD, OUTPUT_USD = 2.5, 10.0  # per million tokens: gpt-4o
PROMPT_WORDS, ANSWER_TOKENS = (20, 200), (5, 60)  # of three letters and a blank: a token to the server, and to us
INTERVAL_S = (
    0.01  # between two tokens of the server: a fast hosted model; what is on its way when a client leaves is billed
)
LEAVES = 0.15  # share of the clients that go away in mid-answer
RUNS_S = (0.3, 1.5)  # until a kill
REQUEST_S, LOOK_S = 60.0, 0.02  # one answer at most; between two looks; s
CAP_SHARE = 0.4  # of what all requests cost together

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setup:
    """`requests` by `clients` at a time, and `kills` kills; seeded."""

    requests: int = 1000
    clients: int = 20
    kills: int = 20
    seed: int = 1


@dataclass(slots=True)
class Meter:
    """The server's bill for the exchanges since the last `reset`, $, and those that are under way."""

    server: LoopbackServer
    first: int = 0

    def reset(self) -> None:
        """Count from here on."""
        self.first = self.server.n_requests

    @property
    def exchanges(self) -> list[Exchange]:
        """The server's requests since then. Raises BenchError if it does not remember them all."""
        n = self.server.n_requests - self.first
        if n > len(self.server.exchanges):
            msg = f"the meter remembers {len(self.server.exchanges)} requests, not {n}"
            raise BenchError(msg)
        return list(self.server.exchanges)[len(self.server.exchanges) - n :]

    @property
    def usd(self) -> float:
        """The bill so far, $."""
        return sum(bill(exchange) for exchange in self.exchanges)

    @property
    def running(self) -> set[str]:
        """The numbers of the requests under way here."""
        return {_number(e) for e in self.exchanges if not e.ended}

    def usd_of(self, numbers: set[str]) -> float:
        """Return the price of the requests of these numbers, $."""
        return sum(bill(e) for e in self.exchanges if _number(e) in numbers)


def _number(exchange: Exchange) -> str:
    return text_of(exchange.body["messages"][-1]).split()[-1]


def bill(exchange: Exchange) -> float:
    """Return the price of an exchange as far as it has come, $."""
    prompt = exchange.usage()["prompt_tokens"]
    return (prompt * INPUT_USD + exchange.chunks * OUTPUT_USD) / 1e6


@dataclass(frozen=True, slots=True)
class Question:
    """`words` of prompt, `tokens` of answer; the client leaves after `leaves_at` pieces, if it does.

    `number` tells it from 999 others; it is the last word of the prompt.
    """

    number: int
    words: int
    tokens: int
    leaves_at: int | None

    @property
    def prompt(self) -> str:
        """Words of three letters, so that a word is a token to both, as the daemon counts without a tokenizer."""
        return "abc " * (self.words - 1) + f"{self.number % 1000:03d} "

    @property
    def usd(self) -> float:
        """The price to the end, $."""
        return (self.words * INPUT_USD + self.tokens * OUTPUT_USD) / 1e6


def questions(n: int, seed: int) -> list[Question]:
    """`n` of them, seeded."""
    drawn = random.Random(seed)
    found = []
    for number in range(n):
        words, tokens = drawn.randint(*PROMPT_WORDS), drawn.randint(*ANSWER_TOKENS)
        leaves_at = drawn.randint(1, tokens) if drawn.random() < LEAVES else None
        found.append(Question(number, words, tokens, leaves_at))
    return found


@dataclass(slots=True)
class Tally:
    """Counts of the ends of one run's requests, and the numbers of those under way."""

    whole: int = 0
    left: int = 0
    refused: int = 0
    retry_after_s: set[int] = field(default_factory=set)
    running: set[str] = field(default_factory=set)


# --- the run --------------------------------------------------------------------------------------------------------


async def bench_money(setup: Setup, progress: Progress) -> dict[str, Any]:
    """Make all three measurements. Raises BenchError."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-money-")))
        server = await stack.enter_async_context(LoopbackServer(tokens=ANSWER_TOKENS[1], interval_s=INTERVAL_S))
        meter = Meter(server)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=REQUEST_S), connector=aiohttp.TCPConnector(limit=0)
            )
        )
        bench = _Bench(setup, folder, meter, session, progress)
        return {
            "requests": setup.requests,
            "clients": setup.clients,
            "machine": f"{platform.machine()} {platform.system()}, Python {platform.python_version()}",
            "ledger": await bench.ledger(),
            "cap": await bench.cap(),
            "kills": await bench.kills(),
        }


@dataclass(slots=True)
class _Bench:
    setup: Setup
    folder: Path
    meter: Meter
    session: aiohttp.ClientSession
    progress: Progress

    async def ledger(self) -> dict[str, Any]:
        """Make all requests, with some clients leaving early, and hold the ledger against the meter."""
        self.meter.reset()
        async with self._daemon("ledger") as url:
            tally = await self._ask_all(url, questions(self.setup.requests, self.setup.seed), Tally())
            ledger = await self._settled_ledger(url)
        metered = self.meter.usd
        return {
            "ledger_usd": ledger["server_usd"],
            "meter_usd": metered,
            "difference_usd": ledger["server_usd"] - metered,
            "answered": tally.whole,
            "left_early": tally.left,
            "booked_requests": ledger["requests"],
        }

    async def cap(self) -> dict[str, Any]:
        """The same under a cap that is reached on the way: what the server bills in all against the cap."""
        asked = questions(self.setup.requests, self.setup.seed + 1)
        cap_usd = CAP_SHARE * sum(q.usd for q in asked)
        self.meter.reset()
        async with self._daemon("cap", {"caps": {"usd_per_day": cap_usd}}) as url:
            tally = await self._ask_all(url, asked, Tally())
            ledger = await self._settled_ledger(url)
        dearest = max(q.usd for q in asked)
        over = self.meter.usd - cap_usd
        return {
            "cap_usd": cap_usd,
            "meter_usd": self.meter.usd,
            "ledger_usd": ledger["server_usd"],
            "over_usd": over,
            "over_in_dearest_requests": over / dearest,
            "answered": tally.whole,
            "refused": tally.refused,
            "retry_after_s": sorted(tally.retry_after_s)[-1:] or None,
        }

    async def kills(self) -> dict[str, Any]:
        """Kill the daemon in the middle, again and again; what the ledger lacks against what was under way."""
        drawn = random.Random(self.setup.seed)
        rounds = [await self._kill_once(i, drawn) for i in range(self.setup.kills)]
        return {
            "rounds": rounds,
            "worst_beyond_running_usd": max((r["beyond_running_usd"] for r in rounds), default=0.0),
            "disagreeing": sum(r["beyond_running_usd"] > 1e-9 for r in rounds),
        }

    async def _kill_once(self, i: int, drawn: random.Random) -> dict[str, Any]:
        folder = self.folder / f"kill-{i}"
        folder.mkdir()
        self.meter.reset()
        process = await start(self._argv(folder, {}), child_env(folder), folder / "daemon.log")
        try:
            url = await _listening(process)
            tally = Tally()
            asking = asyncio.create_task(self._ask_all(url, questions(1000, drawn.randrange(1 << 30)), tally))
            await asyncio.sleep(drawn.uniform(*RUNS_S))  # the moment of the kill is what is drawn
            process.kill()
            running = tally.running | self.meter.running
            await process.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await self._until(lambda: not self.meter.server.open_streams)
        async with child(self._argv(folder, {}), folder, "again") as url:
            ledger = await self._ledger(url)
        lacking, most = self.meter.usd - ledger["server_usd"], self.meter.usd_of(running)
        self.progress(f"kill {i + 1} of {self.setup.kills}: {ledger['requests']} booked, {len(running)} were running")
        return {
            "booked_requests": ledger["requests"],
            "running": len(running),
            "ledger_usd": ledger["server_usd"],
            "meter_usd": self.meter.usd,
            "lacking_usd": lacking,
            "running_usd": most,
            "beyond_running_usd": max(0.0, lacking - most, -lacking),  # lacking more than that, or having too much
        }

    # --- the daemon and its clients --------------------------------------------------------------------------------

    @asynccontextmanager
    async def _daemon(self, name: str, settings: dict[str, Any] | None = None) -> AsyncIterator[str]:
        folder = self.folder / name
        folder.mkdir()
        async with child(self._argv(folder, settings or {}), folder, name) as url:
            yield url

    def _argv(self, folder: Path, settings: dict[str, Any]) -> list[str]:
        config = folder / "config.toml"
        server = {
            "base_url": self.meter.server.url, "model": "loopback", "probe": False,
            "input_usd_per_mtok": INPUT_USD, "output_usd_per_mtok": OUTPUT_USD,
        }  # fmt: skip
        history = {"path": str(folder / "history.sqlite")}
        config.write_text(tomlkit.dumps({"server": server, "history": history} | settings), encoding="utf-8")
        words = ["up", "--port", "0", "--json", "--until-eof", "--no-device", "--policy", "all-server", "--config"]
        return verb(*words, str(config))

    async def _ask_all(self, url: str, asked: list[Question], tally: Tally) -> Tally:
        """`clients` at a time, until all is asked or the daemon is gone."""
        queue = iter(asked)
        done, began = 0, time.monotonic()

        async def client() -> None:
            nonlocal done
            for question in queue:
                name = question.prompt.split()[-1]
                tally.running.add(name)
                await self._ask(url, question, tally)
                tally.running.discard(name)
                done += 1
                if done % 250 == 0:
                    self.progress(f"{done} requests in {time.monotonic() - began:.0f} s")

        async with asyncio.TaskGroup() as group:
            for _ in range(self.setup.clients):
                group.create_task(client())
        return tally

    async def _ask(self, url: str, question: Question, tally: Tally) -> None:
        body = {
            "model": "disco", "stream": True, "max_tokens": question.tokens,
            "messages": [{"role": "user", "content": question.prompt}],
        }  # fmt: skip
        async with self.session.post(f"{url}/chat/completions", json=body, allow_redirects=False) as response:
            if response.status == 429:
                tally.refused += 1
                tally.retry_after_s.add(int(response.headers["Retry-After"]))
                return
            if response.status != 200:
                msg = f"the daemon answered {response.status}: {(await response.text())[:LOG_TAIL]}"
                raise BenchError(msg)
            n = 0
            async for line in response.content:
                n += b'"content"' in line
                if question.leaves_at is not None and n >= question.leaves_at:
                    tally.left += 1
                    response.close()
                    return
        tally.whole += 1

    async def _settled_ledger(self, url: str) -> dict[str, Any]:
        """The ledger once all has ended and is written."""
        await self._until(lambda: not self.meter.server.open_streams)
        served = (await self._get(url, "state"))["served"]
        async with asyncio.timeout(REQUEST_S):
            while (found := await self._ledger(url))["requests"] < served:  # noqa: ASYNC110 - as above
                await asyncio.sleep(LOOK_S)  # the writer is a thread of the other process
        return found

    async def _until(self, true: Callable[[], bool]) -> None:
        """Wait for what this very loop will do; it has no event for it."""
        async with asyncio.timeout(REQUEST_S):
            while not true():  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(LOOK_S)

    async def _ledger(self, url: str) -> dict[str, Any]:
        days = (await self._get(url, "ledger"))["data"]
        return {key: sum(day[key] for day in days) for key in ("requests", "server_usd")}

    async def _get(self, url: str, what: str) -> dict[str, Any]:
        async with self.session.get(f"{url.removesuffix('/v1')}/disco/v1/{what}") as response:
            response.raise_for_status()
            found: dict[str, Any] = await response.json()
        return found


async def _listening(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(REQUEST_S):
        while line := await process.stdout.readline():
            with suppress(ValueError, KeyError, TypeError):
                return str(json.loads(line)["url"])
    msg = "the daemon ended before it listened"
    raise BenchError(msg)


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    ledger, cap, kills = figures["ledger"], figures["cap"], figures["kills"]
    leaving = f"{ledger['answered']} answered, {ledger['left_early']} clients left early"
    over = f"${cap['over_usd']:+.6f}, {cap['over_in_dearest_requests']:+.2f} of the dearest request"
    apart = f"${kills['worst_beyond_running_usd']:.6f} ({kills['disagreeing']} times)"
    rows = (
        ("", f"{figures['requests']} requests by {figures['clients']} clients; {figures['machine']}"),
        ("ledger", f"${ledger['ledger_usd']:.6f}, the server's meter ${ledger['meter_usd']:.6f}"),
        ("", f"difference ${ledger['difference_usd']:+.6f} ({leaving})"),
        ("cap", f"${cap['cap_usd']:.6f}, billed ${cap['meter_usd']:.6f}: over by {over}"),
        ("", f"{cap['answered']} answered, {cap['refused']} refused"),
        (
            "kill -9",
            f"{len(kills['rounds'])} times; beyond what was under way, ledger and meter differ by at most {apart}",
        ),
    )
    return "\n".join(f"{name:9} {said}" for name, said in rows)


def main(argv: list[str] | None = None) -> int:
    """Ask, cap and kill; progress goes to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eval.money",
        description="A metering server, many clients at once, some of whom leave; a cap; kill -9 at random moments.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--requests", type=at_least(20), default=1000, help="(default: %(default)s)")
    parser.add_argument("--clients", type=at_least(1), default=20, help="at a time (default: %(default)s)")
    parser.add_argument("--kills", type=at_least(0), default=20, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    setup = Setup(args.requests, args.clients, args.kills)
    return print_figures(run_measurement(bench_money(setup, progress)), table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

"""Four scripted servers and one daemon: three fall ill and heal again and again, each in its own way.

All is seen from outside: what each client got, what each server was asked and would bill, and what the daemon's state
says of each breaker. A server bills a prompt as soon as it has taken it, be it that it then stays silent, and each
token that it has sent; a refusal bills nothing.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import tomlkit
from openai import AsyncOpenAI, OpenAIError

from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.script import Exchange, script
from disco_daemon.system.program import verb
from tests.fixtures.upstream import Upstream

PROMPT_WORDS, ANSWER_TOKENS = 40, 12
INTERVAL_S = 0.005  # between two tokens: a fast hosted model
CUT_AT = 3  # tokens, after which the connection is reset
RETRY_AFTER_S = 1
LOOK_S = 0.02  # between two looks at the breakers: less than the time between two requests
ROUNDED_S = 0.05  # the state tells until when in tenths
PATIENCE_S = 60.0  # for one answer, and for the end of all
PROMISED = {"met": 3, "back": 2}


@dataclass(frozen=True, slots=True)
class Kind:
    """One server: price of a million tokens put in and out, $, its first token, s, and how and when it falls ill.

    `ill` are shares of a round. What is cheap and quick falls ill first, so that each one is the best when it does.
    """

    name: str
    usd: tuple[float, float]
    ttft_s: float
    ill: tuple[float, float] | None = None
    fault: Callable[[Upstream], AbstractContextManager[None]] | None = None
    refuses: bool = False


KINDS = (
    Kind("stalls", (1.0, 2.0), 0.02, (0.2, 0.5), lambda u: u.hang()),
    Kind(
        "limited", (1.0, 2.0), 0.03, (0.3, 0.5), lambda u: u.status(429, headers={"Retry-After": str(RETRY_AFTER_S)}),
        refuses=True,
    ),
    Kind("resets", (1.0, 2.0), 0.04, (0.4, 0.6), lambda u: u.cut_after(CUT_AT)),
    Kind("dear", (30.0, 60.0), 0.002),
)  # fmt: skip


@dataclass(slots=True)
class Illness:
    """One time that a server was ill, in s of the loop; `healed` is None while it is."""

    server: str
    began: float
    healed: float | None = None


@dataclass(slots=True)
class Seen:
    """The breakers at one moment: the name of the state of each, and until when it is open, s of the loop."""

    at: float
    states: dict[str, tuple[str, float]]


@dataclass(slots=True)
class Run:
    """All that was seen."""

    servers: dict[str, Upstream]
    sent_at: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    silent_s: list[float] = field(default_factory=list)  # the longest silence of each answer behind its first token
    attempts: int = 0
    moves: int = 0
    hedges: int = 0
    wrong: list[str] = field(default_factory=list)
    illnesses: list[Illness] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def is_ill(self, name: str, exchange: Exchange) -> bool:
        """Whether the server was ill when that request came."""
        came = exchange.started_at
        mine = [one for one in self.illnesses if one.server == name]
        return any(one.began <= came and (one.healed is None or came < one.healed) for one in mine)

    def bill(self, kind: Kind) -> float:
        """Return the bill of one server, $."""
        usd = 0.0
        for one in self.servers[kind.name].exchanges:
            if not (kind.refuses and self.is_ill(kind.name, one)):
                usd += one.usage()["prompt_tokens"] * kind.usd[0] + one.chunks * kind.usd[1]
        return usd / 1e6


def prompt_of(number: int) -> str:
    """Words of three digits, a token each to the daemon and to the servers, in an order that no other number has."""
    return "".join(f"{(number * 37 + i * (7 + number % 11)) % 1000:03d} " for i in range(PROMPT_WORDS))


async def measure(n: int, clients: int, per_s: float, rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Ask `n` questions, `per_s` a second where the answers allow it. Raises BenchError."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-servers-")))
        servers = {}
        for kind in KINDS:
            server = servers[kind.name] = await stack.enter_async_context(
                Upstream(tokens=ANSWER_TOKENS, interval_s=INTERVAL_S)
            )
            stack.enter_context(server.delay(kind.ttft_s))
        url = await stack.enter_async_context(child(_argv(folder, servers), folder, "daemon"))
        client = await stack.enter_async_context(
            AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        run = Run(servers)
        async with _watched(run, session, url):
            await _ask_all(run, client, n, clients, per_s, rounds, progress)
            await _quiet(run)
        rows = await _booked(session, url, n)
        state = await _get(session, url, "state")
    return _figures(run, state, rows, n, clients, per_s)


def _argv(folder: Path, servers: dict[str, Upstream]) -> list[str]:
    entries = [
        {
            "name": kind.name, "base_url": servers[kind.name].url, "model": "loopback", "probe": False,
            "continuation": "continue_final_message",
            "input_usd_per_mtok": kind.usd[0], "output_usd_per_mtok": kind.usd[1],
        }
        for kind in KINDS
    ]  # fmt: skip
    config = folder / "config.toml"
    settings = {"history": {"path": str(folder / "history.sqlite")}, "servers": entries}
    config.write_text(tomlkit.dumps(settings), encoding="utf-8")
    return verb("up", "--port", "0", "--json", "--until-eof", "--no-device", "--config", str(config))


async def _get(session: aiohttp.ClientSession, url: str, what: str) -> dict[str, Any]:
    limit = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with session.get(f"{url.removesuffix('/v1')}/disco/v1/{what}", timeout=limit) as response:
        response.raise_for_status()
        found: dict[str, Any] = await response.json()
        return found


@asynccontextmanager
async def _watched(run: Run, session: aiohttp.ClientSession, url: str) -> AsyncIterator[None]:
    """Look at the breakers all the time."""

    async def look() -> None:
        loop = asyncio.get_running_loop()
        while True:
            told = (await _get(session, url, "state"))["servers"]
            to_loop = loop.time() - time.time()
            states = {
                one["name"]: (one["breaker"]["state"], to_loop + (one["breaker"]["until_s"] or 0.0)) for one in told
            }
            run.seen.append(Seen(loop.time(), states))
            await asyncio.sleep(LOOK_S)  # the state has no events

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _ask_all(
    run: Run, client: AsyncOpenAI, n: int, clients: int, per_s: float, rounds: int, progress: Callable[[str], None]
) -> None:
    loop = asyncio.get_running_loop()
    began, queue, ill = loop.time(), iter(range(n)), dict[str, ExitStack]()

    def turn(number: int) -> None:
        """Let servers fall ill and heal, as the schedule has it for that question."""
        share = number * rounds / n % 1.0
        for kind in KINDS:
            is_ill = kind.ill is not None and kind.ill[0] <= share < kind.ill[1]
            if is_ill and kind.name not in ill and kind.fault is not None:
                ill[kind.name] = ExitStack()
                ill[kind.name].enter_context(kind.fault(run.servers[kind.name]))
                run.illnesses.append(Illness(kind.name, loop.time()))
            elif not is_ill and kind.name in ill:
                ill.pop(kind.name).close()
                next(one for one in reversed(run.illnesses) if one.server == kind.name).healed = loop.time()

    async def one_client() -> None:
        for number in queue:
            await asyncio.sleep(max(0.0, began + number / per_s - loop.time()))
            turn(number)
            await _ask(run, client, number)
            if (number + 1) % 250 == 0:
                progress(f"{number + 1} requests in {loop.time() - began:.0f} s")

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one_client())
    for left in ill.values():
        left.close()


async def _ask(run: Run, client: AsyncOpenAI, number: int) -> None:
    """Stream one answer, and hold it against the script."""
    loop = asyncio.get_running_loop()
    sent, first, text, reason = loop.time(), None, "", None
    last = silent_s = 0.0
    disco: dict[str, Any] = {}
    run.sent_at.append(sent)
    try:
        stream = await client.chat.completions.create(
            model="disco", messages=[{"role": "user", "content": prompt_of(number)}], stream=True
        )
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    if choice.delta.content:
                        now = loop.time()
                        silent_s, first, last = max(silent_s, now - last if first else 0.0), first or now, now
                        text += choice.delta.content
                disco = (chunk.model_extra or {}).get("disco", disco)
    except (OpenAIError, aiohttp.ClientError, TimeoutError) as e:
        run.wrong.append(f"{number}: {e!r}"[:300])
        return
    if text != "".join(script(prompt_of(number), ANSWER_TOKENS)) or reason != "stop":
        run.wrong.append(f"{number}: {text!r}, {reason}")
    run.first_s.append((first or loop.time()) - sent)
    run.silent_s.append(silent_s)
    starts = disco.get("endpoints", {})
    run.attempts += len(starts)
    run.moves += disco.get("handoffs", 0)
    run.hedges += sum(one.get("hedge") is not None for one in starts.values())


async def _quiet(run: Run) -> None:
    """Wait until no server has a stream open."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while any(server.open_streams for server in run.servers.values()):  # noqa: ASYNC110 - this very loop's work
                await asyncio.sleep(LOOK_S)
    except TimeoutError as e:
        raise BenchError("a stream is still open at a server though all answers have ended") from e


async def _booked(session: aiohttp.ClientSession, url: str, n: int) -> dict[str, float]:
    """Return the ledger's sums once all is written."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            days = (await _get(session, url, "ledger"))["data"]
            found = {key: sum(day[key] for day in days) for key in ("requests", "server_usd")}
            if found["requests"] >= n:
                return found
            await asyncio.sleep(LOOK_S)  # the writer is a thread of the other process


def _figures(
    run: Run, state: dict[str, Any], ledger: dict[str, float], n: int, clients: int, per_s: float
) -> dict[str, Any]:
    told = {one["name"]: one for one in state["servers"]}
    each: dict[str, Any] = {}
    for kind in KINDS:
        exchanges, meter = run.servers[kind.name].exchanges, run.bill(kind)
        met, known, trials, back = [], [], 0, []
        for illness in (one for one in run.illnesses if one.server == kind.name):
            n_met, n_known, n_tried, n_back = judge(run, illness)
            met.append(n_met)
            known.append(n_known)
            trials += n_tried
            back.append(n_back)
        each[kind.name] = {
            "asked": len(exchanges), "met": met, "met_known": known, "trials": trials, "back": back,
            "meter_usd": meter, "ledger_usd": told[kind.name]["usd_today"],
            "difference_usd": told[kind.name]["usd_today"] - meter,
        }  # fmt: skip
    met = [m for one in each.values() for m in one["met"]]
    known = [m for one in each.values() for m in one["met_known"]]
    backs = [b for one in each.values() for b in one["back"] if b is not None]
    meter = sum(one["meter_usd"] for one in each.values())
    first = statistics.quantiles(run.first_s, n=100, method="inclusive")
    return {
        "requests": n, "clients": clients, "per_s": per_s, "wrong": len(run.wrong), "wrong_ones": run.wrong[:5],
        "asked_of_servers": sum(one["asked"] for one in each.values()), "starts_told": run.attempts,
        "moves": run.moves, "hedges": run.hedges, "open_streams": 0,
        "first_token_ms": {
            "p50": round(first[49] * 1e3), "p99": round(first[98] * 1e3), "max": round(max(run.first_s) * 1e3),
        },
        "silence_ms": round(max(run.silent_s) * 1e3),
        "met_most": max(met, default=0), "met_known_most": max(known, default=0),
        "back_most": max(backs, default=0), "outages": len(backs),
        "booked_requests": ledger["requests"], "ledger_usd": ledger["server_usd"], "meter_usd": meter,
        "difference": ledger["server_usd"] / meter - 1, "servers": each,
    }  # fmt: skip


def judge(run: Run, illness: Illness) -> tuple[int, int, int, int | None]:
    """Return how many requests met an ill server until it was gone, how many did later, and with which it was back.

    The second of the four numbers counts, of the first, those that came once it had failed one: what several clients
    send at once, before anybody can know, is left out. The last one counts the requests that were sent since it was
    well and its back-off, or what it had asked for, was over; None where it was not gone, or fell ill again before.
    """
    name, healed, never = illness.server, illness.healed or math.inf, math.inf
    later = [one.began for one in run.illnesses if one.server == name and one.began > illness.began]
    again = min(later, default=never)
    asked = [one for one in run.servers[name].exchanges if illness.began <= one.started_at < again]
    ill = [one for one in asked if one.started_at < healed]
    gone = next((one.at for one in run.seen if illness.began < one.at and one.states[name][0] != "closed"), never)
    met = [one for one in ill if one.started_at < gone]
    failed_at = min((one.ended_at for one in met if one.ended_at is not None), default=never)
    known = sum(one.started_at > failed_at for one in met) + bool(met)
    if gone > healed or healed == never:
        return len(met), known, len(ill) - len(met), None
    well = min((one.started_at for one in asked if one.started_at >= healed), default=again)
    untils = [one.states[name][1] for one in run.seen if healed <= one.at < well and one.states[name][0] == "open"]
    let_go = [one.closed_at for one in ill if one.closed_at is not None]
    ready = max([healed, *let_go, *(until + ROUNDED_S for until in untils[-1:])])
    sent = [at for at in run.sent_at if ready <= at <= well]
    if well == never:
        return len(met), known, len(ill) - len(met), len(sent) + 1 if sent else None
    return len(met), known, len(ill) - len(met), max(1, len(sent)) if sent or well < again else None

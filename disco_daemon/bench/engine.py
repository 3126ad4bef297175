"""The speed at which our engine reads prompts and writes answers, alone or in turns with another server.

`disco bench engine` measures ours alone; `python -m benchmarks.engine`, from a checkout, sets llama-server beside it. A
server is asked over HTTP. Where there are two, each repeat asks both the same things, and which of them goes first
changes with every repeat. A figure is the median of its repeats; a ratio is our median over the other's. `cpu_s` is the
processor time of a server's processes for a token: of a prompt, or of answers while all of them run. Ours runs as
`disco up --device-only` with delivery off: the daemon's part of the way is in our figures. It has one KV cache of
`n_ctx` tokens for all its answers, a prefix cache, and answers greedily. The file is longer than others: what is asked
and how it is told stand beside each other.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import tomlkit

from ..models.default import fetch_default_model
from ..plain import reason_of
from ..system.processors import n_cores
from ..system.program import verb
from .child import BenchError, child_process
from .engine_chats import Count, calibrate_count, chat_of_length, story
from .streamed import (
    MIN_TOGETHER,
    Chat,
    Door,
    StreamedAnswer,
    ask,
    at_rest,
    device_state,
    rate_together,
    rate_whole,
    state_of,
    worst_gap,
)

OURS = "ours"
REQUEST_S = 1800.0  # one answer, s: of a large model that a slow processor answers with, beside fifteen others
TTFT_TOKENS = 2  # of an answer that is timed to its first token
TTFT_BUDGET, TTFT_TRIES = 512, 4  # short prompts are timed more often: as many as make 512 tokens, 4 at most
CHAT_TOKENS, TURN_TOKENS = 600, 32  # of the chat's first prompt, and of each answer in it
NEXT_TURN = "What is the most important part of it?"
RUNNING, RUN_TOKENS = 4, 160  # answers that a long prompt disturbs; long enough to outlast its prefill in small chunks
LONG_PROMPT = 2048  # tokens
LONG_CONTEXT = 800  # tokens in front of each answer, where answers are written behind long prompts
SHARE_AT, LOOK_S = 8, 0.5  # answers at a time when Python's share is read, and how often, s

Progress = Callable[[str], None]
Start = Callable[[Path], list[str]]  # the command that starts a server whose files go to a folder
Figures = dict[str, list[float]]  # of each server, ours first; one for each repeat


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The measurements: `concurrent` answers of `max_tokens` tokens each, first tokens of prompts of `lengths` tokens.

    `threads` 0: one fewer than the cores, at least 1. `n_ctx` tokens of KV cache for each server, or `n_cells` where
    that is given; then `n_ctx` bounds one answer. `shape` names what a model with random weights is made like: it
    repeats itself, so `guesses` of its next tokens, which would all be right, are then off.
    """

    model: Path | None = None
    repeats: int = 5
    threads: int = 0
    concurrent: tuple[int, ...] = (1, 4, 8, 16)
    lengths: tuple[int, ...] = (32, 512, 2048)
    n_ctx: int = 8192
    max_tokens: int = 96
    n_cells: int = 0
    shape: str = ""
    guesses: bool = True

    @property
    def n_threads(self) -> int:
        """CPU threads of each server."""
        return self.threads or max(1, n_cores() - 1)


def ratio(figures: Mapping[str, Sequence[float]], key: str = "ratio") -> dict[str, float]:
    """Our median over the other server's, below `key`; nothing where we are measured alone."""
    ours, *others = map(statistics.median, figures.values())
    return {key: round(ours / others[0], 4)} if others else {}


def medians(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each server."""
    return {name: round(statistics.median(values), 5) for name, values in figures.items()}


def processor(figures: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """Each server's processor time, and how many times ours the other takes; nothing where one was not measured."""
    known = {name: [value for value in values if value] for name, values in figures.items()}
    if not all(known.values()):
        return {}
    found = {name: statistics.median(values) for name, values in known.items()}
    ours, *others = found.values()
    compared = {"cpu_ratio": round(others[0] / ours, 4)} if others else {}
    return {"cpu_s": {name: round(value, 8) for name, value in found.items()}, **compared}


def chunk_time(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Return the time of an iteration with a prompt's chunk beside running answers between two states, s, or None."""
    n, took_s = (after.get(key, 0) - before.get(key, 0) for key in ("chunks", "chunks_s"))
    return took_s / n if n else None


def python_share(states: Sequence[Mapping[str, Any]]) -> float | None:
    """Python's share of the engine's iterations, by states of the device before and during a run; None if unknown.

    From `python_s` and `busy_s`, the s spent outside and inside of llama.cpp since the start, where states have them.
    Else the median of `python_share` during the run: each is that of the last second or so of computing, and a state in
    which no further iteration has been computed still has that of before the run.
    """
    before, during = states[0], states[1:]
    if during and all(key in state for key in ("python_s", "busy_s") for state in (before, during[-1])):
        python, busy = (during[-1][key] - before[key] for key in ("python_s", "busy_s"))
        return float(round(python / (python + busy), 4)) if python + busy > 0 else None
    started = [s for s in during if "iterations" not in s or s["iterations"] != before.get("iterations")]
    shares = [s["python_share"] for s in started if s.get("python_share") is not None]
    return round(statistics.median(shares), 4) if shares else None


# --- the measurements ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Bench:
    """The doors, ours first, and the numbers of the prompts already used: none is asked twice at the same door."""

    doors: Mapping[str, Door]
    setup: EngineSetup
    count: Count
    progress: Progress
    fresh: Iterator[int] = field(default_factory=itertools.count)
    shares: dict[int, float | None] = field(default_factory=dict)  # of Python, by the number of answers at a time

    def turns(self) -> Iterator[tuple[int, list[Door]]]:
        """Return each repeat with the doors in the order in which they are asked."""
        for repeat in range(self.setup.repeats):
            doors = list(self.doors.values())
            yield repeat, doors if repeat % 2 == 0 else doors[::-1]

    def report(self, what: str, figures: Mapping[str, Sequence[float]], unit: str) -> None:
        """Report the latest repeat's figures."""
        last = ", ".join(f"{name} {values[-1]:.4g}" for name, values in figures.items())
        self.progress(f"{what}: {last} {unit} ({len(figures[OURS])} of {self.setup.repeats})")

    async def throughput(self, n: int, n_prompt: int = 0) -> dict[str, Any]:
        """Aggregate token/s of `n` answers at a time; of decoding alone where each server runs all of them at once.

        Their prompts are short, or have `n_prompt` tokens each.
        """
        together: dict[str, list[float | None]] = {name: [] for name in self.doors}
        whole = self._figures()
        cpu: dict[str, list[float | None]] = {name: [] for name in self.doors}
        early = dict.fromkeys(self.doors, 0)
        states = [device_state(await state_of(self.doors[OURS]))]
        for _, doors in self.turns():
            fresh = [next(self.fresh) for _ in range(n)]
            chats = [await chat_of_length(n_prompt, i, self.count) if n_prompt else story(i) for i in fresh]
            for door in doors:
                heard, cpu_s = await self._at_once(door, chats, states if n == SHARE_AT and not n_prompt else None)
                cpu[door.name].append(cpu_s)
                together[door.name].append(rate_together(heard))
                whole[door.name].append(rate_whole(heard))
                early[door.name] += sum(h.finish != "length" for h in heard)
            self.report(f"throughput of {n}{behind(n_prompt)}, with prefill", whole, "token/s")
        if not n_prompt:
            self.shares[n] = python_share(states)
        pure = {name: [rate for rate in rates if rate is not None] for name, rates in together.items()}
        is_pure = all(len(pure[name]) == len(whole[name]) for name in whole)
        chosen = pure if is_pure else whole
        return {
            **ratio(chosen),
            "measure": "decode" if is_pure else "whole",
            "tps": medians(chosen),
            **ratio(whole, "whole_ratio"),
            "whole_tps": medians(whole),
            **processor(cpu),
            "ended_early": early,
            "raw": {"decode": together, "whole": whole},
        }

    def _figures(self) -> Figures:
        return {name: [] for name in self.doors}

    async def _at_once(
        self, door: Door, chats: Sequence[Chat], states: list[dict[str, Any]] | None
    ) -> tuple[list[StreamedAnswer], float | None]:
        """Ask all of it at once; meanwhile look at our state now and then, if it is wanted.

        The second is the processor time of a token while all answers run, s; None if that is not known.
        """
        answers = [StreamedAnswer() for _ in chats]
        async with _group() as group:
            asked = zip(chats, answers, strict=True)
            tasks = [group.create_task(ask(door, chat, self.setup.max_tokens, heard)) for chat, heard in asked]
            watcher = group.create_task(_watch(door, states)) if states is not None and door.name == OURS else None
            for heard in answers:
                await heard.settled.wait()
            begin, before_s = time.perf_counter(), door.cpu_s()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            end, after_s = time.perf_counter(), door.cpu_s()
            await asyncio.wait(tasks)
            if watcher is not None:
                watcher.cancel()
        n = sum(heard.n_between(begin, end) for heard in answers)
        is_pure = n > MIN_TOGETHER * sum(heard.n_tokens for heard in answers)
        return answers, _each(before_s, after_s, n) if is_pure else None

    async def ttft(self, n_tokens: int) -> dict[str, Any]:
        """Time to the first token of a prompt of `n_tokens` tokens that no cache has, s."""
        figures = self._figures()
        cpu: dict[str, list[float | None]] = {name: [] for name in self.doors}
        tries = max(1, min(TTFT_TRIES, TTFT_BUDGET // n_tokens))
        seen: dict[str, dict[str, Any]] = {}
        for _, doors in self.turns():
            chats = [await chat_of_length(n_tokens, next(self.fresh), self.count) for _ in range(tries)]
            for door in doors:
                before_s = door.cpu_s()
                heard = [await ask(door, chat, TTFT_TOKENS) for chat in chats]
                cpu[door.name].append(_each(before_s, door.cpu_s(), n_tokens * tries))
                figures[door.name].append(statistics.median(h.ttft for h in heard))
                seen[door.name] = heard[-1].prompt
            self.report(f"first token of {n_tokens}", figures, "s")
        return {**ratio(figures), "s": medians(figures), **processor(cpu), "prompts": seen, "raw": figures}

    async def second_turn(self) -> dict[str, Any]:
        """Time to the first token of a chat's second turn, s, when the first has just been answered."""
        figures = self._figures()
        seen: dict[str, dict[str, Any]] = {}
        for _, doors in self.turns():
            chat = await chat_of_length(CHAT_TOKENS, next(self.fresh), self.count)
            for door in doors:
                before = await ask(door, chat, TURN_TOKENS)
                answer = {"role": "assistant", "content": before.text}
                heard = await ask(door, [*chat, answer, {"role": "user", "content": NEXT_TURN}], TTFT_TOKENS)
                figures[door.name].append(heard.ttft)
                seen[door.name] = heard.prompt
            self.report("second turn", figures, "s")
        return {**ratio(figures), "s": medians(figures), "prompts": seen, "raw": figures}

    async def worst_tbt(self) -> dict[str, Any]:
        """Longest silence of the running answers while a long prompt is prefilled, s, and that prompt's TTFT, s."""
        before = device_state(await at_rest(self.doors[OURS]))
        gaps, ttfts = self._figures(), self._figures()
        for _, doors in self.turns():
            chats = [story(next(self.fresh)) for _ in range(RUNNING)]
            long = await chat_of_length(LONG_PROMPT, next(self.fresh), self.count)
            for door in doors:
                gap, ttft = await self._disturb(door, chats, long)
                gaps[door.name].append(gap)
                ttfts[door.name].append(ttft)
            self.report(f"worst gap beside a prompt of {LONG_PROMPT}", gaps, "s")
        chunk_s, found = chunk_time(before, device_state(await at_rest(self.doors[OURS]))), medians(gaps)
        return {
            **ratio(gaps),
            "s": found,
            **ratio(ttfts, "prompt_ttft_ratio"),
            "prompt_ttft_s": medians(ttfts),
            "chunk_s": chunk_s and round(chunk_s, 4),
            "over_chunk": round(found[OURS] / chunk_s, 3) if chunk_s else None,
            "raw": gaps,
        }

    async def _disturb(self, door: Door, chats: Sequence[Chat], long: Chat) -> tuple[float, float]:
        running = [StreamedAnswer() for _ in chats]
        async with _group() as group:
            for chat, heard in zip(chats, running, strict=True):
                group.create_task(ask(door, chat, RUN_TOKENS, heard))
            for heard in running:
                await heard.settled.wait()
            late = await ask(door, long, TTFT_TOKENS)
        gap = max(worst_gap(h.times, late.sent, late.first) for h in running)
        if not gap:
            raise BenchError(f"{door.name}: the running answers were over before the long prompt came")
        return gap, late.ttft


def behind(n_prompt: int) -> str:
    """Say behind what prompts answers are written; nothing of short ones."""
    return f" behind {n_prompt} tokens each" if n_prompt else ""


async def _watch(door: Door, states: list[dict[str, Any]]) -> None:
    """Add the device's state every LOOK_S until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        states.append(device_state(await state_of(door)))


def _each(before_s: float | None, after_s: float | None, n: float) -> float | None:
    """Return what each of `n` tokens took, s; None if that is not known."""
    return None if before_s is None or after_s is None else (after_s - before_s) / n


@asynccontextmanager
async def _group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that fails with its first error, not with a group of them."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def bench_engine(setup: EngineSetup, progress: Progress) -> dict[str, Any]:
    """Measure our engine alone. Raises BenchError."""
    model = setup.model
    if model is None:
        model = await asyncio.to_thread(fetch_default_model, progress)
    with breaks_off():
        async with open_doors(setup, {OURS: lambda folder: up(folder, setup, model)}, progress) as doors:
            count = await calibrate_count(doors[OURS])
            return await measure(Bench(doors, setup, count, progress)) | about(setup, model)


@contextmanager
def breaks_off() -> Iterator[None]:
    """Raise BenchError for what a server or the network does to a measurement."""
    try:
        yield
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        msg = f"the measurement broke off: {reason_of(error)}"
        raise BenchError(msg) from error


def about(setup: EngineSetup, model: Path) -> dict[str, Any]:
    """Describe machine and setting."""
    host = {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()}
    settings = {"threads": setup.n_threads, "n_ctx": setup.n_ctx, "repeats": setup.repeats, "model": model.name}
    return {"host": host, **settings}


async def begin(bench: Bench) -> None:
    """Send each server a first request, which loads, compiles and maps what that does."""
    for door in bench.doors.values():
        await ask(door, story(next(bench.fresh)), TTFT_TOKENS)


async def measure(bench: Bench) -> dict[str, Any]:
    """Run all measurements with short prompts, after a first request."""
    await begin(bench)
    rates = {str(n): await bench.throughput(n) for n in bench.setup.concurrent}
    ttfts = {str(n): await bench.ttft(n) for n in bench.setup.lengths}
    turn, gap = await bench.second_turn(), await bench.worst_tbt()
    share = bench.shares.get(SHARE_AT)
    return {"python_share": share, "worst_tbt": gap, "throughput": rates, "ttft": ttfts, "second_turn": turn}


@asynccontextmanager
async def open_doors(
    setup: EngineSetup, servers: Mapping[str, Start], progress: Progress
) -> AsyncIterator[dict[str, Door]]:
    """Run the servers, and open a door to each."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-engine-")))
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        doors = {}
        for name, command in servers.items():
            url, pid = await stack.enter_async_context(child_process(command(folder), folder, name))
            # A connection for each request: llama-server closes those it finds idle, and whatever is under way on them.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            session = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**20)
            doors[name] = Door(name, url, await stack.enter_async_context(session), pid)
            progress(f"{name}: {url}, {setup.n_threads} threads")
        yield doors


def up(folder: Path, setup: EngineSetup, model: Path) -> list[str]:
    """Write the configuration of our daemon, and return the command that starts it."""
    device: dict[str, Any] = {"n_ctx": setup.n_ctx, "n_cells": setup.n_cells}
    if not setup.guesses:
        device["speculation"] = "off"
    settings = {"device": device, "delivery": {"mode": "off"}}
    config = folder / "ours.toml"
    config.write_text(tomlkit.dumps(settings), encoding="utf-8")
    return [
        *verb("up"), "--port", "0", "--json", "--until-eof", "--config", str(config),
        "--history", str(folder / "ours.sqlite"), "--model", str(model), "--threads", str(setup.n_threads),
        "--device-only", "--policy", "all-device", "--log-level", "warning",
    ]  # fmt: skip


# --- for people ------------------------------------------------------------------------------------------------------


def table(figures: dict[str, Any]) -> str:
    """Return each server's figures, and our ratio to the other where there is one, row by row."""
    gap = figures["worst_tbt"]
    rows = [
        *((f"{n} answers, {f['measure']}", f["tps"], f, "token/s") for n, f in figures["throughput"].items()),
        *(
            (f"{n} answers{behind(LONG_CONTEXT)}", f["tps"], f, "token/s")
            for n, f in figures.get("throughput_long", {}).items()
        ),
        *((f"first token, prompt of {n}", f["s"], f, "s") for n, f in figures["ttft"].items()),
        ("first token, second turn", figures["second_turn"]["s"], figures["second_turn"], "s"),
        (f"worst gap beside {LONG_PROMPT}", gap["s"], gap, "s"),
    ]
    head = "".join(f"{name:>10}" for name in gap["s"]) + (f"{'ratio':>8}" if "ratio" in gap else "")
    lines = [f"{'':<28}{head}"]
    for label, medians_of, measured, unit in rows:
        values = "".join(f"{value:>10.4g}" for value in medians_of.values())
        compared = f"{measured['ratio']:>8.3f}" if "ratio" in measured else ""
        lines.append(f"{label:<28}{values}{compared}  {unit}")
    share, host = figures["python_share"], figures["host"]
    lines.append(f"Python's share of an iteration: {'unknown' if share is None else f'{share:.1%}'}")
    peer = "; peer: {name} {version}".format(**figures["peer"]) if "peer" in figures else ""
    lines.append(f"{figures['model']}, {figures['threads']} threads{peer}")
    lines.append(f"{figures['repeats']} repeats, Python {host['python']}, {host['cpus']} CPUs, {host['platform']}")
    return "\n".join(lines)

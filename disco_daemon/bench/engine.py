"""Our engine beside llama.cpp's own llama-server: the same GGUF, threads, prompts and client, in one run.

Both are asked over HTTP, and the same things in turn: each repeat measures both, and which of them goes first changes
with every repeat. A figure is the median of its repeats; a ratio is our median over the peer's. Both have one KV cache
of `n_ctx` tokens for all their answers, a prefix cache, and answer greedily. Ours runs as `disco up --device-only` with
delivery off: the daemon's part of the way is in our figures, as the peer's HTTP server is in its own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import statistics
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import tomlkit

from ..models.default import fetch_default_model
from ..program import verb
from . import llama_server
from .child import BenchError, child
from .demo import PASSAGE
from .streamed import Chat, Door, Heard, ask, at_rest, device_state, rate_together, rate_whole, state_of, worst_gap

OURS, PEER = "ours", "peer"
REQUEST_S = 300.0  # one answer, s
TTFT_TOKENS = 2  # of an answer that is timed to its first token
TTFT_BUDGET, TTFT_TRIES = (
    512,
    4,
)  # short prompts are timed more often in a repeat: as many as make 512 tokens, 4 at most
CHAT_TOKENS, TURN_TOKENS = 600, 32  # of the chat's first prompt, and of each answer in it
NEXT_TURN = "What is the most important part of it?"
RUNNING, RUN_TOKENS = 4, 160  # answers that a long prompt disturbs; long enough to outlast its prefill in small chunks
LONG_PROMPT = 2048  # tokens
SHARE_AT, LOOK_S = 8, 0.5  # answers at a time when Python's share is read, and how often, s

Count = Callable[[Chat], Awaitable[int]]
Progress = Callable[[str], None]
Both = dict[str, list[float]]  # figures of OURS and PEER, one for each repeat


@dataclass(frozen=True, slots=True)
class Setup:
    """What to measure: `concurrent` answers of `max_tokens` tokens each, first tokens of prompts of `lengths` tokens.

    `threads` 0: one fewer than the cores, at least 1. `n_ctx` tokens of KV cache on either side.
    """

    model: Path | None = None
    repeats: int = 5
    threads: int = 0
    concurrent: tuple[int, ...] = (1, 4, 8, 16)
    lengths: tuple[int, ...] = (32, 512, 2048)
    n_ctx: int = 8192
    max_tokens: int = 96

    @property
    def n_threads(self) -> int:
        """CPU threads of either side."""
        return self.threads or max(1, (os.cpu_count() or 2) - 1)


def ratio(figures: Mapping[str, Sequence[float]]) -> float:
    """Our median over the peer's."""
    return round(statistics.median(figures[OURS]) / statistics.median(figures[PEER]), 4)


def medians(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each side."""
    return {name: round(statistics.median(values), 5) for name, values in figures.items()}


def chunk_time(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """What an iteration with a part of a prompt beside running answers took between two states, s; None without any."""
    n, took_s = (after.get(key, 0) - before.get(key, 0) for key in ("chunks", "chunks_s"))
    return took_s / n if n else None


def python_share(states: Sequence[Mapping[str, Any]]) -> float | None:
    """Python's share of the engine's iterations, of states of the device before and during a run; None if untold.

    From `python_s` and `busy_s`, the s spent outside and inside of llama.cpp since the start, where they are told. Else
    the median of what `python_share` was during the run: it is that of the last second or so of computing, and what is
    told for as long as no further iteration is computed is from before the run.
    """
    before, during = states[0], states[1:]
    if during and all(key in state for key in ("python_s", "busy_s") for state in (before, during[-1])):
        python, busy = (during[-1][key] - before[key] for key in ("python_s", "busy_s"))
        return float(round(python / (python + busy), 4)) if python + busy > 0 else None
    started = [s for s in during if "iterations" not in s or s["iterations"] != before.get("iterations")]
    told = [s["python_share"] for s in started if s.get("python_share") is not None]
    return round(statistics.median(told), 4) if told else None


# --- what is asked ---------------------------------------------------------------------------------------------------


def story(i: int) -> Chat:
    """A short question with a long answer, other words for each i; small models go on for a hundred tokens or more."""
    words = PASSAGE.split()
    begin = " ".join(words[(7 * i) % len(words) :][:8])
    return _chat(i, f"Write a long story with many details that begins like this: {begin}")


def _chat(i: int, content: str) -> Chat:
    """A chat that no cache knows: the system message is of this one alone, and stands in front."""
    words = list(dict.fromkeys(PASSAGE.split()))  # each once
    name = f"{words[i % len(words)]} {words[i // len(words) % len(words)]}"
    return [{"role": "system", "content": name}, {"role": "user", "content": content}]


async def sized(n_tokens: int, i: int, count: Count) -> Chat:
    """A chat that no cache knows, of `n_tokens` tokens when rendered, as `count` counts them. Raises BenchError.

    Whole words come next to the length, single-letter ones fill it up.
    """
    words = list(itertools.islice(itertools.cycle(PASSAGE.split()), 11 * i % 180, 11 * i % 180 + n_tokens))

    def chat(n: int, fill: int = 0) -> Chat:
        return _chat(i, " ".join([*words[:n], *["a"] * fill]))

    low, high = 0, n_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if await count(chat(middle)) <= n_tokens else (low, middle - 1)
    missing = n_tokens - await count(chat(low))
    if missing < 0:
        msg = f"a prompt of {n_tokens} tokens is shorter than the chat template alone"
        raise BenchError(msg)
    return chat(low, missing)


def counter(door: Door) -> Count:
    """How long a chat is, by llama-server's own template and tokenizer; both sides run the same model."""

    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with door.session.post(f"{door.root}/{path}", json=body, allow_redirects=False) as response:
            response.raise_for_status()
            found: dict[str, Any] = await response.json()
        return found

    async def count(chat: Chat) -> int:
        prompt = (await post("apply-template", {"messages": chat}))["prompt"]
        return len((await post("tokenize", {"content": prompt, "add_special": True, "parse_special": True}))["tokens"])

    return count


# --- the measurements ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Bench:
    """Both doors, and the numbers of the prompts already used: none is asked twice at the same door."""

    doors: Mapping[str, Door]
    setup: Setup
    count: Count
    progress: Progress
    fresh: Iterator[int] = field(default_factory=itertools.count)
    shares: dict[int, float | None] = field(default_factory=dict)  # of Python, by the number of answers at a time

    def turns(self) -> Iterator[tuple[int, list[Door]]]:
        """Each repeat, and who is asked first in it."""
        for repeat in range(self.setup.repeats):
            yield repeat, [self.doors[name] for name in ((OURS, PEER) if repeat % 2 == 0 else (PEER, OURS))]

    def told(self, what: str, figures: Mapping[str, Sequence[float]], unit: str) -> None:
        """Say the latest repeat's figures."""
        last = ", ".join(f"{name} {figures[name][-1]:.4g}" for name in (OURS, PEER))
        self.progress(f"{what}: {last} {unit} ({len(figures[OURS])} of {self.setup.repeats})")

    async def throughput(self, n: int) -> dict[str, Any]:
        """Aggregate token/s of `n` answers at a time; of decoding alone where both sides run all of them at once."""
        together: dict[str, list[float | None]] = {OURS: [], PEER: []}
        whole: Both = {OURS: [], PEER: []}
        early = dict.fromkeys((OURS, PEER), 0)
        states = [device_state(await state_of(self.doors[OURS]))]
        for _, doors in self.turns():
            chats = [story(next(self.fresh)) for _ in range(n)]
            for door in doors:
                heard = await self._at_once(door, chats, states if n == SHARE_AT else None)
                together[door.name].append(rate_together(heard))
                whole[door.name].append(rate_whole(heard))
                early[door.name] += sum(h.finish != "length" for h in heard)
            self.told(f"throughput of {n}, with prefill", whole, "token/s")
        self.shares[n] = python_share(states)
        pure = {name: [rate for rate in rates if rate is not None] for name, rates in together.items()}
        is_pure = all(len(pure[name]) == len(whole[name]) for name in whole)
        chosen = pure if is_pure else whole
        return {
            "ratio": ratio(chosen),
            "measure": "decode" if is_pure else "whole",
            "tps": medians(chosen),
            "whole_ratio": ratio(whole),
            "whole_tps": medians(whole),
            "ended_early": early,
            "raw": {"decode": together, "whole": whole},
        }

    async def _at_once(self, door: Door, chats: Sequence[Chat], states: list[dict[str, Any]] | None) -> list[Heard]:
        """Ask all of it at once; meanwhile look at our state now and then, if it is wanted."""
        async with _group() as group:
            tasks = [group.create_task(ask(door, chat, self.setup.max_tokens)) for chat in chats]
            watcher = group.create_task(_watch(door, states)) if states is not None and door.name == OURS else None
            await asyncio.wait(tasks)
            if watcher is not None:
                watcher.cancel()
        return [task.result() for task in tasks]

    async def ttft(self, n_tokens: int) -> dict[str, Any]:
        """Time to the first token of a prompt of `n_tokens` tokens that nobody has seen before, s."""
        figures: Both = {OURS: [], PEER: []}
        tries = max(1, min(TTFT_TRIES, TTFT_BUDGET // n_tokens))
        seen: dict[str, dict[str, Any]] = {}
        for _, doors in self.turns():
            chats = [await sized(n_tokens, next(self.fresh), self.count) for _ in range(tries)]
            for door in doors:
                heard = [await ask(door, chat, TTFT_TOKENS) for chat in chats]
                figures[door.name].append(statistics.median(h.ttft for h in heard))
                seen[door.name] = heard[-1].prompt
            self.told(f"first token of {n_tokens}", figures, "s")
        return {"ratio": ratio(figures), "s": medians(figures), "prompts": seen, "raw": figures}

    async def second_turn(self) -> dict[str, Any]:
        """Time to the first token of a chat's second turn, s, when the first has just been answered."""
        figures: Both = {OURS: [], PEER: []}
        seen: dict[str, dict[str, Any]] = {}
        for _, doors in self.turns():
            chat = await sized(CHAT_TOKENS, next(self.fresh), self.count)
            for door in doors:
                before = await ask(door, chat, TURN_TOKENS)
                answer = {"role": "assistant", "content": before.text}
                heard = await ask(door, [*chat, answer, {"role": "user", "content": NEXT_TURN}], TTFT_TOKENS)
                figures[door.name].append(heard.ttft)
                seen[door.name] = heard.prompt
            self.told("second turn", figures, "s")
        return {"ratio": ratio(figures), "s": medians(figures), "prompts": seen, "raw": figures}

    async def worst_tbt(self) -> dict[str, Any]:
        """Longest silence of the running answers while a long prompt is prefilled, s, and that prompt's TTFT, s."""
        before = device_state(await at_rest(self.doors[OURS]))
        gaps: Both = {OURS: [], PEER: []}
        ttfts: Both = {OURS: [], PEER: []}
        for _, doors in self.turns():
            chats = [story(next(self.fresh)) for _ in range(RUNNING)]
            long = await sized(LONG_PROMPT, next(self.fresh), self.count)
            for door in doors:
                gap, ttft = await self._disturbed(door, chats, long)
                gaps[door.name].append(gap)
                ttfts[door.name].append(ttft)
            self.told(f"worst gap beside a prompt of {LONG_PROMPT}", gaps, "s")
        chunk_s, found = chunk_time(before, device_state(await at_rest(self.doors[OURS]))), medians(gaps)
        return {
            "ratio": ratio(gaps),
            "s": found,
            "prompt_ttft_s": medians(ttfts),
            "chunk_s": chunk_s and round(chunk_s, 4),
            "over_chunk": round(found[OURS] / chunk_s, 3) if chunk_s else None,
            "raw": gaps,
        }

    async def _disturbed(self, door: Door, chats: Sequence[Chat], long: Chat) -> tuple[float, float]:
        running = [Heard() for _ in chats]
        async with _group() as group:
            for chat, heard in zip(chats, running, strict=True):
                group.create_task(ask(door, chat, RUN_TOKENS, heard))
            for heard in running:
                await heard.settled.wait()
            late = await ask(door, long, TTFT_TOKENS)
        gap = max(worst_gap(h.times, late.sent, late.first) for h in running)
        if not gap:
            msg = f"{door.name}: the running answers were over before the long prompt came"
            raise BenchError(msg)
        return gap, late.ttft


async def _watch(door: Door, states: list[dict[str, Any]]) -> None:
    """Add the device's state every LOOK_S until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        states.append(device_state(await state_of(door)))


@asynccontextmanager
async def _group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that fails with its first error, not with a group of them."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def bench_engine(setup: Setup, progress: Progress) -> dict[str, Any]:
    """Run it all. Raises BenchError."""
    model = setup.model
    if model is None:
        model = await asyncio.to_thread(fetch_default_model, progress)
    try:
        async with _doors(setup, model, progress) as doors:
            bench = Bench(doors, setup, counter(doors[PEER]), progress)
            figures = await _measure(bench)
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        msg = f"the measurement broke off: {error!r}"
        raise BenchError(msg) from error
    host = {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()}
    settings = {"threads": setup.n_threads, "n_ctx": setup.n_ctx, "repeats": setup.repeats, "model": model.name}
    return figures | {"peer": llama_server.peer(), "host": host, **settings}


async def _measure(bench: Bench) -> dict[str, Any]:
    for door in bench.doors.values():  # what is loaded, compiled and mapped at the first request
        await ask(door, story(next(bench.fresh)), TTFT_TOKENS)
    rates = {str(n): await bench.throughput(n) for n in bench.setup.concurrent}
    ttfts = {str(n): await bench.ttft(n) for n in bench.setup.lengths}
    turn, gap = await bench.second_turn(), await bench.worst_tbt()
    return {
        "throughput_ratio": {n: found["ratio"] for n, found in rates.items()},
        "ttft_ratio": {n: found["ratio"] for n, found in ttfts.items()},
        "second_turn_ttft_ratio": turn["ratio"],
        "python_share": bench.shares.get(SHARE_AT),
        "worst_tbt": gap,
        "throughput": rates,
        "ttft": ttfts,
        "second_turn": turn,
    }


@asynccontextmanager
async def _doors(setup: Setup, model: Path, progress: Progress) -> AsyncIterator[dict[str, Door]]:
    """Run both servers, and open a door to each."""
    # One cache for all slots, as ours: divided among 16 slots it would have no room for a long prompt. The rest is what
    # llama.cpp does by default; batch sizes and its cache of prompts outside the KV cache made no difference.
    options = llama_server.Options(
        n_ctx=setup.n_ctx, n_parallel=max((RUNNING + 1, *setup.concurrent)), n_threads=setup.n_threads, kv_unified=True
    )
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-engine-")))
        commands = {OURS: _up(folder, setup, model), PEER: llama_server.argv(model, options)}
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        doors = {}
        for name, argv in commands.items():
            url = await stack.enter_async_context(child(argv, folder, name))
            # A connection for each request: llama-server closes those it finds idle, and whatever is under way on them.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            session = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**20)
            doors[name] = Door(name, url, await stack.enter_async_context(session))
            progress(f"{name}: {url}, {setup.n_threads} threads")
        yield doors


def _up(folder: Path, setup: Setup, model: Path) -> list[str]:
    settings = {"device": {"n_ctx": setup.n_ctx}, "delivery": {"mode": "off"}}
    config = folder / "ours.toml"
    config.write_text(tomlkit.dumps(settings), encoding="utf-8")
    return [
        *verb("up"), "--port", "0", "--json", "--until-eof", "--config", str(config),
        "--history", str(folder / "ours.sqlite"), "--model", str(model), "--threads", str(setup.n_threads),
        "--device-only", "--policy", "all-device", "--log-level", "warning",
    ]  # fmt: skip


# --- for people ------------------------------------------------------------------------------------------------------


def table(figures: dict[str, Any]) -> str:
    """Ours, the peer's and the ratio, row by row."""
    rows = [
        *((f"{n} answers, {f['measure']}", f["tps"], f["ratio"], "token/s") for n, f in figures["throughput"].items()),
        *((f"first token, prompt of {n}", f["s"], f["ratio"], "s") for n, f in figures["ttft"].items()),
        ("first token, second turn", figures["second_turn"]["s"], figures["second_turn"]["ratio"], "s"),
        (f"worst gap beside {LONG_PROMPT}", figures["worst_tbt"]["s"], figures["worst_tbt"]["ratio"], "s"),
    ]
    lines = [f"{'':<28}{'ours':>10}{'peer':>10}{'ratio':>8}"]
    lines += [f"{label:<28}{s[OURS]:>10.4g}{s[PEER]:>10.4g}{r:>8.3f}  {unit}" for label, s, r, unit in rows]
    share = figures["python_share"]
    lines.append(f"Python's share of an iteration: {'not told' if share is None else f'{share:.1%}'}")
    peer, host = figures["peer"], figures["host"]
    lines.append(f"{figures['model']}, {figures['threads']} threads; peer: {peer['name']} {peer['version']}")
    lines.append(f"{figures['repeats']} repeats, Python {host['python']}, {host['cpus']} CPUs, {host['platform']}")
    return "\n".join(lines)

"""The main job in front of your eyes: a daemon, a server, a dozen prompts, and what each side alone would have done."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import tomlkit
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from ..models.default import fetch_default_model, models_dir
from ..system.processors import n_cores
from ..system.program import command, environment, verb
from .child import BenchError, child, end, start

# Of the hosted model that the loopback server stands for (gpt-4o-mini), and of a laptop that computes.
PRICES = {"input_usd_per_mtok": 0.15, "output_usd_per_mtok": 0.60}
WATTS = 15.0
MAX_TOKENS = 32  # of a raced answer; enough to see the stream, little enough for a dozen on a small machine
ALONE_TOKENS = 2  # of the answers that are only timed
REQUEST_TIMEOUT_S = 120.0
SLACK_RATIO, SLACK_S = 1.3, 0.05  # a race may start this much later than the faster side alone

PASSAGE = """\
The lighthouse on the eastern cape was built in 1871 from granite that was quarried on the island itself. Its lamp
first burned colza oil, then paraffin, and was electrified only in 1956, when a cable was laid across the sound.
Three keepers lived there with their families. They kept a vegetable garden behind a wall that broke the wind, a few
sheep, and a school of six children who were taught by the wife of the second keeper. Every evening one of the men
climbed the one hundred and forty-two steps, trimmed the wick and wound the clockwork that turned the lens. In fog
they fired a small cannon every ten minutes, until a siren replaced it. The log books, which survive almost
complete, record storms, passing ships, the price of flour, births, and one wedding. In the winter of 1904 the
supply boat could not land for eleven weeks, and the keepers lived on potatoes and salted fish. The station was
automated in 1988. Today a small museum is open in summer; it is run by volunteers, among them two grandchildren of
the last keeper, who like to show visitors the lens."""


def prompts() -> list[str]:
    """Twelve prompts from a line to a page, short and long in turn."""
    words = PASSAGE.split()

    def part(n: int) -> str:
        return " ".join(words[:n])

    return [
        "Write one sentence about the sea.",
        f"Summarise this text in one sentence.\n\n{part(180)}",
        "Name three colours.",
        f"What is the main topic of the following text?\n\n{part(110)}",
        "What is the capital of France?",
        f"List the numbers that occur in this text.\n\n{part(150)}",
        "Give me a short title for a story about a fox and a clever crow who both want the same piece of cheese.",
        f"Write a question that this text answers.\n\n{PASSAGE}",
        "Say good morning in two languages.",
        f"Who are the people in this text?\n\n{part(130)}",
        "Explain in one sentence why the sky is blue.",
        f"Continue the following text.\n\n{part(90)}",
    ]


@dataclass(frozen=True, slots=True)
class Live:
    """A real server instead of the local one."""

    base_url: str
    model: str
    api_key: str


Say = Callable[[str], None]
_numbers = itertools.count(100)  # all of three digits, so that the prompts have one length


async def run_demo(*, live: Live | None, say: Say, show: Callable[[str], None]) -> dict[str, Any]:
    """Run the demo. `say` gets progress lines, `show` the text of one answer as it streams.

    Returns `{"requests": [...], "summary": {...}}`, times in s, cost in $. Raises DiscoError.
    """
    model = await asyncio.to_thread(fetch_default_model, say)
    rows: list[dict[str, Any]] = []
    async with _stage(model, live, say) as daemon:
        http = DefaultAsyncHttpxClient(follow_redirects=False, trust_env=False)
        client = AsyncOpenAI(
            base_url=daemon, api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S, http_client=http
        )
        async with client:
            say("warming up: the first answer of each side includes loading its model")
            for route in ("disco/device", "disco/server"):
                await _ask(client, route, "Hello!", ALONE_TOKENS)
            for number, prompt in enumerate(prompts(), 1):
                alone = {
                    side: (await _ask(client, f"disco/{side}", prompt, ALONE_TOKENS))["ttft_s"]
                    for side in ("device", "server")
                }
                if number == 1:
                    show(f"\n> {prompt}\n")
                raced = await _ask(client, "disco", prompt, MAX_TOKENS, show if number == 1 else None)
                if number == 1:
                    show("\n\n")
                rows.append(_row(raced, alone))
                row = rows[-1]
                say(f"{number:2}/12  {row['prompt_tokens']:4} tokens  {row['winner']:6}  {row['ttft_s'] * 1e3:5.0f} ms")
    return {"requests": rows, "summary": _summary(rows)}


async def _ask(
    client: AsyncOpenAI, model: str, prompt: str, max_tokens: int, show: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """One streamed answer through the unmodified client; the daemon's `disco` object and the TTFT seen here."""
    # In front stands what was never asked before: a prompt that is cached from the last time would show nothing.
    fresh = f"{next(_numbers)}. You are a helpful assistant."
    began = time.perf_counter()
    first: float | None = None
    answer: dict[str, Any] | None = None
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": fresh}, {"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )
    async for chunk in stream:
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text and first is None:
            first = time.perf_counter() - began
        if text and show is not None:
            show(text)
        answer = (chunk.model_extra or {}).get("disco", answer)
    if answer is None or first is None:
        msg = f"{model} gave no answer to {prompt[:40]!r}"
        raise BenchError(msg)
    return answer | {"ttft_s": first}


def _row(raced: dict[str, Any], alone: dict[str, float]) -> dict[str, Any]:
    winner = raced["winner"]
    loser = "server" if winner == "device" else "device"
    endpoints = raced["endpoints"]
    return {
        "prompt_tokens": raced["prompt_tokens"],
        "plan": raced["plan"],
        "winner": winner,
        "ttft_s": round(raced["ttft_s"], 4),
        "device_ttft_s": round(alone["device"], 4),
        "server_ttft_s": round(alone["server"], 4),
        "tokens": raced["tokens"],
        "cost_usd": raced["cost_usd"],
        "loser_tokens": endpoints[loser]["completion_tokens"] if loser in endpoints else 0,
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def in_time(row: dict[str, Any]) -> bool:
        limit = SLACK_RATIO * min(row["device_ttft_s"], row["server_ttft_s"]) + SLACK_S
        return bool(row["ttft_s"] <= limit)

    def mean(key: str) -> float:
        return float(round(sum(row[key] for row in rows) / len(rows), 4))

    faster = [min(row["device_ttft_s"], row["server_ttft_s"]) for row in rows]
    return {
        "in_time": sum(in_time(row) for row in rows),
        "of": len(rows),
        "wins": {side: sum(row["winner"] == side for row in rows) for side in ("device", "server")},
        "mean_ttft_s": mean("ttft_s"),
        "mean_device_ttft_s": mean("device_ttft_s"),
        "mean_server_ttft_s": mean("server_ttft_s"),
        "ratio_to_faster_side": round(sum(row["ttft_s"] for row in rows) / sum(faster), 3),
        "max_loser_tokens": max(row["loser_tokens"] for row in rows),
        "cost_usd": sum(row["cost_usd"] for row in rows),
    }


# --- processes ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _stage(model: Path, live: Live | None, say: Say) -> AsyncIterator[str]:
    """The daemon, and unless `live` a server of its own; yields the daemon's URL."""
    threads = max(1, n_cores() // 2)  # both engines compute during a race: half of the cores each
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-demo-")))
        if live is None:
            trace = stack.enter_context(as_file(files("disco_daemon.profiles") / "traces" / "gpt-3.5-turbo.csv"))
            fast = await _fast_copy(model, folder, say)
            argv = _up(folder, "server", {}, fast, threads, "--policy", "all-device", "--shape-ttft", str(trace))
            say("starting the server: the same software, a faster build of the model, a real TTFT trace in front")
            url = await stack.enter_async_context(child(argv, folder, "server"))
            server = {"base_url": url, "model": "disco/device"} | PRICES
            env = {}
        else:
            server, env = {"base_url": live.base_url, "model": live.model}, {"OPENAI_API_KEY": live.api_key}
        # The race is what is shown here; `benchmarks.handoff` shows answers that move.
        settings = {"server": server | {"probe": False}, "handoff": {"for_cost": False}, "device": {"watts": WATTS}}
        argv = _up(folder, "daemon", settings, model, threads, "--policy", "race")
        say("starting the daemon")
        yield await stack.enter_async_context(child(argv, folder, "daemon", env))


def _up(folder: Path, name: str, settings: dict[str, Any], model: Path, threads: int, *more: str) -> list[str]:
    config = folder / f"{name}.toml"
    config.write_text(tomlkit.dumps(settings), encoding="utf-8")
    return [
        *verb("up"), "--port", "0", "--json", "--until-eof", "--config", str(config),
        "--history", str(folder / f"{name}.sqlite"), "--model", str(model), "--threads", str(threads), *more,
    ]  # fmt: skip


async def _fast_copy(model: Path, folder: Path, say: Say) -> Path:
    """The default model with Q8_0 weights, which a CPU prefills more than twice as fast: the demo's server."""
    fast = models_dir() / model.name.replace("Q4_1", "Q8_0")
    if fast == model or fast.exists():
        return fast
    say("preparing the server's model (once)")
    writing = command("disco_daemon.engine.measure.requantize", str(model), str(fast))
    process = await start(writing, environment(), folder / "requantize.log")
    try:
        if await process.wait() != 0:
            msg = f"could not prepare {fast}: is the disk full?"
            raise BenchError(msg)
    finally:
        await end(process)
    return fast

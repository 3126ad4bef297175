"""Whether other clients' cancels, long prompts and preemptions change an answer, on tiny models of all kinds.

`python -m benchmarks.engine.tiny_models --requests 500 --json`: a daemon for each model, with a real engine; every
answer that is not cancelled is compared with that of the same request alone. Anything that differs is a failure: exit
code 1. So is a run of hundreds in which too little happened that could have changed one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import tomlkit

from disco_daemon.bench.child import child
from disco_daemon.bench.command import at_least, progress, run_measurement
from disco_daemon.engine import wire
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.admission import Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.scheduler.baselines import Fcfs
from disco_daemon.scheduler.latency import IterationLatency
from tests.fixtures.daemon import by_socket
from tests.fixtures.tiny_models import MODELS, tiny_model

N_CTX, N_CELLS = 768, 768  # of an answer, and of all that run: three with long prompts do not fit
AT_ONCE = 16  # clients
N_DIFFERENT = 48  # requests; each comes about ten times, since what it is alone has to be computed too
LONG, SHORT = (100, 300), (2, 40)  # words of a prompt
LONG_SHARE, CANCEL_SHARE, CHOICES_SHARE, ALIKE_SHARE = 0.25, 0.3, 0.1, 0.5
FEW_TOKENS, MANY_TOKENS, MANY_SHARE = (1, 32), (150, 300), 0.4  # of an answer: those that grow long need others' cells
HUNDREDS = 200  # requests; a shorter run need not have all events
LEAST_PREEMPTED = 0.04  # of the requests of such a run; fewer, and it says too little of preemption
LOOK_S = 0.05  # between two looks at how many answers run and wait
ANSWERS = re.compile(r'^disco_engine_answers\{state="(\w+)"\} (\S+)$', re.MULTILINE)
PATIENCE_S = 120.0  # for one answer, on a machine that does other things
WORDS = ("river", "lamp", "stone", "garden", "winter", "silver", "music", "door", "island", "paper", "cloud", "letter")


@dataclass(frozen=True, slots=True)
class TinyRequest:
    """A prompt and how many tokens are asked for, for so many choices."""

    prompt: str
    max_tokens: int
    n: int = 1


@dataclass(slots=True)
class Tally:
    """What has become of requests."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, what: str, example: str = "") -> None:
        """Count one; the first few examples are kept."""
        self.counts[what] += 1
        if example and len(self.examples) < 5:
            self.examples.append(f"{what}: {example}"[:400])


def requests(rng: random.Random, n: int) -> list[TinyRequest]:
    """Draw different requests, half of which begin alike."""
    base = rng.choices(WORDS, k=LONG[1])
    found = []
    for i in range(n):
        n_words = rng.randint(*(LONG if rng.random() < LONG_SHARE else SHORT))
        words = base[:n_words] if rng.random() < ALIKE_SHARE else rng.choices(WORDS, k=n_words)
        choices = 3 if rng.random() < CHOICES_SHARE else 1
        found.append(
            TinyRequest(
                " ".join([*words, str(i)]),
                rng.randint(*(MANY_TOKENS if rng.random() < MANY_SHARE else FEW_TOKENS)),
                choices,
            )
        )
    return found


def alone(model: Path, asked: Sequence[TinyRequest]) -> dict[TinyRequest, str]:
    """Compute each answer with a KV cache for itself, in this process."""
    load = wire.Load(model_path=str(model), n_ctx=N_CTX, n_threads=1, n_gpu_layers=0, n_cells=N_CTX, exact=True)
    llama = Llama(load, AbortFlag(), warm=False)
    found = {}
    for request in asked:
        llama.clear()
        said: list[str] = []
        latency = IterationLatency(llama.latency_prior)
        admission = Admission(Cells(llama, 2, N_CTX), Fcfs(), latency)

        def hear(message: wire.Message, said: list[str] = said) -> None:
            if isinstance(message, wire.TextPiece):
                said.append(message.text)

        batcher = Batcher(llama, hear, admission)
        messages = [{"role": "user", "content": request.prompt}]
        batcher.add(wire.Generate(id="alone", messages=messages, temperature=0.0, max_tokens=request.max_tokens))
        while batcher.step():
            pass
        found[request] = "".join(said)
    llama.close()
    return found


async def ask(root: str, session: aiohttp.ClientSession, request: TinyRequest, n_pieces: int | None) -> list[str]:
    """Ask for an answer, streamed; return the texts of its choices. The client leaves behind `n_pieces`."""
    body = {
        "model": "disco/device", "messages": [{"role": "user", "content": request.prompt}], "temperature": 0,
        "max_tokens": request.max_tokens, "stream": True, "n": request.n,
    }  # fmt: skip
    texts, ended, n = [""] * request.n, 0, 0
    async with session.post(f"{root}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise ValueError(await response.text())
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            if n_pieces is not None and n >= n_pieces:
                raise asyncio.CancelledError
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ValueError(line.decode())
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
                ended += choice["finish_reason"] is not None
                n += 1
    if ended != request.n:
        msg = f"the stream ended behind {texts}"
        raise ValueError(msg)
    return texts


async def one(
    root: str, session: aiohttp.ClientSession, request: TinyRequest, expected: str, rng: random.Random, tally: Tally
) -> None:
    """Ask once, or ask and leave; tell what became of it."""
    leaves = rng.random() < CANCEL_SHARE
    n_pieces, after_s = (rng.choice([0, 1, 3, 8]), rng.choice([None, 0.001, 0.02, 0.2])) if leaves else (None, None)
    try:
        async with asyncio.timeout(after_s or PATIENCE_S):
            texts = await ask(root, session, request, n_pieces)
    except (asyncio.CancelledError, TimeoutError) as e:
        if leaves:
            tally.add("cancelled")
        else:
            tally.add("failed", repr(e))
    except (ValueError, aiohttp.ClientError) as e:
        tally.add("failed", str(e))
    else:
        for text in texts:
            tally.add(
                "same" if text == expected else "differ", "" if text == expected else f"{text!r}, not {expected!r}"
            )


async def stress(root: str, expected: dict[TinyRequest, str], n: int, rng: random.Random) -> Tally:
    """Let clients ask `n` requests, AT_ONCE at a time."""
    tally, asked = Tally(), list(expected)
    left = iter(range(n))

    async def client(seed: int) -> None:
        own = random.Random(seed)
        async with aiohttp.ClientSession() as session:
            for _ in left:
                request = own.choice(asked)
                await one(root, session, request, expected[request], own, tally)

    await asyncio.gather(*(client(rng.randrange(1 << 30)) for _ in range(AT_ONCE)))
    return tally


async def watch(root: str, most: Counter[str]) -> None:
    """Keep the most answers that were in each state at a time, until it is cancelled."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{root}/metrics") as response:
                found = ANSWERS.findall(await response.text())
            for name, n in found:
                most[name] = max(most[name], int(float(n)))
            await asyncio.sleep(LOOK_S)  # another process, which has no event to wait for


async def measure_model(kind: str, n: int, n_threads: int, seed: int, folder: Path) -> dict[str, Any]:
    """Ask a daemon with this model `n` requests."""
    rng, began = random.Random(seed), time.monotonic()
    model = tiny_model(folder / f"{kind}.gguf", kind)
    expected = await asyncio.to_thread(alone, model, requests(rng, min(n, N_DIFFERENT)))
    config = folder / f"{kind}.toml"
    device: dict[str, Any] = {"n_ctx": N_CTX, "n_cells": N_CELLS, "rounding": "exact", "autotune": False, "watts": 15.0}
    device["scheduler"] = "fcfs"  # which lets in whatever fits now, and preempts when that grows
    config.write_text(tomlkit.dumps({"device": device}))
    argv = [
        sys.executable, "-P", "-m", "disco_daemon.cli.main", "up", "--port", "0", "--json", "--until-eof", "--config",
        str(config), "--history", str(folder / f"{kind}.sqlite"), "--threads", str(n_threads), "--model", str(model),
    ]  # fmt: skip
    async with child(argv, folder, kind, {"GOMP_SPINCOUNT": "0"}) as url:  # threads may be more than processors free
        most = Counter[str]()
        root = url.removesuffix("/v1")
        watching = asyncio.create_task(watch(root, most))
        tally = await stress(root, expected, n, rng)
        watching.cancel()
        async with by_socket(url) as controls, controls.get(f"{root}/disco/v1/state") as response:
            n_preempted = (await response.json())["endpoints"]["device"]["engine"]["preemptions"]
    figures = {what: tally.counts[what] for what in ("same", "differ", "failed", "cancelled")}
    seconds = round(time.monotonic() - began, 1)
    figures |= {"preempted": n_preempted}
    return {"requests": n, **figures, "most": dict(most), "seconds": seconds, "examples": tally.examples}


async def measure(kinds: Sequence[str], n: int, n_threads: int, seed: int) -> dict[str, Any]:
    """Ask each kind of model `n` requests."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="disco-tiny-") as folder:
        for kind in kinds:
            found[kind] = await measure_model(kind, n, n_threads, seed, Path(folder))
            progress(f"{kind}: {found[kind]}")
    return {"threads": n_threads, "seed": seed, "models": found}


def is_right(figures: dict[str, Any]) -> bool:
    """Whether no answer failed or differed, and no run of hundreds says too little."""
    models = figures["models"]
    return all(one["differ"] == one["failed"] == 0 and not is_thin(kind, one) for kind, one in models.items())


def is_thin(kind: str, figures: dict[str, Any]) -> bool:
    """Whether a run of hundreds of requests has had too few of the events that this kind of model can have.

    Answers that take a cell a token are preempted, where others grow. Those with one state a text never lack a cell:
    they are paused, and then go on from that state.
    """
    n = figures["requests"]
    if n < HUNDREDS:
        return False
    if MODELS[kind].takes_cells:
        return bool(figures["preempted"] < LEAST_PREEMPTED * n)
    return not (figures["cancelled"] and figures["most"].get("paused"))


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.tiny_models", description=__doc__)
    parser.add_argument("--requests", type=at_least(1), default=500, help="of each model (default: %(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="kinds, with commas between (default: all)")
    parser.add_argument("--threads", type=at_least(1), default=2, help="of the engine (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    figures = run_measurement(measure(args.models.split(","), args.requests, args.threads, args.seed))
    if figures is None:
        return 1
    if args.json:
        print(json.dumps(figures))
    return 0 if is_right(figures) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Vectors of many short texts by our daemon and by llama-server: the same GGUF, threads, texts and client, in turns.

    python -m benchmarks.engine.embeddings --model FILE [--texts 256] [--repeats 5] [--threads N] [--slots 4] [--json]

FILE is an embedding model, such as all-MiniLM-L6-v2 as llama.cpp's converter writes it. All texts are in one request;
the ratio is llama-server's time over ours. Vectors of the two have to be the same, or there is no figure.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.bench.engine import OURS, EngineSetup, open_doors, processor, up
from disco_daemon.bench.streamed import Door
from disco_daemon.engine.measure.tune import TEXT

from .. import llama_server
from ..command import run_script

PEER = "peer"
WORDS = (4, 60)  # of a text: a question, or a paragraph's first sentences
LEAST_COSINE = 0.999


def some_texts(n: int) -> list[str]:
    """Return as many different texts, the same each time."""
    rng, words = random.Random(0), TEXT.split()
    return [f"{i} {' '.join(rng.choices(words, k=rng.randint(*WORDS)))}" for i in range(n)]


async def embedded(door: Door, texts: list[str]) -> tuple[float, np.ndarray[Any, Any], int]:
    """Return how long it took, s, the vectors, and the tokens."""
    began = time.perf_counter()
    async with door.session.post(f"{door.url}/embeddings", json={"model": "disco", "input": texts}) as response:
        told = await response.json()
    took_s = time.perf_counter() - began
    if response.status != 200:
        raise BenchError(f"{door.name}: {told}")
    return took_s, np.array([one["embedding"] for one in told["data"]]), told["usage"]["total_tokens"]


async def measure(setup: EngineSetup, model: Path, n_texts: int, n_slots: int) -> dict[str, Any]:
    """Measure both in turns. Raises BenchError."""
    options = llama_server.Options(
        n_ctx=512 * n_slots, n_parallel=n_slots, n_threads=setup.n_threads, kv_unified=True, embeddings=True
    )
    servers = {OURS: lambda folder: up(folder, setup, model), PEER: lambda _: llama_server.argv(model, options)}
    texts, n_tokens = some_texts(n_texts), 0
    took: dict[str, list[float]] = {OURS: [], PEER: []}
    cpu: dict[str, list[float | None]] = {OURS: [], PEER: []}
    async with open_doors(setup, servers, progress) as doors:
        vectors = {}
        for name, door in doors.items():  # the first request waits for the model
            _, vectors[name], n_tokens = await embedded(door, texts)
        alike = (vectors[OURS] * vectors[PEER]).sum(1) / np.linalg.norm(vectors[PEER], axis=1)
        if float(alike.min()) < LEAST_COSINE:
            raise BenchError(f"the vectors of the two differ: the least cosine is {alike.min():.4f}")
        for _ in range(setup.repeats):
            for name, door in doors.items():
                before_s = door.cpu_s()
                took[name].append((await embedded(door, texts))[0])
                after_s = door.cpu_s()
                cpu[name].append(None if before_s is None or after_s is None else after_s - before_s)
    middle = {name: statistics.median(times) for name, times in took.items()}
    return {
        "ratio": round(middle[PEER] / middle[OURS], 3),
        "seconds": {name: round(value, 4) for name, value in middle.items()},
        **processor(cpu),
        "texts": n_texts, "tokens": n_tokens, "least_cosine": round(float(alike.min()), 6),
        "threads": setup.n_threads, "model": model.name, "peer": llama_server.peer() | {"slots": n_slots},
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    seconds = found["seconds"]
    return (
        f"{found['texts']} texts, {found['tokens']} tokens, {found['threads']} threads, {found['model']}: ours "
        f"{seconds[OURS]:.3f} s, llama-server ({found['peer']['slots']} slots) {seconds[PEER]:.3f} s, "
        f"{found['ratio']:.3f} times as fast; by processor time {found.get('cpu_ratio')}; "
        f"least cosine {found['least_cosine']}"
    )


def main(argv: list[str] | None = None) -> int:
    """Compare and print; progress goes to stderr."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.embeddings", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file of an embedding model")
    parser.add_argument("--texts", type=at_least(1), default=256, help="of one request (default: %(default)s)")
    parser.add_argument("--repeats", type=at_least(1), default=5, help="turns (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of both sides (default: one fewer than the cores)")
    parser.add_argument("--slots", type=at_least(1), default=4, help="of llama-server (default: its own, %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    llama_server.require()
    setup = EngineSetup(model=args.model, repeats=args.repeats, threads=args.threads)
    figures = run_measurement(measure(setup, args.model, args.texts, args.slots))
    return print_figures(figures, table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

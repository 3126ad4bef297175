"""Our engine beside llama.cpp's own llama-server: the same GGUF, threads, prompts and client, in one run.

    python -m benchmarks.engine [--repeats 5] [--threads N] [--long 8,16 | --short] [--json]

It needs the wheel xllamacpp, a development dependency. Both sides are asked over HTTP as `disco_daemon.bench.engine`
says, and have one KV cache of `n_ctx` tokens for all their answers and a prefix cache. For `throughput_long`, where an
answer is written behind a prompt of 800 tokens, servers of their own have a cache that holds all of it. The daemon's
part of the way is in our figures, as the peer's HTTP server is in its own. `--long` measures `throughput_long` alone,
and `--short` all else.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from disco_daemon.bench import engine
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.bench.engine import (
    OURS,
    RUNNING,
    Bench,
    EngineSetup,
    Progress,
    Start,
    about,
    begin,
    behind,
    breaks_off,
    measure,
    open_doors,
    table,
    up,
)
from disco_daemon.bench.engine_chats import Count
from disco_daemon.bench.streamed import Chat, Door
from disco_daemon.models.default import fetch_default_model

from .. import llama_server
from ..command import run_script

PEER = "peer"


def with_long_contexts(setup: EngineSetup) -> EngineSetup:
    """Return the setup of `measure_long`: cells for as many answers as run at a time, and for as many ended ones."""
    return replace(setup, n_cells=2 * max(setup.concurrent) * (engine.LONG_CONTEXT + setup.max_tokens))


async def measure_long(bench: Bench) -> dict[str, Any]:
    """Measure answers behind long prompts, LONG_CONTEXT tokens each, at servers that have cells for them."""
    await begin(bench)
    return {str(n): await bench.throughput(n, engine.LONG_CONTEXT) for n in bench.setup.concurrent}


def counter(door: Door) -> Count:
    """Count a chat's tokens by llama-server's own template and tokenizer; both sides run the same model."""

    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with door.session.post(f"{door.root}/{path}", json=body, allow_redirects=False) as response:
            response.raise_for_status()
            found: dict[str, Any] = await response.json()
        return found

    async def count(chat: Chat) -> int:
        prompt = (await post("apply-template", {"messages": chat}))["prompt"]
        return len((await post("tokenize", {"content": prompt, "add_special": True, "parse_special": True}))["tokens"])

    return count


def _servers(setup: EngineSetup, model: Path) -> dict[str, Start]:
    # One cache for all slots, as ours: divided among 16 slots it would have no room for a long prompt. The rest is what
    # llama.cpp does by default; batch sizes and its cache of prompts outside the KV cache made no difference.
    n_ctx, n_parallel = setup.n_cells or setup.n_ctx, max((RUNNING + 1, *setup.concurrent))
    options = llama_server.Options(n_ctx=n_ctx, n_parallel=n_parallel, n_threads=setup.n_threads, kv_unified=True)
    return {OURS: lambda folder: up(folder, setup, model), PEER: lambda _: llama_server.argv(model, options)}


async def bench_engine(setup: EngineSetup, progress: Progress, *, with_long: bool = True) -> dict[str, Any]:
    """Measure both in turns, `with_long` also answers behind long prompts. Raises BenchError."""
    model = await _model(setup, progress)
    with breaks_off():
        async with open_doors(setup, _servers(setup, model), progress) as doors:
            figures = await measure(Bench(doors, setup, counter(doors[PEER]), progress))
    return {
        "throughput_ratio": {n: found["ratio"] for n, found in figures["throughput"].items()},
        "ttft_ratio": {n: found["ratio"] for n, found in figures["ttft"].items()},
        "second_turn_ttft_ratio": figures["second_turn"]["ratio"],
        **figures,
        **(await bench_long(setup, progress) if with_long else {"peer": llama_server.peer(), **about(setup, model)}),
    }


async def bench_long(setup: EngineSetup, progress: Progress) -> dict[str, Any]:
    """Measure answers behind long prompts only. Raises BenchError."""
    model, longer = await _model(setup, progress), with_long_contexts(setup)
    with breaks_off():
        async with open_doors(longer, _servers(longer, model), progress) as doors:
            found = await measure_long(Bench(doors, longer, counter(doors[PEER]), progress))
    return {
        "throughput_ratio_long": {n: figures["ratio"] for n, figures in found.items()},
        "throughput_long": found,
        "peer": llama_server.peer(),
        **about(setup, model),
    }


async def _model(setup: EngineSetup, progress: Progress) -> Path:
    llama_server.require()
    if setup.model is not None:
        return setup.model
    return await asyncio.to_thread(fetch_default_model, progress)


def table_long(figures: dict[str, Any]) -> str:
    """Return the ratios of `bench_long`, one a line."""
    ratios = figures["throughput_ratio_long"]
    return "\n".join(f"{n} answers{behind(engine.LONG_CONTEXT)}: {ratio:.3f}" for n, ratio in ratios.items())


def main(argv: list[str] | None = None) -> int:
    """Compare and print; progress goes to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description="Same model, threads, prompts and client on both sides, in turns. Needs the wheel xllamacpp.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=at_least(1), default=5, help="turns (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of both sides (default: one fewer than the cores)")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--long", metavar="N,N", help="measure only N answers at a time behind long prompts")
    part.add_argument("--short", action="store_true", help="measure all but answers behind long prompts")
    args = parser.parse_args(argv)
    setup = EngineSetup(repeats=args.repeats, threads=args.threads)
    if args.long:
        long = bench_long(replace(setup, concurrent=tuple(map(int, args.long.split(",")))), progress)
        return print_figures(run_measurement(long), table_long, as_json=args.json)
    figures = run_measurement(bench_engine(setup, progress, with_long=not args.short))
    return print_figures(figures, table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

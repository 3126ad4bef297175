"""Our engine beside llama.cpp's own llama-server: the same GGUF, threads, prompts and client, in one run.

    python -m benchmarks.engine [--model FILE | --shape SHAPE [--quant QUANT]] [--repeats 5] [--threads N]
                                [--brief | --short | --long 8,16 | --rounding] [--json]

The peer is compiled natively, once, from the source of llama.cpp that we compile, too (`benchmarks.llama_server`).
`--shape` makes a model with random weights, as large as one that people run (`benchmarks.engine.shapes`); what it says
repeats itself, so that nothing guesses it. Both sides are asked over HTTP as `disco_daemon.bench.engine` says, and have
one KV cache of `n_ctx` tokens for all their answers and a prefix cache. For `throughput_long`, where an answer is
written behind a prompt of 800 tokens, servers of their own have a cache that holds all of it. The daemon's part of the
way is in our figures, as the peer's HTTP server is in its own. `--long` measures `throughput_long` alone, `--short` all
else, and `--brief` what the ratios by processor time are made of: a prompt of 512 tokens, and 1 and 8 answers.
`--rounding` measures the same of our engine alone: how many times the time of fast rounding exact rounding takes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from disco_daemon.bench import engine
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.bench.engine import (
    OURS,
    RUNNING,
    SHARE_AT,
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
from disco_daemon.bench.engine_chats import Count, calibrate_count
from disco_daemon.bench.streamed import Chat, Door
from disco_daemon.config.layers import cache_path
from disco_daemon.engine.llama.ggml import Ggml
from disco_daemon.models.default import fetch_default_model
from disco_daemon.models.gguf import HEADER_BYTES, read_header

from .. import llama_server
from ..command import run_script
from . import limits, shapes

PEER, FAST = "peer", "fast"
PROMPT, ONE, MANY = "512", "1", str(SHARE_AT)  # the measurements behind the ratios by processor time


def with_long_contexts(setup: EngineSetup) -> EngineSetup:
    """Return the setup of `measure_long`: cells for as many answers as run at a time, and for as many ended ones."""
    return replace(setup, n_cells=2 * max(setup.concurrent) * (engine.LONG_CONTEXT + setup.max_tokens))


async def measure_long(bench: Bench) -> dict[str, Any]:
    """Measure answers behind long prompts, LONG_CONTEXT tokens each, at servers that have cells for them."""
    await begin(bench)
    return {str(n): await bench.throughput(n, engine.LONG_CONTEXT) for n in bench.setup.concurrent}


async def measure_brief(bench: Bench) -> dict[str, Any]:
    """Measure what the ratios by processor time are made of."""
    await begin(bench)
    rates = {n: await bench.throughput(int(n)) for n in (ONE, MANY)}
    return {"throughput": rates, "ttft": {PROMPT: await bench.ttft(int(PROMPT))}}


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


async def bench_engine(
    setup: EngineSetup, progress: Progress, *, with_long: bool = True, brief: bool = False
) -> dict[str, Any]:
    """Measure both in turns, `with_long` also answers behind long prompts. Raises BenchError."""
    model = await _model(setup, progress)
    with breaks_off():
        async with open_doors(setup, _servers(setup, model), progress) as doors:
            bench = Bench(doors, setup, counter(doors[PEER]), progress)
            figures = await (measure_brief(bench) if brief else measure(bench))
    bounds = await asyncio.to_thread(limits.measure, setup.n_threads)
    return {
        "throughput_ratio": {n: found["ratio"] for n, found in figures["throughput"].items()},
        "ttft_ratio": {n: found["ratio"] for n, found in figures["ttft"].items()},
        **({} if brief else {"second_turn_ttft_ratio": figures["second_turn"]["ratio"]}),
        **by_processor(figures, limits.work_of(model), bounds),
        **figures,
        **(await bench_long(setup, progress) if with_long and not brief else _beside(setup, model)),
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
        **_beside(setup, model),
    }


async def bench_rounding(setup: EngineSetup, progress: Progress) -> dict[str, Any]:
    """Measure our engine with exact rounding, and beside it with fast rounding. Raises BenchError."""
    model = setup.model if setup.model is not None else await asyncio.to_thread(fetch_default_model, progress)

    def start(rounding: str, folder: Path) -> list[str]:
        (own := folder / rounding).mkdir()
        return ["env", f"DISCO_DEVICE_ROUNDING={rounding}", *up(own, setup, model)]

    servers: dict[str, Start] = {OURS: partial(start, "exact"), FAST: partial(start, "fast")}
    with breaks_off():
        async with open_doors(setup, servers, progress) as doors:
            figures = await measure_brief(Bench(doors, setup, await calibrate_count(doors[OURS]), progress))
    times = {what: one.get("cpu_s") for what, one in _briefly(figures).items()}
    ratios = {what: cpu_s and round(cpu_s[OURS] / cpu_s[FAST], 4) for what, cpu_s in times.items()}
    return {"exact_over_fast": ratios, **figures, **_about(setup, model)}


def _briefly(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what was measured of a prompt, an answer alone, and many answers at a time."""
    rates = figures["throughput"]
    return {"prompt": figures["ttft"].get(PROMPT, {}), "one": rates.get(ONE, {}), "many": rates.get(MANY, {})}


def by_processor(figures: dict[str, Any], work: limits.Work, bounds: limits.Bounds | None) -> dict[str, Any]:
    """Return how many times our processor time the peer takes, and the share that this processor's bound has in ours.

    None stands for what was not measured.
    """
    found = _briefly(figures)
    least = {"prompt": bounds and work.prompt_s(bounds), "one": bounds and work.one_s(bounds)}
    shares = dict.fromkeys(least)
    for what, least_s in least.items():
        if least_s and "cpu_s" in found[what]:
            shares[what] = round(least_s / found[what]["cpu_s"][OURS], 4)
    stated = bounds and asdict(bounds) | {"multiply_adds_per_cycle": bounds.multiply_adds_per_cycle}
    return {
        "cpu_ratio": {what: one.get("cpu_ratio") for what, one in found.items()},
        "limit_share": shares,
        "limits": stated,
        "work": asdict(work),
    }


def _beside(setup: EngineSetup, model: Path) -> dict[str, Any]:
    """Describe both sides, the machine, and the model."""
    return {"native": True, "peer": llama_server.peer(), **_about(setup, model)}


def _about(setup: EngineSetup, model: Path) -> dict[str, Any]:
    """Describe the machine, and the model."""
    with model.open("rb") as file:
        quant = read_header(file.read(HEADER_BYTES)).packing.lower()
    described = {"shape": setup.shape or None, "quant": quant, "file": model.name}
    return {**about(setup, model), "model": described}


async def _model(setup: EngineSetup, progress: Progress) -> Path:
    await asyncio.to_thread(llama_server.require, progress)
    if setup.model is not None:
        return setup.model
    return await asyncio.to_thread(fetch_default_model, progress)


@contextmanager
def made(shape: str, quant: str) -> Iterator[Path]:
    """Make a model for the time of a measurement, on the disk that has the caches: some have gigabytes."""
    cache_path().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="model-", dir=cache_path()) as folder:
        path = Path(folder) / f"random-{shape}-{quant}.gguf"
        progress(f"making {path.name}")
        yield shapes.make(path, shapes.SHAPES[shape], quant, Ggml.installed(), fetch_default_model(progress))


def table_long(figures: dict[str, Any]) -> str:
    """Return the ratios of `bench_long`, one a line."""
    ratios = figures["throughput_ratio_long"]
    return "\n".join(f"{n} answers{behind(engine.LONG_CONTEXT)}: {ratio:.3f}" for n, ratio in ratios.items())


MEASURED = {"prompt": f"a token of a prompt of {PROMPT}", "one": "a token alone", "many": f"a token of {MANY} answers"}


def table_rounding(figures: dict[str, Any]) -> str:
    """Return how many times the processor time of fast rounding exact rounding takes."""
    lines = [f"{MEASURED[what]}: {ratio or 'not measured'}" for what, ratio in figures["exact_over_fast"].items()]
    return "\n".join(["Exact over fast, by processor time:", *lines, _named(figures)])


def _named(figures: dict[str, Any]) -> str:
    return "{file}, {quant}, shape {shape}".format(**figures["model"])


def table_by_processor(figures: dict[str, Any]) -> str:
    """Return how many times as fast ours is, by processor time, and the bound's share."""
    lines = []
    for what, ratio in figures["cpu_ratio"].items():
        share = figures["limit_share"].get(what)
        bound = f", {share:.1%} of it this processor's bound" if share is not None else ""
        lines.append(f"{MEASURED[what]}: {'not measured' if ratio is None else f'{ratio:.3f} times as fast'}{bound}")
    if bounds := figures["limits"]:
        lines.append(
            f"a thread's bounds: {bounds['multiply_adds_per_s'] / 1e9:.4g} billion multiply-adds of bytes a second "
            f"({bounds['multiply_adds_per_cycle']} a cycle), {bounds['bytes_per_s'] / 1e9:.3g} GB/s from memory"
        )
    return "\n".join([*lines, _named(figures)])


def table_all(figures: dict[str, Any]) -> str:
    """Return all that clients see, and what the processor says."""
    seen = figures | {"model": figures["model"]["file"]}
    return f"{table(seen)}\nBy processor time, llama-server's over ours:\n{table_by_processor(figures)}"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description="Same model, threads, prompts and client on both sides, in turns. Compiles llama-server once.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=at_least(1), default=5, help="turns (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of both sides (default: one fewer than the cores)")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="a GGUF file (default: the embedded model)")
    model.add_argument("--shape", choices=shapes.SHAPES, help="random weights in the shape of such a model")
    parser.add_argument("--quant", choices=shapes.QUANTS, default="q4_k_m", help="of a shape (default: %(default)s)")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--long", metavar="N,N", help="measure only N answers at a time behind long prompts")
    part.add_argument("--short", action="store_true", help="measure all but answers behind long prompts")
    part.add_argument("--brief", action="store_true", help="measure a prompt of 512 tokens, and 1 and 8 answers")
    part.add_argument("--rounding", action="store_true", help="measure the same of ours, exact beside fast rounding")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Compare and print; progress goes to stderr."""
    args = _arguments(argv)
    setup = EngineSetup(model=args.model, repeats=args.repeats, threads=args.threads)
    if args.shape is None:
        return _compared(setup, args)
    if not args.rounding:
        llama_server.require()
    with made(args.shape, args.quant) as model:
        return _compared(replace(setup, model=model, shape=args.shape, guesses=False), args)


def _compared(setup: EngineSetup, args: argparse.Namespace) -> int:
    if args.rounding:
        return print_figures(run_measurement(bench_rounding(setup, progress)), table_rounding, as_json=args.json)
    if args.long:
        long = bench_long(replace(setup, concurrent=tuple(map(int, args.long.split(",")))), progress)
        return print_figures(run_measurement(long), table_long, as_json=args.json)
    figures = run_measurement(bench_engine(setup, progress, with_long=not args.short, brief=args.brief))
    return print_figures(figures, table_by_processor if args.brief else table_all, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

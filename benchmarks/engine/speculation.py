"""The gain of speculative decoding: `python -m benchmarks.engine.speculation`.

Two daemons with the same model, one of them with `device.speculation = "off"`, are asked the same things in turn: to
repeat a text, to edit a JSON document, and for a story. A figure is the median over the repeats of token/s from the
first token of an answer to its end, greedy, and nothing beside it; who is asked first changes with every repeat. The
answers have to be the same to the letter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import tomlkit

from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.command import print_figures, progress, run_measurement
from disco_daemon.bench.demo import PASSAGE
from disco_daemon.bench.streamed import Chat, Door, StreamedAnswer, ask, at_rest, device_state
from disco_daemon.models.default import fetch_default_model
from disco_daemon.system.control_groups import n_processors
from disco_daemon.system.program import verb

from ..command import run_script

ON, OFF = "auto", "off"
REQUEST_S = 300.0  # one answer, s
MAX_TOKENS = 200
GOODS = [
    {"id": 100 + i, "name": name, "colour": colour, "price": 12.5 + i, "in_stock": True}
    for i, (name, colour) in enumerate([("lamp", "red"), ("chair", "green"), ("table", "blue"), ("shelf", "white")])
]
TASKS = {
    "repeat": f"Repeat this text word for word:\n\n{PASSAGE}",
    "edit": f"Repeat this JSON, but change the colour of the lamp to black:\n\n{json.dumps(GOODS, indent=1)}",
    "story": "Write a long story with many details about a fox.",
}


def rate(heard: StreamedAnswer) -> float:
    """Token/s from the first token to the end."""
    return (heard.n_tokens - 1) / (heard.ended - heard.first)


async def measure(doors: Mapping[str, Door], repeats: int) -> dict[str, Any]:
    """Median token/s of each task with and without, and their ratio; also of the tokens that were guessed."""
    found: dict[str, Any] = {}
    for task, prompt in TASKS.items():
        rates: dict[str, list[float]] = {ON: [], OFF: []}
        before = device_state(await at_rest(doors[ON]))
        for repeat in range(repeats):
            heard = {name: await _ask(doors[name], prompt) for name in ((ON, OFF) if repeat % 2 else (OFF, ON))}
            if heard[ON].text != heard[OFF].text:
                msg = f"the answers to {task} differ:\n{heard[OFF].text}\n---\n{heard[ON].text}"
                raise BenchError(msg)
            for name, answer in heard.items():
                rates[name].append(rate(answer))
        after = device_state(await at_rest(doors[ON]))
        tps = {name: round(statistics.median(values), 2) for name, values in rates.items()}
        guessed = {key: after.get(key, 0) - before.get(key, 0) for key in ("drafted", "accepted")}
        found[task] = {"tps": tps, "ratio": round(tps[ON] / tps[OFF], 3), **guessed, "raw": rates}
    return found


async def _ask(door: Door, prompt: str) -> StreamedAnswer:
    chat: Chat = [{"role": "user", "content": prompt}]
    return await ask(door, chat, MAX_TOKENS)


@asynccontextmanager
async def _doors(model: Path, draft_model: str, threads: int) -> AsyncIterator[dict[str, Door]]:
    """Run both daemons, and open a door to each."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-speculation-")))
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        doors = {}
        for name in (ON, OFF):
            argv = _up(folder, name, model, draft_model if name == ON else "", threads)
            doors[name] = Door(name, await stack.enter_async_context(child(argv, folder, name)), session)
        yield doors


def _up(folder: Path, speculation: str, model: Path, draft_model: str, threads: int) -> list[str]:
    device = {"speculation": speculation, "draft_model": draft_model, "rounding": "exact"}
    config = folder / f"{speculation}.toml"
    config.write_text(tomlkit.dumps({"device": device, "delivery": {"mode": "off"}}), encoding="utf-8")
    return [
        *verb("up"), "--port", "0", "--json", "--until-eof", "--config", str(config),
        "--history", str(folder / f"{speculation}.sqlite"), "--model", str(model), "--threads", str(threads),
        "--device-only", "--policy", "all-device", "--log-level", "warning",
    ]  # fmt: skip


async def bench_speculation(model: Path, draft_model: str, threads: int, repeats: int) -> dict[str, Any]:
    """Run it all. Raises BenchError."""
    try:
        async with _doors(model, draft_model, threads) as doors:
            for door in doors.values():  # what is loaded, compiled and mapped at the first request
                await ask(door, [{"role": "user", "content": "Hi"}], 2)
            tasks = await measure(doors, repeats)
    except (TimeoutError, aiohttp.ClientError) as error:
        msg = f"the measurement broke off: {error!r}"
        raise BenchError(msg) from error
    host = {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()}
    return {"tasks": tasks, "model": model.name, "threads": threads, "repeats": repeats, "host": host}


def table(figures: dict[str, Any]) -> str:
    """Task by task."""
    lines = [f"{'':<8}{'off':>9}{'auto':>9}{'ratio':>8}   guessed right"]
    for task, f in figures["tasks"].items():
        guessed = f"{f['accepted']} of {f['drafted']}"
        lines.append(f"{task:<8}{f['tps'][OFF]:>9.1f}{f['tps'][ON]:>9.1f}{f['ratio']:>8.2f}   {guessed}  token/s")
    host = figures["host"]
    lines.append(f"{figures['model']}, {figures['threads']} threads, {figures['repeats']} repeats")
    return "\n".join([*lines, f"Python {host['python']}, {host['cpus']} CPUs, {host['platform']}"])


def main(argv: list[str] | None = None) -> int:
    """Ask both daemons; progress goes to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="GGUF file (default: the embedded model)")
    parser.add_argument("--draft-model", default="", help="a small GGUF file of the same family (default: none)")
    parser.add_argument("--threads", type=int, default=max(1, n_processors() - 1), help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    model = args.model or fetch_default_model(progress)
    figures = run_measurement(bench_speculation(model, args.draft_model, args.threads, args.repeats))
    return print_figures(figures, table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

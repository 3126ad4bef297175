"""Real handoffs between a real engine and a real second server: is the text whole, and does it flow.

    python -m benchmarks.handoff [--count 40] [--server disco|llama-server|URL] [--pause] [--json]

Three processes: a daemon that is the server (device only), a daemon that has a device and that server, and this one,
the reader. Every answer is moved once, after a number of tokens that differs from answer to answer. What it says is
held against the answer that the same model gives unbroken; where two models take part, against what each of them says
alone: the first part must begin the source's own answer, the second be the target's own continuation of the first.
With --pause: what it saves, by the ledger, that the source rests until the target comes (`handoff.pause`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.models.default import fetch_default_model

from .. import llama_server
from ..command import run_script
from .daemons import (
    CONCURRENT,
    LIVE_ANSWERS,
    LLAMA,
    N_PROMPTS,
    OWN,
    SERVER_TPS,
    Setup,
    ask,
    body_of,
    daemon_argv,
    prompts,
    serving,
)
from .pause import bench_pause, pause_table
from .seams import PACE_TPS, Compared, Heard, compare, figures_of

REQUEST_S = 300.0
MAX_TOKENS = 64
LONGEST = 512  # tokens of an answer on a busy machine, where shorter ones are over before the target is ready
MAX_TRIES = 10  # answers for each handoff wanted
LIVE_TOKENS = 160  # of an answer of the run whose ledger shows the saving
N_KNOWN = 6  # short answers of the server first: nobody moves to a server whose time to first token is unknown
DEAR_KWH = 100.0  # $/kWh at which the device's tokens cost more than gpt-4o-mini's

Progress = Callable[[str], None]


async def bench_handoff(setup: Setup, progress: Progress) -> dict[str, Any]:
    """Run it all. Raises BenchError."""
    model = await asyncio.to_thread(fetch_default_model, progress)
    try:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-handoff-")))
            server = await stack.enter_async_context(serving(folder, setup, model))
            timeout = aiohttp.ClientTimeout(total=REQUEST_S)
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20))
            figures = {}
            for name in setup.ways:
                policy = "all-server" if name == "to_device" else "all-device"
                argv = daemon_argv(folder, name, setup, server, model, policy, force=True)
                async with child(argv, folder, name) as url:
                    figures[name] = await _one_way(session, url, name, setup, progress)
            live = await _live(session, folder, setup, server, model, progress) if setup.live else {}
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        msg = f"the measurement broke off: {error!r}"
        raise BenchError(msg) from error
    return figures | {
        "cost_reduction": live.pop("both", None),
        "live": live,
        "ideal_tbt_s": round(1 / PACE_TPS, 4),
        "server": setup.server,
        "method": setup.method,
        "delivery": setup.delivery,
        "server_tps": SERVER_TPS if setup.server == OWN else None,
        "host": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
    }


# --- one direction ------------------------------------------------------------------------------------------------


async def _one_way(
    session: aiohttp.ClientSession, url: str, name: str, setup: Setup, progress: Progress
) -> dict[str, Any]:
    """`count` answers that move in one direction, and what became of them."""
    source = "disco/server" if name == "to_device" else "disco/device"
    target = "disco/device" if name == "to_device" else "disco/server"
    manner = {"delivery": setup.delivery, "pace_tps": PACE_TPS}
    asked = prompts()[: min(N_PROMPTS, max(4, setup.count))]
    answers: list[Heard] = []
    compared: list[Compared] = []
    turnstile = asyncio.Semaphore(setup.concurrent)
    length = MAX_TOKENS
    whole: dict[str, str] = {}

    async def ask_unbroken(length: int) -> dict[str, str]:
        heard = [(p, await ask(session, url, body_of(p, source, length))) for p in whole or asked]
        found = {p: h.text for p, h in heard if h.finish == "length"}  # others end before anybody can take over
        progress(f"{name}: {len(found)} unbroken answers of {length} tokens")
        return found

    async def one(prompt: str) -> tuple[str, Heard]:
        async with turnstile:
            heard = await ask(session, url, body_of(prompt, "disco", length, disco=manner))
        answers.append(heard)
        if len(answers) % 50 == 0:
            n_moved = sum(h.move is not None for h in answers)
            progress(f"{name}: {n_moved} of {setup.count} moved, {len(answers)} answers")
        return prompt, heard

    whole = await ask_unbroken(length)
    order = itertools.cycle(whole)
    while whole and (missing := setup.count - len(compared)) > 0 and len(answers) < MAX_TRIES * setup.count:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in itertools.islice(order, missing)]
        moved = [(p, h) for p, h in (t.result() for t in tasks) if h.move]
        compared += [await _compare(session, url, target, whole[p], p, h, setup, length) for p, h in moved]
        if 2 * len(moved) < missing and length < LONGEST and (longer := await ask_unbroken(2 * length)):
            length, whole, order = 2 * length, longer, itertools.cycle(longer)
    return figures_of(answers, compared)


async def _compare(
    session: aiohttp.ClientSession,
    url: str,
    target: str,
    whole: str,
    prompt: str,
    heard: Heard,
    setup: Setup,
    length: int,
) -> Compared:
    """Hold a moved answer against the unbroken one; where it differs, ask the target for its own continuation."""
    assert heard.move is not None
    at = heard.move["at_char"]
    if setup.same_model and heard.text == whole:
        return Compared(identical=True)
    before = heard.text[:at]
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": before}]
    body = {"model": target, "messages": messages, "max_tokens": length, "continue_final_message": True}
    rest = (await ask(session, url, body)).text if before else whole
    return compare(heard.text, at, whole, rest)


# --- what it saves ------------------------------------------------------------------------------------------------


async def _live(
    session: aiohttp.ClientSession, folder: Path, setup: Setup, server: str, model: Path, progress: Progress
) -> dict[str, Any]:
    """The same answers with and without handoffs for money: what the ledger says, $."""
    spent: dict[str, float] = {}
    for name, policy, price in (("to_device", "all-server", 0.30), ("to_server", "all-device", DEAR_KWH)):
        for moving in (False, True):
            changes: dict[str, dict[str, Any]] = {"device": {"usd_per_kwh": price}, "handoff": {"for_cost": moving}}
            label = f"live-{name}-{'moving' if moving else 'staying'}"
            argv = daemon_argv(folder, label, setup, server, model, policy, force=False, changes=changes)
            async with child(argv, folder, label) as url:
                for prompt in prompts()[:N_KNOWN]:
                    await ask(session, url, body_of(prompt, "disco/server", 2))
                asked = prompts()[: setup.live]
                answers = [await ask(session, url, body_of(prompt, "disco", LIVE_TOKENS)) for prompt in asked]
            spent[label] = sum(h.disco["cost_usd"] for h in answers)
            n_moved = sum(h.move is not None for h in answers)
            progress(f"{label}: {n_moved} of {len(answers)} moved, ${spent[label]:.3g}")
    saved = {
        name: round(1 - spent[f"live-{name}-moving"] / spent[f"live-{name}-staying"], 4)
        for name in ("to_device", "to_server")
    }
    return saved | {"spent_usd": spent, "both": round(sum(saved.values()) / 2, 4)}


ROWS = (
    ("handoffs", "handoffs", ""),
    ("text equal to the unbroken run", "identical", ""),
    ("characters lost", "lost_chars", ""),
    ("characters doubled", "doubled_chars", ""),
    ("differences not explained", "unexplained", ""),
    ("time between tokens, p99", "tbt_p99_s", "s"),
    ("delayed tokens a handoff, mean", "delayed_tokens_mean", ""),
    ("delayed tokens a handoff, p99", "delayed_tokens_p99", ""),
    ("largest gap", "largest_gap_s", "s"),
    ("decision to take-over, p50", "took_s_p50", "s"),
)


def table(figures: dict[str, Any]) -> str:
    """Both directions side by side, the ideal first."""
    ways = [way for way in ("to_device", "to_server") if way in figures]
    lines = [" " * 34 + "".join(f"{way.replace('_', ' the '):>15}" for way in ways)]
    for label, key, unit in ROWS:
        cells = "".join(f"{figures[way][key]:>15,}" for way in ways)
        lines.append(f"{label:<34}{cells} {unit}".rstrip())
    lines.append(f"time between tokens at {PACE_TPS} token/s, ideal: {figures['ideal_tbt_s']} s (paper: 0.209-0.217 s)")
    if live := figures["live"]:
        lines.append(f"cost saved live: to the device {live['to_device']:.1%}, to the server {live['to_server']:.1%}")
    host = figures["host"]
    lines.append(f"{figures['method']}, Python {host['python']}, {host['cpus']} CPUs, {host['platform']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Move answers; progress goes to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.handoff",
        description="Text, flow and cost of answers that move in mid-stream, both ways; another disco is the server.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--count", type=at_least(1), default=40, help="handoffs each way (default: %(default)s)")
    parser.add_argument(
        "--method", default="token_ids", choices=("token_ids", "continue_final_message", "assistant", "prefix"),
        help="how the server is asked to continue (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--server", default=OWN, metavar="disco|llama-server|URL", help="the other side (default: %(default)s)"
    )
    parser.add_argument("--server-model", type=Path, metavar="GGUF", help="another model on the server's side")
    parser.add_argument("--shape-ttft", type=Path, metavar="CSV", help="replay a trace's TTFTs at the server")
    parser.add_argument(
        "--concurrent", type=at_least(1), default=CONCURRENT, help="answers at a time (default: %(default)s)"
    )
    parser.add_argument("--delivery", default="paced", choices=("paced", "reserve"), help="(default: %(default)s)")
    parser.add_argument("--way", choices=("to_device", "to_server"), help="one direction only")
    parser.add_argument(
        "--live", type=at_least(0), default=LIVE_ANSWERS, help="answers that show the saving (default: %(default)s)"
    )
    parser.add_argument(
        "--pause", action="store_true", help="only: what `handoff.pause` saves, by the ledger, and its gaps"
    )
    args = parser.parse_args(argv)
    if args.server == LLAMA:
        llama_server.require()
    setup = Setup(
        args.count, args.method, args.server, args.server_model, args.shape_ttft, args.concurrent, args.delivery,
        args.live, (args.way,) if args.way else ("to_device", "to_server"), args.pause,
    )  # fmt: skip
    if args.pause:
        return print_figures(run_measurement(bench_pause(setup, progress)), pause_table, as_json=args.json)
    return print_figures(run_measurement(bench_handoff(setup, progress)), table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

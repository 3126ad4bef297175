"""What `handoff.pause` saves by the ledger: answers to the same prompts stay, move, or move while the source rests.

Each run has a server and a daemon of its own, so that no run finds a prompt in another one's cache. Prompts are long,
and no two begin alike: what a move costs is the time in which the target reads them. The reader is paced.
"""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.demo import PASSAGE
from disco_daemon.models.default import fetch_default_model

from .daemons import SERVER_TPS, Setup, ask, body_of, daemon_argv, serving
from .seams import GAP_SLACK_S, PACE_TPS, Heard

REQUEST_S = 300.0
N_WORDS = 300  # of a prompt: some 400 tokens
N_TOKENS = 192  # of an answer
N_KNOWN = 4  # answers of each side to such prompts first, so that it is known how long they are read
METHOD = "continue_final_message"  # which a server knows without the device, should that be what stalls
# $ per million tokens of the server, as where generating is the dear part; $/kWh where the device is the cheap side, or
# the dear one.
DEAR_OUTPUT = {"input_usd_per_mtok": 0.15, "output_usd_per_mtok": 2.40}
HOME_KWH, DEAR_KWH = 0.30, 1000.0
RUNS = {"staying": (False, False), "moving": (True, False), "resting": (True, True)}  # handoff.for_cost, handoff.pause

Progress = Callable[[str], None]


def long_prompts(first: int, n: int) -> list[str]:
    """Prompts from number `first` on; each begins with its number, so that none is cached for another one."""
    words = PASSAGE.split()
    passages = [" ".join(words[(7 * i + j) % len(words)] for j in range(N_WORDS)) for i in range(first, first + n)]
    return [f"{first + i}. Go on with this text: {passage}" for i, passage in enumerate(passages)]


async def bench_pause(setup: Setup, progress: Progress) -> dict[str, Any]:
    """Run it all. Raises BenchError."""
    model = await asyncio.to_thread(fetch_default_model, progress)
    found: dict[str, Any] = {}
    try:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-handoff-")))
            timeout = aiohttp.ClientTimeout(total=REQUEST_S)
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20))
            for way in setup.ways:
                answers = {run: await _run(session, folder, setup, model, way, run, progress) for run in RUNS}
                found[way] = figures_of_runs(answers)
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        msg = f"the measurement broke off: {error!r}"
        raise BenchError(msg) from error
    host = {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()}
    return found | {"most_gap_s": round(1 / PACE_TPS + GAP_SLACK_S, 4), "server_tps": SERVER_TPS, "host": host}


async def _run(
    session: aiohttp.ClientSession, folder: Path, setup: Setup, model: Path, way: str, run: str, progress: Progress
) -> list[Heard]:
    moves, rests = RUNS[run]
    label, policy = f"{way}-{run}", "all-server" if way == "to_device" else "all-device"
    changes: dict[str, dict[str, Any]] = {
        "server": DEAR_OUTPUT | {"continuation": METHOD},
        "device": {"usd_per_kwh": HOME_KWH if way == "to_device" else DEAR_KWH},
        "handoff": {"for_cost": moves, "pause": rests},
    }
    own = folder / label
    own.mkdir()
    manner = {"delivery": "paced", "pace_tps": PACE_TPS}
    async with serving(own, setup, model) as server:
        argv = daemon_argv(own, label, setup, server, model, policy, force=False, changes=changes)
        async with child(argv, own, label) as url:
            for first, side in ((1000, "server"), (2000, "device")) if moves else ():
                for prompt in long_prompts(first, N_KNOWN):
                    await ask(session, url, body_of(prompt, f"disco/{side}", 2))
            asked = long_prompts(0, setup.live)
            answers = [await ask(session, url, body_of(prompt, "disco", N_TOKENS, disco=manner)) for prompt in asked]
    progress(f"{label}: {sum(h.move is not None for h in answers)} of {len(answers)} moved, ${_spent(answers):.3g}")
    return answers


def _spent(answers: list[Heard]) -> float:
    return sum(float(heard.disco["cost_usd"]) for heard in answers)


def figures_of_runs(answers: dict[str, list[Heard]]) -> dict[str, Any]:
    """Return the figures of one way: what moves save in either manner, and how the answers read."""
    spent = {run: _spent(heard) for run, heard in answers.items()}
    saved = {run: 1 - spent[run] / spent["staying"] for run in ("moving", "resting")}
    whole, moves = [heard.text for heard in answers["staying"]], [h.move for h in answers["resting"] if h.move]
    return {
        "answers": len(whole),
        "spent_usd": spent,
        "saved": {run: round(share, 4) for run, share in saved.items()},
        "ratio": round(saved["resting"] / saved["moving"], 3) if saved["moving"] > 0 else None,
        "moved": {run: sum(h.move is not None for h in heard) for run, heard in answers.items()},
        "identical": {run: sum(h.text == w for h, w in zip(answers[run], whole, strict=True)) for run in saved},
        "paused": sum(move["paused"] for move in moves),
        "asked_again": sum(m["asked_again"] for h in answers["resting"] for m in h.disco["moves"]),
        "thrown_away": {run: sum(h.move["overlap"] for h in answers[run] if h.move) for run in saved},
        "largest_gap_s": {
            run: round(max((g for h in answers[run] for g in h.gaps), default=0.0), 4) for run in answers
        },
    }


def pause_table(figures: dict[str, Any]) -> str:
    """Both ways, each with the present handoff beside the one whose source rests."""
    lines = [f"{'':<12}{'':>10}{'moved':>9}{'saved':>9}{'equal text':>12}{'thrown away':>13}{'largest gap':>14}"]
    for way in (way for way in ("to_device", "to_server") if way in figures):
        found = figures[way]
        for run in ("moving", "resting"):
            of = found["answers"]
            lines.append(
                f"{way:<12}{run:>10}{found['moved'][run]:>5}/{of:<3}{found['saved'][run]:>9.1%}"
                f"{found['identical'][run]:>8}/{of:<3}{found['thrown_away'][run]:>9} tok"
                f"{found['largest_gap_s'][run]:>12} s"
            )
        times = "no saving to compare with" if found["ratio"] is None else f"{found['ratio']} times the saving"
        lines.append(f"{way:<12}{times}; rested {found['paused']}, asked again {found['asked_again']}")
    host = figures["host"]
    lines.append(f"largest gap allowed: {figures['most_gap_s']} s; the server makes {figures['server_tps']:g} token/s")
    lines.append(f"Python {host['python']}, {host['cpus']} CPUs, {host['platform']}")
    return "\n".join(lines)

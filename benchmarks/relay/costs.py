"""What one request through the relay costs, step by step: the processor time of each, with its budget.

    git worktree add --detach ../before COMMIT
    python -m benchmarks.relay.costs [../before] [--n 2000] [--json]

A scripted server and a daemon in front of it: `n` requests with an answer of one token, one after the other, and then
50 streams of 200 tokens at once, in rounds. The daemon's stack is looked at by the clock of its own CPU time
(`benchmarks.relay.sampled_daemon`), and belongs to the step of the innermost function that the table of steps knows. A
step's cost is its share of the looks, of the CPU time that the daemon says it took, a median of the rounds. With
another checkout's folder the same is measured for that, both in each round: what else the machine does meets both.

The budgets are what the marks of docs/lab/benchmarks.md allow: 0.6 of what a request took when they were made (0.17 of
what LiteLLM's proxy adds, wanted is 0.1), and 0.86 of what a token took. They hold on a machine that sorts and sums
2,000 numbers in `YARDSTICK_US`; on another one they are scaled by that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

import disco_daemon
from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.bench.relay import AskedWay, cpu_s_of, daemon_argv, door, rate, state_of
from disco_daemon.system.program import command

from ..command import run_script
from ..yardstick import yardstick_us
from .against import packages

WARMUP = 200  # requests
STREAMS, TOKENS, ROUNDS = 50, 200, 12
KINDS = {"request": "a request with one token, us of CPU", "token": "a token in 50 streams, us of CPU"}


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a request, by the functions that are its own: parts of `path:function`, regular expressions.

    `request_us` and `token_us` are its budget, us of the reference machine: of a request, and of a token in a crowd.
    """

    name: str
    functions: str
    request_us: float
    token_us: float


# In the order of a request. What none knows, such as money and estimates, is its caller's.
STEPS = (
    Step(
        "parse: line, headers, guard, body",
        r"/aiohttp/(web_(?!response)|http_parser)|/api/(\w+/)?(connections|guard|doors|bodies|openai\w*|answering|app|control_requests"
        r"|peers|signs_of_life|names|chat_messages)\.py",
        200.0, 1.4,
    ),
    Step(
        "plan",
        r"/conductor/(plan|eligible|context)\.py|/dispatch/(table|pacer|hedge)\.py|planner\.py:_?(plan|preview)",
        60.0, 0.4,
    ),
    Step(
        "key, headers",
        r"server_client\.py:(_?headers|_bound|_auth\w*)|openai/.*:(_?\w*auth\w*|_build_headers)",
        5.0, 0.1,
    ),
    Step(
        "connection",
        r"/aiohttp/(connector|resolver)\.py|/kept_connections\.py:(__init__|connection_|is_|slept|source|_watch|set_res)",
        15.0, 0.1,
    ),
    Step(
        "request to the server",
        r"/endpoints/(server_client|server_errors|continuation|retry|thoughts)\.py|server\.py:(ask|_open|_body|_start)|/openai/|/httpx2?/|"
        r"/aiohttp/(client|client_reqrep|client_middlewares|payload|tracing|cookiejar)\.py",
        170.0, 1.8,
    ),
    Step(
        "chunks of its answer, the first one too",
        r"/endpoints/(server_answer|stream|chunks|calls|writable|finish_reasons|bill|gaps|model_facts|kept_connections)\.py|"
        r"/delivery/counting\.py|/aiohttp/(client_proto|streams)\.py",
        130.0, 7.4,
    ),
    Step(
        "the answer's states, pace and text",
        r"/answer/|/conductor/(answer_run|conductor|endpoint_run|inbox|in_flight|runs|timers|moves|lifetimes|keeper)\.py"
        r"|/delivery/(buffer|cut|graphemes|held_tokens|seam|grid|repetition)\.py",
        180.0, 6.2,
    ),
    Step("SSE and its socket", r"/api/(\w+/)?(sse|shapes|events)\.py|/aiohttp/web_response\.py", 200.0, 4.2),
    Step(
        "record: row, prices, metrics, what is learned",
        r"/conductor/(record|journal|traces)\.py|/delivery/(qoe|trace)\.py|/store/|/api/(\w+/)?(metrics|scrape|health)\.py|"
        r"/prometheus_client/|/daemon/(tasks/(learner|prober)|runtime|money)\.py|planner\.py:(observe|record|settle)",
        220.0, 2.3,
    ),
    Step("event loop, sockets that have something", r"/asyncio/|selectors\.py|/daemon/tasks/|/cli/", 150.0, 1.7),
)  # fmt: skip
REST = "elsewhere"
YARDSTICK_US = 15.3


def step_of(stack: Sequence[str]) -> str:
    """Return the step of a stack, innermost function first: the step that knows the first function, the loop's last."""
    loop = STEPS[-1]
    for function in stack:
        for step in STEPS[:-1]:
            if re.search(step.functions, function):
                return step.name
    return loop.name if any(re.search(loop.functions, function) for function in stack) else REST


def costs_of(stacks: Sequence[tuple[Sequence[str], int]], cpu_us: float) -> dict[str, float]:
    """Return what each step costs, us, of `cpu_us` in all."""
    met = Counter[str]()
    for stack, n in stacks:
        met[step_of(stack)] += n
    total = met.total()
    if not total:
        raise BenchError("the daemon was never met at work: ask more (--n)")
    return {name: round(cpu_us * met[name] / total, 2) for name in (*(step.name for step in STEPS), REST)}


def _taken(file: Path) -> list[tuple[list[str], int]]:
    found: list[tuple[list[str], int]] = json.loads(file.read_text("utf-8"))
    file.unlink()
    return found


@dataclass(slots=True)
class Taken:
    """What one daemon took: the CPU time of a token in each round, us, and the stacks that were met."""

    cpu_us: list[float] = field(default_factory=list)
    stacks: list[tuple[list[str], int]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Return the median of the rounds, and what each step has of it."""
        cpu_us = statistics.median(self.cpu_us)
        n_looks = sum(n for _, n in self.stacks)
        return {"cpu_us": round(cpu_us, 2), "n_looks": n_looks, "steps": costs_of(self.stacks, cpu_us)}


async def _sample(way: AskedWay, file: Path, streams: int, tokens: int, n: int, into: Taken) -> None:
    """Ask `n` times for so many streams at once."""
    pid = int((await state_of(way.target))["pid"])
    os.kill(pid, signal.SIGUSR1)
    before = await cpu_s_of(way.target)
    for _ in range(n):
        await rate(way, streams, tokens)
    cpu_us = (await cpu_s_of(way.target) - before) * 1e6 / (n * streams * tokens)
    os.kill(pid, signal.SIGUSR2)
    await state_of(way.target)  # answered behind the signal, whose handler writes the file
    into.cpu_us.append(cpu_us)
    into.stacks += await asyncio.to_thread(_taken, file)


async def measure(checkouts: dict[str, Path], n: int) -> dict[str, Any]:
    """Measure the daemon of each checkout. Raises BenchError."""
    found: dict[str, Any] = {}
    here = Path(__file__).parent.parent.parent
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-bench-")))
        argv = command("disco_daemon.bench.loopback", "--port", "0", "--tokens", str(TOKENS))
        server_url = await stack.enter_async_context(child(argv, folder, "loopback server"))
        ways, yardsticks, ratios = {}, [yardstick_us()], dict[str, float]()
        for name, checkout in checkouts.items():
            own = folder / name
            path = os.pathsep.join([str(packages(checkout, own)), str(here)])
            env = {"PYTHONPATH": path} | {f"XDG_{k}_HOME": str(own) for k in ("CONFIG", "DATA", "CACHE")}
            words = daemon_argv(server_url, own)
            sampled = command("benchmarks.relay.sampled_daemon", str(own / "stacks"), *words[words.index("up") :])
            url = await stack.enter_async_context(child(sampled, own, "daemon", env))
            ways[name] = AskedWay(name, await stack.enter_async_context(door(name, url)))
        try:
            for way in ways.values():
                for _ in range(WARMUP):
                    await rate(way, 1, 1)
            for kind, of in {"request": (1, 1, max(1, n // ROUNDS)), "token": (STREAMS, TOKENS, 1)}.items():
                taken = {name: Taken() for name in ways}
                for i in range(ROUNDS):
                    for name in list(ways)[:: 1 if i % 2 else -1]:
                        await _sample(ways[name], folder / name / "stacks", *of, taken[name])
                    yardsticks.append(yardstick_us())
                    progress(f"{kind}: round {i + 1} of {ROUNDS}")
                for name in ways:
                    found.setdefault(name, {})[kind] = taken[name].figures()
                if len(ways) == 2:
                    this, that = (taken[name].cpu_us for name in ways)
                    ratios[kind] = round(statistics.median(a / b for a, b in zip(this, that, strict=True)), 4)
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            msg = f"the measurement broke off: {error!r}"
            raise BenchError(msg) from error
    yardstick = statistics.median(yardsticks)
    scale = yardstick / YARDSTICK_US
    return {
        "costs": found,
        "ratio": ratios,
        "budget": {
            "request": {step.name: round(step.request_us * scale, 2) for step in STEPS},
            "token": {step.name: round(step.token_us * scale, 2) for step in STEPS},
        },
        "yardstick_us": round(yardstick, 1),
        "n": n,
        "host": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures as rows: what one request costs, and what one token of many does."""
    names = list(figures["costs"])
    lines = []
    for kind, title in (
        ("request", "a request with one token, us of CPU"),
        ("token", "a token in 50 streams, us of CPU"),
    ):
        found = [figures["costs"][name][kind] for name in reversed(names)]
        budget = figures["budget"][kind]
        heads = "".join(f"{name:>10}" for name in reversed(names))
        lines.append(f"{title:<46}{heads}{'budget':>10}")
        digits = 0 if kind == "request" else 1
        for step in (*budget, REST):
            cells = "".join(f"{one['steps'][step]:>10.{digits}f}" for one in found)
            lines.append(f"{step:<46}{cells}" + (f"{budget[step]:>10.{digits}f}" if step in budget else ""))
        total = "".join(f"{one['cpu_us']:>10.{digits}f}" for one in found)
        lines.append(f"{'in all':<46}{total}{sum(budget.values()):>10.{digits}f}")
        if kind in figures["ratio"]:
            lines.append(f"{'this by that, median of the rounds':<56}{figures['ratio'][kind]:>10.3f}")
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> int:
    """Measure and print; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", help="another checkout's folder, to compare with")
    parser.add_argument("--n", type=at_least(100), default=2000, help="requests (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    checkouts = {"this": Path(disco_daemon.__file__).parent.parent}
    if args.checkout is not None:
        checkouts["that"] = args.checkout.resolve()
    return print_figures(run_measurement(measure(checkouts, args.n)), table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

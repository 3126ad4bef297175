"""Measures what other programs on the cores cost the engine, with our way to wait for a thread and two others.

`python benchmarks/relay/busy_core.py [--threads 2] [--tokens 64] [--repeats 3] [--busy 0,1]`; the last line is JSON,
medians in token/s of one answer of the default model. The other programs count to infinity. The other ways are OpenMP's
own, and `asleep`, which never spins; `ratio` is ours / OpenMP's, and `asleep_ratio` is `asleep` / ours, of the same
run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from unittest import mock

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine
from disco_daemon.models.default import default_model_path
from disco_daemon.system import process, program
from disco_daemon.system.control_groups import n_processors
from disco_daemon.types import GenerationRequest, Sampling

Environment = Callable[..., dict[str, str]]

PATIENCE_S = 120.0
ENOUGH_S = 10.0  # of an answer
PROMPT = "Tell me a long story about a fox and a crow who live in a wood."

BURN = """from disco_daemon.system.program import end_with_stdin
end_with_stdin()
while True: pass"""


@contextlib.asynccontextmanager
async def busy(n: int) -> AsyncIterator[None]:
    """`n` programs that leave no core alone."""
    argv = [sys.executable, "-P", "-c", BURN]
    pipe = asyncio.subprocess.PIPE  # ends with us
    others = [await asyncio.create_subprocess_exec(*argv, stdin=pipe) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            await other.wait()


async def speed(threads: int, tokens: int, environment: Environment) -> float:
    """One answer by an engine of its own, token/s from its first token on."""
    with mock.patch.object(process, "environment", environment):
        engine = Engine(wire.Load(model_path=str(default_model_path()), n_ctx=1024, n_threads=threads), SystemClock())
        engine.start()
        try:
            await engine.ready(PATIENCE_S)
            sampling = Sampling(max_tokens=tokens, temperature=0)
            answer = engine.open(GenerationRequest("r", ({"role": "user", "content": PROMPT},), sampling))
            times: list[float] = []
            async for message in answer:
                times += [time.perf_counter()] if isinstance(message, wire.TextPiece) else []
                if times and times[-1] - times[0] > ENOUGH_S:
                    break
            await answer.close()
            return (len(times) - 1) / (times[-1] - times[0])
        finally:
            await engine.close()


def asleep(module: str = "") -> dict[str, str]:
    """An engine's environment in which no thread spins."""
    return program.environment(module=module) | {"GOMP_SPINCOUNT": "0"}


def openmp(module: str = "") -> dict[str, str]:
    """An environment in which OpenMP says itself how long threads spin."""
    del module
    return os.environ.copy()


WAYS: dict[str, Environment] = {"ours": program.environment, "openmp": openmp, "asleep": asleep}


async def measure(threads: int, tokens: int, repeats: int, others: list[int]) -> dict[str, dict[str, float]]:
    """Medians by what else runs, and by who says how threads wait; the ways take turns."""
    found: dict[str, dict[str, list[float]]] = {}
    for n in others:
        rows = found.setdefault(f"{n} busy" if n else "quiet", {name: [] for name in WAYS})
        for _ in range(repeats):
            for name, environment in WAYS.items():
                async with busy(n):
                    rows[name].append(await asyncio.wait_for(speed(threads, tokens, environment), PATIENCE_S))
    return {what: {name: statistics.median(v) for name, v in rows.items()} for what, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=min(n_processors(), 4))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy", default="0,1", help="numbers of other programs, with commas between")
    args = parser.parse_args()
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)
    others = [int(n) for n in args.busy.split(",")]
    found = asyncio.run(measure(args.threads, args.tokens, args.repeats, others))
    rows = {
        what: {name: round(tps, 1) for name, tps in row.items()}
        | {"ratio": round(row["ours"] / row["openmp"], 2), "asleep_ratio": round(row["asleep"] / row["ours"], 2)}
        for what, row in found.items()
    }
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps(vars(args) | {"tps": rows} | machine))


if __name__ == "__main__":
    main()

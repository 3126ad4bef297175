"""Measures what another program on one of the cores costs the engine, with our way to wait for a thread and OpenMP's.

`python benchmarks/busy_core.py [--threads 2] [--tokens 64] [--repeats 3]`; the last line is JSON, medians in token/s of
one answer of the default model. The other program counts to infinity. `ratio` is ours / OpenMP's own in the same run.
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

from disco_daemon import process, program
from disco_daemon.clock import SystemClock
from disco_daemon.control_groups import n_processors
from disco_daemon.engine import wire
from disco_daemon.engine.config import EngineConfig
from disco_daemon.engine.supervisor import Engine
from disco_daemon.models.default import default_model_path
from disco_daemon.types import GenerationRequest, Sampling

PATIENCE_S = 120.0
ENOUGH_S = 10.0  # of an answer
PROMPT = "Tell me a long story about a fox and a crow who live in a wood."

BURN = """from disco_daemon.program import end_with_stdin
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


async def speed(threads: int, tokens: int, environment: Callable[[], dict[str, str]]) -> float:
    """One answer by an engine of its own, token/s from its first token on."""
    with mock.patch.object(process, "environment", environment):
        engine = Engine(EngineConfig(default_model_path(), 1024, threads), SystemClock())
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


async def measure(threads: int, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians by what else runs, and by who says how threads wait; the two take turns."""
    found: dict[str, dict[str, list[float]]] = {}
    for n in (0, 1):
        rows = found.setdefault("one busy core" if n else "quiet", {"ours": [], "openmp": []})
        for _ in range(repeats):
            for name, environment in (("ours", program.environment), ("openmp", os.environ.copy)):
                async with busy(n):
                    rows[name].append(await asyncio.wait_for(speed(threads, tokens, environment), PATIENCE_S))
    return {what: {name: statistics.median(v) for name, v in rows.items()} for what, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=min(n_processors(), 4))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)
    found = asyncio.run(measure(args.threads, args.tokens, args.repeats))
    rows = {
        what: {name: round(tps, 1) for name, tps in row.items()} | {"ratio": round(row["ours"] / row["openmp"], 2)}
        for what, row in found.items()
    }
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps(vars(args) | {"tps": rows} | machine))


if __name__ == "__main__":
    main()

"""DiSCo's Table 4 by content: how long a model takes to load, beside its time to first token once it is there.

    python -m benchmarks.relay.cold_start [--model FILE ...] [--runs 10] [--json]

Each run starts an engine of its own and asks it the paper's question; two runs before are not counted, as in the paper,
so the file is in the page cache. Load is from the start of the process until it can serve. The paper's models, machines
and precision (Qwen-2.5, FP16, two GPUs) are others: what can be compared is how many first tokens a load takes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path
from typing import Any

from disco_daemon.bench.command import at_least, print_figures, run_measurement
from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine
from disco_daemon.models.default import default_model_path
from disco_daemon.simulate.figures import align
from disco_daemon.types import GenerationRequest, Sampling

from ..command import run_script
from ..eval.published import COLD_STARTS
from ..formatting import number

PROMPT = "How to use GitHub?"  # the paper's
N_RUNS, N_WARM = 10, 2  # the paper's
N_CTX = 1024  # the question and its first token need no more
PATIENCE_S = 120.0  # a model that takes longer to load, or to say a word, is not measured


async def once(model: Path, n_threads: int) -> tuple[float, float]:
    """Return how long a fresh engine took to load, and then to its first token, s. Raises EndpointError."""
    clock = SystemClock()
    engine = Engine(wire.Load(model_path=str(model), n_ctx=N_CTX, n_threads=n_threads), clock)
    started = clock.now()
    engine.start()
    try:
        await engine.ready(PATIENCE_S)
        ready = clock.now()
        request = GenerationRequest("cold", ({"role": "user", "content": PROMPT},), Sampling(max_tokens=1))
        answer = engine.open(request)
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(await anext(answer), wire.TextPiece | wire.Done):
                pass
        first = clock.now()
        await answer.close()
        return ready - started, first - ready
    finally:
        await engine.close()


async def cold_starts(models: list[Path], n_runs: int, n_threads: int) -> dict[str, Any]:
    """Return the medians of each model, s."""
    found = {}
    for model in models:
        rows = [await once(model, n_threads) for _ in range(N_WARM + n_runs)][N_WARM:]
        load_s, ttft_s = (statistics.median(column) for column in zip(*rows, strict=True))
        found[model.stem] = {"load_s": load_s, "ttft_s": ttft_s}
    return {"n_runs": n_runs, "models": found}


def table(figures: dict[str, Any]) -> str:
    """Return the medians beside Table 4's."""
    here = [(name, row["load_s"], row["ttft_s"]) for name, row in figures["models"].items()]
    rows = [
        [name, number(load_s, 2), number(ttft_s, 3), number(load_s / ttft_s, 0)]
        for name, load_s, ttft_s in [*here, *((f"{name}, Table 4", *times) for name, times in COLD_STARTS.items())]
    ]
    return align(("model", "load s", "TTFT s", "load / TTFT"), rows)


def main(argv: list[str] | None = None) -> int:
    """Load and ask each model again and again, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.relay.cold_start", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", type=Path, action="append", metavar="FILE", help="a GGUF file (default: ours)")
    parser.add_argument("--runs", type=at_least(1), default=N_RUNS, help="loads of each model (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(1), default=1, help="threads of the engine (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    models = args.model or [default_model_path()]
    return print_figures(run_measurement(cold_starts(models, args.runs, args.threads)), table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

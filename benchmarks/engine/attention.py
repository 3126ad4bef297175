"""What exact answers' attention costs: `python -m benchmarks.engine.attention [--repeats 5] [--json]`.

Keys in BF16, as exact answers have them, beside keys in F16, as the others have, in turns: the default model, one
thread, chunks of a prompt of CONTEXT tokens, and an iteration of N_TEXTS answers behind such prompts. What a last
chunk takes more than a first one is its attention. Processor times, the least of all repeats: other programs only add.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from disco_daemon.bench.command import at_least, print_figures, progress
from disco_daemon.engine import wire
from disco_daemon.engine.llama.model import AbortFlag, Llama, build
from disco_daemon.engine.llama.rows import Row
from disco_daemon.models.default import default_model_path

from ..command import run_script

CONTEXT, CHUNK, N_TEXTS = 1024, 64, 4
WAYS = {"exact": True, "fast": False}
NAMES = {
    "first_chunk_ms": f"the first {CHUNK} tokens of a prompt, ms",
    "last_chunk_ms": f"the last {CHUNK} of {CONTEXT}, ms",
    "prompt_ms": f"all {CONTEXT}, ms",
    "answers_ms": f"a token of each of {N_TEXTS} answers behind {CONTEXT} tokens, ms",
}


def took_ms(llama: Llama, rows: Sequence[Row]) -> float:
    """Return the processor time of one decode, ms. Raises RuntimeError if it does not go through."""
    began = time.process_time()
    if rc := llama.decode(rows):
        msg = f"llama_decode returned {rc}"
        raise RuntimeError(msg)
    return 1e3 * (time.process_time() - began)


def measure(llama: Llama) -> dict[str, float]:
    """Read a prompt for each answer, and draw a token of each; the times of the first prompt, and of that token."""
    llama.clear()
    chunks = list[float]()
    for seq in range(N_TEXTS):
        for at in range(0, CONTEXT, CHUNK):
            chunks.append(took_ms(llama, [(100 + i, i, seq, False) for i in range(at, at + CHUNK)]))
    n = CONTEXT // CHUNK
    answers_ms = took_ms(llama, [(100, CONTEXT, seq, True) for seq in range(N_TEXTS)])
    return {
        "first_chunk_ms": chunks[0], "last_chunk_ms": chunks[n - 1], "prompt_ms": sum(chunks[:n]),
        "answers_ms": answers_ms,
    }  # fmt: skip


def bench(repeats: int) -> dict[str, Any]:
    """Measure both ways in turns."""
    n_cells = (N_TEXTS + 1) * CONTEXT
    models = {
        name: Llama(
            wire.Load(
                model_path=str(default_model_path()), n_ctx=2 * CONTEXT, n_cells=n_cells, n_threads=1, n_gpu_layers=0,
                exact=exact,
            ),
            AbortFlag(),
        )
        for name, exact in WAYS.items()
    }  # fmt: skip
    least: dict[str, dict[str, float]] = {name: dict.fromkeys(NAMES, float("inf")) for name in WAYS}
    for repeat in range(repeats):
        for name, llama in list(models.items())[:: 1 if repeat % 2 == 0 else -1]:
            for figure, value in measure(llama).items():
                least[name][figure] = min(least[name][figure], value)
        progress(f"{repeat + 1} of {repeats}")
    for llama in models.values():
        llama.close()
    ratio = {figure: least["exact"][figure] / least["fast"][figure] for figure in NAMES}
    return {**least, "ratio": ratio, "build": build()}


def table(found: dict[str, Any]) -> str:
    """Return a line for each figure: exact, fast, and the ratio."""
    lines = [f"{'':48}{'exact':>10}{'fast':>12}{'ratio':>8}"]
    lines += [
        f"{name:48}{found['exact'][figure]:10.1f}{found['fast'][figure]:12.1f}{found['ratio'][figure]:8.2f}"
        for figure, name in NAMES.items()
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Compare and print; progress goes to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.attention", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--repeats", type=at_least(1), default=5, help="turns (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    return print_figures(bench(args.repeats), table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))

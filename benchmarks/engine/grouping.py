"""One llama_decode for several answers' tokens, beside one for each: ms, by how many there are.

`python benchmarks/engine/grouping.py [--threads 1] [--repeats 40] [--model FILE]`; the last line is JSON. Both ways are
measured in turn with the default model, medians; `ratio` is together / one by one: above 1 one by one is quicker.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from disco_daemon.engine import wire
from disco_daemon.engine.llama.model import AbortFlag, Llama, build
from disco_daemon.engine.serve.row_grouping import MOST
from disco_daemon.models.default import default_model_path

CONTEXT = 40  # tokens of each answer to begin with
N_ROWS = (*range(2, MOST + 2), 12, 16)


def time_iteration(llama: Llama, n: int, at: int, *, apart: bool) -> float:
    """A token for each of `n` answers that have `at`, ms."""
    rows = [(100 + seq, at, seq, True) for seq in range(n)]
    began = time.perf_counter()
    rcs = [llama.decode(part) for part in ([[row] for row in rows] if apart else [rows])]
    took_s = time.perf_counter() - began
    if any(rcs):
        msg = f"llama_decode returned {rcs}"
        raise RuntimeError(msg)
    return 1e3 * took_s


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--model", type=Path, default=None)
    arguments = parser.parse_args()
    model = arguments.model or default_model_path()
    llama = Llama(
        wire.Load(model_path=str(model), n_ctx=8192, n_threads=arguments.threads, n_gpu_layers=0, n_cells=8192),
        AbortFlag(),
    )
    figures: dict[str, dict[str, float]] = {}
    for n in N_ROWS:
        llama.clear()
        for seq in range(n):
            llama.decode([(100 + i, i, seq, False) for i in range(CONTEXT)])
        both: dict[bool, list[float]] = {True: [], False: []}
        for i in range(arguments.repeats):
            for k, apart in enumerate((i % 2 == 0, i % 2 == 1)):
                both[apart].append(time_iteration(llama, n, CONTEXT + 2 * i + k, apart=apart))
        together, alone = statistics.median(both[False]), statistics.median(both[True])
        figures[str(n)] = {"together_ms": together, "apart_ms": alone, "ratio": together / alone}
        print(f"{n:>3} answers: together {together:7.2f} ms, one by one {alone:7.2f} ms, ratio {together / alone:.3f}")
    print(json.dumps({"rows": figures, "threads": arguments.threads, "model": model.name, "build": build()}))


if __name__ == "__main__":
    main()

"""llama.cpp's kernels as built here, asked through ggml itself: `python -m benchmarks.engine.kernels --check --json`.

Random operations, products and attention of all shapes that llama.cpp asks for, are computed by each number of threads
and compared with what numpy makes of them in 64 bits (kernel_products.py, kernel_attention.py). Results are poisoned
beforehand: a number that is never written is as wrong as any. More threads than processors provoke races. With --check
the exit code is 1 if one number is wrong.

With --lengths products of one row and of eight are timed instead, for each packing by how many numbers a row of
weights has: thousand million bytes a second of processor time of one thread, from memory, the best of some rounds. A
length with which a packing has less than LEAST_SHARE of its median is named: a kernel falls off there.

Another build is checked by `--library FOLDER`, where its libggml-base and libggml-cpu are; for other instruction sets,
from llama-cpp-python's source:

    cmake -S vendor/llama.cpp -B b -DBUILD_SHARED_LIBS=ON -DCMAKE_PROJECT_llama.cpp_INCLUDE=$PWD/native/llama_cpp.cmake
    \\
      -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON && cmake --build b --target ggml-cpu
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.bench.command import at_least, print_figures, progress
from disco_daemon.engine.llama.ggml import Ggml
from disco_daemon.engine.measure.machine_speed import NAMES, MachineBench
from disco_daemon.system.processors import shared_cache_bytes
from disco_daemon.system.program import SPINS

from ..command import run_script
from .checked_operations import CheckedGraph
from .kernel_attention import Attention
from .kernel_products import Products

N_CASES, N_OPERATIONS = 20_000, 50  # in all, and of a graph
THREADS = (1, 2, 4, 8)
ATTENTION, EXPERTS = 0.25, 0.15  # shares of all cases
MOST_SHOWN = 20  # of what is wrong
LENGTHS = (
    512,
    1024,
    2048,
    4096,
    6144,
    8192,
    9728,
    12288,
    14336,
    18432,
    28672,
)  # numbers of a row of weights, as models have
TIMED_ROWS, LEAST_SHARE = (1, 8), 0.8
MARKS = ("disco_products", "disco_exact_attention", "disco_masked_cells")


class Check:
    """Random operations, by number, and what is wrong with them."""

    def __init__(self, ggml: Ggml, seed: int) -> None:
        self.ggml, self.seed = ggml, seed
        self._products, self._attention = Products(ggml, seed), Attention(ggml, seed)

    def graph(self, number: int, n_operations: int) -> CheckedGraph:
        """Make graph `number` of operations that chance chooses."""
        random = np.random.default_rng((self.seed, number))
        graph = CheckedGraph(self.ggml, n_operations)
        while len(graph.operations) < n_operations:
            chance = random.random()
            if chance < ATTENTION:
                self._attention.attention(graph, random)
            elif chance < ATTENTION + EXPERTS:
                self._products.product_of_experts(graph, random)
            else:
                self._products.product(graph, random)
        return graph

    def run(self, n_cases: int, threads: tuple[int, ...]) -> dict[str, Any]:
        """Compute `n_cases` operations by each number of threads."""
        began = time.monotonic()
        wrong, by_threads, kinds = set[tuple[int, str]](), Counter[int](), Counter[str]()
        shown = list[str]()
        for number, first in enumerate(range(0, n_cases, N_OPERATIONS)):
            graph = self.graph(number, min(N_OPERATIONS, n_cases - first))
            kinds.update(one.name.split()[0] for one in graph.operations)
            for n in threads:
                faults = graph.compute(n)
                by_threads[n] += len(faults)
                wrong |= {(number, name) for name, _ in faults}
                shown += [f"{n} threads: {name}: {fault}" for name, fault in faults]
            graph.close()
            if number % 40 == 39:
                progress(f"{first + N_OPERATIONS} of {n_cases}, {len(wrong)} wrong, {time.monotonic() - began:.0f} s")
        return {
            "cases": n_cases, "wrong": len(wrong), "threads": list(threads), "seconds": time.monotonic() - began,
            "wrong_by_threads": {str(n): by_threads[n] for n in threads}, "operations": dict(kinds),
            "versions": self.ggml.marks(MARKS), "shown": shown[:MOST_SHOWN],
        }  # fmt: skip


def of_lengths(bench: MachineBench, lengths: Sequence[int]) -> dict[str, Any]:
    """Time products by numbers of a row of weights, in all packings."""
    gb_per_s: dict[str, list[float]] = {}
    falls = list[str]()
    for n in TIMED_ROWS:
        for number, name in NAMES.items():
            title = f"{name}, {n} row{'s' if n > 1 else ''}"
            found = gb_per_s[title] = [rate / 1e9 for rate in bench.bytes_per_s(number, lengths, n)]
            progress(f"{title}: {' '.join(f'{rate:.1f}' for rate in found)}")
            least = LEAST_SHARE * statistics.median(found)
            falls += [f"{title} of {k}" for k, rate in zip(lengths, found, strict=True) if rate < least]
    return {"lengths": list(lengths), "gb_per_s": gb_per_s, "falls": falls}


def table_of_lengths(found: dict[str, Any]) -> str:
    """Return a line for each packing and number of rows, and where they fall."""
    lines = [f"{'GB/s, numbers of a row':<24}" + "".join(f"{length:>7}" for length in found["lengths"])]
    lines += [f"{name:<24}" + "".join(f"{one:7.1f}" for one in rates) for name, rates in found["gb_per_s"].items()]
    return "\n".join([*lines, f"falls: {', '.join(found['falls']) or 'none'}"])


def table(found: dict[str, Any]) -> str:
    """Return a line for each number of threads, and what is wrong."""
    lines = [
        f"{found['cases']} operations ({found['operations']}), by kernels {found['versions']}: {found['wrong']} wrong"
    ]
    lines += [f"{n:>2} threads: {wrong} wrong" for n, wrong in found["wrong_by_threads"].items()]
    return "\n".join([*lines, *found["shown"], f"{found['seconds']:.0f} s"])


def main(argv: list[str] | None = None) -> int:
    """Check and print; progress goes to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.kernels", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="fail if a number is wrong")
    parser.add_argument("--cases", type=at_least(1), default=N_CASES, help="operations (default: %(default)s)")
    parser.add_argument(
        "--threads", type=at_least(1), nargs="+", default=THREADS, help="numbers of threads (default: 1 2 4 8)"
    )
    parser.add_argument("--seed", type=at_least(0), default=1, help="of all chance (default: %(default)s)")
    parser.add_argument("--library", type=Path, help="folder of another build (default: the one that is installed)")
    parser.add_argument(
        "--lengths", type=at_least(256), nargs="*", help=f"time rows of these lengths (default: {LENGTHS})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))  # as in the engine, before ggml is loaded
    ggml = Ggml.of_folder(args.library) if args.library else Ggml.installed()
    if args.lengths is not None:
        bench = MachineBench(1, shared_cache_bytes(), ggml=ggml)
        print_figures(of_lengths(bench, args.lengths or LENGTHS), table_of_lengths, as_json=args.json)
        return 0
    found = Check(ggml, args.seed).run(args.cases, tuple(args.threads))
    print_figures(found, table, as_json=args.json)
    return 1 if args.check and found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(run_script(main))

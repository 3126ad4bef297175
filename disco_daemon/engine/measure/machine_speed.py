"""Measures what this machine does at most, by llama.cpp's own kernels, in a process of its own: some 3 s, no model.

Products of weights in each packing are computed for one token, over more weights than caches hold, and for many; then
attention, numbers one by one, and operations of no size. Time is the processor's, divided by threads, as each has the
same to do and waits for the others at work: what else runs here takes turns, not processor time. Of some rounds the
fastest counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from ...models.roofline import MachineSpeed, PackedSpeed
from ...system.confine import Access, confine
from ...system.job import JobSocket
from ..llama import gpu
from ..llama.ggml import F16, F32, Array, Ggml, Graph, Node
from .machine_messages import MachineJob, MachineMeasured

# ggml.h, of the files that people have. Those of other packings have the speed of the next in bits.
NAMES = {
    1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 39: "MXFP4",
}  # fmt: skip
ROW = 2048  # numbers of a row: of a model with some 2B parameters
ONE_BYTES = 64 << 20  # of weights that one token reads, at least
CACHES, MOST_BYTES = (
    2,
    1 << 30,
)  # times the caches that cores share, so that they hold none of it; but no more than this
MANY, MANY_ROWS = 256, 2048  # tokens of a prompt, and rows of weights for them
UNITS, UNIT = 64, 256  # blocks of random numbers that weights are drawn from
HEAD, HEADS, KV_HEADS = 128, 16, 8  # of attention
ONE_CELLS, MANY_CELLS = 4096, 1024
ELEMENTS = 1 << 20
EMPTY = 256  # operations of no size, in a row
ROUNDS, ROUND_S = 6, 0.12  # of each, and what they take together at most, s
MOST_ROUNDS = 4  # times that: then one is enough
HIDDEN = -np.inf


class MachineBench:
    """Times operations with one number of threads."""

    def __init__(self, n_threads: int, cache_bytes: int = 0) -> None:
        self._ggml, self._n_threads = Ggml.installed(), n_threads
        self._one_bytes = min(MOST_BYTES, max(ONE_BYTES, CACHES * cache_bytes))
        self._chance = np.random.default_rng(0)

    def speed(self) -> MachineSpeed:
        """Measure all. Raises RuntimeError if ggml refuses."""
        packings = {name: self._packed(number) for number, name in NAMES.items()}
        return MachineSpeed(
            packings=packings,
            attention_one_per_s=self._attention(1, ONE_CELLS),
            attention_many_per_s=self._attention(MANY, MANY_CELLS),
            elements_per_s=ELEMENTS / self._elementwise(ELEMENTS // ROW, ROW, 1),
            operation_s=self._elementwise(1, 32, EMPTY) / EMPTY,
            n_threads=self._n_threads,
        )

    def _packed(self, number: int) -> PackedSpeed:
        packing = self._ggml.packing(number)
        if packing is None:
            raise RuntimeError(f"this llama.cpp does not know packing {NAMES[number]}")
        numbers = (0.05 * self._chance.standard_normal((UNITS, UNIT))).astype(np.float32)
        units = self._ggml.packed(packing, numbers).reshape(UNITS, -1)
        row = ROW // packing.block * packing.n_bytes
        n_rows = self._one_bytes // row
        weights = units[self._chance.integers(0, UNITS, n_rows * ROW // UNIT)].reshape(-1)

        def product_s(n: int, m: int) -> float:
            graph = Graph(self._ggml, 4)
            asked = self._chance.standard_normal((n, ROW)).astype(np.float32)
            left = graph.tensor(number, (ROW, m, 1, 1), (packing.n_bytes, row, row * m, row * m), weights)
            right = graph.tensor(F32, (ROW, n, 1, 1), _strides((ROW, n)), asked)
            return self._time_s(graph, graph.call("ggml_mul_mat", left, right))

        return PackedSpeed(row * n_rows / product_s(1, n_rows), ROW * MANY_ROWS * MANY / product_s(MANY, MANY_ROWS))

    def _attention(self, n: int, n_cells: int) -> float:
        """Return multiply-adds a second of the last n tokens of a text of `n_cells`."""
        graph = Graph(self._ggml, 4)
        asked = self._chance.standard_normal((n, HEADS, HEAD)).astype(np.float32)
        cells = [self._chance.standard_normal((n_cells, KV_HEADS, HEAD)).astype(np.float16) for _ in range(2)]
        mask: Array = np.zeros((n, n_cells), np.float16)
        seen = np.arange(n_cells)[None] <= (n_cells - n + np.arange(n))[:, None]
        mask[~seen] = HIDDEN
        q = graph.tensor(
            F32, (HEAD, n, HEADS, 1), (4, 4 * HEAD * HEADS, 4 * HEAD, 4 * HEAD * HEADS * n), asked
        )  # the heads of a token lie side by side
        wide = 2 * HEAD * KV_HEADS
        k, v = (
            graph.tensor(F16, (HEAD, n_cells, KV_HEADS, 1), (2, wide, 2 * HEAD, wide * n_cells), one) for one in cells
        )
        at = graph.tensor(F16, (n_cells, n, 1, 1), (2, 2 * n_cells, 2 * n_cells * n, 2 * n_cells * n), mask)
        node = graph.call("ggml_flash_attn_ext", q, k, v, at, HEAD**-0.5, 0.0, 0.0)
        return 2 * HEADS * HEAD * float(seen.sum()) / self._time_s(graph, node)

    def _elementwise(self, n: int, size: int, times: int) -> float:
        """Return what it takes to multiply rows number by number, again and again, s."""
        graph = Graph(self._ggml, 2 * times + 4)
        numbers = np.ones((n, size), np.float32)
        node = graph.tensor(F32, (size, n, 1, 1), _strides((size, n)), numbers)
        nodes = []
        for _ in range(times):
            node = graph.call("ggml_mul", node, node)
            nodes.append(node)
        return self._time_s(graph, *nodes)

    def _time_s(self, graph: Graph, *nodes: Node) -> float:
        """Return the least time of some rounds, s."""
        for node in nodes:
            ne = tuple(node.contents.ne)
            graph.compute_into(node, np.empty(ne[::-1], np.float32), _strides(ne[:3]))
        try:
            return least_s(lambda: graph.run(self._n_threads), time.process_time) / self._n_threads
        finally:
            graph.close()


def least_s(run: Callable[[], None], now: Callable[[], float], enough_s: float = ROUND_S) -> float:
    """Run something some times; return the least time that it took, s. Where it is quick, the first does not count."""
    took: list[float] = []
    while len(took) <= ROUNDS and (len(took) < 2 or sum(took[1:]) < enough_s) and sum(took) < MOST_ROUNDS * enough_s:
        began = now()
        run()
        took.append(now() - began)
    return min(took[1:] or took)


def _strides(ne: Sequence[int]) -> list[int]:
    """Return the bytes between numbers, rows, slices and slices of slices of 32-bit floats that lie in a row."""
    found = [4]
    for n in (*ne, 1, 1)[:3]:
        found.append(found[-1] * n)
    return found


def main() -> None:
    """Do the job of the inherited socket."""
    home = JobSocket()
    job, _ = home.job(MachineJob, lambda _: confine(Access(), gpu.free_bytes))
    os.nice(job.nice)
    began = time.perf_counter()
    with home.refusing(RuntimeError, MemoryError):
        home.done(MachineMeasured(MachineBench(job.n_threads, job.cache_bytes).speed(), time.perf_counter() - began))


if __name__ == "__main__":
    main()

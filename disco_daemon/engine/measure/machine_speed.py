"""Measures what this machine does at most, by llama.cpp's own kernels, in a process of its own: some 4 s, no model.

Products of weights in each packing are computed for one token and for many, and those of experts that tokens chose;
then attention, numbers one by one, and operations of no size. What one token reads is in matrices as a model has, and
together more than caches hold: some of 64 MiB stays in a processor's last cache, of which a guest is told a part.
Time is the processor's, divided by threads, as each has the same to do and waits for the others at work: what else runs
here takes turns, not processor time. Of some rounds the fastest counts.
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
from ..llama.ggml import F16, F32, I32, Array, Ggml, Graph, Node, Packing
from ..llama.memory import available_bytes
from .machine_messages import MachineJob, MachineMeasured

# ggml.h, of the files that people have. Those of other packings have the speed of the next in bits.
NAMES = {
    1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 39: "MXFP4",
}  # fmt: skip
EXPERTS = (8, 12, 14, 39)  # of those, what files with experts have most
ROW, ROWS = 2048, 1024  # numbers of a row, and rows of a matrix: of a model with some 2B parameters
ONE_BYTES = 256 << 20  # of weights that one token reads, at least
CACHES, MOST_BYTES = (
    2,
    1 << 30,
)  # times the caches that cores share, so that they hold none of it; but no more than this
FREE_SHARE, LEAST_BYTES = 1 / 4, 16 << 20  # of the free memory that is filled for that, but no less than this
PATTERN_BYTES = 1 << 20  # that are drawn; memory is filled with them again and again
MANY, MANY_ROWS = 256, 2048  # tokens of a prompt, and rows of weights for them
N_EXPERTS, USED, EXPERT_ROWS = 32, 8, 512  # of a layer, of a token, and rows of each
MANY_EXPERTS = 4  # all of which each token of a prompt uses, so that it is multiplying that takes the time
UNITS, UNIT = 64, 256  # blocks of random numbers that weights are drawn from
HEAD, HEADS, KV_HEADS = 128, 16, 8  # of attention
ONE_CELLS, MANY_CELLS = 512, 1024
KEPT_HEADS, KEPT_CELLS = (64, 128, 256), 256  # lengths of heads whose cells are read from memory, and cells of a layer
ELEMENTS = 1 << 20
EMPTY = 256  # operations of no size, in a row
ROUNDS, ROUND_S = 6, 0.12  # of each, and what they take together at most, s
MOST_ROUNDS = 4  # times that: then one is enough
HIDDEN = -np.inf


class MachineBench:
    """Times operations with one number of threads."""

    def __init__(
        self, n_threads: int, cache_bytes: int = 0, free_bytes: int | None = None, ggml: Ggml | None = None
    ) -> None:
        self._ggml, self._n_threads = ggml or Ggml.installed(), n_threads
        free = available_bytes() if free_bytes is None else free_bytes
        n_bytes = min(MOST_BYTES, max(ONE_BYTES, CACHES * cache_bytes), int(FREE_SHARE * free))
        self._memory = np.empty(max(LEAST_BYTES, n_bytes), np.uint8)
        self._chance = np.random.default_rng(0)

    @property
    def n_bytes(self) -> int:
        """The bytes of memory that are filled."""
        return len(self._memory)

    def speed(self) -> MachineSpeed:
        """Measure all. Raises RuntimeError if ggml refuses."""
        packings, experts, kept = {}, {}, {}
        for number, name in NAMES.items():
            packing = self._filled(number)
            packings[name] = self._packed(packing)
            if number in EXPERTS:
                experts[name] = self._of_experts(packing)
            if number == F16:  # what is there now are cells, too
                kept = {str(length): self._kept(length) for length in KEPT_HEADS}
        return MachineSpeed(
            packings=packings,
            experts=experts,
            kept_bytes_per_s=kept,
            attention_one_per_s=self._attention(1, ONE_CELLS),
            attention_many_per_s=self._attention(MANY, MANY_CELLS),
            elements_per_s=ELEMENTS / self._elementwise(ELEMENTS // ROW, ROW, 1),
            scaled_per_s=ELEMENTS / self._scaled(),
            operation_s=self._elementwise(1, 32, EMPTY) / EMPTY,
            n_threads=self._n_threads,
        )

    def _filled(self, number: int) -> Packing:
        """Fill the memory with weights in a packing, which is returned."""
        packing = self._ggml.packing(number)
        if packing is None:
            raise RuntimeError(f"this llama.cpp does not know packing {NAMES[number]}")
        numbers = (0.05 * self._chance.standard_normal((UNITS, UNIT))).astype(np.float32)
        units = self._ggml.packed(packing, numbers).reshape(UNITS, -1)
        pattern = units[self._chance.integers(0, UNITS, PATTERN_BYTES // units.shape[1])].reshape(-1)
        whole = len(self._memory) // len(pattern)
        self._memory[: whole * len(pattern)].reshape(whole, -1)[:] = pattern
        self._memory[whole * len(pattern) :] = pattern[: len(self._memory) - whole * len(pattern)]
        return packing

    def bytes_per_s(self, number: int, lengths: Sequence[int], n: int) -> list[float]:
        """Return the bytes a second of weights in a packing that `n` rows are multiplied with, by numbers of a row.

        Raises RuntimeError if ggml refuses.
        """
        packing = self._filled(number)
        return [self._read_per_s(packing, length, n) for length in lengths]

    def _read_per_s(self, packing: Packing, length: int, n: int) -> float:
        row = length // packing.block * packing.n_bytes
        m = min(ROWS, len(self._memory) // row)
        n_bytes = row * m
        n_matrices = len(self._memory) // n_bytes
        return n_bytes * n_matrices / self._product_s(packing, length, n, m, n_matrices)

    def _product_s(self, packing: Packing, length: int, n: int, m: int, times: int) -> float:
        row = length // packing.block * packing.n_bytes
        graph = Graph(self._ggml, 2 * times + 2)
        right = graph.tensor(F32, (length, n, 1, 1), _strides((length, n)), self._rows(n, length))
        nb = (packing.n_bytes, row, row * m, row * m)
        nodes = []
        for i in range(times):
            left = graph.tensor(packing.number, (length, m, 1, 1), nb, self._memory, i * row * m)
            nodes.append(graph.call("ggml_mul_mat", left, right))
        return self._time_s(graph, *nodes)

    def _packed(self, packing: Packing) -> PackedSpeed:
        many_s = self._product_s(packing, ROW, MANY, MANY_ROWS, 1)
        return PackedSpeed(self._read_per_s(packing, ROW, 1), ROW * MANY_ROWS * MANY / many_s)

    def _of_experts(self, packing: Packing) -> PackedSpeed:
        row = ROW // packing.block * packing.n_bytes
        each = row * EXPERT_ROWS

        def product_s(n: int, layers: Sequence[int], chosen: Sequence[Array], n_experts: int) -> float:
            graph = Graph(self._ggml, 3 * len(layers) + 2)
            right = graph.tensor(F32, (ROW, 1, n, 1), _strides((ROW, 1, n)), self._rows(n))
            shape, nb = (ROW, EXPERT_ROWS, n_experts, 1), (packing.n_bytes, row, each, each * n_experts)
            nodes = []
            for layer, experts in zip(layers, chosen, strict=True):
                left = graph.tensor(packing.number, shape, nb, self._memory, layer * each * n_experts)
                ids = graph.tensor(I32, (experts.shape[1], n, 1, 1), _strides((experts.shape[1], n)), experts)
                nodes.append(graph.call("ggml_mul_mat_id", left, right, ids))
            return self._time_s(graph, *nodes)

        n_experts = min(N_EXPERTS, len(self._memory) // each)  # of a memory that is smaller
        layers: list[int] = []
        chosen: list[Array] = []  # in the end all experts were, each once: what was read already would lie in a cache
        for layer in range(len(self._memory) // (each * n_experts)):
            order = self._chance.permutation(n_experts).astype(np.int32)
            for start in range(0, n_experts, USED):
                layers.append(layer)
                chosen.append(order[None, start : start + USED].copy())
        one = each * sum(experts.size for experts in chosen) / product_s(1, layers, chosen, n_experts)
        all_of_them = np.tile(np.arange(MANY_EXPERTS, dtype=np.int32), (MANY, 1))
        many = MANY_EXPERTS * ROW * EXPERT_ROWS * MANY / product_s(MANY, [0], [all_of_them], MANY_EXPERTS)
        return PackedSpeed(one, many)

    def _rows(self, n: int, length: int = ROW) -> Array:
        return self._chance.standard_normal((n, length)).astype(np.float32)

    def _kept(self, head: int) -> float:
        """Return how many bytes of cells a second one token reads, layer by layer, behind a short text."""
        wide = 2 * head * KV_HEADS
        layer = 2 * KEPT_CELLS * wide
        n_layers = len(self._memory) // layer
        graph = Graph(self._ggml, 3 * n_layers + 4)
        asked = self._chance.standard_normal((HEADS, head)).astype(np.float32)
        q = graph.tensor(F32, (head, 1, HEADS, 1), (4, 4 * head * HEADS, 4 * head, 4 * head * HEADS), asked)
        mask: Array = np.zeros(KEPT_CELLS, np.float16)
        at = graph.tensor(F16, (KEPT_CELLS, 1, 1, 1), (2, *[2 * KEPT_CELLS] * 3), mask)
        nodes = []
        for i in range(n_layers):
            k, v = (
                graph.tensor(
                    F16, (head, KEPT_CELLS, KV_HEADS, 1), (2, wide, 2 * head, wide * KEPT_CELLS), self._memory, start
                )
                for start in (i * layer, i * layer + layer // 2)
            )
            nodes.append(graph.call("ggml_flash_attn_ext", q, k, v, at, head**-0.5, 0.0, 0.0))
        return layer * n_layers / self._time_s(graph, *nodes)

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

    def _scaled(self) -> float:
        """Return what it takes to multiply each of many rows with a number of its own, s."""
        graph = Graph(self._ggml, 4)
        n = ELEMENTS // ROW
        rows = graph.tensor(F32, (ROW, n, 1, 1), _strides((ROW, n)), np.ones((n, ROW), np.float32))
        factors = graph.tensor(F32, (1, n, 1, 1), _strides((1, n)), np.ones(n, np.float32))
        return self._time_s(graph, graph.call("ggml_mul", rows, factors))

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

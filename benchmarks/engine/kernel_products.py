"""Random products for `benchmarks.engine.kernels`, of all shapes that llama.cpp asks ggml for, and what they are to be.

Rows are whole numbers up to 127 times a power of two, in each block of 32 one of 127, so that packing them loses
nothing: what a product comes to is known in 64 bits, from the numbers that packed weights stand for, and the order in
which 32 bits are added up is all that a right one may differ by.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from disco_daemon.arrays import FloatArray
from disco_daemon.engine.llama.ggml import BF16, F16, F32, I32, Q8_K, Array, Ggml, Node, Packing

from .checked_operations import CheckedGraph

OURS = (
    "q4_0",
    "q4_1",
    "q8_0",
    "iq4_nl",
    "mxfp4",
    "q4_K",
    "q5_K",
    "q6_K",
)  # what native/products.h multiplies; half of all cases
# Blocks of which any bytes behind the scale are a meaning; to find those of given numbers takes ggml seconds.
BY_CHANCE = ("iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
SPREAD = "iq1_m"  # likewise, its scale in the upper halves of the last bytes
N_TYPES = 43  # GGML_TYPE_COUNT; beyond it ggml reads what is not there
N_WEIGHTS, N_ROWS = 1 << 16, 1 << 18  # numbers to take weights and rows from
ROUNDING = 1e-5  # of the sum of all amounts; 32 bits lose 1e-7 at each of some hundred
LARGEST = 1 << 19  # products in one case


class Numbers:
    """Packed numbers to take tensors from, and what they stand for."""

    def __init__(self, packing: Packing, data: NDArray[np.uint8], numbers: NDArray[np.float32]) -> None:
        self.packing, self.data, self.numbers = packing, data, numbers

    def tensor(
        self, graph: CheckedGraph, ne: Sequence[int], steps: Sequence[int], start: int
    ) -> tuple[Node, FloatArray]:
        """Return a tensor with `steps` numbers from a row, slice, slice of slices to the next, and its numbers."""
        one = self.packing
        nb = [one.n_bytes, *(step // one.block * one.n_bytes for step in steps)]
        node = graph.tensor(one.number, ne, nb, self.data, start // one.block * one.n_bytes)
        strides = [4 * step for step in (*reversed(steps), 1)]
        view = np.lib.stride_tricks.as_strided(self.numbers[start:], tuple(reversed(ne)), strides)
        return node, view.astype(float)


class Products:
    """Makes products of weights in each of ggml's types."""

    def __init__(self, ggml: Ggml, seed: int) -> None:
        self.ggml = ggml
        self._random = np.random.default_rng(seed)
        found = (ggml.packing(number) for number in range(N_TYPES))
        self.packings = {one.number: one for one in found if one}
        self._weights: dict[int, Numbers] = {}
        self._packed: dict[int, Numbers] = {}
        self.kinds = [n for n, one in self.packings.items() if one.is_of_weights]
        self.ours = [n for n, one in self.packings.items() if one.name in OURS]

    @cached_property
    def rows(self) -> NDArray[np.float32]:
        """Numbers that each type of rows can have."""
        random = self._random
        whole = random.integers(-127, 128, (N_ROWS // 32, 32))
        whole[np.arange(len(whole)), random.integers(0, 32, len(whole))] = random.choice([-127, 127], len(whole))
        power = np.repeat(random.integers(-9, -4, N_ROWS // 256), 8)  # of 256, which some types pack together
        return np.ldexp(whole, power[:, None]).astype(np.float32).reshape(-1)

    def weights(self, number: int) -> Numbers:
        """Return weights of a type."""
        if number not in self._weights:
            one = self.packings[number]
            if one.name in BY_CHANCE or one.name == SPREAD:
                blocks = self._random.integers(0, 256, (N_WEIGHTS // one.block, one.n_bytes), np.uint8)
                scales = self._random.uniform(0.01, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
                if one.name == SPREAD:
                    nibbles = np.stack([scales & 15, scales >> 4], 2).reshape(-1, 4)
                    blocks[:, -7::2] = blocks[:, -7::2] & 15 | nibbles << 4
                else:
                    blocks[:, :2] = scales
                data = blocks.reshape(-1)
            else:
                data = self.ggml.packed(one, self._random.normal(0, 1, (N_WEIGHTS // 256, 256)).astype(np.float32))
            self._weights[number] = Numbers(one, data, self.ggml.unpacked(one, data))
        return self._weights[number]

    def packed_rows(self, number: int) -> Numbers:
        """Return rows of a type."""
        if number not in self._packed:
            one = self.packings[number]
            self._packed[number] = Numbers(one, self.ggml.rows(one, self.rows), self.rows)
        return self._packed[number]

    def _kind(self, random: np.random.Generator) -> int:
        return int(random.choice(self.ours if random.random() < 0.5 else self.kinds))

    def _place(
        self, random: np.random.Generator, most: int, ne: Sequence[int], block: int
    ) -> tuple[tuple[int, int, int], int] | None:
        """Return how a tensor of this shape lies: its steps, and where it starts. None: there is no room for it."""
        k, m, slices, more = ne
        gap = int(random.integers(1, 4)) * block
        steps = {
            "in a row": (k, k * m, k * m * slices),
            "rows apart": (k + gap, (k + gap) * m, (k + gap) * m * slices),
            "slices apart": (k, k * m + gap, (k * m + gap) * slices + gap),
            "slices within rows": (k * slices, k, k * m * slices),
            "all within rows": (k * slices * more, k, k * slices),
            "slices outside": (k, k * m * more, k * m),
        }[str(random.choice(LAYOUTS, p=LAYOUT_SHARES))]
        extent = k + sum((n - 1) * step for n, step in zip(ne[1:], steps, strict=True))
        if extent > most:
            return None
        return steps, int(random.integers(0, (most - extent) // block + 1)) * block

    def _rows_of(
        self,
        graph: CheckedGraph,
        random: np.random.Generator,
        weights: Packing,
        ne: Sequence[int],
        *,
        may_be_packed: bool,
    ) -> tuple[Node, FloatArray] | None:
        """Return rows for a product with such weights, mostly floats."""
        kinds = [F32]
        if may_be_packed:
            # Of slices of such rows ggml's own tiles take the wrong ones; llama.cpp never gives them.
            kinds += [weights.of_rows] if weights.of_rows != Q8_K else []
            kinds += [F16, BF16] if weights.number == F32 else []
        number = int(random.choice(kinds)) if random.random() < 0.2 else F32
        of = self.packed_rows(number)
        block = max(of.packing.block, self.packings[weights.of_rows].block)
        placed = self._place(random, N_ROWS, ne, block)
        return of.tensor(graph, ne, *placed) if placed else None

    def _operands(
        self,
        graph: CheckedGraph,
        random: np.random.Generator,
        weights: Packing,
        ne: Sequence[int],
        rows_ne: Sequence[int],
        *,
        may_be_packed: bool,
    ) -> tuple[Node, FloatArray, Node, FloatArray] | None:
        """Return weights and rows of these shapes with their numbers; None where chance has no room for them."""
        placed = self._place(random, N_WEIGHTS, ne, weights.block)
        rows = self._rows_of(graph, random, weights, rows_ne, may_be_packed=may_be_packed)
        if placed is None or rows is None:
            return None
        return (*self.weights(weights.number).tensor(graph, ne, *placed), *rows)

    def product(self, graph: CheckedGraph, random: np.random.Generator) -> bool:
        """Add a product of weights and rows of up to four dimensions; return False where chance made one too large."""
        one = self.packings[self._kind(random)]
        block = max(one.block, self.packings[one.of_rows].block)
        k = block * int(random.integers(1, 13 if block < 256 else 4))
        if block == 1:
            k = int(random.integers(1, 400))
        m, n = int(random.choice(N_OF_WEIGHTS)), int(random.choice(N_OF_ROWS))
        slices, more = ((int(random.integers(1, 5)) if random.random() < 0.6 else 1) for _ in range(2))
        each, each_more = ((int(random.integers(2, 4)) if random.random() < 0.3 else 1) for _ in range(2))
        ne, rows_ne = (k, m, slices, more), (k, n, slices * each, more * each_more)
        if k * m * n * rows_ne[2] * rows_ne[3] > LARGEST:
            return False
        if (found := self._operands(graph, random, one, ne, rows_ne, may_be_packed=True)) is None:
            return False
        node, numbers, row_node, row_numbers = found
        numbers = np.repeat(np.repeat(numbers, each, 1), each_more, 0)
        expected = row_numbers @ numbers.swapaxes(2, 3)
        amount = np.abs(row_numbers) @ np.abs(numbers).swapaxes(2, 3)
        gaps = tuple(int(gap) for gap in random.integers(0, 5, 3)) if random.random() < 0.3 else (0, 0, 0)
        shape = "x".join(map(str, rows_ne[1:]))
        name = f"mul_mat {one.name} {'x'.join(map(str, ne))} by {shape} of type {row_node.contents.type}"
        graph.add(
            name, graph.call("ggml_mul_mat", node, row_node), expected, ROUNDING * amount + 1e-30,
            (gaps[0], gaps[1], gaps[2]),
        )  # fmt: skip
        return True

    def product_of_experts(self, graph: CheckedGraph, random: np.random.Generator) -> bool:
        """Add a product of rows with some of many experts' weights; return False where chance made one too large."""
        one = self.packings[self._kind(random)]
        block = max(one.block, self.packings[one.of_rows].block)
        k = block * int(random.integers(1, 9 if block < 256 else 3)) if block > 1 else int(random.integers(1, 200))
        m, n_experts = int(random.choice(N_OF_WEIGHTS)), int(random.integers(1, 9))
        n_used, n_tokens = int(random.integers(1, n_experts + 1)), int(random.choice(N_OF_ROWS))
        n_rows = n_used if random.random() < 0.5 else 1
        ne, rows_ne = (k, m, n_experts, 1), (k, n_rows, n_tokens, 1)
        if k * m * n_used * n_tokens > LARGEST:
            return False
        if (found := self._operands(graph, random, one, ne, rows_ne, may_be_packed=False)) is None:
            return False
        node, numbers, row_node, row_numbers = found
        apart = n_used + int(random.integers(0, 3))  # as a view of the best of all experts
        ids: Array = np.zeros((n_tokens, apart), np.int32)
        ids[:, :n_used] = np.argsort(random.random((n_tokens, n_experts)), 1)[:, :n_used]
        id_node = graph.tensor(
            I32, (n_used, n_tokens, 1, 1), (4, *[4 * apart] * 1, 4 * apart * n_tokens, 4 * apart * n_tokens), ids
        )
        chosen = numbers[0, ids[:, :n_used]]  # tokens, used, m, k
        given = np.broadcast_to(row_numbers[0], (n_tokens, n_used, k))
        expected = np.einsum("tumk,tuk->tum", chosen, given)[None]
        amount = np.einsum("tumk,tuk->tum", np.abs(chosen), np.abs(given))[None]
        name = f"mul_mat_id {one.name} {k}x{m}, {n_used} of {n_experts}, {n_tokens} tokens of {n_rows}"
        graph.add(name, graph.call("ggml_mul_mat_id", node, row_node, id_node), expected, ROUNDING * amount + 1e-30)
        return True


LAYOUTS = ["in a row", "rows apart", "slices apart", "slices within rows", "all within rows", "slices outside"]
LAYOUT_SHARES = [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
N_OF_WEIGHTS = [*range(1, 18), 31, 32, 33, 48, 64, 80, 100, 128, 192, 256, 300, 512, 600]
N_OF_ROWS = [*[1, 2, 3, 4] * 3, *range(1, 18), 24, 32, 33, 40, 64, 255, 256, 257, 300]

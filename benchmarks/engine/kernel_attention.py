"""Random attention for `benchmarks.engine.kernels`, of all shapes that llama.cpp asks ggml for, and what it is to be.

What is asked for are whole numbers times a power of two, so that packing them as keys are packed loses nothing; keys
and values are what their packed ones stand for. A number of a result is a mean of values, so what rounding may do is
told in parts of the largest of them: little where sums have 32 bits, more where ggml adds up in 16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disco_daemon.arrays import FloatArray
from disco_daemon.engine.llama.ggml import BF16, F16, F32, Array, Ggml, Node

from .checked_operations import CheckedGraph
from .kernel_products import Numbers

KINDS = [*[(BF16, F16), (F16, F16)] * 4, (BF16, BF16), (F32, F32), (8, 8), (2, 2), (8, F16), (3, 3)]  # keys, values
HEADS = [16, 32, 48, 64, 64, 80, 96, 112, 128, 128, 192, 256, 512, 72, 40, 576]  # numbers of one
N_CELLS = [*range(1, 9), 31, 32, 33, 63, 64, 65, 100, 127, 128, 200, 256, 511, 512, 513, 700]
N_TOKENS = [*[1] * 8, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 65, 70]
N_NUMBERS = 1 << 20  # to take keys and values from
ROUNDING, ROUNDING_16 = 2e-5, 2e-2  # of the largest value: of sums with 32 bits, and with 16
LARGEST = 1 << 19  # products in one case
HIDDEN = -np.inf


class Attention:
    """Makes attention over keys and values in the types that caches have."""

    def __init__(self, ggml: Ggml, seed: int) -> None:
        self.ggml = ggml
        self._numbers = np.random.default_rng(seed).normal(0, 1, N_NUMBERS).astype(np.float32).reshape(-1, 256)
        self._kept: dict[int, Numbers] = {}

    def _of(self, number: int) -> Numbers:
        if number not in self._kept:
            one = self.ggml.packing(number)
            if one is None:
                msg = f"ggml has no type {number}"
                raise ValueError(msg)
            data = self.ggml.packed(one, self._numbers)
            self._kept[number] = Numbers(one, data, self.ggml.unpacked(one, data))
        return self._kept[number]

    def _cells(
        self, graph: CheckedGraph, random: np.random.Generator, number: int, ne: tuple[int, int, int, int]
    ) -> tuple[Node, FloatArray] | None:
        """Return keys or values (numbers, cells, heads, sequences), mostly a part of a cache, heads side by side."""
        size, n_cells, n_heads, _ = ne
        width = size * n_heads
        if random.random() < 0.8:
            apart = n_cells + int(random.integers(0, 9))  # cells of a sequence
            steps = (width, size, width * apart)
        else:
            steps = (size, size * n_cells, width * n_cells)
        extent = size + sum((n - 1) * step for n, step in zip(ne[1:], steps, strict=True))
        of = self._of(number)
        block = of.packing.block
        if extent > N_NUMBERS or size % block:
            return None
        return of.tensor(graph, ne, steps, int(random.integers(0, (N_NUMBERS - extent) // block + 1)) * block)

    def attention(self, graph: CheckedGraph, random: np.random.Generator) -> bool:
        """Add attention of tokens of one or more sequences; return False where chance made one that cannot be."""
        of_keys, of_values = KINDS[random.integers(len(KINDS))]
        n_key = int(random.choice(HEADS))
        n_value = n_key if random.random() < 0.8 else int(random.choice(HEADS))
        n_tokens, n_cells = int(random.choice(N_TOKENS)), int(random.choice(N_CELLS))
        n_shared, n_kv_heads = int(random.integers(1, 6)), int(random.integers(1, 4))
        n_heads, n_sequences = n_shared * n_kv_heads, int(random.choice([1, 1, 1, 2, 3]))
        if n_tokens * n_cells * n_heads * n_sequences * (n_key + n_value) > LARGEST:
            return False
        keys = self._cells(graph, random, of_keys, (n_key, n_cells, n_kv_heads, n_sequences))
        values = self._cells(graph, random, of_values, (n_value, n_cells, n_kv_heads, n_sequences))
        if keys is None or values is None:
            return False
        asked_node, asked = _asked(graph, random, (n_key, n_tokens, n_heads, n_sequences))
        bias = float(random.choice([0.0, 0.0, 0.0, 8.0]))
        mask_node, mask = _mask(graph, random, (n_cells, n_tokens, n_heads, n_sequences), is_there=bias > 0)
        scale = float(np.float32(1 / np.sqrt(n_key)))
        cap = float(random.choice([0.0, 0.0, 0.0, 30.0]))
        node = graph.call("ggml_flash_attn_ext", asked_node, keys[0], values[0], mask_node, scale, bias, cap)
        sinks = None
        if random.random() < 0.25:
            sinks = random.normal(0, 2, n_heads).astype(np.float32)
            row = 4 * n_heads
            graph.ggml.base.ggml_flash_attn_ext_add_sinks(
                node, graph.tensor(F32, (n_heads, 1, 1, 1), (4, row, row, row), sinks)
            )
        expected = _expected(
            asked, np.repeat(keys[1], n_shared, 1), np.repeat(values[1], n_shared, 1), mask, scale, bias, cap, sinks
        )
        rounding = ROUNDING_16 if of_values == F16 and not _is_ours(of_keys, n_key, n_value) else ROUNDING
        name = (
            f"flash_attn_ext keys of type {of_keys} {n_key}x{n_cells}x{n_kv_heads}x{n_sequences}, values of {of_values}"
            f" {n_value}, {n_tokens} tokens of {n_heads} heads, mask {None if mask is None else mask.shape},"
            f" bias {bias:g}, cap {cap:g}{'' if sinks is None else ', sinks'}"
        )
        graph.add(name, node, expected, np.full(expected.shape, rounding * np.abs(values[1]).max()))
        return True


def _is_ours(of_keys: int, n_key: int, n_value: int) -> bool:
    """Whether native/exact_attention.h computes it, or ggml in tiles: sums have 32 bits."""
    return of_keys in (BF16, F16) and n_key % 16 == 0 and n_value % 16 == 0 and max(n_key, n_value) <= 512


def _asked(graph: CheckedGraph, random: np.random.Generator, ne: tuple[int, int, int, int]) -> tuple[Node, FloatArray]:
    """Return what rows ask for; mostly the heads of a token lie side by side."""
    size, n_tokens, n_heads, n_sequences = ne
    whole = random.integers(-127, 128, (n_sequences, n_tokens, n_heads, size))
    if size % 32 == 0:  # in each block the most that there is
        whole[..., ::32] = 127
    numbers = np.ldexp(whole, -6).astype(np.float32)
    if random.random() < 0.3:
        numbers = np.ascontiguousarray(numbers.swapaxes(1, 2))
        nb = (4, 4 * size, 4 * size * n_tokens, 4 * size * n_tokens * n_heads)
        return graph.tensor(F32, ne, nb, numbers), numbers.astype(float)
    nb = (4, 4 * size * n_heads, 4 * size, 4 * size * n_tokens * n_heads)
    return graph.tensor(F32, ne, nb, numbers), numbers.swapaxes(1, 2).astype(float)


def _mask(
    graph: CheckedGraph, random: np.random.Generator, shape: tuple[int, int, int, int], *, is_there: bool
) -> tuple[Node, FloatArray | None]:
    """Return what is added to scores: which cells rows see, and how far they are."""
    n_cells, n_tokens, n_heads, n_sequences = shape
    if not is_there and random.random() < 0.15:
        return None, None
    n_of_heads = n_heads if random.random() < 0.1 else 1
    n_of_sequences = n_sequences if random.random() < 0.7 else 1
    found: Array = np.zeros((n_of_sequences, n_of_heads, n_tokens, n_cells), np.float16)
    at = np.arange(n_cells)
    for mask in found.reshape(-1, n_tokens, n_cells):
        first = int(random.integers(0, n_cells))
        for token, row in enumerate(mask):
            way = random.random()
            if way < 0.5:  # one text, cells in a row
                row[(at < first) | (at > first + token)] = HIDDEN
            elif way < 0.7:  # cells of many
                row[random.random(n_cells) < random.choice([0.05, 0.5, 0.95, 1.0])] = HIDDEN
            elif way < 0.8:
                row[random.integers(0, n_cells) :] = HIDDEN
            if random.random() < 0.2:
                row[row == 0] = random.choice([-1.0, -3.5, 0.25, -0.0], int((row == 0).sum()))
    if random.random() < 0.3:  # all the same
        found[:] = found[:1, :1, :1]
    nb = (2, 2 * n_cells, 2 * n_cells * n_tokens, 2 * n_cells * n_tokens * n_of_heads)
    node = graph.tensor(F16, (n_cells, n_tokens, n_of_heads, n_of_sequences), nb, found)
    return node, found.astype(float)


def _expected(
    asked: FloatArray, keys: FloatArray, values: FloatArray, mask: FloatArray | None, scale: float, bias: float,
    cap: float, sinks: NDArray[np.float32] | None,
) -> FloatArray:  # fmt: skip
    """Return the result as ggml lays it out: sequences, tokens, heads, numbers."""
    scores = asked @ keys.swapaxes(2, 3) * scale
    if cap:
        scores = cap * np.tanh(scores / cap)
    n_heads = asked.shape[1]
    if mask is not None:
        scores = scores + _slopes(n_heads, bias)[:, None, None] * mask  # a mask may be of one head, of one sequence
    with np.errstate(invalid="ignore"):
        most = scores.max(-1, keepdims=True)
        if sinks is not None:
            most = np.maximum(most, sinks[:, None, None])
        shares = np.exp(scores - np.where(np.isfinite(most), most, 0.0))
    total = shares.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - most)
    found = shares @ values / np.where(total == 0, 1.0, total)  # a row that sees nothing is nothing
    return np.asarray(found.swapaxes(1, 2), float)


def _slopes(n_heads: int, bias: float) -> FloatArray:
    """Return by how much heads heed what is far (ALiBi)."""
    if not bias:
        return np.ones(n_heads)
    even = 1 << int(np.log2(n_heads))
    head = np.arange(n_heads)
    return np.where(
        head < even, 2.0 ** (-bias / even * (head + 1)), 2.0 ** (-bias / 2 / even * (2 * (head - even) + 1))
    )

"""Operations of ggml's with what they are to come to: `CheckedGraph` computes them and says which are wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disco_daemon.arrays import FloatArray
from disco_daemon.engine.llama.ggml import Ggml, Graph, Node


@dataclass(slots=True)
class Operation:
    """What is computed: `numbers` is to be `expected`, give or take `allowance`, beside it all stays."""

    name: str
    node: Node
    memory: NDArray[np.float32]
    numbers: NDArray[np.float32]
    expected: FloatArray
    allowance: FloatArray

    def poison(self) -> None:
        """Put into the memory what no operation gives."""
        self.memory.fill(np.nan)

    def fault(self) -> str:
        """Return what is wrong with the result; "" if nothing is. The result is gone afterwards."""
        missing = int(np.isnan(self.numbers).sum())
        off = ~(np.abs(self.numbers - self.expected) <= self.allowance)
        worst = float(np.nanmax(np.abs(self.numbers - self.expected) / self.allowance)) if off.any() else 0.0
        self.numbers[...] = np.nan
        if missing:
            return f"{missing} of {self.numbers.size} numbers never written"
        if off.any():
            return f"{int(off.sum())} of {off.size} numbers wrong, by {worst:.3g} times what rounding may do"
        if not np.isnan(self.memory).all():
            return "something is written beside the result"
        return ""


class CheckedGraph(Graph):
    """Operations whose results are known."""

    def __init__(self, ggml: Ggml, n_nodes: int) -> None:
        super().__init__(ggml, n_nodes)
        self.operations: list[Operation] = []

    def add(
        self, name: str, node: Node, expected: FloatArray, allowance: FloatArray, gaps: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """Take up an operation; `gaps` are the numbers behind each row, slice and slice of slices of the result."""
        ne = tuple(node.contents.ne)
        strides = [1, ne[0] + gaps[0]]
        strides.append(strides[1] * ne[1] + gaps[1])
        strides.append(strides[2] * ne[2] + gaps[2])
        memory = np.empty(strides[3] * ne[3] + 16, np.float32)  # some behind the end, too
        numbers = np.lib.stride_tricks.as_strided(memory, ne[::-1], [4 * stride for stride in reversed(strides)])
        if numbers.shape != expected.shape:
            msg = f"{name}: ggml makes {numbers.shape}, not {expected.shape}"
            raise ValueError(msg)
        self.compute_into(node, memory, [4 * stride for stride in strides])
        self.operations.append(Operation(name, node, memory, numbers, expected, allowance))

    def compute(self, n_threads: int) -> list[tuple[str, str]]:
        """Compute all; return the operations that are wrong, with what is. Raises RuntimeError if ggml refuses."""
        self._poisoned(n_threads)
        return [(one.name, fault) for one in self.operations if (fault := one.fault())]

    def results(self, n_threads: int) -> list[NDArray[np.float32]]:
        """Compute all; return what each operation came to. Raises RuntimeError if ggml refuses."""
        self._poisoned(n_threads)
        return [one.numbers.copy() for one in self.operations]

    def _poisoned(self, n_threads: int) -> None:
        for one in self.operations:
            one.poison()
        self.run(n_threads)

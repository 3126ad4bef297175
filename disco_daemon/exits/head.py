"""An exit's head: from the hidden rows behind a cut to logits, in the arithmetic of llama.cpp's graph.

    z = h + down @ (silu(gate @ u) * (up @ u)),  u = rms(h) * norm      (a block of norm and FFN; not in a linear head)
    y = map @ (rms(z) * scale),  logits = output @ y

`output` is the whole model's own output matrix, n_vocab x n_embd, which is kept apart; `map` is n_embd x n_embd. So a
head is an ordinary block without attention, a norm, and an output matrix `output @ map`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FfnBlock:
    """Norm (n_embd) and FFN with SwiGLU: `gate` and `up` n_ff x n_embd, `down` n_embd x n_ff."""

    norm: Floats
    gate: Floats
    up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class ExitHead:
    """The weights of a head; `eps` is that of the model's norms."""

    scale: Floats
    map: Floats
    eps: float
    block: FfnBlock | None = None

    def features(self, rows: Floats) -> Floats:
        """Return rms(z) * scale of hidden rows, n x n_embd."""
        z = rows if self.block is None else rows + through(self.block, rows, self.eps)
        return normed(z, self.eps) * self.scale

    def rows(self, rows: Floats) -> Floats:
        """Return what stands for the whole model's last normed rows, n x n_embd."""
        return self.features(rows) @ self.map.T

    def logits(self, rows: Floats, output: Floats) -> Floats:
        """Return logits, n x n_vocab."""
        return self.rows(rows) @ output.T

    def folded(self, output: Floats) -> Floats:
        """Return the output matrix that takes `features` to logits, n_vocab x n_embd."""
        return output @ self.map


def normed(rows: Floats, eps: float) -> Floats:
    """Return rows divided by their root mean square."""
    squares = np.mean(np.square(rows), axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(rows / np.sqrt(squares + np.float32(eps)), np.float32)


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x)), without overflow."""
    found: Floats = np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)
    return found


def through(block: FfnBlock, rows: Floats, eps: float) -> Floats:
    """Return what a block adds to hidden rows."""
    u: Floats = normed(rows, eps) * block.norm
    gate: Floats = u @ block.gate.T
    added: Floats = (gate * sigmoid(gate) * (u @ block.up.T)) @ block.down.T
    return added

"""Trains a head's block and map on kept rows, to say what the whole model says: Adam on gradients by hand.

The loss of a row is the cross-entropy with the whole model's own probabilities of its likeliest words, among those that
its answers use, which is a sixth of a vocabulary. Sources: Hinton et al., arXiv 1503.02531 (distillation); Kingma and
Ba, arXiv 1412.6980 (Adam); Pan et al., arXiv 2402.00518 (exits of a frozen model).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .head import ExitHead, FfnBlock, Floats, normed, sigmoid

Weights = dict[str, Floats]
EPOCHS = 4  # times through all rows; more gain less than more rows do
BATCH = 256  # rows
RATE = 2e-3  # of a step; 1e-3 ends one point lower
WARM_STEPS = 20
N_WORDS = 6144  # of the vocabulary; an answer seldom has others
N_TOLD = 64  # of these words, the likeliest after each row
AT_ONCE = 512  # rows whose logits are in memory at a time
SEED = 22


def weights_of(head: ExitHead) -> Weights:
    """Return a copy of what is trained of a head, by name."""
    found = {"map": head.map.copy()}
    if head.block is not None:
        found |= {name: getattr(head.block, name).copy() for name in ("norm", "gate", "up", "down")}
    return found


def with_weights(head: ExitHead, weights: Weights) -> ExitHead:
    """Return a head with trained weights in place of its own."""
    block = None if head.block is None else FfnBlock(*(weights[name] for name in ("norm", "gate", "up", "down")))
    return ExitHead(head.scale, weights["map"], head.eps, block)


@dataclass(frozen=True, slots=True)
class ToldWords:
    """What the whole model says after some rows: the likeliest of some words, n x k, and their shares, which sum to 1.

    The others' shares are left out: they change no gradient by much, and take most of the memory and of the time.
    """

    words: NDArray[np.int64]
    shares: Floats

    def of(self, rows: NDArray[np.int64]) -> ToldWords:
        """Return those of some rows."""
        return ToldWords(self.words[rows], self.shares[rows])


def loss_and_gradients(head: ExitHead, rows: Floats, targets: ToldWords, output: Floats) -> tuple[float, Weights]:
    """Return the mean loss over `rows` (n x n_embd), and its gradients by name.

    `targets` are the whole model's words, which are numbers of rows of `output`; those are some rows of the output
    matrix, k x n_embd.
    """
    n = len(rows)
    grads: Weights = {}
    if (block := head.block) is not None:
        r = normed(rows, head.eps)
        u = np.asarray(r * block.norm, np.float32)
        gate: Floats = u @ block.gate.T
        up: Floats = u @ block.up.T
        s = sigmoid(gate)
        silu = gate * s
        act = silu * up
        z = np.asarray(rows + act @ block.down.T, np.float32)
    else:
        z = rows
    inv = 1 / np.sqrt(np.mean(np.square(z), axis=1, keepdims=True) + np.float32(head.eps))
    x = z * inv * head.scale
    y = x @ head.map.T
    logits = y @ output.T
    logits -= logits.max(1, keepdims=True)
    said = np.take_along_axis(logits, targets.words, 1)
    p = np.exp(logits, out=logits)
    total = p.sum(1, keepdims=True)
    loss = float(np.mean(np.log(total[:, 0]) - np.einsum("ij,ij->i", targets.shares, said)))
    p /= total
    np.put_along_axis(p, targets.words, np.take_along_axis(p, targets.words, 1) - targets.shares, 1)
    dy = (p @ output) / np.float32(n)
    grads["map"] = dy.T @ x
    if block is None:
        return loss, grads
    dx = (dy @ head.map) * head.scale
    dz = inv * (dx - z * np.square(inv) * np.mean(dx * z, axis=1, keepdims=True))
    grads["down"] = dz.T @ act
    da = dz @ block.down
    dgate = da * up * (s * (1 + gate * (1 - s)))
    dup = da * silu
    grads["gate"], grads["up"] = dgate.T @ u, dup.T @ u
    grads["norm"] = ((dgate @ block.gate + dup @ block.up) * r).sum(0)
    return loss, grads


@dataclass(slots=True)
class Adam:
    """Adam's state: the running means of gradients and of their squares, by name, after `n` steps."""

    mean: Weights = field(default_factory=dict)
    square: Weights = field(default_factory=dict)
    n: int = 0

    def step(self, weights: Weights, grads: Weights, rate: float, decay: float = 0.0) -> None:
        """Change the weights in place; `rate` is of each weight by the root mean square of its own matrix."""
        self.n += 1
        for name, grad in grads.items():
            if name not in self.mean:
                self.mean[name], self.square[name] = np.zeros_like(grad), np.zeros_like(grad)
            mean, square = self.mean[name], self.square[name]
            mean *= np.float32(0.9)
            mean += np.float32(0.1) * grad
            square *= np.float32(0.99)
            square += np.float32(0.01) * np.square(grad)
            step = (
                mean / np.float32(1 - 0.9**self.n) / (np.sqrt(square / np.float32(1 - 0.99**self.n)) + np.float32(1e-8))
            )
            weights[name] -= np.float32(rate) * step
            if decay and name != "norm":
                weights[name] *= np.float32(1 - rate * decay)


def train(
    head: ExitHead,
    rows: Floats,
    finals: Floats,
    labels: NDArray[np.int64],
    output: Floats,
    report: Callable[[int, int, float], None],
) -> ExitHead:
    """Return a head that was trained EPOCHS times on hidden rows, the whole model's last rows, and its tokens.

    `report` gets the number of an epoch, of how many, and its mean loss.
    """
    words = np.argsort(-np.bincount(labels, minlength=len(output)), kind="stable")[:N_WORDS]
    some = np.ascontiguousarray(output[words])
    told_words = told(finals, some)
    weights, adam, random = weights_of(head), Adam(), np.random.default_rng(SEED)
    size = min(BATCH, len(rows))
    n_steps = EPOCHS * (len(rows) // size)
    for epoch in range(EPOCHS):
        order, losses = random.permutation(len(rows)), []
        for at in range(0, len(rows) - size + 1, size):
            batch = order[at : at + size]
            loss, grads = loss_and_gradients(with_weights(head, weights), rows[batch], told_words.of(batch), some)
            rise, fall = min(1.0, (adam.n + 1) / WARM_STEPS), 0.5 + 0.5 * np.cos(np.pi * adam.n / n_steps)
            adam.step(weights, grads, RATE * rise * fall)
            losses.append(loss)
        report(epoch + 1, EPOCHS, float(np.mean(losses)))
    return with_weights(head, weights)


def told(finals: Floats, output: Floats) -> ToldWords:
    """Return what the whole model says, by its last rows, of the words of `output`."""
    n_told = min(N_TOLD, len(output))
    words = np.empty((len(finals), n_told), np.int64)
    shares = np.empty((len(finals), n_told), np.float32)
    for at in range(0, len(finals), AT_ONCE):
        logits = finals[at : at + AT_ONCE] @ output.T
        best = np.argpartition(logits, -n_told, axis=1)[:, -n_told:]
        p = np.take_along_axis(logits, best, 1)
        p = np.exp(p - p.max(1, keepdims=True))
        words[at : at + AT_ONCE], shares[at : at + AT_ONCE] = best, p / p.sum(1, keepdims=True)
    return ToldWords(words, shares)

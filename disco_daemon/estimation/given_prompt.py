"""The lengths of answers given the prompt's: a curve for each bin of prompt lengths, shrunk to that of all. Pure.

In some uses a prompt's length says much about its answer's (of the logarithm's variance out of sample: 0.55 in Azure's
chats, 0.1 in Alpaca's instructions), in others nothing (Azure's code completions, Mooncake's chats), and then bins are
noise. So the bins count only while they foretell what was not used to make them; else the curve of all answers does.
"""

from __future__ import annotations

import numpy as np

from ..arrays import BoolArray, FloatArray, IntArray, distinct
from .survival import Survival, kaplan_meier

WINDOW = 1000  # answers; with 200, in bins of 25, the simulated scheduler gains a tenth of what it gains with 1,000
PER_BIN, MAX_BINS = 30, 20  # answers in a bin at least, and bins of as many answers each
SHRINK_N = 4.0  # answers that the curve of all counts for in each bin; 2 to 8 foretell the same within 0.04 of R2
N_BLOCKS = 5  # of consecutive answers; each is foretold by the others
LEAST_ANSWERS = 100  # fewer foretell what they like
# R2 out of sample below which the bins do not count: where prompts say nothing it is below in 9 of 10 windows of 200
# answers, and of 1,000 it is 0 to within 0.04.
LEAST_FORETOLD = 0.05


class GivenPrompt:
    """Answer lengths by prompt length, from the answers [n] of which the prompt is known.

    `pooled` is the curve of all answers, `prompts` and `tokens` are lengths in tokens, > 0; `whole` is False where an
    answer was cut and would have gone on. `foretold` is R2 out of sample, of the logarithm of the answer's length.
    """

    __slots__ = ("_bins", "_curves", "_edges", "_tokens", "_whole", "foretold", "pooled")

    def __init__(self, pooled: Survival, prompts: IntArray, tokens: FloatArray, whole: BoolArray) -> None:
        self.pooled = pooled
        self._tokens, self._whole = tokens, whole
        self._edges = bin_edges(prompts) if len(prompts) >= LEAST_ANSWERS else np.empty(0)
        self._bins: IntArray = self._edges.searchsorted(prompts, "right")
        self._curves: dict[int, Survival] = {}
        self.foretold = 0.0
        if len(self._edges):
            self.foretold = foretold(self._bins, expected_log(pooled, tokens, whole))

    @property
    def is_open(self) -> bool:
        """Whether the prompt's length says enough to count."""
        return self.foretold > LEAST_FORETOLD

    def curve(self, prompt: int) -> Survival:
        """P(answer longer than x tokens) to a prompt of `prompt` tokens; the pooled curve itself while shut."""
        if not self.is_open:
            return self.pooled
        own = int(self._edges.searchsorted(prompt, "right"))
        if own not in self._curves:
            here = self._bins == own
            self._curves[own] = shrunk(self.pooled, self._tokens[here], self._whole[here])
        return self._curves[own]


def bin_edges(prompts: IntArray) -> FloatArray:
    """Return where bins of about as many prompts each meet; fewer bins where many prompts are equally long."""
    n_bins = max(1, min(MAX_BINS, len(prompts) // PER_BIN))
    ranks = np.arange(1, n_bins) * len(prompts) // n_bins
    edges = distinct(np.sort(prompts)[ranks]).astype(np.float64)
    above: FloatArray = edges[edges > prompts.min()]
    return above


def shrunk(pooled: Survival, tokens: FloatArray, whole: BoolArray, strength: float = SHRINK_N) -> Survival:
    """Return the curve of answers [n], pooled with `strength` pseudo-answers distributed as `pooled` is.

    As they are samples beside the others (Susarla and Van Ryzin, JASA 71, 1976), they also say how a cut answer goes
    on. Without answers that is `pooled` itself. `n` counts the answers alone.
    """
    if not len(tokens):
        return pooled
    falls = -np.diff(pooled.after, prepend=1.0)
    left = max(float(pooled.after[-1]), 0.0)  # more than the longest one known
    mixed = kaplan_meier(
        np.concatenate([pooled.times, pooled.times[-1:], tokens]),
        np.concatenate([np.ones(len(falls), np.bool_), np.zeros(1, np.bool_), whole]),
        np.concatenate([strength * np.maximum(falls, 0.0), [strength * left], np.ones(len(tokens))]),
    )
    return Survival(mixed.times, mixed.after, float(len(tokens)), float(1.0 - whole.mean()))


def expected_log(pooled: Survival, tokens: FloatArray, whole: BoolArray) -> FloatArray:
    """Return log(1 + length) [n]; of a cut answer what it is expected to be by `pooled`, given that it is longer."""
    logs: FloatArray = np.log1p(tokens)
    if whole.all():
        return logs
    steps = np.log1p(pooled.times)
    falls = -np.diff(pooled.after, prepend=1.0)
    falls[-1] += pooled.after[-1]
    above = np.append((steps * falls)[::-1].cumsum()[::-1], 0.0)
    weight = np.append(falls[::-1].cumsum()[::-1], 0.0)
    first = pooled.times.searchsorted(tokens, "right")
    beyond = above[first] / np.maximum(weight[first], np.finfo(float).tiny)
    return np.where(whole | (weight[first] <= 0), logs, np.maximum(beyond, logs))


def foretold(bins: IntArray, values: FloatArray) -> float:
    """Return R2 of `values` [n] by the mean of their bins, each block of consecutive ones foretold by the others.

    1 is exact, 0 or less no better than the mean of all. Means are shrunk to that of all as the curves are.
    """
    n, n_bins = len(values), int(bins.max()) + 1
    block = np.arange(n) * N_BLOCKS // n
    cell = block * n_bins + bins
    counts = np.bincount(cell, minlength=N_BLOCKS * n_bins).reshape(N_BLOCKS, n_bins)
    sums = np.bincount(cell, values, N_BLOCKS * n_bins).reshape(N_BLOCKS, n_bins)
    others, total = counts.sum(0) - counts, sums.sum(0) - sums
    mean = total.sum(1, keepdims=True) / others.sum(1, keepdims=True)
    by_bin = (total + SHRINK_N * mean) / (others + SHRINK_N)
    spread = float(((values - mean[block, 0]) ** 2).sum())
    missed = float(((values - by_bin[block, bins]) ** 2).sum())
    return 1.0 - missed / spread if spread > 0 else 0.0

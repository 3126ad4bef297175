"""The server's TTFT given how slow it has been lately. Real traces are autocorrelated: a slow period lasts.

A *score* predicts the log of the next TTFT from exponential means of the last ones (`server_ttft`). The past samples
are sorted by the score they had, and for a few representative scores a distribution is estimated from the samples
near it, each moved part of the way along the regression line.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import BoolArray, FloatArray
from .survival import Survival, complete, heavy_tail, kaplan_meier, mixture

N_CONTEXTS = 7  # 5 to 9 gave the same results on the traces
BANDWIDTH = 0.18  # of the rank of the score; narrower overfits 300 samples, wider forgets slow periods
MIN_NEIGHBOURS = 40  # samples under the kernel, at least
EVERYWHERE = 0.05  # weight of a far-away sample: no stall is forgotten because it came in a quiet time
MOVED = 0.5  # how far a sample is moved along the regression line; 0 to 1 differ little
PRIOR_STRENGTH = 8.0  # pseudo-requests; 3 to 16 differ little on the traces


@dataclass(frozen=True, slots=True, eq=False)
class Contexts:
    """Server TTFT distributions `curves` by score; `bounds` [C - 1] separate the scores, `shares` [C] sum to 1."""

    bounds: FloatArray
    shares: FloatArray
    curves: tuple[Survival, ...]


def estimate_contexts(
    times: FloatArray, observed: BoolArray, weights: FloatArray, scores: FloatArray, n_contexts: int = N_CONTEXTS
) -> Contexts:
    """Estimate the distribution of the TTFT for a few typical scores.

    `times` [n] s, `observed` [n] (False = censored), `weights` [n] (decay), `scores` [n] log s, each from before its
    sample. Scores that do not vary give one context.
    """
    n = len(times)
    if n < 2 or float(np.ptp(scores)) == 0.0:
        return Contexts(np.empty(0), np.ones(1), (_with_prior(times, observed, weights),))
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(n)
    ranks[order] = (np.arange(n) + 0.5) / n
    centres = (np.arange(n_contexts) + 0.5) / n_contexts
    typical = np.quantile(scores, centres)
    width = max(BANDWIDTH, MIN_NEIGHBOURS / n)
    curves = []
    for centre, score in zip(centres, typical, strict=True):
        near = weights * (np.exp(-0.5 * ((ranks - centre) / width) ** 2) + EVERYWHERE)
        near *= weights.sum() / near.sum()
        curves.append(_with_prior(times * np.exp(MOVED * (score - scores)), observed, near))
    return Contexts((typical[1:] + typical[:-1]) / 2, np.full(n_contexts, 1 / n_contexts), tuple(curves))


def _with_prior(times: FloatArray, observed: BoolArray, weights: FloatArray) -> Survival:
    own = kaplan_meier(times, observed, weights)
    prior = heavy_tail(own.quantile(0.5))
    return mixture([(own.n, complete(own, prior)), (PRIOR_STRENGTH, prior)])

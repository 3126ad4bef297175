"""How sure an exit may be: the probability that the whole model says the same token, learned from verdicts.

A confidence is made of three numbers of the exit's own distribution (`signals`), by logistic regression, and then by
a monotone table that says what share of tokens with that score was right (isotonic regression, pool adjacent
violators), where each step of the table is drawn to what the regression says there: 1,500 verdicts are few for a table.
Sources: Guo et al., arXiv 1706.04599 (calibration error); Zadrozny and Elkan, KDD 2002 (isotonic).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .head import Floats

Doubles = NDArray[np.float64]
N_BINS = 15  # of a calibration error, as in its source
N_STEPS = 30  # of Newton's method; it needs fewer than ten
LEAST = 100  # tokens, to calibrate from
POOL = 40  # tokens at least stand behind each step of the table,
DRAWN = 40.0  # and as if so many more were as likely right as the regression says
PRIOR = 4.0  # the strength of the coefficients' prior, in tokens
WINDOW = 1500  # verdicts that are remembered in use
EVERY = 50  # verdicts, between two fits in use
_EDGE = 1e-4  # no confidence is nearer to 0 or to 1


def signals(logits: Floats) -> Doubles:
    """Return n x 3: log-odds of the first word, its distance from the second in log-probability, entropy in nats."""
    top = np.partition(logits, -2, axis=1)[:, -2:].astype(np.float64)
    shifted = (logits - logits.max(1, keepdims=True)).astype(np.float32)
    p = np.exp(shifted)
    total = p.sum(1, dtype=np.float64)
    entropy = np.log(total) - np.einsum("ij,ij->i", p, shifted) / total
    first = np.clip(1 / total, 1e-6, 1 - 1e-6)
    margin = np.abs(top[:, 1] - top[:, 0])
    return np.stack([np.log(first / (1 - first)), margin, entropy], axis=1)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Coefficients (4: one each for the signals, and the constant), and the table: scores in order, and shares."""

    coefficients: Doubles
    scores: Doubles
    shares: Doubles

    def confidence(self, found: Doubles) -> Doubles:
        """Return the probability to agree for n x 3 signals."""
        score = _with_one(found) @ self.coefficients
        return np.interp(score, self.scores, self.shares)


def calibrate(found: Doubles, agrees: NDArray[np.bool_]) -> Calibration:
    """Return the calibration that n x 3 signals and their verdicts teach. Raises ValueError for fewer than LEAST."""
    if len(found) < LEAST:
        raise ValueError(f"{len(found)} tokens are too few to calibrate from: it takes {LEAST}")
    rows = _with_one(found)
    coefficients = _logistic(rows, agrees.astype(np.float64), np.zeros(rows.shape[1]))
    return Calibration(coefficients, *_isotonic(rows @ coefficients, agrees))


class VerdictLearner:
    """A calibration in use: each verdict is a label, and the latest `WINDOW` of them decide."""

    def __init__(self, base: Calibration) -> None:
        self.calibration = base
        self._base = base
        self._signals, self._agrees = np.zeros((WINDOW, 3)), np.zeros(WINDOW, np.bool_)
        self.n = 0

    def confidence(self, found: Doubles) -> Doubles:
        """Return the probability to agree for n x 3 signals."""
        return self.calibration.confidence(found)

    def learn(self, found: Doubles, agrees: NDArray[np.bool_]) -> None:
        """Take verdicts on drafts with these signals, n x 3, in order."""
        for signal, agree in zip(found, agrees, strict=True):
            self._signals[self.n % WINDOW], self._agrees[self.n % WINDOW] = signal, agree
            self.n += 1
            if self.n >= 2 * LEAST and self.n % EVERY == 0:
                self._fit()

    def _fit(self) -> None:
        n = min(self.n, WINDOW)
        rows, agrees = _with_one(self._signals[:n]), self._agrees[:n]
        coefficients = _logistic(rows, agrees.astype(np.float64), self._base.coefficients)
        self.calibration = Calibration(coefficients, *_isotonic(rows @ coefficients, agrees))


def calibration_error(confidence: Doubles, agrees: NDArray[np.bool_], n_bins: int = N_BINS) -> float:
    """Return the expected calibration error: |share that agrees - mean confidence|, over bins weighted by tokens."""
    bins = np.minimum((confidence * n_bins).astype(np.int64), n_bins - 1)
    gaps = np.bincount(bins, weights=agrees - confidence, minlength=n_bins)
    return float(np.abs(gaps).sum() / max(1, len(confidence)))


def coverage(confidence: Doubles, theta: float) -> float:
    """Return the share of tokens that may leave at an exit with this threshold."""
    return float(np.mean(confidence >= theta)) if len(confidence) else 0.0


def _with_one(found: Doubles) -> Doubles:
    return np.concatenate([found, np.ones((len(found), 1))], axis=1)


def _logistic(rows: Doubles, labels: Doubles, prior: Doubles) -> Doubles:
    """Return the coefficients that make the labels most probable, drawn to `prior` as if by PRIOR tokens."""
    spread = np.maximum(rows.std(0), 1e-6)
    spread[-1] = 1.0
    weight = PRIOR * np.square(spread)
    w = prior.copy()
    for _ in range(N_STEPS):
        p = 0.5 * (1 + np.tanh(0.5 * (rows @ w)))
        gradient = rows.T @ (p - labels) + weight * (w - prior)
        curve = (rows * np.maximum(p * (1 - p), 1e-6)[:, None]).T @ rows + np.diag(weight)
        step = np.linalg.solve(curve, gradient)
        length = float(np.abs(step * spread).max())
        w -= step * min(1.0, 2.0 / max(length, 1e-12))  # a longer step leaves where the curve holds
        if length < 1e-6:
            break
    return w


def _isotonic(scores: Doubles, agrees: NDArray[np.bool_]) -> tuple[Doubles, Doubles]:
    """Return scores in order and the share that is right at each: never falling, each from POOL tokens or more."""
    order, likely = np.argsort(scores, kind="stable"), 0.5 * (1 + np.tanh(0.5 * scores))
    n_pools = max(1, len(order) // POOL)
    pools: list[tuple[float, float, float]] = []  # sum of labels, sum of scores, tokens
    for part in np.array_split(order, n_pools):
        n = len(part) + DRAWN
        pool = (float(agrees[part].sum() + DRAWN * likely[part].mean()), float(n * scores[part].mean()), n)
        while pools and pools[-1][0] / pools[-1][2] >= pool[0] / pool[2]:
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1], last[2] + pool[2])
        pools.append(pool)
    shares = np.clip([right / n for right, _, n in pools], _EDGE, 1 - _EDGE)
    return np.array([total / n for _, total, n in pools]), np.maximum.accumulate(shares)

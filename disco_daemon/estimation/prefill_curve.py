"""The device's time to first token against the prompt's length, from a measurement: T_d(l) = c + k*l + q*l**2. Pure.

Attention makes prefill grow a little faster than the prompt; a straight line through that has to bend its c below 0.
So both are fitted, and q is kept only when it earns its place: by BIC = n ln(RSS / n) + p ln n (Schwarz, Ann. Statist.
6 (1978) 461), which for n samples asks that a third coefficient lower RSS by more than about ln(n) / n of it.

- Noise grows with the work: a residual's is taken as proportional to l + REF, as in `device_ttft`.
- A few samples are outliers, when something else took the processor. Least absolute residuals give a first curve and
  the robust sigma, Tukey's biweight from there on the estimate (an MM-estimate: Yohai, Ann. Statist. 15 (1987) 642).
- c, k, q >= 0: the least squares within are those of one of the few sets of coefficients that may be 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..arrays import FloatArray, distinct
from .device_ttft import MAD_SIGMA, REF

LEAST_SAMPLES, LEAST_LENGTHS = 6, 3  # of a fit: three coefficients, and something left to judge them by
BIWEIGHT = 4.685  # robust sigmas beyond which a residual counts nothing: 95 % efficient on normal noise (Huber 1981)
ROUNDS = 30  # of reweighting; it settles in about ten
MOST_FASTER = 100.0  # of an interval that reaches down to no time at all
LEAST_SIGMA = 1e-6  # of the mean: noiseless samples have a sigma too
UNITS = np.array([1.0, 1 / REF, 1 / REF**2])  # s, s/token, s/token^2 in units that condition the matrix well
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # of 1 to 10 degrees of freedom

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """T_d(l) = c + k*l + q*l**2 in s, of prompts of l tokens that no cache knows.

    `r2` is the share of the variance of all `n` samples that the curve explains, not weighted, outliers included.
    `n_outliers` of them count less than half. `relative_error` is the median of |predicted / seen - 1| over all.
    """

    c_s: float
    k_s_per_token: float
    q_s_per_token2: float
    r2: float
    relative_error: float
    n: int
    n_outliers: int
    covariance: tuple[tuple[float, float, float], ...]  # of c, k, q
    t: float  # half of a 95 % interval, in standard deviations

    def predict(self, tokens: float) -> float:
        """Return T_d of a prompt of `tokens` tokens, s."""
        return self.c_s + self.k_s_per_token * tokens + self.q_s_per_token2 * tokens**2

    def interval(self, i: int) -> Interval:
        """The 95 % interval of c (0), k (1) or q (2), not below 0."""
        value = (self.c_s, self.k_s_per_token, self.q_s_per_token2)[i]
        half = self.t * math.sqrt(self.covariance[i][i])
        return max(0.0, value - half), value + half

    def speed(self, tokens: float) -> tuple[float, Interval]:
        """Return the speed at which a prompt is read, c aside: l / (T_d(l) - c) in token/s, and its 95 % interval.

        Its upper end is at most MOST_FASTER times the speed.
        """
        each = self.k_s_per_token + self.q_s_per_token2 * tokens
        row = np.array([0.0, 1.0, tokens])
        half = self.t * math.sqrt(float(row @ np.array(self.covariance) @ row))
        return 1 / each, (1 / (each + half), 1 / max(each - half, each / MOST_FASTER))


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """Coefficients in UNITS, one for each column of the design; `weight` in [0, 1] and `sigma` are of its residuals."""

    theta: FloatArray
    residual: FloatArray
    weight: FloatArray
    sigma: float


def fit(tokens: ArrayLike, seconds: ArrayLike) -> Line:
    """The curve through samples of (l, T_d), straight unless bending it pays.

    Raises ValueError for fewer than LEAST_SAMPLES samples or LEAST_LENGTHS lengths, for what is negative or not finite,
    and for times that do not grow with the length.
    """
    x, y = np.asarray(tokens, np.float64), np.asarray(seconds, np.float64)
    _check(x, y)
    spread = x + REF
    design, target = (np.stack([x**0, x, x**2], axis=1) * UNITS) / spread[:, None], y / spread
    bent = _robust(design, target)
    found, columns = bent, 3
    if not _pays(design, target, bent):
        found, columns = _robust(design[:, :2], target), 2
    theta = np.zeros(3)
    theta[:columns] = found.theta * UNITS[:columns]
    if theta[1] <= 0 and theta[2] <= 0:
        raise ValueError("the times do not grow with the prompt's length")
    return _line(x, y, theta, found, _covariance(design[:, :columns], found))


def _check(x: FloatArray, y: FloatArray) -> None:
    if x.ndim != 1 or x.shape != y.shape or len(x) < LEAST_SAMPLES or len(distinct(x)) < LEAST_LENGTHS:
        raise ValueError(f"a fit needs {LEAST_SAMPLES} samples of {LEAST_LENGTHS} lengths, not {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x >= 0).all() and (y > 0).all()):
        raise ValueError("lengths must be at least 0 tokens, times above 0 s, and both finite")


def _line(x: FloatArray, y: FloatArray, theta: FloatArray, found: _Fit, covariance: FloatArray) -> Line:
    predicted = theta[0] + theta[1] * x + theta[2] * x**2
    r2 = 1.0 - float(((y - predicted) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    rows = tuple((float(a), float(b), float(c)) for a, b, c in covariance)
    return Line(
        c_s=float(theta[0]),
        k_s_per_token=float(theta[1]),
        q_s_per_token2=float(theta[2]),
        r2=r2,
        relative_error=float(np.median(np.abs(predicted / y - 1))),
        n=len(x),
        n_outliers=int((found.weight < 0.5).sum()),
        covariance=rows,
        t=t95(len(x) - len(found.theta)),
    )


def _pays(design: FloatArray, target: FloatArray, bent: _Fit) -> bool:
    """Whether q is above 0 and lowers BIC.

    Both curves are judged by the weights of the more general one: by those of the straight line, what bends would be
    its outliers.
    """
    if bent.theta[2] <= 0:
        return False
    root, n = np.sqrt(bent.weight), float(bent.weight.sum())
    straight = _at_least_0(design[:, :2] * root[:, None], target * root)
    residuals = (target - design[:, :2] @ straight, bent.residual)
    floor = n * (LEAST_SIGMA * float(target.mean())) ** 2
    rss = [max(float((bent.weight * r**2).sum()), floor) for r in residuals]
    return n * math.log(rss[0] / rss[1]) > math.log(n)


def _robust(design: FloatArray, target: FloatArray) -> _Fit:
    """An MM-estimate: sigma from the least absolute residuals, then the biweight with that sigma."""
    n, p = design.shape
    least = LEAST_SIGMA * float(target.mean())
    weight: FloatArray = np.ones(n)
    theta, residual = _fit_weighted(design, target, weight)
    for _ in range(ROUNDS):  # weights of 1 / |r| make squares of absolute values
        theta, residual = _fit_weighted(design, target, 1 / np.maximum(np.abs(residual), least))
    # p of them are 0 whatever the noise is. Leaving out all but one gave the smallest errors, one sample in ten being
    # 2 to 8 times too slow.
    sigma = max(MAD_SIGMA * float(np.median(np.sort(np.abs(residual))[p - 1 :])), least)
    for _ in range(ROUNDS):
        weight = np.maximum(0.0, 1 - (residual / (BIWEIGHT * sigma)) ** 2) ** 2
        theta, residual = _fit_weighted(design, target, weight)
    return _Fit(theta, residual, weight, sigma)


def _fit_weighted(design: FloatArray, target: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    root = np.sqrt(weight / weight.max())
    theta = _at_least_0(design * root[:, None], target * root)
    return theta, target - design @ theta


def _at_least_0(design: FloatArray, target: FloatArray) -> FloatArray:
    """The theta >= 0 of least squares: that of its own support, so the best of all supports where none is negative."""
    n_columns = design.shape[1]
    best, best_theta = math.inf, np.zeros(n_columns)
    for support in itertools.product((False, True), repeat=n_columns):
        columns = np.flatnonzero(support)
        theta: FloatArray = np.zeros(n_columns)
        theta[columns] = np.linalg.lstsq(design[:, columns], target, rcond=None)[0]
        rss = float(((target - design @ theta) ** 2).sum())
        if rss < best and (theta >= 0).all():
            best, best_theta = rss, theta
    return best_theta


def _covariance(design: FloatArray, found: _Fit) -> FloatArray:
    """Of c, k, q in s and tokens; 0 for a q that is not there. Asymptotic, of an M-estimate (Huber 1981, eq. 7.6.5)."""
    n, p = design.shape
    u = found.residual / (BIWEIGHT * found.sigma)
    inside = np.abs(u) < 1
    psi = np.where(inside, found.residual / found.sigma * (1 - u**2) ** 2, 0.0)
    slope = max(float(np.where(inside, (1 - u**2) * (1 - 5 * u**2), 0.0).mean()), 1 / n)
    variance = found.sigma**2 * float(psi @ psi) / (n - p) / slope**2
    covariance: FloatArray = np.zeros((3, 3))
    covariance[:p, :p] = variance * np.linalg.inv(design.T @ design) * np.outer(UNITS[:p], UNITS[:p])
    return covariance


def t95(n: int) -> float:
    """Student's t of a 95 % interval at n >= 1 degrees of freedom; above 10 by Abramowitz & Stegun 26.7.5."""
    if n <= len(T95):
        return T95[n - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def mean95(values: Sequence[Any]) -> tuple[float, Interval | None]:
    """The mean, and its 95 % interval by Student's t, not below 0; None of a single value. ValueError of none."""
    if not values:
        raise ValueError("there is no mean of nothing")
    numbers = np.asarray(values, np.float64)
    mean = float(numbers.mean())
    if len(numbers) == 1:
        return mean, None
    half = t95(len(numbers) - 1) * float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    return mean, (max(0.0, mean - half), mean + half)

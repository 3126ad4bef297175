"""The device's time to first token, learned while it serves: T_d = load + c + k*x*(1 + g*n_busy). Pure.

x = l - cached is what has to be prefilled, in tokens. Recursive least squares over [1, x, n_busy*x] with an exponential
window (Ljung, System Identification, ch. 11), with an information matrix instead of a covariance: what is never tried
(answers side by side, prompts of another length) then stays at the prior instead of winding up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ..arrays import FloatArray

Triple = tuple[float, float, float]
Lower = tuple[float, float, float, float, float, float]  # a symmetric or lower triangular 3x3: 00, 10, 11, 20, 21, 22

G_PRIOR = 1.0  # a running answer takes a share of the engine as large as ours
FORGET = 0.99  # a window of about 100 samples
FORGET_YOUNG, YOUNG = 0.1, 20.0  # taken off in the first samples: what came in before the noise was known goes sooner

# Noise grows with the work: a sample's is taken as proportional to (x + REF) * (1 + n_busy), so that long prompts do
# not drown c and short ones not k. REF also is the unit in which c is held, to keep the matrix well conditioned.
REF = 32.0

# Strength of the prior in samples: of an empty prompt for c, of a very long one for k, and for g of one beside a very
# busy engine. A row's entries are below 1, so that about five real samples outweigh these. The floor never fades.
PRIOR = (0.2, 0.3, 0.1)
PRIOR_FLOOR = 0.05

HUBER = 1.345  # robust sigmas up to which a residual counts in full: 95 % efficient on normal noise (Huber 1981)
WINDOW = 21  # residuals that give the robust sigma, as their median absolute deviation
MAD_SIGMA = 1.4826  # sigma / MAD of normal noise
START_SCALE = 0.15  # of k: what is believed of the noise before the first samples
LEAST_SCALE = 0.01  # of k: below this, two noiseless samples would make the third one an outlier

# If all but one of MOVED samples are off on one side by MOVED_SIGMAS, they are no outliers but a new speed (battery,
# heat, a new driver): all older samples together then count a twentieth. Measured: one outlier in ten does so once in
# 3e5.
MOVED, MOVED_SIGMAS, MOVED_KEEP = 7, 2.0, 0.05
MOST_MOVED = 20.0  # the largest change of speed believed at once

LEAST_K = 1e-3  # of the prior: k stays positive whatever the samples say
MOST = 1e9  # a count beyond this is an error of the caller


class _Sample(NamedTuple):
    """One first token, all in units of its own noise; `residual` as judged when it came."""

    row: Triple
    target: float
    residual: float


class DeviceTtft:
    """Learns k (s/token), c (s) and g (the growth of k with each other answer that is running) from the TTFTs seen.

    `k_s_per_token` is the prior, 1 / measured prefill speed; `c_s` the prior of the constant part. A sample whose
    prefill was cancelled before its first token is censored and must never be added: the time until the cancellation
    is shorter than its TTFT and would pull k to the fast side by as much. (Leaving it out does so too, but by no more
    than the noise around the line, a few percent.) Raises ValueError unless k > 0 and c >= 0, both finite.
    """

    __slots__ = ("_factor", "_floor", "_info", "_prior", "_recent", "_scale", "_spread", "_theta", "_vector", "n")

    def __init__(self, k_s_per_token: float, c_s: float = 0.02) -> None:
        if not (0 < k_s_per_token < math.inf and 0 <= c_s < math.inf):
            raise ValueError(f"the prior needs k > 0 and c >= 0, not {k_s_per_token!r} and {c_s!r}")
        self.n = 0  # samples seen
        self._prior = (k_s_per_token, c_s)
        self._info, self._vector = _prior_information(k_s_per_token, c_s)
        self._floor = [PRIOR_FLOOR * a for a in self._info], [PRIOR_FLOOR * a for a in self._vector]
        self._recent: deque[_Sample] = deque(maxlen=WINDOW)
        self._scale = START_SCALE * k_s_per_token  # robust sigma of a residual, s for each token of `_spread`
        self._spread = REF  # running mean of (x + REF) * (1 + n_busy)
        self._solve()

    @property
    def k(self) -> float:
        """Prefill time of one uncached token on an idle engine, s; > 0."""
        return max(self._theta[1], LEAST_K * self._prior[0])

    @property
    def prefill_tps(self) -> float:
        """Prefill speed on an idle engine, token/s."""
        return 1 / self.k

    @property
    def c(self) -> float:
        """The part that does not depend on the prompt, s; >= 0."""
        return max(self._theta[0], 0.0) * REF

    @property
    def g(self) -> float:
        """Growth of k for each other answer that is running, as a share of k; >= 0."""
        return max(self._theta[2], 0.0) / self.k

    @property
    def prior_k(self) -> float:
        """The prior of k, before the first sample, s."""
        return self._prior[0]

    def believing(self, k_s_per_token: float) -> DeviceTtft:
        """The same samples judged from another prior of k; as long as they are few, and all of them are at hand."""
        if self.n != len(self._recent):
            return self
        new = DeviceTtft(k_s_per_token, self._prior[1])
        for row, target, _ in self._recent:
            spread = REF / row[0]
            tokens = row[1] * spread
            new.add(tokens, target * spread, row[2] * spread / tokens if tokens else 0.0)
        return new

    def add(self, tokens: float, ttft_s: float, n_busy: float = 0) -> None:
        """Learn from one first token, `ttft_s` after the engine was asked; the caller has taken off any load wait.

        `tokens` are the uncached ones of the prompt, `n_busy` the other answers running meanwhile. Never a cancelled
        prefill. Raises ValueError, and then has learned nothing, on what is negative or not finite.
        """
        if not (0 <= tokens <= MOST and 0 <= ttft_s < math.inf and 0 <= n_busy <= MOST):
            raise ValueError(f"no TTFT sample: {tokens!r} tokens, {ttft_s!r} s, {n_busy!r} busy")
        spread = (tokens + REF) * (1.0 + n_busy)
        row = (REF / spread, tokens / spread, n_busy * tokens / spread)
        target = ttft_s / spread
        # A young estimate is itself uncertain: its error is not held against the sample.
        residual = (target - _dot(self._theta, row)) / math.sqrt(1.0 + _leverage(self._factor, row))
        self._recent.append(_Sample(row, target, residual))
        if self._has_moved():
            self._restart()
        else:
            self._forget(FORGET - FORGET_YOUNG * math.exp(-self.n / YOUNG))
            self._learn(row, target, self._weight(residual))
        self._solve()
        self._measure_noise()
        self._spread += (spread - self._spread) / min(self.n + 1, WINDOW)
        self.n += 1

    @overload
    def predict(self, tokens: float, n_busy: float = 0, load_s: float = 0.0) -> float: ...
    @overload
    def predict(self, tokens: NDArray[Any], n_busy: float | NDArray[Any] = 0, load_s: float = 0.0) -> FloatArray: ...
    def predict(self, tokens: Any, n_busy: Any = 0, load_s: float = 0.0) -> Any:
        """T_d in s for `tokens` uncached ones beside `n_busy` other answers, of the (broadcast) shape of the two.

        `load_s` is the time until the model is loaded. Raises ValueError on what is negative or not a number.
        """
        if not (_not_negative(tokens) and _not_negative(n_busy) and load_s >= 0):
            raise ValueError("tokens, busy answers and load time must be >= 0")
        return load_s + self.c + tokens * (self.k + max(self._theta[2], 0.0) * n_busy)

    def to_json(self) -> dict[str, Any]:
        """The whole state as plain JSON; `from_json` gives back an equal estimator."""
        return {
            "prior": list(self._prior),
            "n": self.n,
            "info": list(self._info),
            "vector": list(self._vector),
            "recent": [[*sample.row, sample.target, sample.residual] for sample in self._recent],
            "scale": self._scale,
            "spread": self._spread,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceTtft:
        """The estimator that `to_json` wrote. Raises ValueError where that cannot be one."""
        try:
            new = cls(*_floats(data["prior"], 2))
            new.n = int(data["n"])
            new._info, new._vector = _floats(data["info"], 6), _floats(data["vector"], 3)
            for sample in data["recent"]:
                x, y, z, target, residual = _floats(sample, 5)
                new._recent.append(_Sample((x, y, z), target, residual))
            new._scale, new._spread = _floats([data["scale"], data["spread"]], 2)
            new._solve()
        except (KeyError, TypeError, ArithmeticError) as e:
            raise ValueError(f"not a stored device TTFT estimate: {e!r}") from e
        if new.n < 0 or new._scale <= 0 or new._spread <= 0:
            raise ValueError("a stored device TTFT estimate has a count or a scale that is not positive")
        return new

    # --- the recursion ----------------------------------------------------------------------------------------

    def _forget(self, keep: float) -> None:
        """Weaken what is known, but for the floor of the prior."""
        info, vector = self._floor
        self._info = [keep * a + (1.0 - keep) * b for a, b in zip(self._info, info, strict=True)]
        self._vector = [keep * a + (1.0 - keep) * b for a, b in zip(self._vector, vector, strict=True)]

    def _learn(self, row: Triple, target: float, weight: float) -> None:
        x, y, z = row
        wx, wy, wz = weight * x, weight * y, weight * z
        a, b, d, e, f, i = self._info
        self._info = [a + wx * x, b + wy * x, d + wy * y, e + wz * x, f + wz * y, i + wz * z]
        u, v, w = self._vector
        self._vector = [u + wx * target, v + wy * target, w + wz * target]

    def _solve(self) -> None:
        self._factor = _cholesky(self._info)
        self._theta = _solve(self._factor, self._vector)

    # --- outliers and changes of speed ------------------------------------------------------------------------

    def _weight(self, residual: float) -> float:
        """Return the weight of a sample, in [0, 1]: Huber's weight, so that its pull on the estimate is bounded."""
        limit = HUBER * self._scale
        return 1.0 if abs(residual) <= limit else limit / abs(residual)

    def _measure_noise(self) -> None:
        """Set the robust sigma from the latest residuals, their common shift taken off."""
        if len(self._recent) < MOVED:
            return
        middle = len(self._recent) // 2
        residuals = [sample.residual for sample in self._recent]
        median = sorted(residuals)[middle]
        mad = sorted([abs(residual - median) for residual in residuals])[middle]
        self._scale = max(MAD_SIGMA * mad, LEAST_SCALE * self.k)

    def _has_moved(self) -> bool:
        """Whether the latest samples say with one voice that the device has another speed now."""
        if len(self._recent) < MOVED:
            return False
        latest = sorted([self._recent[-1 - i].residual for i in range(MOVED)])
        limit = MOVED_SIGMAS * self._scale
        return latest[1] > limit or latest[-2] < -limit

    def _restart(self) -> None:
        """Bring the estimate to the new speed, all but forget what was before, and learn the latest samples again."""
        latest = list(self._recent)[-MOVED:]
        self._recent.clear()
        ratios = [target / max(_dot(self._theta, row), LEAST_SCALE * self.k) for row, target, _ in latest]
        speed = min(max(sorted(ratios)[MOVED // 2], 1.0 / MOST_MOVED), MOST_MOVED)
        self._vector = [speed * a for a in self._vector]
        self._forget(MOVED_KEEP)
        theta = [speed * a for a in self._theta]
        for row, target, _ in latest:
            self._learn(row, target, self._weight(target - _dot(theta, row)))


def _not_negative(x: Any) -> bool:
    return bool((x >= 0).all()) if isinstance(x, np.ndarray) else bool(x >= 0)


def _floats(values: Sequence[Any], n: int) -> list[float]:
    """`n` finite numbers of a JSON document. Raises ValueError, or TypeError on what is no number."""
    numbers = [float(value) for value in values]
    if len(numbers) != n or not all(map(math.isfinite, numbers)):
        raise ValueError(f"expected {n} finite numbers, not {values!r}")
    return numbers


def _prior_information(k: float, c: float) -> tuple[list[float], list[float]]:
    """Information matrix and vector of the prior; that of g binds k*g to whatever k turns out to be."""
    on_c, on_k, on_g = PRIOR
    matrix = [on_c, 0.0, on_k + on_g * G_PRIOR**2, 0.0, -on_g * G_PRIOR, on_g]
    return matrix, [on_c * c / REF, on_k * k, 0.0]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _cholesky(matrix: Sequence[float]) -> Lower:
    """The lower factor L of a positive definite 3x3 = L L'. Raises ValueError or ZeroDivisionError where it is not."""
    a00, a10, a11, a20, a21, a22 = matrix
    l00 = math.sqrt(a00)
    l10, l20 = a10 / l00, a20 / l00
    l11 = math.sqrt(a11 - l10 * l10)
    l21 = (a21 - l20 * l10) / l11
    return l00, l10, l11, l20, l21, math.sqrt(a22 - l20 * l20 - l21 * l21)


def _forward(factor: Lower, b: Sequence[float]) -> Triple:
    """Solve L y = b."""
    l00, l10, l11, l20, l21, l22 = factor
    y0 = b[0] / l00
    y1 = (b[1] - l10 * y0) / l11
    return y0, y1, (b[2] - l20 * y0 - l21 * y1) / l22


def _solve(factor: Lower, b: Sequence[float]) -> Triple:
    """Solve L L' x = b."""
    l00, l10, l11, l20, l21, l22 = factor
    y0, y1, y2 = _forward(factor, b)
    x2 = y2 / l22
    x1 = (y1 - l21 * x2) / l11
    return (y0 - l10 * x1 - l20 * x2) / l00, x1, x2


def _leverage(factor: Lower, row: Triple) -> float:
    """Variance of the estimate at `row`, in units of one sample's: row' A^-1 row."""
    y = _forward(factor, row)
    return _dot(y, y)

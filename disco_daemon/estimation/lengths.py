"""The lengths of prompts and answers, learned while serving; in tokens. Pure.

Prompts are all seen in full and weigh the budget: a decayed histogram. Answers are cut by `max_tokens` and by readers
who leave: the product-limit estimate of survival.py, which gives E[remaining | generated so far], for all prompts
together and, where that foretells more, by the prompt's length (given_prompt.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays import FloatArray
from ..types import GENERATED, ExpectedRest
from .given_prompt import WINDOW, GivenPrompt
from .survival import Survival, heavy_tail, kaplan_meier

EXACT = 256  # up to here every length has its own bin; above, PER_OCTAVE bins double the length
PER_OCTAVE = 8  # bins for each doubling of the length, beyond EXACT
LONGEST = 2**20  # longer prompts count as this
BINS = EXACT + 2 + PER_OCTAVE * round(math.log2(LONGEST / EXACT))

HALF_LIFE = 300  # requests until one counts half
GROWTH = 2.0 ** (1.0 / HALF_LIFE)
RESCALE_AT = 1e100
FORGOTTEN = 1e-12  # a share below this is left out

# Chat prompts: half below 60 tokens, with a long tail. Points of a lognormal, evenly spaced in the logarithm.
PRIOR_MEDIAN, PRIOR_SIGMA, PRIOR_POINTS, PRIOR_REACH = 60.0, 1.2, 24, 2.6
PROMPT_PRIOR_N = 5.0  # requests the prior counts for; it fades as they do

ANSWER_WINDOW = 200  # answers, as many as of the server's first tokens: docs/explain/design.md#what-is-learned
ANSWER_MEDIAN, ANSWER_SHAPE = 150.0, 1.5
ANSWER_PRIOR_N = 3.0  # requests that the prior of answers' lengths counts for
_ANSWER_PRIOR = heavy_tail(ANSWER_MEDIAN, ANSWER_SHAPE)
KEPT_SHARE, MOST_KEPT = 1 / 50, 20  # `about` is out of date by so many of the answers that are known, 20 at most

DENSE = 16  # `of` counts in an array up to this many times longer than the data (or 4096), else sorts


@dataclass(frozen=True, slots=True, eq=False)
class LengthDistribution:
    """Lengths `values` [J] > 0, strictly ascending, tokens, and their probabilities `shares` [J] > 0, of sum 1.

    Raises ValueError on anything else.
    """

    values: FloatArray
    shares: FloatArray

    def __post_init__(self) -> None:
        values, shares = self.values, self.shares
        if values.ndim != 1 or values.shape != shares.shape or not len(values):
            msg = f"lengths and shares must be vectors of the same length >= 1, not {values.shape} and {shares.shape}"
            raise ValueError(msg)
        if not (values[0] > 0 and values[-1] < np.inf and (values[1:] > values[:-1]).all()):
            raise ValueError("lengths must ascend from > 0 and be finite")
        if not (shares.min() > 0 and abs(shares.sum() - 1.0) < 1e-9):
            raise ValueError("shares must be positive and sum to 1")

    @classmethod
    def of(cls, lengths: ArrayLike) -> LengthDistribution:
        """The exact distribution of `lengths` [n], whole numbers >= 1. Raises ValueError on anything else."""
        data = np.asarray(lengths)
        if data.ndim != 1 or not data.size or data.dtype.kind not in "iu":
            raise ValueError("lengths must be a vector of at least one whole number")
        if data.max() > max(DENSE * data.size, 4096):
            values, counts = np.unique(data, return_counts=True)
        else:
            counts = np.bincount(data)  # raises ValueError on negative lengths
            values = (counts > 0).nonzero()[0]  # several times faster on booleans
            counts = counts[values]
        return cls(values.astype(np.float64), counts / data.size)

    @property
    def mean(self) -> float:
        """E[l], tokens."""
        return float(self.values @ self.shares)

    @property
    def token_shares(self) -> FloatArray:
        """Share [J] of all tokens that lies in prompts of each length; sums to 1."""
        tokens = self.values * self.shares
        share: FloatArray = tokens / tokens.sum()
        return share

    def in_buckets(self, j_max: int) -> LengthDistribution:
        """Neighbours merged into at most `j_max` buckets of about equal probability, each at its mean length.

        The mean over all stays the same. A length more probable than 1 / `j_max` makes its bucket heavier. Raises
        ValueError on `j_max` < 1.
        """
        first = self._firsts(j_max)
        if len(first) == len(self.values):
            return self
        shares = np.add.reduceat(self.shares, first)
        return LengthDistribution(np.add.reduceat(self.values * self.shares, first) / shares, shares)

    def bucket_edges(self, j_max: int) -> FloatArray:
        """Return where the buckets of `in_buckets` meet: halfway from the last of one to the first of the next.

        One fewer than there are buckets. Raises ValueError on `j_max` < 1.
        """
        first = self._firsts(j_max)[1:]
        edges: FloatArray = (self.values[first - 1] + self.values[first]) / 2
        return edges

    def _firsts(self, j_max: int) -> NDArray[np.intp]:
        """The number of the first length of each bucket."""
        if j_max < 1:
            raise ValueError(f"at least one bucket is needed, not {j_max}")
        if len(self.values) <= j_max:
            return np.arange(len(self.values))
        # The middle of its share says where a length belongs.
        bucket = np.floor((self.shares.cumsum() - self.shares / 2) * j_max)
        return np.flatnonzero(np.diff(np.minimum(bucket, j_max - 1), prepend=-1))


class PromptLengths:
    """The distribution of the prompt lengths lately seen, with a half-life of HALF_LIFE requests.

    A bin's value is the mean of its members. Until requests have come in it is a weak prior.
    """

    __slots__ = ("_counts", "_sums", "_weight", "n")

    def __init__(self) -> None:
        self.n = 0  # prompts seen
        self._weight = 1.0  # of the latest one: new ones grow instead of all old ones shrinking
        self._counts, self._sums = [0.0] * BINS, [0.0] * BINS
        for value, share in _prompt_prior():
            self._put(value, PROMPT_PRIOR_N * share)

    def add(self, length: int) -> None:
        """Count a prompt of `length` tokens. Raises ValueError unless it is at least 1."""
        if not 1 <= length < math.inf:
            raise ValueError(f"no prompt has {length!r} tokens")
        self._weight *= GROWTH
        if self._weight > RESCALE_AT:
            self._rescale()
        self._put(min(int(length), LONGEST), self._weight)
        self.n += 1

    def distribution(self) -> LengthDistribution:
        """The distribution now; some hundred lengths at most."""
        counts, sums = np.array(self._counts), np.array(self._sums)
        used = counts > FORGOTTEN * counts.sum()
        counts = counts[used]
        return LengthDistribution(sums[used] / counts, counts / counts.sum())

    def to_json(self) -> dict[str, Any]:
        """The whole state as plain JSON; `from_json` gives back an equal one."""
        bins = [[i, c, s] for i, (c, s) in enumerate(zip(self._counts, self._sums, strict=True)) if c > 0]
        return {"n": self.n, "weight": self._weight, "bins": bins}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PromptLengths:
        """What `to_json` wrote. Raises ValueError where that cannot be it."""
        new = cls()
        new._counts, new._sums = [0.0] * BINS, [0.0] * BINS
        try:
            new.n, new._weight = int(data["n"]), float(data["weight"])
            for index, count, total in data["bins"]:
                new._counts[index], new._sums[index] = float(count), float(total)
                valid = 0 < count < math.inf and _bin(round(total / count)) == index
                if not valid:
                    raise ValueError(f"bin {index!r} cannot hold {count!r} prompts of {total!r} tokens together")
        except (KeyError, TypeError, IndexError, ArithmeticError) as e:
            raise ValueError(f"not stored prompt lengths: {e!r}") from e
        if new.n < 0 or not 0 < new._weight < math.inf or not any(new._counts):
            raise ValueError("stored prompt lengths are empty or have a count or weight that is not positive")
        return new

    def _put(self, length: int, weight: float) -> None:
        index = _bin(length)
        self._counts[index] += weight
        self._sums[index] += weight * length

    def _rescale(self) -> None:
        self._counts = [count / self._weight for count in self._counts]
        self._sums = [total / self._weight for total in self._sums]
        self._weight = 1.0


class OutputLengths:
    """The distribution of answer lengths, from the last ANSWER_WINDOW answers, whole and cut ones, and a prior.

    By the length of the prompt it is from the last WINDOW of them: a bin needs its own.

    The prior's ANSWER_PRIOR_N pseudo-answers are pooled with the samples (Susarla and Van Ryzin, JASA 71, 1976), not
    mixed in afterwards: where every answer is cut at the same `max_tokens` they alone say how it would have gone on,
    which, the prior's tail being heavy, errs to the long side.
    """

    __slots__ = ("_curve", "_given", "_kept", "_n_since_kept", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[int, bool, int]] = deque(maxlen=WINDOW)
        self._curve: Survival | None = None
        self._given: GivenPrompt | None = None
        self._kept: GivenPrompt | None = None  # that of `about`, and how many answers it does not know
        self._n_since_kept = 0

    def add(self, tokens: int, censored: bool, prompt: int = 0) -> None:
        """Count an answer of `tokens`; `censored` where it was cut (max_tokens, disconnect, failure) and would go on.

        `prompt` is the length of its prompt, tokens; 0 where it is not known. An answer cut before its first token
        says nothing and is left out. Raises ValueError on a count that is negative or not finite.
        """
        if not (0 <= tokens < math.inf and 0 <= prompt < math.inf):
            raise ValueError(f"no answer has {tokens!r} tokens to a prompt of {prompt!r}")
        if censored and tokens == 0:
            return
        self._samples.append((int(tokens), bool(censored), int(prompt)))
        self._curve = self._given = None
        self._n_since_kept += 1

    def curve(self, prompt: int = 0) -> Survival:
        """P(answer longer than x tokens) to a prompt of `prompt` tokens, of all answers where that is 0.

        Its `n` and `censored_share` are those of the samples alone.
        """
        if self._curve is None:
            self._curve = self._fit()
        return self.given.curve(prompt) if prompt > 0 else self._curve

    @property
    def given(self) -> GivenPrompt:
        """The answers by the length of their prompts."""
        if self._given is None:
            rows = np.fromiter(chain.from_iterable(self._samples), np.int64, 3 * len(self._samples)).reshape(-1, 3)
            tokens, cut, prompts = rows[rows[:, 2] > 0].T
            self._given = GivenPrompt(self.curve(), prompts, tokens.astype(np.float64), cut == 0)
        return self._given

    def expected_remaining(self, generated: int, prompt: int = 0) -> float:
        """E[tokens still to come | `generated` so far and not ended]; 0 beyond the longest answer known.

        The prior knows of some up to 25 medians. Raises ValueError on a negative count.
        """
        if not generated >= 0:
            raise ValueError(f"no answer has {generated!r} tokens so far")
        return float(self.curve(prompt).expected_remaining(float(generated)))

    def about(self, prompt: int) -> float:
        """E[tokens] of an answer to a prompt of `prompt` > 0 tokens, though perhaps not by the very latest answers.

        For what is itself an estimate: exact, each answer would cost a third of a millisecond of fitting.
        """
        out_of_date = self._n_since_kept > min(len(self._samples) * KEPT_SHARE, MOST_KEPT)
        if self._kept is None or self._given is not None or out_of_date:
            self._kept, self._n_since_kept = self.given, 0
        return self._kept.curve(prompt).expected_remaining(0.0)

    def rest(self, prompt: int) -> ExpectedRest:
        """E[tokens still to come] at each of GENERATED; empty where the prompt's length says nothing about it."""
        if prompt <= 0 or not self.given.is_open:
            return ()
        curve, at = self.curve(prompt), np.array(GENERATED, np.float64)
        left, last = curve.at(at), float(curve.times[-1])
        more = curve.mean_below(last) - curve.mean_below(np.minimum(at, last))
        known = (left > 0) & (at < last)
        rests: list[float] = np.divide(more, left, out=np.zeros(len(at)), where=known).tolist()
        return tuple(rests)

    def to_json(self) -> dict[str, Any]:
        """The whole state as plain JSON; `from_json` gives back an equal one."""
        return {"samples": [list(sample) for sample in self._samples]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OutputLengths:
        """What `to_json` wrote, or an earlier one that did not keep prompts. Raises ValueError where it cannot be."""
        new = cls()
        try:
            for tokens, censored, *prompt in data["samples"]:
                new.add(tokens, censored, *prompt)
        except (KeyError, TypeError) as e:
            raise ValueError(f"not stored answer lengths: {e!r}") from e
        return new

    def _fit(self) -> Survival:
        prior = _ANSWER_PRIOR
        n, n_prior = min(len(self._samples), ANSWER_WINDOW), len(prior.times)
        if not n:
            return prior
        tokens, cut, _ = np.array(list(self._samples)[-n:], np.float64).T
        pooled = kaplan_meier(
            np.concatenate([prior.times, tokens]),
            np.concatenate([np.ones(n_prior, np.bool_), cut == 0]),
            np.concatenate([np.full(n_prior, ANSWER_PRIOR_N / n_prior), np.ones(n)]),
        )
        return Survival(pooled.times, pooled.after, float(n), float(cut.mean()))


def _bin(length: int) -> int:
    """The bin of a length: itself up to EXACT, then the eighth of an octave above."""
    return length if length <= EXACT else EXACT + 1 + int(PER_OCTAVE * math.log2(length / EXACT))


def _prompt_prior() -> list[tuple[int, float]]:
    """Lengths and shares of the prior."""
    z = np.linspace(-PRIOR_REACH, PRIOR_REACH, PRIOR_POINTS)
    shares = np.exp(-z * z / 2)
    lengths = np.rint(PRIOR_MEDIAN * np.exp(PRIOR_SIGMA * z)).astype(int)
    return list(zip(lengths.tolist(), (shares / shares.sum()).tolist(), strict=True))

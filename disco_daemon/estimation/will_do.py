"""The chance that an answer by the device will do, learned from what readers did next. Pure.

A logistic curve over the length of the prompt and the kind of the request, fitted with a prior that nothing matters. It
says nothing until there is enough evidence, of answers that did and of some that did not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..arrays import FloatArray

KINDS = ("tools", "schema", "code", "thinking", "numbers")  # what is told apart, beside the length
MOST_EXAMPLES = 2000  # the latest answers; people and models change
LEAST_EXAMPLES = 60  # answers; of a share of 1 in 5 that is known to within 10 points
LEAST_EACH = 10  # that did, and that did not: with fewer the curve is its prior
PRIOR = 1.0  # of each slope, per unit: as if one answer had said that it is 0
STEPS = 12  # Newton's, which settle after five or six
USUAL_TOKENS = 100.0  # a prompt of this length has 0 as its feature
LEAST_READ_S = 10.0  # of reading, some 40 words: who stops an answer later may have read enough of it


class Row(Protocol):
    """A row of the history, by the names of its columns."""

    def __getitem__(self, name: str, /) -> Any:
        """Return what a column has."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceAnswer:
    """One answer by the device alone, and whether it did for its reader."""

    tokens: int
    kinds: frozenset[str]
    did: bool


def answer_of(row: Row) -> DeviceAnswer | None:
    """Return what a row of the history teaches, of those that do; None where that does not show.

    A reader who asked for the same again was not content, nor one who stopped the answer at once. Nothing shows where
    the question was edited, or the answer was stopped by somebody who may have read enough.
    """
    did = row["followed"] is None and row["stopped"] is None
    if did and row["finish_reason"] == "cancelled":
        if row["duration_s"] - (row["ttft_s"] or 0.0) >= LEAST_READ_S:
            return None
        did = False
    if row["followed"] == "edited":
        return None
    return DeviceAnswer(max(1, row["prompt_tokens"]), frozenset(filter(None, row["kind"].split(","))), did)


class WillDo:
    """What these answers teach: `chance` of another one. `n` are the answers, `n_failed` those that would not do."""

    def __init__(self, answers: Iterable[DeviceAnswer] = ()) -> None:
        known = list(answers)[:MOST_EXAMPLES]
        self.n, self.n_failed = len(known), sum(not one.did for one in known)
        enough = self.n >= LEAST_EXAMPLES and min(self.n_failed, self.n - self.n_failed) >= LEAST_EACH
        self._weights = (
            fitted([features(one.tokens, one.kinds) for one in known], [one.did for one in known]) if enough else None
        )

    def chance(self, tokens: int, kinds: Collection[str]) -> float | None:
        """Return the chance that an answer of the device will do; None while too little is known."""
        if self._weights is None:
            return None
        return 1 / (1 + math.exp(-float(self._weights @ np.array(features(tokens, kinds)))))

    def to_json(self, tokens: int, kinds: Collection[str]) -> dict[str, Any]:
        """Return what it thinks of such a request, and what that rests on."""
        return {"chance": self.chance(tokens, kinds), "answers": self.n, "failed": self.n_failed}


def features(tokens: int, kinds: Collection[str]) -> list[float]:
    """Return what a question is told by, as numbers of about the same size; the first one is 1."""
    return [1.0, math.log(max(1, tokens) / USUAL_TOKENS), *(float(kind in kinds) for kind in KINDS)]


def fitted(known: Sequence[Sequence[float]], did: Sequence[bool]) -> FloatArray:
    """Return the weights that make the answers likeliest, under the prior on all but the first, by Newton's steps.

    `known` has the features of each answer; of `did` some have to be true, and some false.
    """
    x, y = np.array(known), np.array(did, dtype=np.float64)
    prior = np.diag([0.0] + [PRIOR] * (x.shape[1] - 1))
    weights = np.zeros(x.shape[1])
    weights[0] = math.log(y.mean() / (1 - y.mean()))
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        slope = x.T @ (y - p) - prior @ weights
        curve = (x * (p * (1 - p))[:, None]).T @ x + prior + 1e-9 * np.eye(x.shape[1])
        weights = weights + np.linalg.solve(curve, slope)
    return weights

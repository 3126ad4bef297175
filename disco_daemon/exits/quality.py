"""What an exit is worth, from its tokens beside the whole model's: figures that `disco exits show` tells."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_WORD = re.compile("[a-z0-9]+")
REPEAT = 16  # tokens: an answer that says so many again goes in circles, and is counted up to there
LONGEST_DRAFT = 8  # tokens
DRAFT_ON = 0.45  # drafts go on while all of them are right with this probability


def length_until_repeat(tokens: Sequence[object], n: int = REPEAT) -> int:
    """Return how many tokens of an answer come before its first run of `n` that was there before; all without one."""
    seen: set[tuple[object, ...]] = set()
    for at in range(len(tokens) - n + 1):
        run = tuple(tokens[at : at + n])
        if run in seen:
            return at
        seen.add(run)
    return len(tokens)


def tokens_per_round_trip(agrees: NDArray[np.bool_], confidence: NDArray[np.float64], answers: Ints) -> float:
    """Return how many tokens of answers one round trip gives, drafted by the exit and judged by the whole model.

    The three have an entry for each token; `answers` says which answer it is of. Each round trip drafts while the
    product of confidences is at least DRAFT_ON, and gives the drafts that are right and one token more.
    """
    n_trips = 0
    for own in np.split(np.arange(len(agrees)), np.flatnonzero(np.diff(answers)) + 1):
        at = 0
        while at < len(own):
            run = own[at : at + LONGEST_DRAFT]
            n_drafted = int(np.sum(np.cumprod(confidence[run]) >= DRAFT_ON))
            n_right = int(np.sum(np.cumprod(agrees[run[:n_drafted]])))
            at += n_right + 1
            n_trips += 1
    return len(agrees) / max(1, n_trips)


def rouge_l(found: str, wanted: str) -> float:
    """Return ROUGE-L of two texts, 0 to 1: F1 of the longest common subsequence of words.

    Words are runs of Latin letters and digits in lower case, as in the package rouge-score. Source: Lin, W04-1013.
    """
    ours, theirs = (_WORD.findall(text.lower()) for text in (found, wanted))
    if not ours or not theirs:
        return float(ours == theirs)
    lengths = [0] * (len(theirs) + 1)
    for word in ours:
        before = 0
        for i, other in enumerate(theirs, start=1):
            here = lengths[i]
            lengths[i] = before + 1 if word == other else max(here, lengths[i - 1])
            before = here
    return 2 * lengths[-1] / (len(ours) + len(theirs))

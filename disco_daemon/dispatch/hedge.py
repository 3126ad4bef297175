"""A second request to the same server, where the first is silent for longer than usual: after how long, and if at all.

Some servers stall now and then, and their next answer comes as soon as ever. So a request that is slower than all but a
share of them is sent again: the first token wins (`endpoints.hedge`). The waits of the device are fitted to the sooner
of the two, in the same programme as always (`optimal`). Dean and Barroso, "The tail at scale", CACM 56 (2013), call it
a hedged request. Pure.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..estimation.survival import Survival, asked_twice
from ..estimation.ttft_context import Contexts
from ..types import Side
from .optimal import Optimal
from .policy import Policy, PolicyInput
from .table import Table

SHARE = 0.08  # of the prompt tokens, by default: what it gains on recorded traces is in docs/lab/evaluation.md
LEAST_GAIN = 0.01  # of the mean TTFT: what gains less is not worth a server's double work
LEAST_SAMPLES = 25.0  # of the server: by fewer, two answers or less are as slow as the slowest SHARE
MEMORY = 200  # requests, as many as the estimators look at: a quiet year saves up no year of second requests


class HedgeAllowance:
    """The prompt tokens that may be sent a second time: never more than `share` of all that were offered.

    What is left is forgotten over MEMORY requests, so that a server that begins to stall is not asked twice by
    everybody at once. That leaves the bound on the sum as it is: the balance b' = d b + share * l - h stays >= 0, and
    so does the sum of all share * l - h, which is b and 1 - d of each b before it.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.n_offered = 0  # tokens of all prompts
        self.n_sent = 0  # tokens of those that were sent a second time
        self.n_hedges = 0  # requests that were
        self._left = 0.0  # tokens

    def offer(self, length: int) -> None:
        """Count a prompt of `length` tokens that is to be answered."""
        self.n_offered += length
        self._left = self._left * (1 - 1 / MEMORY) + self.share * length

    def allows(self, length: int) -> bool:
        """Whether a prompt of `length` tokens may be sent a second time now."""
        return self.share > 0 and self._left >= length

    def take(self, length: int) -> None:
        """Count a second request with a prompt of `length` tokens. Raises ValueError where it is not allowed."""
        if not self.allows(length):
            msg = f"{length} tokens are more than may be sent a second time"
            raise ValueError(msg)
        self._left -= length
        self.n_sent += length
        self.n_hedges += 1

    @property
    def used(self) -> float:
        """The share of the prompt tokens that was sent a second time; 0 before the first prompt."""
        return self.n_sent / self.n_offered if self.n_offered else 0.0


def silence_s(server: Survival, share: float) -> float:
    """Return how long a server is silent before it is asked again, s: as long as in `share` of its answers.

    Infinite for a share of 0.
    """
    return float(server.quantile(1 - share)) if share > 0 else math.inf


def hedged(inputs: PolicyInput, after_s: float) -> PolicyInput:
    """Return the input for a server that is asked again after `after_s`, s."""
    contexts = inputs.contexts
    if contexts is not None:
        contexts = replace(contexts, curves=tuple(asked_twice(curve, after_s) for curve in contexts.curves))
    return replace(inputs, server=asked_twice(inputs.server, after_s), contexts=contexts)


def fit(policy: Policy, inputs: PolicyInput, share: float) -> Table:
    """Fit `policy`, with a second request to the server where that is expected to gain; the table says after how long.

    Only where the device is scarce: there the server's input is the cheap part. And only for the policy of our own,
    which plans with the whole distribution, once there are samples enough.
    """
    ours = isinstance(policy, Optimal) and inputs.constrained is Side.DEVICE
    if share <= 0 or not ours or inputs.server.n < LEAST_SAMPLES:
        return policy.fit(inputs)
    after_s = silence_s(inputs.server, share)
    twice = hedged(inputs, after_s)
    table = policy.fit(twice)
    if expected_gain(inputs, twice, table) >= LEAST_GAIN:
        return replace(table, hedge_s=after_s)
    return policy.fit(inputs)


def expected_gain(once: PolicyInput, twice: PolicyInput, table: Table) -> float:
    """Return the share by which the mean TTFT falls when the server is asked twice, with the waits of `table`.

    A little too low: asked once, the same waits would use more of the device than the budget has.
    """
    mean_s = _mean_ttft_s(once, table)
    return 1.0 - _mean_ttft_s(twice, table) / mean_s if mean_s > 0 else 0.0


def _mean_ttft_s(inputs: PolicyInput, table: Table) -> float:
    """Return E[min(T, w + T_d)] over contexts and prompt lengths at the input's budget, s."""
    contexts = inputs.contexts or Contexts(np.empty(0), np.ones(1), (inputs.server,))
    lengths = inputs.lengths
    bucket = np.searchsorted(table.edges, lengths.values, side="left")
    until = table.device_s[table.rung(inputs.budget, 0.5)][:, bucket] + inputs.device_s
    means = [curve.mean_below(own) @ lengths.shares for curve, own in zip(contexts.curves, until, strict=True)]
    return float(contexts.shares @ np.array(means))

"""A fitted policy: start delays by budget, context and prompt length, to be looked up.

Every policy is the same kind of table. Its rows (*rungs*) are plans that spend more and more; a budget between two
rungs is met by drawing one of them at random, which is also how a discrete boundary length is split. So the pacer can
move the budget of any policy, and the simulator can look up a million plans at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ..arrays import FloatArray
from ..estimation.ttft_context import Contexts
from ..types import Plan


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The state in which one request is planned, beyond its length.

    `budget` is the pacer's, in [0, 1]; `score` says how slow the server has been lately (`Contexts`); `draw` is a
    uniform random number; `cached` tokens of the prompt need no prefill; the device would begin only after `load_s`
    and run `slowdown` times slower than idle, because it is busy; the server was asked `waited_s` ago, in vain.
    """

    budget: float
    score: float = 0.0
    draw: float = 0.5
    cached: int = 0
    load_s: float = 0.0
    slowdown: float = 1.0
    waited_s: float = 0.0

    @property
    def unusual(self) -> bool:
        """Whether the device's or the server's first token is to be expected at another time than fitted."""
        return self.load_s > 0 or self.slowdown != 1.0 or self.waited_s > 0


class Revision(Protocol):
    """A policy's decision for an unusual request: the same trade, computed for this one alone."""

    def revise(self, length: int, rung: int, context: int, request: RequestContext) -> Plan:
        """The start delays under the prices of that rung."""
        ...


@dataclass(frozen=True, eq=False)
class Table:
    """Start delays, s: `device_s` and `server_s` of shape [rungs, contexts, lengths].

    `lengths` [J] are ascending; a length is looked up in the bucket whose upper edge `edges` [J - 1] it does not
    exceed. `budgets` [rungs] is what each rung is expected to spend, ascending. What the device has in its KV cache
    makes a prompt as quick as a shorter one; with `bills_whole` it costs as much as ever (the server's are billed
    whole), so that such a prompt is no row of the table, and is left to the `revision`. The delays are for a server
    that is asked again when it has been silent for `hedge_s`, s; infinite: once only.
    """

    edges: FloatArray
    budgets: FloatArray
    device_s: FloatArray
    server_s: FloatArray
    contexts: Contexts | None = None
    revision: Revision | None = None
    bills_whole: bool = False
    hedge_s: float = math.inf

    @cached_property
    def _edges(self) -> list[float]:
        edges: list[float] = self.edges.tolist()
        return edges

    @cached_property
    def _budgets(self) -> list[float]:
        budgets: list[float] = self.budgets.tolist()
        return budgets

    @cached_property
    def bounds(self) -> list[float]:
        """The scores that separate the contexts."""
        return [] if self.contexts is None else self.contexts.bounds.tolist()

    def plan(self, length: int, request: RequestContext) -> Plan:
        """Start delays for a prompt of `length` tokens."""
        rung, context = self.rung(request.budget, request.draw), bisect_left(self.bounds, request.score)
        if self.revision is not None and (request.unusual or (self.bills_whole and request.cached > 0)):
            return self.revision.revise(length, rung, context, request)
        bucket = bisect_left(self._edges, max(1, length - request.cached))
        device_s = max(0.0, self.device_s.item(rung, context, bucket) - request.waited_s)
        return Plan(device_s, self.server_s.item(rung, context, bucket))

    def rung(self, budget: float, draw: float) -> int:
        """The row for a budget; between two rows, one of them at random in the right proportion."""
        budgets = self._budgets
        upper = bisect_right(budgets, budget)
        if upper == 0 or upper == len(budgets):
            return max(0, upper - 1)
        below, above = budgets[upper - 1], budgets[upper]
        return upper - (draw * (above - below) >= budget - below)

    def delays(
        self, lengths: FloatArray, budgets: FloatArray, scores: FloatArray, draws: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """`plan` for many requests at once; the arguments broadcast. Returns device and server delays, s."""
        upper = np.searchsorted(self.budgets, budgets, side="right")
        low = np.clip(upper - 1, 0, len(self.budgets) - 1)
        high = np.minimum(upper, len(self.budgets) - 1)
        gap = self.budgets[high] - self.budgets[low]
        rung = np.where((gap > 0) & (upper > 0) & (draws * gap < budgets - self.budgets[low]), high, low)
        bounds = self.contexts.bounds if self.contexts is not None else np.empty(0)
        context = np.searchsorted(bounds, scores, side="left")
        bucket = np.searchsorted(self.edges, lengths, side="left")
        return self.device_s[rung, context, bucket], self.server_s[rung, context, bucket]


def edges_of(lengths: FloatArray) -> FloatArray:
    """Upper edges of buckets around ascending `lengths` [J]: halfway to the next; shape [J - 1]."""
    middle: FloatArray = (lengths[1:] + lengths[:-1]) / 2
    return middle


def constant(plan: Plan) -> Table:
    """The table of a plan that is always the same."""
    return Table(
        edges=np.empty(0),
        budgets=np.array([math.nan]),
        device_s=np.full((1, 1, 1), plan.device_s),
        server_s=np.full((1, 1, 1), plan.server_s),
    )

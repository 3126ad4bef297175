"""The policy of our own: the best trade of first-token time against the budget, for the distributions as they are.

Device-constrained, a request of length l whose device starts after w costs the constrained side l tokens with
probability S(w) = P(T_s > w) and shows its first token after X = min(T_s, w + T_d(l)), whose mean is the integral of S
up to w + T_d(l). Over all lengths and contexts we minimise

    E[X] + kappa * CVaR(X)    with    E[tokens of the device] = b * E[l],

CVaR being the mean of the worst 1 %. With CVaR(X) = min over tau of tau + E[(X - tau)+] / 1 % (Rockafellar and Uryasev,
J. Risk 2, 2000) the sum falls apart: for a given tau and a price mu per token every length chooses its own wait from a
grid. mu is found by bisection so that the budget binds, tau by trying. Nothing is assumed about F: where an API stalls,
the wait ends where the stall begins, not at a fixed quantile that lies inside the stall.

Server-constrained there is nothing to wait for, as T_d(l) is known: the server is asked at once for those prompts that
gain most per token, E[X without it] - E[X with it] and its CVaR counterpart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..arrays import FloatArray, distinct
from ..estimation.survival import Survival
from ..estimation.ttft_context import Contexts
from ..types import Plan, Side
from .policy import PolicyInput
from .table import RequestContext, Table

# Both are chosen on the halves of recorded traces that policies are fitted to: `python -m benchmarks.eval.constants`.
KAPPA = 0.058  # s of mean a second of the worst 1 % is worth; docs/explain/design.md#policies
CVAR_SHARE = 0.01  # of the requests: the worst 1 %, by which we are judged …
# … and those that are looked at: of a few hundred samples the worst 1 % are two or three, too few to be fitted to. The
# weight of each second in the tail is the same.
TAIL_SHARE = 0.02
# Weights of the CVaR that are tried where the server is scarce, in kappas: the least is taken whose tail is worth it.
SERVER_WEIGHTS = (0.0, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
TAIL_FOR_MEAN = 0.5  # how far the CVaR may rise over Algorithm 3's, as a share of what the mean falls below its
N_VARS = 48  # candidates for the start of the tail: a CVaR is to within 0.1 % then
SAME = 1.001  # a CVaR that is this many times as high is no higher: prompts of one length are split at random
BODY = np.linspace(0.0, 0.9, 33)[1:]  # quantiles of F that are tried as waits …
TAIL = 1 - np.geomspace(0.1, 0.001, 20)  # … and more of them where the stalls are
GAPS = 6  # the number of waits just before the widest gaps, relatively, in the samples
MAX_BUCKETS = 24  # prompt lengths are put in this many buckets of equal probability
COARSE, FINE = 16, 5  # values of tau tried over its two decades, and around the best of them; 8 were 3 % off at times
BISECTIONS = 14  # halvings of the logarithm of mu over its whole range …
NEAR, NEAR_BISECTIONS = 16.0, 7  # … and within this factor of the price that another tau had
LADDER = 40  # prices in the table, for the pacer to move among
MU_RANGE = (1e-6, 1e4)  # s per unit of budget: below it the budget is free, above it nothing is bought


@dataclass(frozen=True, slots=True)
class Optimal:
    """`kappa` weighs the CVaR against the mean; `tail_share` of the requests are looked at for it."""

    kappa: float = KAPPA
    max_buckets: int = MAX_BUCKETS
    learns: bool = True
    name: str = "optimal"
    tail_share: float = TAIL_SHARE

    def fit(self, inputs: PolicyInput) -> Table:
        """The table for `inputs`, with a ladder of budgets around its own."""
        return (self._device if inputs.constrained is Side.DEVICE else self._server)(inputs)

    def _device(self, inputs: PolicyInput) -> Table:
        problem = _Problem.of(inputs, self.kappa, self.max_buckets, self.tail_share)
        tau = problem.best_tau(inputs.budget)
        cost = problem.cost(tau)
        prices = np.geomspace(MU_RANGE[1], MU_RANGE[0], LADDER)
        prices = problem.prices_around(cost, inputs.budget, prices)
        waits, budgets = problem.ladder(cost, prices)
        return Table(
            problem.edges,
            budgets,
            waits,
            np.zeros_like(waits),
            problem.contexts,
            _WaitRevision(problem, tau, prices),
        )

    def _server(self, inputs: PolicyInput) -> Table:
        whole = _Problem.of(inputs, self.kappa, self.max_buckets, self.tail_share)
        problem, best, order = self._of_server(whole, inputs.budget)
        spent = np.concatenate([[0.0], problem.tokens.ravel()[order].cumsum()])
        spent[-1] = 1.0
        rungs = distinct(
            np.concatenate([np.linspace(0, len(order), LADDER).astype(int), _around(spent, inputs.budget)])
        )
        rank = np.empty(len(order), dtype=np.intp)
        rank[order] = np.arange(len(order))
        server = np.where(rank[None] < rungs[:, None], 0.0, math.inf).reshape(-1, *problem.tokens.shape)
        gains = problem.gain_per_token(best).ravel()[order]
        # Between the last cell that is served and the first that is left out.
        prices = np.concatenate([[math.inf], np.minimum.accumulate((gains[1:] + gains[:-1]) / 2), [-1.0]])[rungs]
        return Table(
            problem.edges,
            spent[rungs],
            np.zeros_like(server),
            server,
            problem.contexts,
            _ServerRevision(problem, best, prices.tolist(), [float(c.mean_below(best)) for c in problem.curves]),
            bills_whole=True,
        )

    def _of_server(self, problem: _Problem, budget: float) -> tuple[_Problem, float, NDArray[np.intp]]:
        """Return the trade that gains most in the mean for what it loses in the tail, its tau, and its cells' order.

        Algorithm 3 serves the longest prompts, so it keeps the tail short. Where a cold device starts slowly, short
        ones gain more a token, and the longest stay on the device. No plan has both: so the CVaR may rise by
        TAIL_FOR_MEAN of what the mean falls, both as ratios to Algorithm 3's, and where no weight does so its own order
        is taken. With a kappa of 0 the tail does not matter.
        """
        longest = np.argsort(-np.broadcast_to(problem.lengths, problem.tokens.shape).ravel(), kind="stable")
        mean, cvar = problem.of_order(longest, budget)
        best = problem, float(problem.taus()[-1]), longest
        low, high = 0, len(SERVER_WEIGHTS)
        while (
            low < high
        ):  # the more the tail weighs, the shorter it is: the least weight that will do is sought by halves
            middle = (low + high) // 2 if self.kappa else 0
            one = replace(problem, kappa=SERVER_WEIGHTS[middle] * self.kappa)
            ordered = [(tau, *_order_by_gain(one, tau, budget)) for tau in one.taus().tolist()]
            tau, order, _ = min(ordered, key=lambda found: found[2])
            own_mean, own_cvar = one.of_order(order, budget)
            gain = 1 - own_mean / mean
            if not self.kappa or (gain >= 0 and own_cvar <= cvar * (SAME + TAIL_FOR_MEAN * gain)):
                best, high = (one, tau, order), middle
            else:
                low = middle + 1
        return best


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """The trade as arrays over contexts [C], lengths [J] and waits on the grid [G].

    `chance` [C, J] is the probability of a context and a length, `tokens` [C, J] its share of all tokens, `mean`
    [C, J, G] = E[X] of each wait, `spend` [C, J, G] the part of the budget it takes.
    """

    contexts: Contexts
    curves: tuple[Survival, ...]
    lengths: FloatArray
    edges: FloatArray
    device_s: FloatArray
    mean_length: float
    grid: FloatArray
    chance: FloatArray
    tokens: FloatArray
    mean: FloatArray
    spend: FloatArray
    kappa: float
    tail_share: float

    @classmethod
    def of(cls, inputs: PolicyInput, kappa: float, max_buckets: int, tail_share: float) -> _Problem:
        contexts = inputs.contexts or Contexts(np.empty(0), np.ones(1), (inputs.server,))
        lengths = inputs.lengths.in_buckets(max_buckets)
        device_s = np.interp(lengths.values, inputs.lengths.values, inputs.device_s)
        grid = _grid(inputs.server)
        tokens = contexts.shares[:, None] * lengths.token_shares
        starts = np.stack([curve.at(grid) for curve in contexts.curves])
        return cls(
            contexts=contexts,
            curves=contexts.curves,
            lengths=lengths.values,
            edges=inputs.lengths.bucket_edges(max_buckets),
            device_s=device_s,
            mean_length=lengths.mean,
            grid=grid,
            chance=contexts.shares[:, None] * lengths.shares,
            tokens=tokens,
            mean=np.stack([curve.mean_below(grid + device_s[:, None]) for curve in contexts.curves]),
            spend=tokens[:, :, None] * starts[:, None, :],
            kappa=kappa,
            tail_share=tail_share,
        )

    @property
    def weight(self) -> float:
        """The weight of a second beyond tau, in seconds of mean."""
        return self.kappa / CVAR_SHARE

    @property
    def start_weight(self) -> float:
        """The weight of a second of tau itself."""
        return self.weight * self.tail_share

    def device_ttft_s(self, tokens: int) -> float:
        """T_d of an idle, loaded device, s; beyond the longest bucket in proportion."""
        beyond = max(1.0, tokens / float(self.lengths[-1]))
        return beyond * float(np.interp(tokens, self.lengths, self.device_s))

    def of_device(self, length: int, request: RequestContext) -> tuple[int, float]:
        """Tokens the device would have to process for a prompt of `length`, and its T_d at this moment, s."""
        tokens = max(1, length - request.cached)
        return tokens, request.load_s + request.slowdown * self.device_ttft_s(tokens)

    def taus(self) -> FloatArray:
        """Candidates for the start of the worst 1 %: from quick answers to the slowest the device can promise."""
        slowest = float(self.grid[-1]) + self.device_s[-1]
        low = min(float(self.grid[len(self.grid) // 2]), float(self.device_s[0]))
        taus: FloatArray = np.geomspace(max(low, slowest * 1e-3), slowest, COARSE)
        return taus

    def cost(self, tau: float) -> FloatArray:
        """E[X] + weight * E[(X - tau)+] of each wait, times its chance; [C, J, G]."""
        below = np.array([curve.mean_below(tau) for curve in self.curves])[:, None, None]
        cost: FloatArray = self.chance[:, :, None] * (self.mean + self.weight * np.maximum(self.mean - below, 0.0))
        return cost

    def choose(self, cost: FloatArray, price: float) -> tuple[NDArray[np.intp], float]:
        """The best wait on the grid for each context and length [C, J] at that price, and the budget it spends."""
        choice = (cost + price * self.spend).argmin(axis=2)
        begin = np.arange(0, self.spend.size, self.spend.shape[2]).reshape(choice.shape)
        return choice, float(
            self.spend.take(begin + choice).sum()
        )  # as `take_along_axis` does, which takes most of the time

    def best_tau(self, budget: float) -> float:
        """The tau whose plans have the least mean + kappa CVaR at the budget."""
        coarse = self.taus()
        values, price = self._values(coarse, budget, None)
        best = int(np.argmin(values))
        low, high = coarse[max(0, best - 1)], coarse[min(len(coarse) - 1, best + 1)]
        fine = np.geomspace(low, high, FINE + 2)[1:-1]
        better, _ = self._values(fine, budget, price)
        return float(fine[int(np.argmin(better))] if min(better) < values[best] else coarse[best])

    def _values(self, taus: FloatArray, budget: float, price: float | None) -> tuple[list[float], float | None]:
        """Return the least objective at the budget for each tau: the Lagrangian's value at the best price.

        And the last of these prices, where the next search may begin.
        """
        values = []
        for tau in taus.tolist():
            cost = self.cost(tau)
            low, high = self._bracket(cost, budget, price)
            values.append(self.start_weight * tau + max(self._dual(cost, low, budget), self._dual(cost, high, budget)))
            price = math.sqrt(low * high)
        return values, price

    def _dual(self, cost: FloatArray, price: float, budget: float) -> float:
        return float((cost + price * self.spend).min(axis=2).sum()) - price * budget

    def _bracket(self, cost: FloatArray, budget: float, near: float | None = None) -> tuple[float, float]:
        """Two prices around the one at which the budget binds, sought first around `near`."""
        if near is not None:
            low, high = self._bisect(cost, budget, near / NEAR, near * NEAR, NEAR_BISECTIONS)
            if low > near / NEAR and high < near * NEAR:
                return low, high
        return self._bisect(cost, budget, *MU_RANGE, BISECTIONS)

    def _bisect(self, cost: FloatArray, budget: float, low: float, high: float, n: int) -> tuple[float, float]:
        for _ in range(n):
            price = math.sqrt(low * high)
            if self.choose(cost, price)[1] > budget:
                low = price
            else:
                high = price
        return low, high

    def prices_around(self, cost: FloatArray, budget: float, prices: FloatArray) -> FloatArray:
        """`prices`, descending, refined where the budget binds."""
        low, high = self._bracket(cost, budget)
        near = np.geomspace(high * 4, low / 4, LADDER // 2)
        return distinct(np.concatenate([prices, near, [low, high]]))[::-1]

    def ladder(self, cost: FloatArray, prices: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Waits [R, C, J] and budgets [R], ascending, for descending prices."""
        choices, budgets = zip(*(self.choose(cost, price) for price in prices.tolist()), strict=True)
        waits, spent = self.grid[np.stack(choices)], np.maximum.accumulate(budgets)
        return waits, spent

    def of_order(self, order: NDArray[np.intp], budget: float) -> tuple[float, float]:
        """Return mean and CVaR, s, if the server is asked for cells in this order until the budget is spent."""
        tokens, chance = self.tokens.ravel()[order], self.chance.ravel()[order]
        served = np.clip((budget - (tokens.cumsum() - tokens)) / tokens, 0.0, 1.0)
        with_server = self.mean[:, :, 0].ravel()[order]
        alone = np.broadcast_to(self.device_s, self.tokens.shape).ravel()[order]
        near = np.geomspace(0.2, 1.0, N_VARS) * float(self.device_s[-1])  # no first token comes later than the device's
        # The VaR is often what a prompt takes without the server.
        taus = distinct(np.concatenate([near, self.device_s]))
        below = np.repeat([curve.mean_below(taus) for curve in self.curves], len(self.lengths), axis=0)[order]
        late = chance * (1 - served) @ np.maximum(alone[:, None] - taus, 0.0)
        late += chance * served @ np.maximum(with_server[:, None] - below, 0.0)
        mean = chance @ (served * with_server + (1 - served) * alone)
        return float(mean), float((taus + late / CVAR_SHARE).min())

    def gain_per_token(self, tau: float) -> FloatArray:
        """Return the gain of asking the server at once, per unit of budget; [C, J], >= 0."""
        with_server = self.cost(tau)[:, :, 0]
        alone = self.chance * (self.device_s + self.weight * np.maximum(self.device_s - tau, 0.0))
        gain: FloatArray = np.maximum(alone - with_server, 0.0) / self.tokens
        return gain


def _grid(server: Survival) -> FloatArray:
    """Waits worth trying, s, ascending from 0: quantiles of F, and where its widest gaps begin.

    To wait on into a gap costs as much as to wait to its beginning, so the steps before stalls have to be on the grid.
    """
    steps = server.times[server.times > 0]
    gaps = np.diff(np.log(steps))
    widest = np.argpartition(gaps, -GAPS)[-GAPS:] if len(gaps) > GAPS else np.arange(len(gaps))
    return distinct(np.concatenate([[0.0], server.quantile(np.concatenate([BODY, TAIL])), steps[widest]]))


def _order_by_gain(problem: _Problem, tau: float, budget: float) -> tuple[NDArray[np.intp], float]:
    """Cells in the order of their gain per token, and the objective when the budget is spent in that order."""
    gains = problem.gain_per_token(tau).ravel()
    order = np.argsort(-gains, kind="stable")
    tokens = problem.tokens.ravel()[order]
    used = np.clip(budget - (tokens.cumsum() - tokens), 0.0, tokens)
    alone = problem.chance * (problem.device_s + problem.weight * np.maximum(problem.device_s - tau, 0.0))
    return order, float(problem.start_weight * tau + alone.sum() - used @ gains[order])


def _around(spent: FloatArray, budget: float) -> NDArray[np.intp]:
    """The numbers of cells just below and above the budget."""
    upper = int(np.searchsorted(spent, budget))
    return np.clip([upper - 1, upper], 0, len(spent) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _WaitRevision:
    """The device's wait, worked out for one request: with its own T_d, and given that the server has kept silent."""

    problem: _Problem
    tau: float
    prices: FloatArray

    def revise(self, length: int, rung: int, context: int, request: RequestContext) -> Plan:
        problem, curve = self.problem, self.problem.curves[context]
        tokens, device_s = problem.of_device(length, request)
        grid = problem.grid[problem.grid >= request.waited_s]
        grid = np.concatenate([[request.waited_s], grid])
        mean = curve.mean_below(grid + device_s)
        tail = np.maximum(mean - curve.mean_below(self.tau), 0.0)
        price = self.prices[rung] * tokens / problem.mean_length
        # The survival beyond `waited_s` only scales all terms alike, so it needs no conditioning.
        wait = float(grid[(mean + problem.weight * tail + price * curve.at(grid)).argmin()])
        return Plan(wait - request.waited_s, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _ServerRevision:
    """Whether to ask the server for one request, with the T_d it really has now, at the price of its whole prompt."""

    problem: _Problem
    tau: float
    prices: list[float]
    below: list[float]  # E[min(T, tau)] of each context

    def revise(self, length: int, rung: int, context: int, request: RequestContext) -> Plan:
        problem, tau = self.problem, self.tau
        _, device_s = problem.of_device(length, request)
        mean = float(problem.curves[context].mean_below(device_s))
        late = max(device_s - tau, 0.0) - max(mean - self.below[context], 0.0)
        gain = (device_s - mean + problem.weight * late) / (length / problem.mean_length)
        return Plan(0.0, 0.0 if gain > self.prices[rung] else math.inf)

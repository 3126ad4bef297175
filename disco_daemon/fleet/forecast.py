"""What a placement gives under a load, from measured costs: the policy `measured` looks at nothing else.

Sequences go through the hosts in flights. Each flight takes its own way, so a module's rows are split among its
replicas by shares; those are chosen so that the busiest host is least busy (`busiest`). A token of every sequence takes
as long as the slowest of these: the busiest host, the busiest link, and one flight's own way through all modules, on
which it waits for others. Hosts finish a run before they begin the next one, so a flight that comes waits for half of a
run of each other flight that it may find there; it finds one as often as that host has it, of the whole way. (Of two
flights that is the exact mean-value analysis of Reiser and Lavenberg with service times that do not vary.) Where a
sequence goes on at the host where it is, but with other layers, its rows pass home.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..arrays import BoolArray, FloatArray
from .busiest import best_shares
from .costs import ModuleCosts
from .placement import FleetHost, ModelModules, Placement

FLIGHTS_PER_HOST = 2  # of a route at a time: one is computed while the other travels
FLIGHTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # numbers of them that are tried, besides the largest
MIXES = (1.0, 0.5, 0.0)  # tried shares: those for the compute, those for the KV cache, and half of both
NO_SPEED = 1e-12  # of a host that may do nothing


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """How many sequences want tokens at a time, and the tokens of context that each has on average."""

    n_sequences: float
    context_tokens: float


@dataclass(frozen=True, slots=True)
class FleetForecast:
    """What is expected of a placement: its rate, how many sequences fit, and what the rate comes of.

    `busy` is for each host how many seconds of a round it computes, a round being one token of every sequence; `fill`
    the share of its KV room that is taken. `shares` is [modules, hosts]. `unevenness` is how full and busy the hosts
    would be if all replicas were used, the worst ones first: of two equal rates the smaller is better.
    """

    tokens_per_s: float
    n_sequences: float
    n_flights: int
    pass_s: float
    round_s: float
    busy: FloatArray
    fill: FloatArray
    crossings: float
    shares: FloatArray

    unevenness: float


@dataclass(frozen=True)
class FleetModel:
    """All that a forecast needs but the placement. Modules in `pinned` stay at home whatever a policy thinks.

    An engine has `max_flights` under way at most; 0 = as many as pay.
    """

    hosts: tuple[FleetHost, ...]
    model: ModelModules
    costs: ModuleCosts
    load: FleetLoad
    pinned: frozenset[int] = field(default_factory=frozenset)
    max_flights: int = 0

    @cached_property
    def speeds(self) -> FloatArray:
        """What each host may compute of the reference machine."""
        return np.array([host.speed for host in self.hosts])

    @cached_property
    def rooms(self) -> FloatArray:
        """The memory of each host that the model may use, bytes."""
        return np.array([host.room_bytes for host in self.hosts])

    @cached_property
    def weights(self) -> FloatArray:
        """The weights of each module, bytes."""
        return np.array(self.model.weights, float)

    @cached_property
    def links(self) -> tuple[FloatArray, FloatArray]:
        """Delay of each host's link, s, and seconds of a row on it; home has none of both."""
        delays = np.array([0.0, *(host.delay_s for host in self.hosts[1:])])
        rows = np.array([0.0, *(self.model.row_bytes / host.bytes_per_s for host in self.hosts[1:])])
        return delays, rows

    def forecast(self, placement: Placement) -> FleetForecast:
        """Return what to expect of a placement; its rate is 0 where nothing fits or nobody may compute."""
        numbers = np.arange(len(self.hosts))
        there = (np.array(placement.masks)[:, None] >> numbers) & 1
        free = self.rooms - self.weights @ there
        try:
            compute = self._shares(placement, self.speeds, n_flights=self._flights(len(self.hosts)))
        except ValueError:
            return self._nothing(placement)
        ends = np.diff(np.array(placement.masks)) != 0  # whether a range of layers ends behind a module
        best = self._under(compute, free, ends)
        if all(mask.bit_count() == 1 for mask in placement.masks):
            return best  # without replicas all shares are the same
        if best.n_sequences:  # replicas need not be used: none makes a fleet slower
            first = self._anywhere(placement.masks)
            best = max((best, replace(self._under(first, free, ends), unevenness=best.unevenness)), key=_tokens_per_s)
        if best.n_sequences < self.load.n_sequences:  # short of room for KV cache: perhaps other shares have more
            try:
                memory = self._shares(placement, np.maximum(free, 0.0), n_flights=0)
            except ValueError:
                return best
            others = [self._under(mix * compute + (1 - mix) * memory, free, ends) for mix in MIXES[1:]]
            best = max((best, *others), key=_tokens_per_s)
        return best

    def _flights(self, n_hosts: int) -> int:
        """Return how many flights there are at most, over so many hosts."""
        n = FLIGHTS_PER_HOST * n_hosts
        return min(n, self.max_flights) if self.max_flights else n

    def _shares(self, placement: Placement, capacity: FloatArray, n_flights: int) -> FloatArray:
        """Return the shares for work of the costs at some flights, or for KV cache if there are none: [modules, hosts].

        Raises ValueError if no host can do some of it.
        """
        work: defaultdict[int, float] = defaultdict(float)
        batch = max(1.0, self.load.n_sequences / max(1, n_flights))
        costs = (0.0, 1.0, 0.0)
        if n_flights:
            costs = self.costs.embedding.at(batch), self.costs.layer.at(batch), self.costs.head.at(batch)
        first, *layers, last = placement.masks
        for mask, n in Counter(layers).items():
            work[mask] += n * costs[1]
        work[first] += costs[0]
        work[last] += costs[2]
        by_mask = best_shares(work, [float(one) for one in capacity])
        rest = [mask for mask in work if mask not in by_mask]
        by_mask |= dict(zip(rest, self._anywhere(rest), strict=True))
        return np.array([by_mask[mask] for mask in placement.masks])

    def _anywhere(self, masks: Sequence[int]) -> FloatArray:
        """Return shares of modules whose work counts nothing, [masks, hosts]: all for the first host that has them."""
        firsts = [(mask & -mask).bit_length() - 1 for mask in masks]
        shares: FloatArray = np.eye(len(self.hosts))[np.array(firsts, int)]
        return shares

    def _under(self, shares: FloatArray, free: FloatArray, ends: BoolArray) -> FleetForecast:
        """Return what to expect of given shares, with the best number of flights; `ends` are those of ranges."""
        at_home = np.eye(len(self.hosts))[:1]  # tokens are drawn at home: every way begins and ends there
        change = np.diff(np.concatenate([at_home, shares, at_home]), axis=0)
        arrive = np.maximum(change, 0.0)
        stays = (np.minimum(shares[:-1], shares[1:]) * ends[:, None]).sum(axis=0)
        stays[0] = 0.0  # nothing passes home that is there
        rows = np.abs(change).sum(axis=0) + 2 * stays  # over each host's link, both ways, of a token
        rows[0] += 2 * stays.sum()
        starts = arrive[:-1].sum(axis=0) + at_home[0] * float(np.minimum(shares[0], at_home[0]).sum())
        # Home looks at what passes behind its own runs: that is waited for like them.
        visits = np.ones(len(self.hosts))
        visits[0] += float(stays.sum()) / max(1.0, float(starts[0]))
        starts = starts + stays
        layers = shares[1:-1].sum(axis=0)
        fill = self.load.context_tokens * self.model.kv_bytes * layers / np.maximum(free, NO_SPEED)
        fits = float(1 / np.max(fill)) if np.max(fill) > 0 else np.inf
        n = min(self.load.n_sequences, fits)
        if n < 1 or bool(np.any((layers > 0) & (self.speeds <= 0))):
            return self._empty(shares, fill * self.load.n_sequences)
        speeds, (delays, row_s) = np.maximum(self.speeds, NO_SPEED), self.links
        link_s = n * float(np.max(rows * row_s))
        n_used = int(np.count_nonzero(shares.sum(axis=0) > 0))
        parts = np.array([layers, shares[0], shares[-1], starts]) / speeds
        most = int(min(n, self._flights(n_used)))
        tried = np.array([*(few for few in FLIGHTS if few < most), most], float)
        batches = n / tried
        curves = (self.costs.layer, self.costs.embedding, self.costs.head, self.costs.call)
        per_host = np.array([[curve.at(batch) for curve in curves] for batch in batches.tolist()]) @ parts
        alone_s = per_host.sum(axis=1) + float(rows @ delays) + batches * float(rows @ row_s)
        pass_s = alone_s + 0.5 * (tried - 1) * (per_host**2 @ visits) / np.maximum(alone_s, NO_SPEED)
        busy = tried[:, None] * per_host
        round_s = np.maximum(np.maximum(pass_s, busy.max(axis=1)), link_s)
        best = int(np.argmin(round_s))
        return FleetForecast(
            n / float(round_s[best]), n, int(tried[best]), float(pass_s[best]), float(round_s[best]), busy[best],
            fill * n, float(rows.sum() / 2), shares, _norm(busy[best], fill * n),
        )  # fmt: skip

    def _nothing(self, placement: Placement) -> FleetForecast:
        shares = self._anywhere(placement.masks)
        return self._empty(shares, np.ones(len(self.hosts)))

    def _empty(self, shares: FloatArray, fill: FloatArray) -> FleetForecast:
        return FleetForecast(0.0, 0.0, 0, np.inf, np.inf, np.zeros(len(self.hosts)), fill, 0.0, shares, np.inf)


def _norm(busy: FloatArray, fill: FloatArray) -> float:
    """Return a number that the worst host decides, then the next."""
    return float(np.sum(busy**8) ** 0.125 + np.sum(np.minimum(fill, 1.0) ** 8) ** 0.125)


def _tokens_per_s(one: FleetForecast) -> float:
    return one.tokens_per_s

"""How many tokens to draft before the partner is asked, of a model that two machines compute. Pure.

A run of d drafts takes one round trip R and, for each of its d + 1 rows, t_e at the edge and t_v at the partner. With
chances p_1 ... p_d of the drafts to be right it yields E = 1 + p_1 + p_1 p_2 + ... tokens, so E / (R + (d + 1)(t_e +
t_v)) tokens a second. One more draft pays as long as its chance to be reached and right, for the time that it takes,
is above that rate (Charnov's marginal value theorem, 1976; the objective is that of Leviathan et al. 2023, arXiv
2211.17192, with a round trip in it). Since chances only fall along a run, the first draft that does not pay ends the
best run. So on a fast link runs are short, and over a slow one they are long, and nobody has to set a threshold.

Around its best length a run's time per token hardly changes, but its questions do, and a partner has others to serve.
So a run goes on beyond it while that costs next to nothing. While the edge waits for a verdict its time costs nothing:
it drafts on, behind its drafts as if all were right, where that may well be of use. Rows that were made so and stand
are `ready` in the next run. Both are left out while many drafts are wasted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median

MAX_DRAFTS = 16  # a longer run is right to its end so seldom that it does not pay, even over a slow link
N_SAMPLES = 31  # latest measurements, of which the median counts: a busy moment changes little
LEAST_S = 1e-6  # no step is taken for shorter
SLACK = 0.07  # of the time per token in the best run: so much may be given for fewer questions
LEAST_CHANCE = 0.2  # that a draft beyond the best run is reached and right
AHEAD_CHANCE = 0.3  # that a draft made while a verdict is awaited is of use
MAX_WASTED = 0.55  # drafts a token; while more were wasted, only those are made that save time for sure
KEEP = 0.98  # of what is known of wasted drafts, at each verdict: a window of some 50


@dataclass(frozen=True, slots=True)
class RunTimes:
    """What a run of drafts takes, in s: `edge_s` and `partner_s` for each row, and `round_trip_s` whatever its length.

    The round trip holds the network both ways and what the partner takes for any run. Raises ValueError for times that
    are not finite and > 0.
    """

    edge_s: float
    round_trip_s: float
    partner_s: float

    def __post_init__(self) -> None:
        if not all(0 < took_s < math.inf for took_s in (self.edge_s, self.round_trip_s, self.partner_s)):
            msg = f"times have to be finite and > 0: {self}"
            raise ValueError(msg)

    @property
    def row_s(self) -> float:
        """What one row takes on both machines, s."""
        return self.edge_s + self.partner_s

    def run_s(self, n_drafts: int, n_ready: int = 0) -> float:
        """Return how long a run takes of whose rows the edge has the first `n_ready` already, s."""
        n_rows = n_drafts + 1
        return self.round_trip_s + n_rows * self.partner_s + max(0, n_rows - n_ready) * self.edge_s


@dataclass(frozen=True, slots=True)
class ExpectedRun:
    """A run of `n_drafts` and what it is expected to yield: tokens a round trip, and the time per token, s."""

    n_drafts: int
    n_tokens: float
    token_s: float


def expected_tokens(chances: Sequence[float]) -> float:
    """Return how many tokens a run yields: its drafts up to the first wrong one, and the one drawn behind them."""
    return 1.0 + math.fsum(accumulate(chances, mul))


def is_worth_drafting(times: RunTimes, chances: Sequence[float], chance: float, n_ready: int = 0) -> bool:
    """Whether a run of drafts, right with `chances` each, gains by one more that is right with `chance` if they are.

    Of its rows the first `n_ready` are there already.
    """
    n = len(chances)
    took_s = times.run_s(n, n_ready)
    rate = expected_tokens(chances) / took_s
    return n < MAX_DRAFTS and math.prod(chances) * chance > rate * (times.run_s(n + 1, n_ready) - took_s)


def is_cheap_to_draft(times: RunTimes, chances: Sequence[float], chance: float, n_ready: int = 0) -> bool:
    """Whether one more draft may well be right, and leaves the time per token within SLACK of the best shorter run."""
    if len(chances) >= MAX_DRAFTS or math.prod(chances) * chance < LEAST_CHANCE:
        return False
    all_chances = (*chances, chance)
    took_s = [times.run_s(n, n_ready) / expected_tokens(all_chances[:n]) for n in range(len(all_chances) + 1)]
    return took_s[-1] <= (1 + SLACK) * min(took_s[:-1])


def expected_run(times: RunTimes, chance: float) -> ExpectedRun:
    """Return the run that is best if every draft is right with the same chance, in [0, 1]."""
    chances: list[float] = []
    while is_worth_drafting(times, chances, chance):
        chances.append(chance)
    n_tokens = expected_tokens(chances)
    return ExpectedRun(len(chances), n_tokens, times.run_s(len(chances)) / n_tokens)


class DraftLength:
    """Learns the times of one link, from `prior` on, and says whether to draft on.

    Medians of the latest samples; what a row takes at the partner is the median slope between what it was busy for with
    runs of different lengths (Theil 1950, Sen 1968), so a busy moment of either machine is no speed, and the jitter of
    the network, which is larger than a row, is none of it.
    """

    __slots__ = ("_edge_s", "_n_tokens", "_n_wasted", "_prior", "_round_trips", "_times")

    def __init__(self, prior: RunTimes) -> None:
        self._prior = prior
        self._edge_s: deque[float] = deque(maxlen=N_SAMPLES)
        self._round_trips: deque[tuple[int, float, float]] = deque(maxlen=N_SAMPLES)
        self._times: RunTimes | None = prior
        self._n_tokens = self._n_wasted = 0.0

    @property
    def times(self) -> RunTimes:
        """What runs take now."""
        if self._times is None:
            partner_s = self._slope()
            rest = [took_s - n_rows * partner_s for n_rows, took_s, _ in self._round_trips]
            self._times = RunTimes(
                max(LEAST_S, median(self._edge_s)) if self._edge_s else self._prior.edge_s,
                max(LEAST_S, median(rest)) if rest else self._prior.round_trip_s,
                partner_s,
            )
        return self._times

    def observe_step(self, took_s: float) -> None:
        """Learn how long the edge took for one row. Raises ValueError for a time that is not finite and > 0."""
        _check(took_s)
        self._edge_s.append(took_s)
        self._times = None

    def observe_round_trip(self, n_rows: int, took_s: float, busy_s: float) -> None:
        """Learn from a verdict on `n_rows`: what it took from asking to hearing, `busy_s` of it at the partner.

        Raises ValueError for times that are not finite and > 0. A partner that says it was busy for longer than it took
        is not believed more than that.
        """
        _check(took_s)
        _check(busy_s)
        self._round_trips.append((n_rows, took_s, min(busy_s, took_s)))
        self._times = None

    def observe_waste(self, n_tokens: int, n_wasted: int) -> None:
        """Learn from a verdict that gave `n_tokens` how many drafts were made in vain since the last one."""
        self._n_tokens = KEEP * self._n_tokens + n_tokens
        self._n_wasted = KEEP * self._n_wasted + n_wasted

    @property
    def is_sparing(self) -> bool:
        """Whether so few drafts were wasted lately that some may be made on the chance."""
        return self._n_wasted <= MAX_WASTED * self._n_tokens

    def wants_draft(
        self, chances: Sequence[float], chance: float, *, n_ready: int = 0, ends_text: bool = False
    ) -> bool:
        """Whether to draft one more token behind drafts of these chances, none of which `ends_text`.

        Of the run's rows the first `n_ready` are there already.
        """
        if ends_text:
            return False
        is_cheap = self.is_sparing and is_cheap_to_draft(self.times, chances, chance, n_ready)
        return is_cheap or is_worth_drafting(self.times, chances, chance, n_ready)

    def wants_ahead(self, chances: Sequence[float], n_judged: int, waited_s: float, *, ends_text: bool = False) -> bool:
        """Whether to make the last of the drafts of these chances while a verdict on `n_judged` rows is awaited.

        It has to be of use with AHEAD_CHANCE, and to be done before the verdict is expected.
        """
        times = self.times
        left_s = times.round_trip_s + n_judged * times.partner_s - waited_s
        return not ends_text and self.is_sparing and left_s >= times.edge_s and math.prod(chances) >= AHEAD_CHANCE

    def _slope(self) -> float:
        """What a row more took the partner, s."""
        seen = [(n_rows, busy_s) for n_rows, _, busy_s in self._round_trips]
        slopes = [(b_s - a_s) / (n_b - n_a) for i, (n_a, a_s) in enumerate(seen) for n_b, b_s in seen[:i] if n_b != n_a]
        return max(LEAST_S, median(slopes)) if slopes else self._prior.partner_s


def _check(took_s: float) -> None:
    if not 0 < took_s < math.inf:
        msg = f"something took {took_s!r} s"
        raise ValueError(msg)

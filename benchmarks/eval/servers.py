"""Three servers at a time, played request by request: which is asked, and which as well where it stays silent.

A draw is three recorded traces whose medians lie within FACTOR of each other. Request i takes at each server what its
trace says at i; a rule sees only the times of those that it asked. It has learned each server's first half, and is
played the second one. Constants are chosen on first halves, cut in two once more (`draw_servers` with `fitted`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from disco_daemon.arrays import FloatArray
from disco_daemon.errors import ConfigError
from disco_daemon.simulate.server_player import Played, PoolRule, ServerRule, serve

from .evaluate import MIN_TESTED
from .traces import LatencyTrace

N_SERVERS = 3
FACTOR = 2.0  # between the medians of the servers of a draw: others are no choice
N_DRAWS = 400
MOST_TRIES = 1_000  # for each draw: traces of which hardly any three are alike are an error, not an endless search
SEED = 45


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Three servers: their names, the times that are known of each, and those that are played; s."""

    names: tuple[str, ...]
    known_s: tuple[FloatArray, ...]
    played_s: tuple[FloatArray, ...]

    @property
    def n(self) -> int:
        """Requests that are played."""
        return min(len(times) for times in self.played_s)

    @property
    def best(self) -> int:
        """The server that has the lowest mean, as is known afterwards."""
        return int(np.argmin([times[: self.n].mean() for times in self.played_s]))

    @property
    def best_s(self) -> FloatArray:
        """The times of that server, s."""
        return self.played_s[self.best][: self.n]


def draw_servers(traces: Sequence[LatencyTrace], n_draws: int, *, seed: int = SEED, fitted: bool = False) -> list[Draw]:
    """Return draws of the traces that are long enough; `fitted`: of their first halves only, cut in two once more.

    Raises ConfigError where too few of them are alike.
    """
    halves = [trace.ttft_s[: len(trace.ttft_s) // 2] for trace in traces] if fitted else [t.ttft_s for t in traces]
    cut = [(t.name, x[: len(x) // 2], x[len(x) // 2 :]) for t, x in zip(traces, halves, strict=True)]
    least = MIN_TESTED // 2 if fitted else MIN_TESTED
    long = [one for one in cut if len(one[2]) >= least]
    rng, found = random.Random(seed), list[Draw]()
    for _ in range(MOST_TRIES * n_draws):
        if len(found) == n_draws or len(long) < N_SERVERS:
            break
        chosen = rng.sample(long, N_SERVERS)
        medians = [float(np.median(known)) for _, known, _ in chosen]
        if max(medians) <= FACTOR * min(medians):
            names, known_s, played_s = zip(*chosen, strict=True)
            found.append(Draw(names, known_s, played_s))
    if len(found) < n_draws:
        msg = f"of {len(long)} traces with {least} rows to test, too few have medians within a factor of {FACTOR:g}"
        raise ConfigError(msg)
    return found


def play(rule: ServerRule, draw: Draw) -> Played:
    """Tell `rule` what is known, then play the draw."""
    teach(rule, draw)
    played = Played()
    for i in range(draw.n):
        serve(rule, [float(times[i]) for times in draw.played_s], i, played)
    return played


def teach(rule: ServerRule, draw: Draw) -> None:
    """Tell the rule the known times, the latest of all servers last."""
    longest = max(len(times) for times in draw.known_s)
    for back in range(longest, 0, -1):
        for server, times in enumerate(draw.known_s):
            if back <= len(times):
                rule.observe(server, float(times[-back]), -back, censored=False)


class _Unhedged:
    """A rule that asks one server."""

    def take_hedge(self, server: int) -> bool:
        """Never."""
        return False


class LowestMean(_Unhedged):
    """The server with the lowest mean of all that was seen of it."""

    def __init__(self, n_servers: int) -> None:
        self._sums_s, self._counts = [0.0] * n_servers, [0] * n_servers

    def choose(self, i: int) -> tuple[int, None]:
        """Return the lowest one; what was never asked comes first."""
        means = [total / n if n else 0.0 for total, n in zip(self._sums_s, self._counts, strict=True)]
        return means.index(min(means)), None

    def observe(self, server: int, ttft_s: float, i: int, *, censored: bool) -> None:
        """Add it."""
        self._sums_s[server] += ttft_s
        self._counts[server] += 1


class RoundRobin(_Unhedged):
    """Each in its turn."""

    def __init__(self, n_servers: int) -> None:
        self._n = n_servers

    def choose(self, i: int) -> tuple[int, None]:
        """Return the next one."""
        return i % self._n, None

    def observe(self, server: int, ttft_s: float, i: int, *, censored: bool) -> None:
        """Learn nothing."""


class LiteLlmLatency(_Unhedged):
    """LiteLLM's `latency-based-routing` at its defaults, as its router_strategy/lowest_latency.py has it.

    The mean of at most ten times; when ten are there the newest takes the place of the last, and the nine oldest stay.
    What has none counts as 0 s. The lowest is asked. LiteLLM divides each time by the tokens of its answer; here it is
    not divided, as traces have no tokens, which is in its favour.
    """

    SIZE = 10

    def __init__(self, n_servers: int) -> None:
        self._times: list[list[float]] = [[] for _ in range(n_servers)]

    def choose(self, i: int) -> tuple[int, None]:
        """Return the one with the lowest mean."""
        means = [sum(times) / len(times) if times else 0.0 for times in self._times]
        return means.index(min(means)), None

    def observe(self, server: int, ttft_s: float, i: int, *, censored: bool) -> None:
        """Keep it, in the place that LiteLLM gives it."""
        times = self._times[server]
        self._times[server] = [*times[: self.SIZE - 1], ttft_s]


RULES: dict[str, Callable[[int], ServerRule]] = {
    "pool": PoolRule,
    "lowest mean, no hedge": LowestMean,
    "round robin": RoundRobin,
    "LiteLLM latency-based": LiteLlmLatency,
}


def play_all(draws: Iterable[Draw], rule: Callable[[int], ServerRule], tick: Callable[[], None]) -> list[Played]:
    """Play every draw with a rule of its own."""
    found = []
    for draw in draws:
        found.append(play(rule(len(draw.names)), draw))
        tick()
    return found

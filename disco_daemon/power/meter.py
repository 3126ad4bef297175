"""Learns joules per token from the machine's power while the engine computes and while it does not.

The time between two samples is a window with an energy E. Windows without computing teach the idle power: a low
quantile of theirs, as other programs only ever add. In a window with computing, the energy above idle belongs to the
tokens:

    E - idle * dt  =  J_p * n_p + J_d * n_d + noise          n_p, n_d: prefill and decode tokens in the window

J_p and J_d are fitted by least squares over the latest windows, both at least 0. As prompts and answers often come in
the same proportion, the windows alone may not tell the two apart; then a prior decides: both phases draw about the
same power, so J_p * prefill_tps - J_d * decode_tps is normal around 0, with half the mean power as its deviation.

Each source has its own windows: a battery measures the whole machine, a package counter a part of it. Plugging in or
out changes the source, and the results of the other one stay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from ..arrays import FloatArray
from ..estimation.prefill_curve import t95
from .measurement import Covers, Integral, PowerReading

WINDOW_S, WINDOW_LAGS = 1.0, 4.0  # the length of a window, and in lags of the source
MOST_GAP_S, GAP_LAGS = 15.0, 1.0  # samples further apart (the machine slept) start the window over
LONGEST_S = 900.0  # work that has not ended by then is dropped, as it would hold up all windows
MOST_WINDOWS = 512  # in a fit; the oldest go first
AROUND_S = 2.0  # before and behind a word that rows were computed for others, which comes once a second
MOST_SOURCES = 8  # of energy whose windows are kept
IDLE_QUANTILE = 0.25
LEAST_IDLE, LEAST_BUSY = 3, 5
PHASES_DIFFER = 0.5  # prior: the relative deviation between the powers of the two phases
LEAST_NOISE = 1e-3  # of a window's mean energy; with less the fit would claim certainty
Z95 = 1.96


@dataclass(frozen=True, slots=True)
class TokenEnergy:
    """J per token with 95 % intervals. `relative_error` is half the 95 % interval for tokens in the mix seen.

    `windows` = 0: assumed, not measured.
    """

    source: str
    prefill_j_per_token: float
    decode_j_per_token: float
    prefill_interval: tuple[float, float]
    decode_interval: tuple[float, float]
    relative_error: float
    idle_watts: float | None = None
    windows: int = 0

    def joules(self, prefill_tokens: float, decode_tokens: float) -> float:
        """Return the energy of these tokens, J."""
        return self.prefill_j_per_token * prefill_tokens + self.decode_j_per_token * decode_tokens


@dataclass(slots=True)
class _Work:
    """Tokens of one phase of one answer, spread evenly over its time; or work for others, without tokens of ours."""

    begin: float
    end: float
    prefill: float = 0.0
    decode: float = 0.0
    for_others: bool = False

    def share(self, begin: float, end: float) -> float:
        overlap = min(end, self.end) - max(begin, self.begin)
        return max(0.0, overlap) / (self.end - self.begin)


@dataclass(slots=True)
class _Window:
    begin: float
    end: float
    joules: float


@dataclass(slots=True)
class _Track:
    """The windows of one source. `rows`: dt in s, E in J, prefill and decode tokens of each busy window."""

    reading: PowerReading
    integral: Integral
    start: tuple[float, float] | None = None
    last: float = -math.inf
    pending: deque[_Window] = field(default_factory=lambda: deque(maxlen=MOST_WINDOWS))
    idle: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_WINDOWS))
    rows: deque[tuple[float, float, float, float]] = field(default_factory=lambda: deque(maxlen=MOST_WINDOWS))
    was_idle: bool = False

    def sample(self, now: float, reading: PowerReading) -> None:
        """Close the window if it is long enough."""
        gap = now - self.last
        self.reading, self.last = reading, now
        joules = self.integral.look(now, reading.watts) if reading.watts is not None else reading.joules or 0.0
        if self.start is None or not 0 < gap <= MOST_GAP_S + GAP_LAGS * reading.lag_s:
            self.start, self.was_idle = (now, joules), False
            return
        begin, before = self.start
        if now - begin >= max(WINDOW_S, WINDOW_LAGS * reading.lag_s):
            self.pending.append(_Window(begin, now, joules - before))
            self.start = (now, joules)

    def settle(self, works: deque[_Work], open_since: float) -> None:
        """Learn from the windows whose work is known: those that ended before anything still open began."""
        while self.pending and self.pending[0].end <= open_since:
            self._learn(self.pending.popleft(), works)

    def _learn(self, window: _Window, works: deque[_Work]) -> None:
        dt = window.end - window.begin
        shares = [(work, share) for work in works if (share := work.share(window.begin, window.end)) > 0]
        if any(work.for_others for work, _ in shares):
            pass  # what of it our own tokens took cannot be told, and idle it was not
        elif shares:
            prefill = sum(work.prefill * share for work, share in shares)
            decode = sum(work.decode * share for work, share in shares)
            self.rows.append((dt, window.joules, prefill, decode))
        elif self.was_idle:  # the first idle window may still have older figures and a fan that slows down
            self.idle.append(window.joules / dt)
        self.was_idle = not shares


class EnergyMeter:
    """Learns joules per token from power samples and the reported work; all times in s, of one clock."""

    def __init__(self, known: TokenEnergy | None = None) -> None:
        """`known` is the result of an earlier run, valid until something better is measured."""
        self._known = known
        self._assumed: PowerReading | None = None
        self._tracks: dict[str, _Track] = {}
        self._current = ""
        self._open: dict[Hashable, tuple[float, float]] = {}  # when it began, when its running phase began
        self._works: deque[_Work] = deque(maxlen=8 * MOST_WINDOWS)

    def begin(self, key: Hashable, now: float) -> None:
        """Note that the engine begins to work on `key`."""
        self._open[key] = (now, now)

    def observe_prefill(self, key: Hashable, now: float, tokens: float) -> None:
        """Note how many prompt tokens were computed, without cached ones. Does nothing for an unknown key."""
        if key in self._open:
            began, since = self._open[key]
            self._add(_Work(since, now, prefill=tokens))
            self._open[key] = (began, now)

    def end(self, key: Hashable, now: float, tokens: float = 0.0) -> None:
        """Note the end of this work, and how many tokens it generated. Does nothing for an unknown key."""
        if (found := self._open.pop(key, None)) is not None:
            self._add(_Work(found[1], now, decode=tokens))

    def observe_others(self, now: float) -> None:
        """Note that this machine has just computed for others: the windows around teach nothing of our own tokens."""
        self._add(_Work(now - AROUND_S, now + AROUND_S, for_others=True))

    def sample(self, now: float, reading: PowerReading) -> None:
        """Take a reading. An assumed one teaches nothing, but stands in while nothing is measured."""
        if reading.covers is Covers.COMPUTING:
            self._assumed, self._current = reading, ""
            return
        track = self._track(reading)
        track.sample(now, reading)
        self._open = {key: times for key, times in self._open.items() if now - times[0] < LONGEST_S}
        self._settle()

    def idle_watts(self) -> float | None:
        """Return the idle power by the current source, W; None before an idle window."""
        track = self._tracks.get(self._current)
        return None if track is None or len(track.idle) < LEAST_IDLE else _idle(track)[0]

    def energy(self, prefill_tps: float, decode_tps: float) -> TokenEnergy | None:
        """Return the best figure: measured by the source with the smallest error, else known, else assumed.

        The speeds, in token/s, are the device's; they weight the phases if the windows cannot tell them apart.
        Raises ValueError unless both are above 0.
        """
        if prefill_tps <= 0 or decode_tps <= 0:
            raise ValueError(f"speeds must be above 0 token/s, not {prefill_tps} and {decode_tps}")
        fits = [_fit(track, prefill_tps, decode_tps) for track in self._tracks.values()]
        figures = [figure for figure in (*fits, self._known) if figure is not None]
        if figures:
            return min(figures, key=lambda figure: figure.relative_error)
        return None if self._assumed is None else from_power(self._assumed, prefill_tps, decode_tps)

    def _add(self, work: _Work) -> None:
        if work.end > work.begin:
            self._works.append(work)

    def _track(self, reading: PowerReading) -> _Track:
        if reading.source not in self._tracks and len(self._tracks) >= MOST_SOURCES:
            del self._tracks[next(iter(self._tracks))]
        track = self._tracks.setdefault(reading.source, _Track(reading, Integral(MOST_GAP_S + reading.lag_s)))
        if reading.source != self._current:
            track.start, self._current = None, reading.source
        return track

    def _settle(self) -> None:
        open_since = min((began for began, _ in self._open.values()), default=math.inf)
        for track in self._tracks.values():
            track.settle(self._works, open_since)
        # A window that is open or waiting needs the work since its beginning.
        starts = [t.start[0] for t in self._tracks.values() if t.start is not None]
        oldest = min([*starts, *(t.pending[0].begin for t in self._tracks.values() if t.pending)], default=-math.inf)
        while self._works and self._works[0].end < oldest:
            self._works.popleft()


def from_power(reading: PowerReading, prefill_tps: float, decode_tps: float) -> TokenEnergy:
    """Return J per token for an assumed power of computing: watts over token/s. Raises ValueError without watts."""
    if reading.watts is None:
        raise ValueError(f"{reading.source} gives no power")
    prefill, decode = reading.watts / prefill_tps, reading.watts / decode_tps
    error = Z95 * reading.uncertainty
    return TokenEnergy(reading.source, prefill, decode, _around(prefill, error), _around(decode, error), error)


def _idle(track: _Track) -> tuple[float, float]:
    """Return the idle power, W, and how far it may be too low: the distance to the median."""
    low, middle = np.quantile(track.idle, (IDLE_QUANTILE, 0.5))
    return float(low), float(middle - low)


def _fit(track: _Track, prefill_tps: float, decode_tps: float) -> TokenEnergy | None:
    """Fit the watts of each phase by least squares; None with too few windows, or if computing adds nothing."""
    if len(track.idle) < LEAST_IDLE or len(track.rows) < LEAST_BUSY:
        return None
    rows = np.array(track.rows)
    idle, too_low = _idle(track)
    seconds = rows[:, 2:] / (prefill_tps, decode_tps)
    above = rows[:, 1] - idle * rows[:, 0]
    if above.sum() <= 0 or seconds.sum() <= 0:
        return None
    watts, covariance = _least_squares(seconds, above)
    mix = seconds.sum(axis=0)
    systematic = math.hypot(track.reading.uncertainty, too_low * float(rows[:, 0].sum() / above.sum()))
    t = t95(len(rows) - 2)
    figures = watts / (prefill_tps, decode_tps)
    halves = np.hypot(t * np.sqrt(np.diag(covariance)), Z95 * systematic * watts) / (prefill_tps, decode_tps)
    error = math.hypot(t * math.sqrt(mix @ covariance @ mix) / above.sum(), Z95 * systematic)
    prefill, decode = ((max(0.0, float(x - h)), float(x + h)) for x, h in zip(figures, halves, strict=True))
    return TokenEnergy(
        source=track.reading.source,
        prefill_j_per_token=float(figures[0]),
        decode_j_per_token=float(figures[1]),
        prefill_interval=prefill,
        decode_interval=decode,
        relative_error=error,
        idle_watts=idle,
        windows=len(rows),
    )


def _least_squares(seconds: FloatArray, joules: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the power of the two phases, W, both at least 0, and its covariance; seconds (n, 2), joules (n,)."""
    mean = joules.sum() / seconds.sum()
    floor = (LEAST_NOISE * joules.mean()) ** 2
    prior = np.array([[1.0, -1.0], [-1.0, 1.0]]) / (PHASES_DIFFER * mean) ** 2
    watts: FloatArray = np.array([mean, mean], np.float64)
    information: FloatArray = prior
    for _ in range(3):  # the noise depends on the fit, and the weight of the prior on the noise
        residual = joules - seconds @ watts
        variance = max(float(residual @ residual) / (len(joules) - 2), floor)
        information = np.asarray(seconds.T @ seconds / variance + prior, np.float64)
        watts = _at_least_0(information, seconds.T @ joules / variance)
    return watts, np.asarray(np.linalg.inv(information), np.float64)


def _at_least_0(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the x >= 0 that minimises x'ax/2 - b'x, for two unknowns."""
    x: FloatArray = np.asarray(np.linalg.solve(a, b), np.float64)
    if (x >= 0).all():
        return x
    low = int(np.argmin(x))
    x[low] = 0.0
    x[1 - low] = max(0.0, b[1 - low] / a[1 - low, 1 - low])
    return x


def _around(x: float, relative: float) -> tuple[float, float]:
    return max(0.0, x * (1 - relative)), x * (1 + relative)

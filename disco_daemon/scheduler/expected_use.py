"""How often a model will be asked for soon: by the time since its last request, and by the hour of the day. Pure.

A model's requests come in bursts, a conversation or a spell of coding, and the bursts by the hour of the day. So the
rate is learned by how long the model has been unused, in steps up to ten minutes; a model that has been unused for
longer is asked for at the rate at which bursts have begun in this hour of the day. Older days count less. Times are
Unix time, s; rates are requests an hour.
"""

from __future__ import annotations

import math
from typing import Any

HOURS = 24
HOUR_S, DAY_S = 3600.0, 86_400.0
FORGOTTEN_S = 14 * DAY_S  # the time in which a day's weight falls to 1/e: two weeks, so that no weekend rules
STEPS_S = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)  # ends of the steps of the time without a request
BURST_S = STEPS_S[-1]  # unused for so long, a model's burst is over
AHEAD_S = 60.0  # what is asked for within this time counts: a model that leaves may be back behind that
PRIOR = (60.0, 60.0, 45.0, 30.0, 15.0, 6.0, 3.0)  # requests an hour in each step, before any was seen: a slow reader's
PRIOR_COUNT = 3.0  # the requests that this counts as
PRIOR_BURSTS, PRIOR_HOURS = 0.2, 2.0  # bursts an hour, and the hours of watching that this counts as
BESIDE = 0.25  # the weight of the hours beside one, since nobody begins on the hour


class ExpectedUse:
    """The requests for one model.

    All mutable state: by step the requests and the hours in it (`_asked`, `_in_step`), by hour of the day the bursts
    that began and the hours of watching without one (`_bursts`, `_quiet`), and the time of the last request.
    """

    def __init__(self, began_at: float) -> None:
        self._asked = [PRIOR_COUNT for _ in PRIOR]
        self._in_step = [PRIOR_COUNT / rate for rate in PRIOR]
        self._bursts, self._quiet = [0.0] * HOURS, [0.0] * HOURS
        self._last = -math.inf
        self._watched_to = began_at

    @property
    def is_known(self) -> bool:
        """Whether it was ever asked for."""
        return self._last > -math.inf or any(self._bursts)

    def observe(self, at: float) -> None:
        """Take a request."""
        self._watch(at)
        age = at - self._last
        if age >= BURST_S:
            self._bursts[_hour(at)] += 1
        else:
            self._asked[_step(max(0.0, age))] += 1
        self._last = max(at, self._last)

    def per_hour(self, at: float) -> float:
        """Return the rate of requests that is expected within AHEAD_S of `at`, an hour."""
        self._watch(at)
        age, expected = min(BURST_S, max(0.0, at - self._last)), 0.0
        end = age + AHEAD_S
        for i, step_end in enumerate(STEPS_S):
            if age < step_end and age < end:
                expected += (min(end, step_end) - age) * self._asked[i] / self._in_step[i]
                age = min(end, step_end)
        return (expected + (end - age) * self._bursts_per_hour(at)) / AHEAD_S

    def to_json(self) -> dict[str, Any]:
        """Return what was learned."""
        return {
            "asked": self._asked,
            "in_step": self._in_step,
            "bursts": self._bursts,
            "quiet": self._quiet,
            "watched_to": self._watched_to,
            "last": self._last if self._last > -math.inf else None,
        }

    @classmethod
    def from_json(cls, saved: Any, now: float) -> ExpectedUse:
        """Go on at `now` from what was saved. Raises ValueError for what is no use.

        Nothing is known of the time between, but for how long the model has been unused: a burst outlives a restart.
        """
        try:
            lists = [[float(n) for n in saved[name]] for name in ("asked", "in_step", "bursts", "quiet")]
            to = float(saved["watched_to"])
            last = saved.get("last")  # which was not saved once
            last = -math.inf if last is None else float(last)
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"no use of a model: {e!r}") from e
        sizes = [len(STEPS_S), len(STEPS_S), HOURS, HOURS]
        if [len(one) for one in lists] != sizes or not all(0 <= n < math.inf for one in lists for n in (*one, to)):
            raise ValueError("no use of a model: it has other numbers")
        if math.isnan(last):
            raise ValueError("no use of a model: its last request has no time")
        if not all(lists[0]) or not all(lists[1]):
            raise ValueError("no use of a model: a step was never watched")
        use = cls(now)
        use._asked, use._in_step, use._bursts, use._quiet = lists
        use._last = min(last, now)
        use._fade(max(0.0, now - to))
        return use

    def _watch(self, to: float) -> None:
        """Take the time up to `to` without a request; a clock that was set back adds nothing."""
        at = self._watched_to
        if to <= at:
            return
        self._watched_to = to
        if to - at > DAY_S:  # of a machine that slept, or a clock that was far behind, the last day will do
            at = to - DAY_S
        while at < to:
            age = at - self._last
            if age < BURST_S:
                i = _step(max(0.0, age))
                end = min(to, self._last + STEPS_S[i])
                if end <= at:  # no float lies between
                    end = math.nextafter(at, math.inf)
                self._in_step[i] += (end - at) / HOUR_S
            else:
                end = min(to, (at // HOUR_S + 1) * HOUR_S)
                self._fade(end - at)
                self._quiet[_hour(at)] += (end - at) / HOUR_S
            at = end

    def _fade(self, passed_s: float) -> None:
        """Let what was seen count less; what is believed before is seen in it, and fades along."""
        keep = math.exp(-passed_s / FORGOTTEN_S)
        for figures in (self._asked, self._in_step, self._bursts, self._quiet):
            figures[:] = [max(n * keep, 1e-9) if figures in (self._asked, self._in_step) else n * keep for n in figures]

    def _bursts_per_hour(self, at: float) -> float:
        """Return the rate at which bursts begin in this hour of the day, by those beside it, too."""
        hour = _hour(at)

        def around(figures: list[float]) -> float:
            return figures[hour] + BESIDE * (figures[hour - 1] + figures[(hour + 1) % HOURS])

        return (around(self._bursts) + PRIOR_BURSTS * PRIOR_HOURS) / (around(self._quiet) + PRIOR_HOURS)


def _hour(at: float) -> int:
    return int(at // HOUR_S) % HOURS


def _step(age: float) -> int:
    return next(i for i, end in enumerate(STEPS_S) if age < end)

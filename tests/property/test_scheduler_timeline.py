"""The closed forms of `scheduler.timeline` against areas added up by brute force, and against `delivery.qoe`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.delivery.qoe import qoe
from disco_daemon.scheduler.timeline import Readers, Timeline

arrivals = st.lists(st.floats(0, 60), max_size=25).map(sorted)
readers = st.tuples(st.floats(0, 10), st.floats(0.2, 50))  # expected TTFT, pace
spans = st.floats(0, 40)
gaps = st.one_of(st.floats(0.01, 5), st.sampled_from([0.2, 0.25, 0.5]))


def told(at: list[float], expected: float, pace: float, arrived: float = 0.0) -> Timeline:
    reader = Timeline(arrived, expected, pace)
    for t in at:
        reader.token(arrived + t)
    return reader


def by_trapezoids(at: list[float], expected: float, pace: float, until: float) -> float:
    """A and E are made of straight lines: trapezoids between all their corners are the areas of Eq. 1."""
    begun: list[float] = []
    for t in at:
        begun.append(max(t, begun[-1] + 1 / pace) if begun else t)
    start = np.array(begun)
    corners = np.unique(np.clip([0.0, expected, until, *start, *(start + 1 / pace)], 0, until))
    digested = np.clip((corners[:, None] - start) * pace, 0, 1).sum(1)
    wanted = pace * np.maximum(corners - expected, 0)
    actual, area = float(np.trapezoid(digested, corners)), float(np.trapezoid(wanted, corners))
    return min(actual / area, 1.0) if area > 1e-6 else 1.0


def close(value: float, at: list[float], expected: float, pace: float, until: float) -> bool:
    """Where next to nothing was expected yet, the ratio is no more than rounding."""
    area = pace * max(until - expected, 0) ** 2 / 2
    return area < 1e-5 or value == pytest.approx(by_trapezoids(at, expected, pace, until), abs=1e-6)


@given(arrivals, readers, spans)
def test_qoe_so_far_is_the_ratio_of_the_areas(at: list[float], reader: tuple[float, float], later: float) -> None:
    now = (at[-1] if at else 0.0) + later
    assert close(told(at, *reader).qoe(now), at, *reader, now)


@given(arrivals.filter(bool), readers, st.floats(0, 1000))
def test_at_the_end_it_is_what_delivery_says(at: list[float], reader: tuple[float, float], arrived: float) -> None:
    timeline = told(at, *reader, arrived)
    end = timeline.arrived_s + at[-1] + timeline.stock_s(arrived + at[-1])
    assert timeline.qoe(end, len(at)) == pytest.approx(qoe(np.array(at), *reader), abs=1e-6)


@settings(deadline=None)  # thousands of tokens to be added up one by one
@given(arrivals, readers, spans, spans, spans, gaps)
def test_a_prediction_is_what_comes_true(
    at: list[float], reader: tuple[float, float], later: float, delay: float, ahead: float, tbt: float
) -> None:
    now = (at[-1] if at else 0.0) + later
    until = now + ahead
    coming = [t for i in range(int(40 / tbt) + 2) if (t := now + delay + i * tbt) <= until]
    assert close(told(at, *reader).predicted(now, until, now + delay, tbt), [*at, *coming], *reader, until)


@given(arrivals, readers, spans, spans)
def test_no_token_is_never(at: list[float], reader: tuple[float, float], later: float, ahead: float) -> None:
    now = (at[-1] if at else 0.0) + later
    timeline = told(at, *reader)
    assert timeline.predicted(now, now + ahead, math.inf, 1.0) == timeline.qoe(now + ahead)


@given(
    st.lists(st.tuples(arrivals, readers, spans), min_size=1, max_size=6),
    st.floats(0.1, 60),
    st.lists(st.floats(0.003, 20), min_size=1, max_size=4),
)
def test_a_table_says_what_each_reader_says(
    cases: list[tuple[list[float], tuple[float, float], float]], ahead: float, tbts: list[float]
) -> None:
    now = 61.0
    timelines = [told(at, *reader) for at, reader, _ in cases]
    delays = np.array([delay for *_, delay in cases])
    table = Readers(timelines).predicted(now, now + ahead, delays, tbts)
    one_by_one = [
        [
            reader.predicted(now, now + ahead, now + delay + tbt, tbt)
            for reader, delay in zip(timelines, delays.tolist(), strict=True)
        ]
        for tbt in tbts
    ]
    np.testing.assert_allclose(table, one_by_one, atol=1e-6)
    np.testing.assert_allclose(Readers(timelines).qoe(now), [reader.qoe(now) for reader in timelines], atol=1e-9)


@given(arrivals, readers, spans, spans, gaps, spans)
def test_to_be_served_is_never_worse_than_to_wait(
    at: list[float], reader: tuple[float, float], delay: float, ahead: float, tbt: float, sooner: float
) -> None:
    timeline = told(at, *reader)
    waits = timeline.predicted(61.0, 61.0 + ahead, math.inf, tbt)
    late = timeline.predicted(61.0, 61.0 + ahead, 61.0 + delay + sooner, tbt)
    soon = timeline.predicted(61.0, 61.0 + ahead, 61.0 + delay, tbt)
    assert waits - 1e-9 <= late <= soon + 1e-9

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.qoe.steady import qoe_steady
from disco_daemon.arrays import FloatArray
from disco_daemon.delivery.qoe import NOTICED_S, qoe, reading
from disco_daemon.types import Reading

times = st.floats(0, 100)
arrivals = st.lists(times, min_size=1, max_size=40).map(lambda ts: np.array(sorted(ts)))
ttfts = st.floats(0, 20)
paces = st.floats(0.1, 100)


def begun(at: FloatArray, pace: float) -> FloatArray:
    """When each token's digestion begins, one by one."""
    out: list[float] = []
    for t in at.tolist():
        out.append(max(t, out[-1] + 1 / pace) if out else t)
    return np.array(out)


def by_quadrature(at: FloatArray, expected: float, pace: float) -> float:
    """Eq. 1 by brute force on a fine grid."""
    start = begun(at, pace)
    t = np.linspace(0, start[-1] + 1 / pace, 100_001)
    digested = np.clip((t[:, None] - start) * pace, 0, 1).sum(1)
    wanted = np.clip(pace * (t - expected), 0, len(at))
    area = wanted.sum()
    return float(min(1.0, digested.sum() / area)) if area > 0 else 1.0


@given(arrivals, ttfts, paces)
def test_qoe_lies_between_0_and_1(at: FloatArray, expected: float, pace: float) -> None:
    assert 0 <= qoe(at, expected, pace) <= 1


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_ratio_of_the_areas(seed: int) -> None:
    random = np.random.default_rng(seed)
    at = np.cumsum(random.exponential(0.3, 30)) + random.uniform(0, 4)
    expected, pace = random.uniform(0, 3), random.uniform(2, 8)
    assert qoe(at, expected, pace) == pytest.approx(by_quadrature(at, expected, pace), abs=1e-4)


@given(arrivals, ttfts, paces, times)
def test_a_whole_answer_that_comes_later_is_never_better(
    at: FloatArray, expected: float, pace: float, later: float
) -> None:
    assert qoe(at + later, expected, pace) <= qoe(at, expected, pace) + 1e-9


@given(arrivals, ttfts, paces, st.data())
def test_earlier_tokens_never_lower_it_while_the_last_is_read_at_the_same_time(
    at: FloatArray, expected: float, pace: float, data: st.DataObject
) -> None:
    share = data.draw(st.lists(st.floats(0, 1), min_size=len(at), max_size=len(at)))
    earlier = np.sort(at * np.array(share))
    earlier[-1] = max(begun(at, pace)[-1], earlier[-1])
    assume(np.isclose(begun(earlier, pace)[-1], begun(at, pace)[-1], rtol=1e-12, atol=0))
    assert qoe(earlier, expected, pace) >= qoe(at, expected, pace) - 1e-9


def test_eq_1_is_blind_to_a_stall_before_the_last_token() -> None:
    """Not a wish but the published definition: why the largest gap is told beside it."""
    late = 11 + np.arange(100) / 5
    stalled = np.append(late[:-1], 1000.0)
    assert qoe(late, 1.0, 5.0) == pytest.approx(0.5)
    assert qoe(stalled, 1.0, 5.0) > 0.97
    assert reading(stalled, 1.0, 5.0).largest_gap_s > 900


@given(st.integers(1, 200), ttfts, ttfts, paces, st.floats(1, 1000))
def test_the_closed_form_holds_for_any_speed_from_the_pace_on(
    n: int, ttft: float, expected: float, pace: float, faster: float
) -> None:
    at = ttft + np.arange(n) / (pace * faster)
    assert qoe(at, expected, pace) == pytest.approx(qoe_steady(ttft, n, expected, pace), abs=1e-9)


def test_the_closed_form_takes_arrays() -> None:
    ttft, n = np.array([0.5, 1.0, 2.0, 11.0]), np.array([1, 100, 100, 100], np.int16)
    expected = [qoe_steady(float(t), int(k), 1.0, 5.0) for t, k in zip(ttft, n, strict=True)]
    np.testing.assert_allclose(qoe_steady(ttft, n, 1.0, 5.0), expected)
    assert qoe_steady(ttft[:, None], n, 1.0, np.full(4, 5)).shape == (4, 4)
    assert isinstance(qoe_steady(0.5, 10, 1.0, 5.0), float)


@given(st.integers(1, 200), ttfts, paces)
def test_just_as_expected_is_1(n: int, expected: float, pace: float) -> None:
    assert qoe(expected + np.arange(n) / pace, expected, pace) == pytest.approx(1, abs=1e-9)


def test_by_hand() -> None:
    """Two tokens at 1 token/s, expected from 0 on."""
    assert qoe(np.array([1.0, 2.0]), 0.0, 1.0) == pytest.approx(2 / 4), "0 + 0.5 + 1.5 of 0.5 + 1.5 + 2"
    assert qoe(np.array([1.0, 1.0]), 0.0, 1.0) == pytest.approx(2 / 4), "a burst is read one by one"
    assert qoe(np.array([0.0, 2.0]), 0.0, 1.0) == pytest.approx(3 / 4), "0.5 + 1 + 1 + 0.5 of 0.5 + 1.5 + 2"
    assert qoe(np.array([0.0]), 5.0, 1.0) == 1, "all read before it was expected"


def test_a_late_start_costs_more_of_a_short_answer() -> None:
    assert qoe_steady(3.0, 10, 1.0, 5.0) < qoe_steady(3.0, 500, 1.0, 5.0)


@pytest.mark.parametrize(
    "at",
    [[], [[1.0, 2.0]], [2.0, 1.0], [-1.0, 0.0], [0.0, np.nan], [np.nan, 1.0], [0.0, np.nan, 2.0], [0.0, np.inf]],
    ids=["empty", "matrix", "descending", "negative", "nan last", "nan first", "nan inside", "infinite"],
)
def test_nonsense_arrivals_are_refused(at: list[float]) -> None:
    with pytest.raises(ValueError, match=r"without tokens|ascend"):
        qoe(np.array(at), 1.0, 5.0)
    with pytest.raises(ValueError, match=r"without tokens|ascend"):
        reading(np.array(at), 1.0, 5.0)


@pytest.mark.parametrize(
    ("expected", "pace"),
    [(-1.0, 5.0), (np.nan, 5.0), (np.inf, 5.0), (1.0, 0.0), (1.0, -1.0), (1.0, np.nan), (1.0, np.inf)],
)
def test_nonsense_expectations_are_refused(expected: float, pace: float) -> None:
    with pytest.raises(ValueError, match="expected TTFT"):
        qoe(np.ones(3), expected, pace)
    with pytest.raises(ValueError, match="expected TTFT"):
        qoe_steady(1.0, 3, expected, pace)


@pytest.mark.parametrize(("ttft", "n"), [(-1.0, 3), (np.nan, 3), (np.inf, 3), (1.0, 0), (1.0, np.nan), (1.0, np.inf)])
def test_nonsense_steady_answers_are_refused(ttft: float, n: float) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        qoe_steady(ttft, n, 1.0, 5.0)
    with pytest.raises(ValueError, match="at least one token"):
        qoe_steady(np.array([1.0, ttft]), n, 1.0, 5.0)


def test_the_largest_gap() -> None:
    assert reading(np.array([5.0]), 1.0, 5.0).largest_gap_s == 0, "the wait for the first token is the TTFT"
    assert reading(np.array([5.0, 5.0, 7.0, 8.0]), 1.0, 5.0).largest_gap_s == 2


@given(arrivals, ttfts, paces)
def test_a_reading_agrees_with_its_parts(at: FloatArray, expected: float, pace: float) -> None:
    read = reading(at, expected, pace)
    assert read.qoe == qoe(at, expected, pace)
    assert read.ttlt_s == pytest.approx(begun(at, pace)[-1] + 1 / pace)
    gaps = np.diff(at) if len(at) > 1 else np.zeros(1)
    assert read.largest_gap_s == pytest.approx(gaps.max())
    assert (read.tbt_p50_s, read.tbt_p99_s) == pytest.approx(tuple(np.quantile(gaps, [0.5, 0.99])))


def test_only_waits_that_a_reader_notices_are_stalls() -> None:
    pace = 4.8
    steady = np.linspace(1.0, 1.0 + 19 / pace, 20)
    jitter = np.random.default_rng(0).uniform(0, NOTICED_S / 2, 20)
    late: FloatArray = np.add(steady, jitter, dtype=np.float64)
    assert reading(late, 1.0, pace).stalled == 0
    steady[7:] += 0.5
    assert reading(steady, 1.0, pace).stalled == 1, "the rest is in step again"
    assert reading(np.arange(20, dtype=np.float64), 1.0, pace).stalled == 19, "the first token is not late"


def test_a_burst_gives_the_reader_a_stock() -> None:
    at = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.9])
    read = reading(at, 1.0, 5.0)
    assert (read.stalled, read.largest_gap_s) == (0, 0.9)
    assert read.ttlt_s == pytest.approx(1.2)
    at[-1] = 1.1
    assert reading(at, 1.0, 5.0).stalled == 1


def test_a_reading_of_one_token() -> None:
    assert reading(np.array([2.0]), 1.0, 5.0) == Reading(
        qoe=qoe(np.array([2.0]), 1.0, 5.0), ttlt_s=2.2, largest_gap_s=0.0, stalled=0, tbt_p50_s=0.0, tbt_p99_s=0.0
    )


def test_nonsense_has_no_reading() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        reading(np.array([]), 1.0, 5.0)
    with pytest.raises(ValueError, match="expected TTFT"):
        reading(np.ones(3), 1.0, 0.0)

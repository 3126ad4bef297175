from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from disco_daemon.engine.serve.row_grouping import FAR, MOST, NEWEST, OTHER_EVERY, TRIES, RowGrouping

FIRST = 2 * TRIES  # iterations
LONG = 40 * OTHER_EVERY


def play(grouping: RowGrouping, n: int, ratio: float, n_times: int, slowness: float = 1.0) -> list[bool]:
    """Compute `n` rows so often, which take `ratio` times as long one by one; whether they went apart each time."""
    ways = []
    for _ in range(n_times):
        ways.append(grouping.apart(n))
        grouping.observe(n, slowness * (ratio if ways[-1] else 1.0), apart=ways[-1])
    return ways


@given(st.integers(2, MOST), st.floats(0.5, 2.0))
def test_rows_go_the_quicker_way_and_seldom_the_other(n: int, ratio: float) -> None:
    assume(min(abs(ratio - x) for x in (1, FAR, 1 / FAR)) > 1e-6)
    grouping = RowGrouping()
    grouping.observe(1, ratio / n, apart=False)
    ways = play(grouping, n, ratio, LONG)
    assert not ways[0], "what they take together is measured first"
    other = [i for i, apart in enumerate(ways) if apart is not (ratio < 1) and i > FIRST]
    if not 1 / FAR < ratio < FAR:
        assert not other
        return
    assert all(b - a == OTHER_EVERY for a, b in pairwise(other))
    assert len(other) >= LONG // OTHER_EVERY - 1


@given(st.integers(2, MOST))
def test_what_is_hopeless_is_not_tried_once(n: int) -> None:
    grouping = RowGrouping()
    grouping.observe(1, 0.9, apart=False)  # it reads the weights, whether for one row or several
    assert not any(play(grouping, n, 0.9 * n, LONG))


def test_nothing_is_split_before_it_is_known_what_one_takes_nor_what_llama_cpp_does_best() -> None:
    grouping = RowGrouping()
    assert not any(play(grouping, 2, 0.5, LONG)), "nobody knows what one takes"
    grouping.observe(1, 0.1, apart=False)
    assert not grouping.apart(2), "nor what two took just now"
    grouping.observe(2, 1.0, apart=False)
    assert grouping.apart(2)
    assert not grouping.apart(3)
    assert not any(play(grouping, MOST + 1, 0.5, LONG))
    assert not any(play(grouping, 1, 0.5, LONG))


@given(st.integers(2, MOST), st.floats(0.7, 1.4), st.floats(0.7, 1.4))
def test_when_the_speeds_change_so_does_the_way(n: int, before: float, after: float) -> None:
    assume(abs(after - 1) > 0.01)
    grouping = RowGrouping()
    grouping.observe(1, 0.010, apart=False)
    play(grouping, n, before, 200)
    ways = play(grouping, n, after, NEWEST * OTHER_EVERY)
    assert [after < 1.0] * 2 in (ways[-2:], ways[-3:-1], ways[-4:-2])


@given(st.integers(2, MOST), st.sampled_from([0.9, 1.1]), st.randoms(use_true_random=False))
def test_what_slows_all_iterations_for_a_while_changes_nothing(n: int, ratio: float, rng: random.Random) -> None:
    grouping = RowGrouping()
    grouping.observe(1, 0.010, apart=False)
    for _ in range(50):
        ways = play(grouping, n, ratio, 101, slowness=rng.uniform(1.0, 3.0))
    assert sum(apart is (ratio < 1) for apart in ways) > 90


def test_one_slow_iteration_does_not_count_for_more_than_it_is() -> None:
    grouping = RowGrouping()
    grouping.observe(1, 0.010, apart=False)
    play(grouping, 4, 0.8, 3 * OTHER_EVERY)
    grouping.observe(4, 0.01, apart=False)
    grouping.observe(4, 10.0, apart=True)
    assert grouping.apart(4), "another process had the processor"

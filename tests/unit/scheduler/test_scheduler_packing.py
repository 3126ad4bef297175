from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from benchmarks.qoe.scheduling import exact, ratio_to_optimum
from disco_daemon.scheduler.packing import by_density, greedy, pack


def by_trying(gains: list[float], cells: list[int], size: int, room: int) -> float:
    return max(
        sum(gains[i] for i in chosen)
        for n in range(size + 1)
        for chosen in combinations(range(len(gains)), n)
        if sum(cells[i] for i in chosen) <= room
    )


@pytest.mark.parametrize("seed", range(10))
def test_the_oracle_is_the_best_of_all_selections(seed: int) -> None:
    random = np.random.default_rng(seed)
    gains, cells = random.random(9), random.integers(1, 30, 9)
    best = exact(gains, cells.astype(float), 60)
    for size in range(10):
        assert best[size] == pytest.approx(by_trying(gains.tolist(), cells.tolist(), size, 60))


def test_the_choice_is_within_two_percent_of_the_optimum() -> None:
    """Over all batch sizes and selections; `python -m benchmarks.qoe.scheduling` tries 1,000 instances."""
    ratios = [ratio_to_optimum(seed) for seed in range(2_000, 2_150)]
    assert min(ratios) >= 0.98
    assert max(ratios) <= 1 + 1e-9


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_worth_more_than_the_bound(seed: int) -> None:
    random = np.random.default_rng(seed)
    n, size, room = int(random.integers(1, 12)), int(random.integers(1, 13)), int(random.integers(1, 120))
    gains, cells = random.random(n), random.integers(1, 40, n).astype(float)
    chosen, total, bound = by_density(gains, cells, size, room)
    best = exact(gains, cells, room)[min(size, n)]
    assert total - 1e-9 <= best <= bound + 1e-9
    assert total == pytest.approx(gains[chosen].sum())
    assert chosen == greedy((gains / cells).argsort()[::-1], cells, size, room)


def test_what_does_not_fit_is_skipped() -> None:
    cells = np.array([50.0, 60.0, 40.0, 10.0])
    assert greedy(np.array([0, 1, 2, 3]), cells, 4, 100.0) == [0, 2, 3]
    assert greedy(np.array([0, 1, 2, 3]), cells, 2, 100.0) == [0, 2]
    assert greedy(np.array([0, 1]), cells, 0, 100.0) == []


def test_a_large_job_is_taken_for_small_ones_where_that_pays() -> None:
    """Algorithm 1 takes the dense one, and has no room for the good one then."""
    gains, cells = np.array([[0.2, 0.9]]), np.array([10.0, 100.0])
    assert pack(gains, cells, [2], 100.0, rough=True) == (0, [0])
    assert pack(gains, cells, [2], 100.0) == (0, [1])


def test_two_are_exchanged_for_one() -> None:
    gains, cells = np.array([[0.5, 0.45, 0.8]]), np.array([50.0, 50.0, 70.0])
    assert sorted(pack(gains, cells, [3], 100.0)[1]) == [0, 1]
    assert pack(gains, cells, [1], 100.0)[1] == [2]


@pytest.mark.parametrize("rough", [True, False])
def test_the_size_with_the_largest_total_wins_and_the_larger_of_two_equals(rough: bool) -> None:
    cells = np.ones(4)
    crowd = np.array([[0.9] * 4, [0.5] * 4, [0.1] * 4])
    assert pack(crowd, cells, [1, 2, 4], 10.0, rough=rough)[0] == 1
    flat = np.array([[0.9, 0, 0, 0]] * 3)
    row, chosen = pack(flat, cells, [1, 2, 4], 10.0, rough=rough)
    assert row == 2
    assert sorted(chosen) == [0, 1, 2, 3], "one without a gain is served where there is room"


def test_what_a_size_is_worth_to_the_others_counts() -> None:
    gains, cells = np.array([[0.0], [0.5]]), np.ones(1)
    assert pack(gains, cells, [0, 1], 10.0, np.array([3.0, 2.0])) == (0, [])
    assert pack(gains, cells, [0, 1], 10.0, np.array([3.0, 2.8])) == (1, [0])


@pytest.mark.parametrize("rough", [True, False])
def test_no_room_for_anybody_is_no_choice(rough: bool) -> None:
    assert pack(np.array([[0.5, 0.1]]), np.array([3.0, 4.0]), [2], 0.0, rough=rough) == (0, [])


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("rough", [True, False])
def test_it_fits_and_nobody_is_there_twice(seed: int, rough: bool) -> None:
    random = np.random.default_rng(seed)
    n = int(random.integers(1, 80))
    cells = random.integers(1, 100, n).astype(float)
    sizes = sorted({int(size) for size in random.integers(0, n + 5, 4)})
    room = float(random.integers(0, int(cells.sum()) + 5))
    row, chosen = pack(random.random((len(sizes), n)), cells, sizes, room, rough=rough)
    assert len(chosen) == len(set(chosen)) <= sizes[row]
    assert cells[chosen].sum() <= room


def test_where_prices_are_known_priority_is_the_gain_over_the_price() -> None:
    """Both need as many cells, and the one that gains more now will hold them for long."""
    gains, cells = np.array([[0.9, 0.6]]), np.array([60.0, 60.0])
    assert pack(gains, cells, [2], 100.0) == (0, [0])
    assert pack(gains, cells, [2], 100.0, prices=np.array([900.0, 100.0])) == (0, [1])

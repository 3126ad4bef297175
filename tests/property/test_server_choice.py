"""Whatever happens, the choice among servers keeps its promises."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.dispatch.member import KNOWN
from disco_daemon.dispatch.pool import LOOK_SHARE, Candidate, Pool
from disco_daemon.dispatch.share import WINDOW, WindowShare

NAMES = ("a/m", "b/m", "c/m", "d/m")
TIMES = st.floats(1e-4, 60.0)
# What becomes of one request: who is down, how long each would take, whether each fails.
REQUESTS = st.lists(
    st.tuples(
        st.tuples(*(st.sampled_from((0.0, 0.0, 3.0)) for _ in NAMES)),
        st.tuples(*(TIMES for _ in NAMES)),
        st.tuples(*(st.integers(0, 9) for _ in NAMES)),
    ),
    max_size=60,
)


def serve(pool: Pool, down: tuple[float, ...], times: tuple[float, ...], luck: tuple[int, ...], now: float) -> bool:
    """Play one request as an endpoint would; whether it was asked twice."""
    candidates = [Candidate(name, 0.001 * i, d) for i, (name, d) in enumerate(zip(NAMES, down, strict=True))]
    choice = pool.choose(candidates, now)
    if min(down) == 0:
        assert down[NAMES.index(choice.name)] == 0, "one that is down was chosen while another is up"
    i = NAMES.index(choice.name)
    if luck[i] == 0:
        pool.fail(choice.name, now)
        return False
    if choice.hedge is None or times[i] <= choice.hedge[1]:
        pool.observe(choice.name, times[i], now)
        return False
    other, after_s = choice.hedge
    assert other != choice.name
    assert down[NAMES.index(other)] == 0
    if not pool.take_hedge(other):
        pool.observe(choice.name, times[i], now)
        return False
    second = after_s + times[NAMES.index(other)]
    pool.observe(choice.name, min(times[i], second), now, censored=second < times[i])
    return True


@given(REQUESTS)
@settings(max_examples=25, deadline=None)
def test_who_is_down_is_never_asked_while_another_is_up_and_a_round_trip_changes_nothing(requests) -> None:  # type: ignore[no-untyped-def]
    pool = Pool()
    for now, request in enumerate(requests):
        down, times, luck = request
        serve(pool, down, times, luck, float(now))
    candidates = [Candidate(name) for name in NAMES]
    again = Pool.from_json(json.loads(json.dumps(pool.to_json())))
    assert again.to_json() == pool.to_json()
    assert again.weigh(candidates) == pool.weigh(candidates)


@given(st.floats(0, 1), st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 3)), max_size=450))
@settings(max_examples=40, deadline=None)
def test_no_window_of_requests_has_more_hedges_than_its_share(share, requests) -> None:  # type: ignore[no-untyped-def]
    allowed = WindowShare(share)
    taken: list[int] = []
    for tokens, wanted in requests:
        allowed.count(tokens)
        taken.append(sum(allowed.take(tokens) for _ in range(wanted)))
        assert allowed.n_taken == sum(taken)
    for begin in range(max(1, len(taken) - WINDOW + 1)):
        assert sum(taken[begin : begin + WINDOW]) <= share * WINDOW + 1e-6


def test_servers_that_are_unknown_get_a_bounded_share_until_they_are_known() -> None:
    pool = Pool()
    for _ in range(KNOWN):
        pool.observe("a/m", 0.4, 0.0)
    chosen: list[str] = []
    for i in range(3 * WINDOW):  # none of the others ever says how fast it is
        chosen.append(pool.choose([Candidate(name) for name in NAMES], float(i)).name)
        if chosen[-1] == "a/m":
            pool.observe("a/m", 0.4, float(i))
    for begin, end in pairwise(range(0, 3 * WINDOW + 1, WINDOW)):
        looks = sum(name != "a/m" for name in chosen[begin:end])
        assert 0 < looks <= LOOK_SHARE * WINDOW

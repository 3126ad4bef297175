"""Which models stay in memory: never over the limit, never one that answers leaves, and no more than must."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.scheduler.expected_use import BURST_S, DAY_S, HOUR_S, ExpectedUse
from disco_daemon.scheduler.residency import DELAYS, ModelUse, coming_back, leaving_for, next_to_load

NAMES = [f"m{i}" for i in range(6)]


@st.composite
def memories(draw: st.DrawFn) -> tuple[list[ModelUse], int]:
    """Models in a memory that holds those that are here, as a keeper of the limit has them; now and then it shrank."""
    models = [
        ModelUse(
            name,
            draw(st.integers(1, 100)),
            draw(st.floats(0.1, 60)),
            draw(st.floats(0, 500)),
            is_here=(here := draw(st.booleans())),
            is_busy=here and draw(st.booleans()),
            has_left=not here and draw(st.booleans()),
            is_expected=not here and draw(st.booleans()),
            is_just_used=here and draw(st.booleans()),
        )
        for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    ]
    here_bytes = sum(m.n_bytes for m in models if m.is_here)
    return models, here_bytes + draw(st.integers(-50, 100))


@given(memories(), st.integers(0, 150))
def test_who_leaves_makes_room_and_is_not_busy_and_not_one_more_than_must(
    memory: tuple[list[ModelUse], int], n_bytes: int
) -> None:
    models, limit = memory
    by_name = {m.name: m for m in models}
    here = sum(m.n_bytes for m in models if m.is_here)
    leaving = leaving_for(n_bytes, models, limit)
    idle = sum(m.n_bytes for m in models if m.is_here and not m.is_busy)
    if leaving is None:
        assert here - idle + n_bytes > limit, "there was room, if all that are idle had left"
        return
    gone = [by_name[name] for name in leaving]
    assert all(m.is_here and not m.is_busy for m in gone)
    left = here - sum(m.n_bytes for m in gone) + n_bytes
    assert left <= limit
    assert all(left + m.n_bytes > limit for m in gone), "one of them could have stayed"


@given(memories(), st.data())
def test_the_first_that_can_be_loaded_is(memory: tuple[list[ModelUse], int], data: st.DataObject) -> None:
    models, limit = memory
    away = [m.name for m in models if not m.is_here]
    wanted = data.draw(st.permutations(away))
    swap = next_to_load(wanted, models, limit)
    sizes = {m.name: m.n_bytes for m in models}
    can = [name for name in wanted if leaving_for(sizes[name], models, limit) is not None]
    assert (None if swap is None else swap.name) == next(iter(can), None)


@given(memory=memories(), beside=st.booleans())
def test_only_what_left_or_is_expected_comes_and_only_where_that_saves_more_than_its_load(
    *, memory: tuple[list[ModelUse], int], beside: bool
) -> None:
    models, limit = memory
    by_name = {m.name: m for m in models}
    if (swap := coming_back(models, limit, beside=beside)) is None:
        return
    back, gone = by_name[swap.name], [by_name[name] for name in swap.leaving]
    assert back.has_left or (back.is_expected and not gone), "nobody leaves for what was not here"
    assert not back.is_here
    assert not any(m.is_busy for m in gone)
    assert not any(m.is_just_used for m in gone), "whoever asked it may ask on at once"
    saved = back.saves - sum(m.saves for m in gone)
    assert saved > back.load_s * (60 * DELAYS if beside else 1), "an hour pays for it, or a minute for the delay"
    assert sum(m.n_bytes for m in models if m.is_here) - sum(m.n_bytes for m in gone) + back.n_bytes <= limit


def test_the_one_leaves_that_saves_least_for_its_memory() -> None:
    often = ModelUse("often", 50, 5.0, 60.0, is_here=True)
    seldom = ModelUse("seldom", 50, 5.0, 2.0, is_here=True)
    slow = ModelUse("slow", 50, 300.0, 2.0, is_here=True)  # asked for as seldom, but dear to have again
    assert leaving_for(40, [often, seldom, slow], 150) == ("seldom",)


times = st.lists(st.floats(0, 40 * DAY_S, allow_nan=False), max_size=60)


@given(times, st.floats(0, 60 * DAY_S))
def test_rates_are_finite_whatever_the_clock_does(at: list[float], then: float) -> None:
    use = ExpectedUse(1000.0)
    for one in at:  # in any order: a clock may be set back
        use.observe(one)
        assert 0 <= use.per_hour(one) < math.inf
    assert 0 <= use.per_hour(then) < math.inf
    again = ExpectedUse.from_json(json.loads(json.dumps(use.to_json())), then)
    assert again.per_hour(then) == pytest.approx(use.per_hour(then), rel=1e-6), "a restart is no end of a burst"


@pytest.mark.parametrize(
    "saved",
    [
        {}, [], {"asked": 1}, {**ExpectedUse(0.0).to_json(), "quiet": [0.0]},
        {**ExpectedUse(0.0).to_json(), "asked": ["x"] * 7}, {**ExpectedUse(0.0).to_json(), "in_step": [0.0] * 7},
        {**ExpectedUse(0.0).to_json(), "watched_to": math.nan},
        {**ExpectedUse(0.0).to_json(), "last": math.nan}, {**ExpectedUse(0.0).to_json(), "last": "noon"},
    ],
)  # fmt: skip
def test_what_no_use_wrote_is_told_from_one(saved: object) -> None:
    with pytest.raises(ValueError):
        ExpectedUse.from_json(saved, 0.0)


def test_a_model_in_use_is_expected_behind_a_restart_as_it_was_before_for_as_long_as_its_burst_lasts() -> None:
    use = ExpectedUse(0.0)
    for minute in range(600):
        use.observe(60.0 * minute)
    last = 60.0 * 599
    saved = use.to_json()
    back, late = (ExpectedUse.from_json(saved, last + passed) for passed in (20.0, BURST_S + 60.0))
    assert back.per_hour(last + 20) == pytest.approx(use.per_hour(last + 20), rel=0.01)
    assert back.per_hour(last + 20) > 20, "requests an hour; no burst has begun for ten hours"
    assert late.per_hour(last + BURST_S + 60) < 1
    older = {name: one for name, one in saved.items() if name != "last"}  # as it was written until now
    assert ExpectedUse.from_json(older, last + 20).per_hour(last + 20) < 1
    set_back = ExpectedUse.from_json(saved, 100.0)
    assert 0 <= set_back.per_hour(100.0) < math.inf


def test_a_model_is_expected_at_its_hour_and_within_its_bursts() -> None:
    use = ExpectedUse(0.0)
    for day in range(10):
        for minute in range(0, 60, 5):
            use.observe(day * DAY_S + 9 * HOUR_S + 60 * minute)
    morning, night = (10 * DAY_S + hour * HOUR_S for hour in (9.5, 3.0))
    assert use.per_hour(morning) > 3 * use.per_hour(night)
    use.observe(morning)
    assert use.per_hour(morning + 250) > 5 * use.per_hour(morning + BURST_S + 5 * HOUR_S), (
        "a burst is soon gone on with"
    )


def test_what_was_learned_is_the_same_after_a_restart() -> None:
    use = ExpectedUse(0.0)
    for day in range(5):
        use.observe(day * DAY_S + 9 * HOUR_S)
    then = 5 * DAY_S + 9 * HOUR_S
    again = ExpectedUse.from_json(use.to_json(), then)
    assert again.per_hour(then) == pytest.approx(use.per_hour(then), rel=0.2)

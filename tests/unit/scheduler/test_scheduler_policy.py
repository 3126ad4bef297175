from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.eval.traces import Requests
from benchmarks.qoe.machine import Machine, Simulation
from benchmarks.qoe.scheduling import LARGE, random_jobs
from benchmarks.qoe.simulation import QoeSetting, workload
from disco_daemon.scheduler.andes import ONE_BY_ONE, Andes, horizon_s
from disco_daemon.scheduler.baselines import Fcfs, RoundRobin
from disco_daemon.scheduler.begun_answers import BegunJobs
from disco_daemon.scheduler.candidates import REST_PRICE, Candidates
from disco_daemon.scheduler.jobs import Capacity, Job, TokenScheduler
from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.scheduler.timeline import Readers, Timeline

LATENCY = (0.02, 0.01, 0.001, 0.0)  # 10 side by side: 0.12 s
NOW = 100.0


def job(
    key: int, cells: int = 100, *, arrived: float = NOW, tokens: int = 0, pace: float = 5.0, runs: bool = False
) -> Job:
    """A request whose `tokens` came just before `NOW`, all at once."""
    timeline = Timeline(arrived, 1.0, pace)
    if tokens:
        timeline.token(NOW, tokens)
    return Job(key, timeline, cells, 0 if tokens else cells, resident=runs, waiting_since=None if runs else arrived)


def andes(**wanted: float) -> Andes:
    return Andes(IterationLatency(LATENCY), **wanted)


def keys(jobs: Sequence[Job]) -> list[object]:
    return [job.key for job in jobs]


def obey(jobs: Sequence[Job], chosen: Sequence[Job], now: float) -> None:
    """What an engine does: who is chosen runs, who is not waits."""
    for job in jobs:
        if job in chosen:
            job.waiting_since, job.resident = None, True
        elif job.waiting_since is None:
            job.waiting_since, job.resident = now, False
            job.n_preempted += 1


@pytest.mark.parametrize("scheduler", [Fcfs(), RoundRobin(), andes()], ids=["fcfs", "round-robin", "andes"])
def test_no_jobs_no_choice(scheduler: TokenScheduler) -> None:
    assert scheduler.choose([], Capacity(1000, 8), NOW) == []


@pytest.mark.parametrize("scheduler", [Fcfs(), RoundRobin(), andes()], ids=["fcfs", "round-robin", "andes"])
def test_all_run_while_all_fit(scheduler: TokenScheduler) -> None:
    jobs = [job(i) for i in range(5)]
    assert sorted(map(str, keys(scheduler.choose(jobs, Capacity(1000, 8), NOW)))) == list("01234")


@pytest.mark.parametrize("scheduler", [Fcfs(), RoundRobin(), andes()], ids=["fcfs", "round-robin", "andes"])
def test_one_above_the_high_water_mark_is_served_alone(scheduler: TokenScheduler) -> None:
    assert keys(scheduler.choose([job(0, 990), job(1, 995)], Capacity(1000, 8), NOW)) in ([0], [1])
    assert scheduler.choose([job(2, 1001)], Capacity(1000, 8), NOW) == []


@pytest.mark.parametrize(
    "scheduler", [Fcfs(), RoundRobin(), andes(preemption_cap=0.0)], ids=["fcfs", "round-robin", "andes"]
)
def test_who_runs_may_grow_above_the_high_water_mark_but_not_above_all(scheduler: TokenScheduler) -> None:
    jobs = [job(0, 500, runs=True, tokens=1), job(1, 480, runs=True, tokens=1), job(2, 15)]
    assert sorted(map(str, keys(scheduler.choose(jobs, Capacity(1000, 8), NOW)))) == ["0", "1"]
    jobs[1].n_context = 501
    chosen = scheduler.choose(jobs, Capacity(1000, 8), NOW)
    assert sum(job.n_context for job in chosen) <= 1000
    assert jobs[0] in chosen or jobs[1] in chosen


# --- the baselines ----------------------------------------------------------------------------------------------------


def test_fcfs_stops_at_the_first_that_does_not_fit() -> None:
    jobs = [job(2, 100, arrived=3.0), job(1, 500, arrived=2.0), job(0, 600, arrived=1.0)]
    assert keys(Fcfs().choose(jobs, Capacity(1000, 8), NOW)) == [0]


def test_fcfs_takes_off_who_came_last() -> None:
    jobs = [job(i, 300, arrived=float(i), runs=True) for i in range(4)]
    assert keys(Fcfs().choose(jobs, Capacity(1000, 8), NOW)) == [0, 1, 2]


def test_round_robin_takes_turns() -> None:
    scheduler, jobs = RoundRobin(slice_s=2.0), [job(i, arrived=90.0 + i) for i in range(4)]
    turns = []
    for now in (100.0, 101.0, 102.0, 104.0):
        chosen = scheduler.choose(jobs, Capacity(1000, 2), now)
        obey(jobs, chosen, now)
        turns.append(keys(chosen))
    assert turns == [[0, 1], [0, 1], [2, 3], [0, 1]]


def test_a_slice_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="slice"):
        RoundRobin(0.0)


# --- Andes ------------------------------------------------------------------------------------------------------------


def test_a_reader_with_text_in_hand_yields_to_one_with_none() -> None:
    full = job(0, arrived=90.0, tokens=150, runs=True)
    assert keys(andes().choose([full, job(1)], Capacity(1000, 1), NOW)) == [1]


def test_a_reader_without_text_in_hand_goes_on() -> None:
    short = job(0, arrived=99.0, tokens=1, runs=True)
    assert keys(andes().choose([short, job(1)], Capacity(1000, 1), NOW)) == [0]


def test_an_equal_gain_does_not_swap() -> None:
    running, waiting = job(0, arrived=95.0, tokens=10, runs=True), job(1, arrived=95.0, tokens=10)
    for jobs in ([running, waiting], [waiting, running]):
        assert keys(andes().choose(jobs, Capacity(1000, 1), NOW)) == [0]


def test_one_keeps_its_place_against_one_but_not_against_two() -> None:
    """All gain the same; who runs counts half as much again."""
    running = job(0, 200, arrived=95.0, tokens=10, runs=True)
    others = [job(i, 100, arrived=95.0, tokens=10) for i in (1, 2)]
    assert keys(andes(high_water=1.0).choose([running, others[0]], Capacity(250, 8), NOW)) == [0]
    paper = andes(high_water=1.0, stall_share=1.0)
    assert set(keys(paper.choose([running, *others], Capacity(250, 8), NOW))) == {1, 2}


def test_a_newcomer_waits_at_the_door_while_begun_answers_fill_the_cells() -> None:
    begun = [job(i, 100, arrived=90.0, tokens=60, runs=True) for i in range(10)]  # 2 s of text in hand
    new = job(10, 100)
    assert 10 not in keys(andes(stall_share=0.0).choose([*begun, new], Capacity(1000, 64), NOW))
    assert 10 in keys(andes(stall_share=0.0).choose([*begun[:8], new], Capacity(1000, 64), NOW)), "there is room for it"


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["begun-first", "as-in-the-paper"])
def test_of_two_newcomers_the_one_whose_answer_will_be_shorter_comes_in_first(share: float) -> None:
    begun = [job(i, 100, arrived=90.0, tokens=60, runs=True) for i in range(9)]
    long, short = job(10, 100), job(11, 100)
    long.expected_rest, short.expected_rest = 400.0, 80.0
    for one in begun:
        one.expected_rest = 10.0
    for order in ([long, short], [short, long]):
        scheduler = andes(stall_share=share, high_water=1.0)
        chosen = set(keys(scheduler.choose([*begun, *order], Capacity(1000, 64), NOW)))
        assert chosen & {10, 11} == {11}


def test_an_answer_of_which_nothing_is_known_is_expected_to_be_as_long_as_others_are() -> None:
    jobs = [job(i, 100) for i in range(3)]
    jobs[0].expected_rest, jobs[1].expected_rest = 300.0, 100.0
    prices = Candidates(jobs, Capacity(1000, 8), 1.0).prices
    assert prices is not None
    assert prices - 100 == pytest.approx(REST_PRICE * np.array([300.0, 100.0, 200.0]))
    assert Candidates([jobs[2]], Capacity(1000, 8), 1.0).prices is None


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_choice_that_nothing_disputes_is_the_one_that_packing_makes(seed: int, knows: bool) -> None:
    rng = np.random.default_rng(seed)
    jobs = random_jobs(rng, int(rng.integers(2, 40)), 0.0, mean_cells=300)
    for one in jobs:
        one.expected_rest = float(rng.integers(1, 500)) if knows else 0.0
        if one.timeline.n_tokens and rng.random() < 0.5:
            one.waiting_since, one.resident, one.resume_s = None, True, 0.0
    capacity = Capacity(int(rng.integers(3000, 15000)), int(rng.integers(8, 64)))
    quick, slow = (Andes(IterationLatency(LARGE), stall_share=0.0, preemption_cap=100.0) for _ in range(2))
    slow._undisputed = lambda *_: None  # type: ignore[method-assign]
    assert set(keys(quick.choose(jobs, capacity, 31.0))) == set(keys(slow.choose(jobs, capacity, 31.0)))


def test_a_begun_answer_comes_back_before_its_reader_has_read_all_there_is() -> None:
    waiting = job(0, 100, arrived=90.0, tokens=52)  # text for 0.4 s
    others = [job(i, 100, arrived=90.0, tokens=300, runs=True) for i in range(1, 11)]  # for 50 s
    assert 0 in keys(andes(stall_share=0.0).choose([waiting, *others], Capacity(1000, 64), NOW))


def test_of_begun_answers_the_longest_are_given_up_and_no_more_than_a_share_of_all_readers() -> None:
    scheduler = andes(stall_share=0.1, preemption_cap=100.0)
    begun = [job(i, 80 + 10 * i, arrived=90.0, tokens=60, runs=True) for i in range(10)]
    new = [job(i, 250) for i in range(10, 20)]
    chosen = keys(scheduler.choose([*begun, *new], Capacity(1300, 64), NOW))
    left_out = {i for i in range(10) if i not in chosen}
    assert left_out == {8, 9}, "two of twenty readers, those with the most cells"
    assert len([i for i in chosen if isinstance(i, int) and i >= 10]) == 1, "as many newcomers as that makes room for"


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1, 0.3]), st.floats(1.1, 3.0))
@settings(max_examples=20, deadline=None)
def test_no_more_readers_stand_still_than_may(seed: int, share: float, load: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = Requests(rng.integers(5, 80, 200), rng.integers(40, 300, 200))
    machine = Machine(
        (0.02, 0.001, 0.0005, 0.00002), n_cells=3000, n_seqs=64, n_host_cells=10**6, swap_cps=1e6, n_chunk=64
    )
    requests = workload(
        QoeSetting("text", "poisson", 120, (seed,)),
        lengths,
        load * machine.capacity_rps(lengths.prompt, lengths.output),
        seed,
    )
    latency = IterationLatency(machine.latency)
    scheduler = Andes(latency, max_wait_s=math.inf, high_water=0.97, stall_share=share)
    stood = Simulation(machine, requests, scheduler, latency).run().stalls() > 10.0
    assert stood.mean() <= share + 1 / 120


def test_the_longer_all_are_here_the_further_it_looks() -> None:
    def ahead(*ages: float) -> float:
        return horizon_s(Readers([Timeline(NOW - age, 1.0, 5.0) for age in ages]), NOW, 20.0)

    assert ahead(1.0, 3.0) == 20.0
    assert ahead(20.0, 40.0) == pytest.approx(60.0)


@pytest.mark.parametrize("latency", [LATENCY, (0.0, 0.0, 0.007, 1e-4)], ids=["by-answers", "all-by-cells"])
def test_who_is_in_a_hurry_runs_beside_others_however_slow_that_is(latency: tuple[float, float, float, float]) -> None:
    """Four answers are written while a prompt of 2,048 tokens comes: nobody stands still for it."""
    jobs = [job(i, 170, arrived=95.0, tokens=100, pace=20.0, runs=True) for i in range(4)]
    jobs.append(job(4, 2048, pace=11.0))
    for one in jobs:
        one.hurried = True
    assert set(keys(Andes(IterationLatency(latency)).choose(jobs, Capacity(8192, 32), NOW))) == set(range(5))


def test_of_those_in_a_hurry_some_wait_where_there_is_no_room_for_all() -> None:
    jobs = [job(i, 300, pace=10.0) for i in range(4)]
    for one in jobs:
        one.hurried = True
    chosen = andes().choose(jobs, Capacity(1000, 8), NOW)
    assert len(chosen) == 3


@pytest.mark.parametrize("cell_s", [0.0, 1e-5])
def test_the_largest_batch_that_keeps_a_pace_is_found_without_trying(cell_s: float) -> None:
    latency = IterationLatency((0.02, 0.01, 0.001, cell_s))
    jobs = [job(i, 150, pace=pace) for i, pace in enumerate([4.0, 5.0, 7.0, 11.0] * 10)]
    candidates = Candidates(jobs, Capacity(2000, 64), 1.0)
    for tbt_s in (0.01, 0.025, 0.031, 0.1, 0.2, 0.4):
        n = Andes(latency)._within(candidates, tbt_s)
        tried = [k for k in range(1, 41) if latency.predict(k, 0, min(150 * k, 2000)) <= tbt_s]
        assert max(n, 0) == max(tried, default=0), tbt_s


def test_the_shorter_context_is_served_first() -> None:
    jobs = [job(i, cells) for i, cells in enumerate((500, 300, 300, 300))]
    assert set(keys(andes().choose(jobs, Capacity(1000, 8), NOW))) == {1, 2, 3}


def test_a_batch_that_keeps_nobodys_pace_is_made_smaller() -> None:
    """Six side by side get 12.5 token/s each, twenty 4.5; fourteen of the twenty have text to read for long."""

    def n_served(pace: float) -> int:
        jobs = [job(i, pace=pace) for i in range(6)]
        jobs += [job(i, pace=pace, tokens=500, arrived=80.0) for i in range(6, 20)]
        return len(andes().choose(jobs, Capacity(100_000, 20), NOW))

    assert n_served(12.0) == 6
    assert n_served(4.0) == 20


def test_preemptions_keep_to_the_cap() -> None:
    def preemptions(cap: float) -> int:
        scheduler, jobs = andes(preemption_cap=cap), [job(i, arrived=NOW + i) for i in range(30)]
        count = 0
        for turn in range(60):
            now = NOW + turn
            present = [job for job in jobs if job.timeline.arrived_s <= now]
            chosen = scheduler.choose(present, Capacity(100_000, 3), now)
            count += sum(job.running and job not in chosen for job in present)
            assert scheduler.n_preempted == count
            obey(present, chosen, now)
            for served in chosen:
                served.timeline.token(now + 0.9, 15)
                served.n_context += 15
                served.n_missing = 0
            assert count <= cap * scheduler.n_seen
        return count

    assert preemptions(0.0) == 0
    assert 0 < preemptions(0.3) <= 9 < preemptions(3.0)


def test_who_waited_too_long_is_served_to_its_end() -> None:
    scheduler = andes(max_wait_s=30.0, preemption_cap=100.0)
    old = job(0, 900, arrived=NOW)
    for turn in range(60):
        now = NOW + turn
        fresh = [job(100 + 3 * turn + i, arrived=now) for i in range(3)]  # always somebody better
        chosen = scheduler.choose([old, *fresh], Capacity(1100, 3), now)
        assert (old in chosen) == (turn > 30), turn
        obey([old], chosen, now)


def test_no_starvation_bound_no_mercy() -> None:
    scheduler = andes(max_wait_s=float("inf"))
    jobs = [job(0, 900, arrived=NOW - 1000), *(job(i) for i in range(1, 4))]
    assert 0 not in keys(scheduler.choose(jobs, Capacity(1100, 3), NOW))


@pytest.mark.parametrize(
    "wanted",
    [{"stall_share": 1.1}, {"horizon_s": 0.0}, {"preemption_cap": -1.0}, {"max_wait_s": 0.0}, {"high_water": 1.5}],
)
def test_what_is_no_scheduler_is_refused(wanted: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"no scheduler|high-water"):
        andes(**wanted)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.15, 1.0]))
@settings(max_examples=25, deadline=None)
def test_gains_computed_one_by_one_choose_what_those_of_all_do(seed: int, share: float) -> None:
    """Over a whole run, so that the state that one choice leaves to the next is the same, too."""

    def choices(one_by_one: int) -> list[list[object]]:
        rng, latency = np.random.default_rng(seed), IterationLatency(LARGE)
        scheduler = Andes(latency, stall_share=share, max_wait_s=20.0)
        jobs = random_jobs(rng, int(rng.integers(2, 64)), 0.0, mean_cells=300)
        capacity = Capacity(int(rng.integers(2000, 9000)), int(rng.integers(8, 64)))
        found, now = [], 31.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("disco_daemon.scheduler.andes.ONE_BY_ONE", one_by_one)
            for turn in range(12):
                chosen = scheduler.choose(jobs, capacity, now)
                found.append(keys(chosen))
                obey(jobs, chosen, now)
                for one in chosen:
                    one.timeline.token(now + 0.9, 9)
                    one.n_context, one.n_missing = one.n_context + 9, 0
                now += 1.0
                jobs[turn % len(jobs)] = random_jobs(rng, 1, now, mean_cells=300, first_key=1000 + turn)[0]
        return found

    assert choices(ONE_BY_ONE) == choices(0)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_of_newcomers_those_that_fit_are_admitted_by_gain_and_price(seed: int) -> None:
    rng = np.random.default_rng(seed)
    candidates = Candidates([job(i, int(rng.integers(1, 400))) for i in range(20)], Capacity(2000, 20), 1.0)
    gains, room = rng.random(20) + 0.01, float(rng.integers(0, 2000))
    new = rng.random(20) < 0.6
    begun = BegunJobs([], new, ~new & (rng.random(20) < 0.5), room)
    others = np.flatnonzero(rng.random(20) < 0.8)
    left, expected = room, {i for i in others.tolist() if begun.stays[i]}
    for i in sorted((i for i in others.tolist() if new[i]), key=lambda i: candidates.needs[i] / gains[i]):
        if candidates.needs[i] <= left:
            left -= candidates.needs[i]
            expected.add(i)
    assert begun.may_enter(candidates, gains, others).tolist() == sorted(expected)

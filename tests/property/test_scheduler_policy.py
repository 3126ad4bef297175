"""What holds of every decision of every token scheduler, whatever comes, goes and grows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.scheduler.andes import Andes
from disco_daemon.scheduler.baselines import Fcfs, RoundRobin
from disco_daemon.scheduler.jobs import Capacity, Job, TokenScheduler
from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.scheduler.timeline import Timeline

CAPACITY = Capacity(2000, 6)
LATENCY = (0.02, 0.01, 0.001, 1e-6)


def schedulers(cap: float, max_wait_s: float) -> dict[str, TokenScheduler]:
    andes = Andes(IterationLatency(LATENCY), preemption_cap=cap, max_wait_s=max_wait_s)
    return {"fcfs": Fcfs(), "round-robin": RoundRobin(1.0), "andes": andes}


@pytest.mark.parametrize("name", ["fcfs", "round-robin", "andes"])
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.2, 6), st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([2.0, 1e6]))
def test_every_choice_fits_and_is_stable(name: str, seed: int, rate: float, cap: float, max_wait_s: float) -> None:
    random, scheduler = np.random.default_rng(seed), schedulers(cap, max_wait_s)[name]
    jobs: list[Job] = []
    n_seen, now = 0, 1000.0
    for _ in range(25):
        for _ in range(int(random.poisson(rate))):
            cells = int(random.integers(1, 2300))
            timeline = Timeline(now, float(random.uniform(0, 3)), float(random.choice([3.0, 5.0, 80.0])))
            jobs.append(Job(n_seen, timeline, cells, cells, waiting_since=now))
            n_seen += 1
        chosen = scheduler.choose(jobs, CAPACITY, now)
        assert len({id(job) for job in chosen}) == len(chosen) <= CAPACITY.n_seqs
        assert all(job in jobs for job in chosen)
        assert sum(job.n_context for job in chosen) <= CAPACITY.n_cells
        assert chosen or all(job.n_context > CAPACITY.n_cells for job in jobs), "somebody runs"
        for job in jobs:
            if job in chosen:
                job.waiting_since, job.resident, job.n_missing = None, True, 0
            elif job.running:
                job.waiting_since, job.resident = now, False
        if cap == 0 and name == "andes":
            again = scheduler.choose(jobs, CAPACITY, now)
            assert {job.key for job in chosen} <= {job.key for job in again}, "asked again, who runs goes on"
            for job in again:
                job.waiting_since, job.resident, job.n_missing = None, True, 0
            chosen = again
        now += 0.5
        for job in chosen:
            n = int(random.integers(1, 20))
            job.timeline.token(now, n)
            job.n_context += n
        jobs = [job for job in jobs if not (job.timeline.n_tokens and random.random() < 0.1)]

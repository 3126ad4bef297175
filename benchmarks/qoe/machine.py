"""A simulated serving engine of the scale of Andes (Liu et al. 2024, arXiv 2404.16283) under our token schedulers.

One engine that batches continuously, iteration by iteration in simulated time: prompts are prefilled in chunks beside
the running answers, every ready answer gets one token an iteration, KV cells are bounded, and who is paused may have to
be swapped out and in again. Who runs is decided by the classes that decide it in the engine process
(`disco_daemon.scheduler.andes`). Iterations between two decisions in which the batch stays as it is are reckoned at
once.

The paper's testbed is OPT-66B on four A100 GPUs. Its text states no latency model, so OPT_66B is reckoned from public
figures of the model and the card, listed beside it; absolute rates are ours, the ratios against FCFS are what counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from disco_daemon.arrays import FloatArray, IntArray
from disco_daemon.delivery.qoe import qoe
from disco_daemon.estimation.lengths import OutputLengths
from disco_daemon.scheduler.jobs import Capacity, Job, TokenScheduler
from disco_daemon.scheduler.latency import IterationLatency, IterationLoad
from disco_daemon.scheduler.timeline import Timeline
from disco_daemon.types import ExpectedRest, rest_at

from .steady import longest_stall_s

EXPECTED_TTFT_S = 1.0  # of every reader, as in the paper
QUANTUM = 10  # iterations after which is decided anew at the latest, as in the authors' public code


@dataclass(frozen=True, slots=True)
class Machine:
    """The simulated server: an iteration's latency and the memory.

    `latency` are s: of an iteration, per decoding sequence, per prompt token, per KV cell read. `n_cells` tokens fit
    into the KV cache, `n_host_cells` more into the swap space; `swap_cps` cells/s are copied either way. `n_chunk`
    prompt tokens are prefilled in one iteration, all prompts together.
    """

    latency: tuple[float, float, float, float]
    n_cells: int
    n_seqs: int
    n_host_cells: int
    swap_cps: float
    n_chunk: int

    def iteration_s(self, n_decode: int, n_prefill: int, n_context: float) -> float:
        """Return the time of one iteration, s."""
        base, sequence, prompt, cell = self.latency
        return base + sequence * n_decode + prompt * n_prefill + cell * n_context

    def capacity_rps(self, prompt: IntArray, output: IntArray) -> float:
        """Requests/s of such lengths, [n] tokens, that are served when the KV cache is always full: load 1.

        While its tokens come, an answer of n tokens after a prompt of p holds p + n / 2 cells on average; the batch is
        as large as fits of that, and prefill takes its share of the time.
        """
        held = float((output * (prompt + output / 2)).sum() / output.sum())
        batch = min(self.n_cells / held, float(self.n_seqs))
        decode_s = self.iteration_s(0, 0, batch * held) + self.latency[1] * batch
        return 1.0 / (float(output.mean()) * decode_s / batch + self.latency[2] * float(prompt.mean()))


# OPT-66B (64 layers of width 9,216, 16 bit) on four A100 of 80 GB. Weights 132 GB; a KV cell is 2 x 64 x 9,216 x 2 B =
# 2.36 MB. Of 4 x 80 GB, vLLM takes 0.9; less the weights and 16 GB of activations, 140 GB are left: 59,000 cells.
# - an iteration: reading the weights, 132 GB at 4 x 2.0 TB/s = 17 ms; all-reduces and the server's Python, about 33 ms
# - a sequence: 132 GFLOP at half of 4 x 312 TFLOP/s = 0.2 ms, and as much again for its bookkeeping
# - a prompt token: the same 132 GFLOP, 0.22 ms
# - a cell: 2.36 MB at three quarters of 4 x 2.0 TB/s = 0.4 us
# Swapping: 4 x 10 GB/s (PCIe, in blocks of 16 tokens) = 17,000 cells/s into 240 GB of host memory, by copy engines of
# their own: an iteration with copies beside it lasts as long as the longer of both.
# At 3.3 requests/s, the rate of the paper's Table 4, 3,000 requests of `sharegpt_lengths` under FCFS get their first
# token after 50 s (median) and a QoE of 0.11 (P10); vLLM's there: 56.7 s and 0.05, as public notes on the paper quote.
OPT_66B = Machine((0.050, 4.0e-4, 2.2e-4, 4.0e-7), 59_000, 256, 100_000, 17_000.0, 512)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival, [n]: when, how long (tokens), and how fast their readers read."""

    arrived_s: FloatArray
    prompt: IntArray
    output: IntArray
    pace_tps: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """The outcome of a run: the times of each request's tokens, and the totals of the engine."""

    arrived_s: FloatArray  # [n]
    pace_tps: FloatArray  # [n]
    tokens_s: tuple[FloatArray, ...]  # [n] x [tokens], s since the start of the run
    n_preempted: int
    n_decisions: int

    def qoes(self) -> FloatArray:
        """QoE of each request, [n]; `delivery.qoe`, to the end of the reading."""
        rows = zip(self.tokens_s, self.arrived_s, self.pace_tps, strict=True)
        return np.array([qoe(times - at, EXPECTED_TTFT_S, float(pace)) for times, at, pace in rows])

    def stalls(self) -> FloatArray:
        """Return the longest time that each reader stood still behind the first token, [n], s."""
        rows = zip(self.tokens_s, self.pace_tps, strict=True)
        return np.array([longest_stall_s(times, float(pace)) for times, pace in rows])

    def ttfts(self) -> FloatArray:
        """Time to the first token, [n], s."""
        return np.array([times[0] for times in self.tokens_s]) - self.arrived_s

    def speeds(self) -> FloatArray:
        """Token delivery speed after the first token, token/s, of the answers with at least two."""
        return np.array([(len(t) - 1) / (t[-1] - t[0]) for t in self.tokens_s if len(t) > 1])

    def throughput_tps(self) -> float:
        """Tokens generated a second while requests arrive: what comes later is the end of the run, not load."""
        end = float(self.arrived_s[-1])
        return sum(int(np.searchsorted(t, end)) for t in self.tokens_s) / end


@dataclass(slots=True, eq=False)
class _Answer:
    """A request inside the engine. `spans` are the iterations that gave it a token each, as [first, last + 1]."""

    index: int
    job: Job
    n_left: int
    rest: ExpectedRest = ()
    spans: list[list[int]] = field(default_factory=list)

    @property
    def n_made(self) -> int:
        """The number of its tokens so far."""
        return self.job.timeline.n_tokens

    def add_tokens(self, first: int, n: int) -> None:
        """Add a token for each of `n` iterations from `first` on."""
        if self.spans and self.spans[-1][1] == first:
            self.spans[-1][1] = first + n
        else:
            self.spans.append([first, first + n])
        self.job.n_context += n
        self.n_left -= n


class Simulation:
    """One engine, one workload, one scheduler; `run` plays it to the last token."""

    def __init__(
        self,
        machine: Machine,
        workload: Workload,
        scheduler: TokenScheduler,
        latency: IterationLatency | None = None,
        quantum: int = QUANTUM,
        answers: OutputLengths | None = None,
    ) -> None:
        """`latency` observes each iteration, for the scheduler to predict the next ones by; `answers` each that ended.

        Raises ValueError where a request alone is more than the machine holds.
        """
        if (workload.prompt + workload.output).max() > machine.n_cells - machine.n_seqs:
            raise ValueError("a request needs more KV cells than there are")
        self._machine, self._workload, self._scheduler = machine, workload, scheduler
        self._latency, self._quantum, self._lengths = latency, quantum, answers
        # One cell a sequence is kept free, so that the iteration after a decision always has room.
        self._capacity = Capacity(machine.n_cells - machine.n_seqs, machine.n_seqs)
        self._now = 0.0
        self._ends: list[float] = []  # of the iterations, s
        self._answers: dict[int, _Answer] = {}  # arrived and not finished, in order of arrival
        self._finished: dict[int, _Answer] = {}
        self._running: list[_Answer] = []
        self._n_arrived = self._n_decisions = self._n_preempted = 0
        self._n_held = self._n_swapped = 0  # cells in the KV cache and in the host's memory
        self._owed_s = 0.0  # of swapping, beside the next iteration

    def run(self) -> SimulatedRun:
        """Run all requests to their end. Raises RuntimeError if the scheduler overfills or starves the engine."""
        while self._admit():
            self._place(self._decide())
            left = self._quantum
            while left > 0 and self._running and not self._news():
                left -= self._iterate(left)
        ends, load = np.array(self._ends), self._workload
        spans = (self._finished[i].spans for i in range(len(load.arrived_s)))
        tokens = tuple(np.concatenate([ends[a:b] for a, b in own]) for own in spans)
        return SimulatedRun(load.arrived_s, load.pace_tps, tokens, self._n_preempted, self._n_decisions)

    # --- who runs -----------------------------------------------------------------------------------------------------

    def _next_arrival(self) -> float:
        arrived = self._workload.arrived_s
        return float(arrived[self._n_arrived]) if self._n_arrived < len(arrived) else math.inf

    def _admit(self) -> bool:
        """Admit the requests that have come by now, or the next one if none runs; return whether there is any."""
        if not self._answers and self._next_arrival() < math.inf:
            self._now = max(self._now, self._next_arrival())
        while self._next_arrival() <= self._now:
            i, load = self._n_arrived, self._workload
            at, n = float(load.arrived_s[i]), int(load.prompt[i])
            timeline = Timeline(at, EXPECTED_TTFT_S, float(load.pace_tps[i]))
            job = Job(
                key=i, timeline=timeline, n_context=n, n_missing=n, resume_s=0.0, resident=False, n_preempted=0,
                waiting_since=at,
            )  # fmt: skip
            rest = self._lengths.rest(n) if self._lengths is not None else ()
            self._answers[i] = _Answer(i, job, int(load.output[i]), rest)
            self._n_arrived += 1
        return bool(self._answers)

    def _news(self) -> bool:
        """Somebody came or went since the decision, so that it has to be taken anew."""
        return self._next_arrival() <= self._now or any(a.n_left == 0 for a in self._running) or self._room() <= 0

    def _room(self) -> int:
        """Iterations for which the running answers can grow; the paused ones are worth nothing against that."""
        if not self._running:
            return 0
        needed = sum(a.job.n_context for a in self._running)
        return (self._machine.n_cells - needed) // len(self._running)

    def _decide(self) -> list[_Answer]:
        for answer in [a for a in self._running if a.n_left == 0]:
            self._leave(answer)
        if not self._answers:
            return []
        for answer in self._answers.values():
            answer.job.expected_rest = rest_at(answer.rest, answer.n_made)
        jobs = [a.job for a in self._answers.values()]
        chosen = [self._answers[int(str(job.key))] for job in self._scheduler.choose(jobs, self._capacity, self._now)]
        self._n_decisions += 1
        cells = sum(a.job.n_context for a in chosen)
        if not chosen or cells > self._capacity.n_cells or len(chosen) > self._capacity.n_seqs:
            msg = f"the scheduler chose {len(chosen)} answers with {cells} cells for {self._capacity}"
            raise RuntimeError(msg)
        return chosen

    def _leave(self, answer: _Answer) -> None:
        self._running.remove(answer)
        self._n_held -= answer.job.n_context
        self._finished[answer.index] = self._answers.pop(answer.index)
        if self._lengths is not None:
            self._lengths.add(answer.n_made, censored=False, prompt=int(self._workload.prompt[answer.index]))

    def _place(self, chosen: Sequence[_Answer]) -> None:
        """Pause and resume so that just the chosen run."""
        stay = {a.index for a in chosen}
        for answer in self._running:
            if answer.index not in stay:
                answer.job.waiting_since = self._now
                answer.job.n_preempted += 1
                self._n_preempted += 1
        self._running = list(chosen)
        self._make_room(stay)
        for answer in chosen:
            answer.job.waiting_since = None
            if not answer.job.resident:
                self._come_in(answer.job)

    def _make_room(self, stay: set[int]) -> None:
        """Move paused answers out of the KV cache, the ones whose readers have most to read first.

        They go until the chosen have what they need now and for the whole quantum.
        """
        coming = sum(a.job.n_context for a in self._running if not a.job.resident)
        excess = self._n_held + coming + self._quantum * len(self._running) - self._machine.n_cells
        if excess <= 0:
            return
        paused = [a.job for a in self._answers.values() if a.job.resident and a.index not in stay]
        for job in sorted(paused, key=lambda j: -j.timeline.stock_s(self._now)):
            if excess <= 0:
                return
            excess -= job.n_context
            self._go_out(job)

    def _go_out(self, job: Job) -> None:
        """Swap out, or forget where the host's memory is full or computing anew is no dearer."""
        job.resident, n = False, job.n_context
        self._n_held -= n
        swap_s = n / self._machine.swap_cps
        fits = self._n_swapped + n <= self._machine.n_host_cells
        if job.n_missing == 0 and fits and 2 * swap_s < self._machine.latency[2] * n:
            job.resume_s = swap_s
            self._n_swapped += n
            self._owed_s += swap_s
        else:
            job.n_missing = n

    def _come_in(self, job: Job) -> None:
        job.resident = True
        self._n_held += job.n_context
        if job.resume_s > 0:
            self._owed_s += job.resume_s
            self._n_swapped -= job.n_context
            job.resume_s = 0.0

    # --- iterations ---------------------------------------------------------------------------------------------------

    def _iterate(self, most: int) -> int:
        """One iteration with prefill or swapping in it, or up to `most` of decoding alone; how many."""
        ready = [a for a in self._running if not a.job.n_missing]
        if len(ready) == len(self._running) and not self._owed_s:
            return self._decode(ready, most)
        n_prefill, begun = self._prefill([a for a in self._running if a.job.n_missing])
        n_context = sum(a.job.n_context for a in ready)
        took = self._machine.iteration_s(len(ready), n_prefill, n_context)
        self._observe(IterationLoad(len(ready), n_prefill, n_context), took)
        end = self._now + max(self._owed_s, took)
        self._owed_s = 0.0
        self._emit(ready + begun, [end])
        return 1

    def _prefill(self, missing: Iterable[_Answer]) -> tuple[int, list[_Answer]]:
        """Prompt tokens of this iteration, in order of admission, and the answers whose prompts are complete by it."""
        room, begun = self._machine.n_chunk, []
        for answer in missing:
            n = min(room, answer.job.n_missing)
            answer.job.n_missing -= n
            room -= n
            if not answer.job.n_missing:
                begun.append(answer)
            if not room:
                break
        return self._machine.n_chunk - room, begun

    def _decode(self, batch: Sequence[_Answer], most: int) -> int:
        """Decode for as many iterations as the batch stays the same."""
        n = min(most, min(a.n_left for a in batch), max(1, self._room()))
        n_context = sum(a.job.n_context for a in batch)
        first = self._machine.iteration_s(len(batch), 0, n_context)
        growth = self._machine.latency[3] * len(batch)  # each iteration reads one cell more of each answer
        ends = self._now + np.cumsum(first + growth * np.arange(n))
        n = min(n, int(np.searchsorted(ends, self._next_arrival())) + 1)
        self._observe(IterationLoad(len(batch), 0, n_context), first)
        self._emit(batch, [float(end) for end in ends[:n]])
        return n

    def _emit(self, batch: Sequence[_Answer], ends: Sequence[float]) -> None:
        """One token for each of the batch at each of the times."""
        first = len(self._ends)
        self._ends.extend(ends)
        self._now = ends[-1]
        for answer in batch:
            answer.add_tokens(first, len(ends))
            token = answer.job.timeline.token
            for end in ends:
                token(end)
        self._n_held += len(batch) * len(ends)

    def _observe(self, load: IterationLoad, took: float) -> None:
        if self._latency is not None:
            self._latency.observe(load, took)

"""Requests that arrive, wait, run and end: an event-driven simulation of serving engines.

Between two events (an arrival, an admission, the end of an answer) nothing changes but the length of the contexts, so
iterations are advanced together, with the time of the one in the middle.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .fleet_constants import HORIZON_S, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, Constants
from .machines import Engine

WARM_S = HORIZON_S / 4  # tokens are counted after this, until no more requests arrive
LONGEST_JUMP = 64  # iterations that are advanced together


@dataclass(slots=True)
class Request:
    """A prompt and its answer's length; `ended_s` once it has ended."""

    arrived_s: float
    n_prompt: int
    n_answer: int
    n_done: int = 0
    ended_s: float = 0.0


@dataclass(slots=True)
class Served:
    """What came of a run: the requests, and how often memory was short."""

    requests: list[Request]
    n_batches: int = 0
    n_out_of_memory: int = 0
    n_preempted: int = 0
    peak_tokens: float = 0.0


def make_requests(rate: float, seed: int, constants: Constants, horizon_s: float = HORIZON_S) -> list[Request]:
    """Return Poisson arrivals with lognormal lengths."""
    random = np.random.default_rng(seed)
    n = int(random.poisson(rate * horizon_s))
    arrived = np.sort(random.uniform(0, horizon_s, n))

    def lengths(mean: float, variation: float, most: int) -> list[int]:
        sigma2 = float(np.log1p(variation**2))
        drawn = random.lognormal(np.log(mean) - sigma2 / 2, sigma2**0.5, n)
        return [int(one) for one in np.clip(np.rint(drawn), 1, most)]

    prompts = lengths(constants.mean_prompt_tokens, constants.prompt_variation, MAX_PROMPT_TOKENS)
    answers = lengths(constants.mean_answer_tokens, constants.answer_variation, MAX_NEW_TOKENS)
    return [Request(float(a), p, o) for a, p, o in zip(arrived, prompts, answers, strict=True)]


@dataclass(slots=True)
class _Continuous:
    """Continuous batching with paged KV cache: an answer starts when there is room, and leaves when it has ended."""

    engine: Engine
    constants: Constants
    arrivals: deque[Request]
    served: Served
    now: float = 0.0
    n_iterations: int = 0
    n_context: float = 0.0
    new_rows: int = 0
    running: list[tuple[int, int, Request]] = field(default_factory=list)  # by the iteration in which they end
    waiting: deque[Request] = field(default_factory=deque)
    n_started: int = 0

    def run(self) -> None:
        while self.arrivals or self.waiting or self.running:
            while self.arrivals and self.arrivals[0].arrived_s <= self.now:
                self.waiting.append(self.arrivals.popleft())
            self._admit()
            if self.running:
                self._advance()
            elif self.arrivals:
                self.now = self.arrivals[0].arrived_s
            else:
                return  # nothing of what waits fits

    def _admit(self) -> None:
        room = self.engine.room_tokens * (1 - self.constants.kv_reserve)
        while self.waiting and len(self.running) < self.engine.max_sequences:
            first = self.waiting[0]
            n_tokens = first.n_prompt + first.n_done
            if self.n_context + n_tokens + 1 > room:
                return
            self.waiting.popleft()
            self.n_context += n_tokens
            self.new_rows += n_tokens
            self.n_started += 1
            end = self.n_iterations + first.n_answer - first.n_done
            heapq.heappush(self.running, (end, self.n_started, first))

    def _advance(self) -> None:
        """Compute iterations until something changes."""
        while len(self.running) > 1 and self.n_context + len(self.running) > self.engine.room_tokens:
            self._preempt()
        n = len(self.running)
        jump = min(LONGEST_JUMP, self.running[0][0] - self.n_iterations)
        jump = max(1, min(jump, int((self.engine.room_tokens - self.n_context) / n)))
        if self.new_rows:
            jump = 1
        step_s = self.engine.step_s(n, n + self.new_rows, self.n_context + n * (jump - 1) / 2)
        has_place = n < self.engine.max_sequences
        if self.arrivals and has_place and jump > 1 and self.now + jump * step_s > self.arrivals[0].arrived_s:
            jump = max(1, min(jump, int((self.arrivals[0].arrived_s - self.now) / step_s) + 1))
        self.new_rows = 0
        self.now += jump * step_s
        self.n_iterations += jump
        self.n_context += n * jump
        self.served.peak_tokens = max(self.served.peak_tokens, self.n_context)
        while self.running and self.running[0][0] <= self.n_iterations:
            _, _, ended = heapq.heappop(self.running)
            ended.ended_s = self.now
            self.n_context -= ended.n_prompt + ended.n_answer

    def _preempt(self) -> None:
        """Put the youngest answer back in front; its tokens are computed again later."""
        youngest = max(self.running, key=lambda one: one[1])
        self.running.remove(youngest)
        heapq.heapify(self.running)
        end, _, request = youngest
        request.n_done = request.n_answer - (end - self.n_iterations)
        self.n_context -= request.n_prompt + request.n_done
        self.waiting.appendleft(request)
        self.served.n_preempted += 1


def serve_continuously(engine: Engine, constants: Constants, requests: Sequence[Request]) -> Served:
    """Run one engine with continuous batching until all requests have ended that fit."""
    served = Served(list(requests))
    _Continuous(engine, constants, deque(requests), served).run()
    return served


def serve_in_batches(engine: Engine, requests: Sequence[Request], batch: int) -> Served:
    """Run one engine with static batches: up to `batch` that wait, padded.

    All of them are delivered when the last has ended. Nothing looks at the memory first: a batch that outgrows it fails
    there, and comes again in two halves.
    """
    served, now = Served(list(requests)), 0.0
    arrivals, waiting = deque(requests), deque[Request]()
    failed: deque[list[Request]] = deque()
    while arrivals or waiting or failed:
        while arrivals and arrivals[0].arrived_s <= now:
            waiting.append(arrivals.popleft())
        if failed:
            chosen = failed.popleft()
        elif waiting:
            chosen = [waiting.popleft() for _ in range(min(batch, len(waiting)))]
        else:
            now = arrivals[0].arrived_s
            continue
        n, n_prompt = len(chosen), max(one.n_prompt for one in chosen)
        n_steps = max(one.n_answer for one in chosen)
        fits = int(engine.room_tokens / n) - n_prompt  # iterations until the memory is full
        n_computed = max(1, min(n_steps, fits))
        now += engine.step_s(n, n * n_prompt, n * n_prompt)
        if n_computed > 1:
            now += (n_computed - 1) * engine.step_s(n, n, n * (n_prompt + n_computed / 2))
        served.n_batches += 1
        served.peak_tokens = max(served.peak_tokens, min(engine.room_tokens, n * (n_prompt + n_computed)))
        if fits < n_steps and n > 1:
            served.n_out_of_memory += 1
            failed.extendleft([chosen[n // 2 :], chosen[: n // 2]])
            continue
        for one in chosen:
            one.ended_s = now
    return served


def deal(requests: Sequence[Request], n: int) -> list[list[Request]]:
    """Return the requests of each of `n` engines, in turn."""
    return [list(requests[number::n]) for number in range(n)]


@dataclass(frozen=True, slots=True)
class Metrics:
    """What is reported of a run: token/s, mean latency, s, the share of answers in time, and shortages of memory.

    `out_of_memory` is the share of batches that failed, `preempted` of answers that were interrupted.
    """

    throughput: float
    latency_s: float
    in_time: float
    out_of_memory: float
    preempted: float
    peak_tokens: float


def measure(runs: Sequence[Served], constants: Constants) -> Metrics:
    """Return the figures of engines that ran side by side."""
    requests = [one for run in runs for one in run.requests]
    ended = [one for one in requests if one.ended_s > 0]
    if not requests or len(ended) < len(requests):
        return Metrics(0.0, float("inf"), 0.0, 1.0, 0.0, 0.0)  # some can never be served: the model does not fit
    tokens = sum(one.n_answer for one in ended if WARM_S < one.ended_s <= HORIZON_S)
    latencies = np.array([one.ended_s - one.arrived_s for one in ended])
    expected = np.array([constants.ttft_expected_s + one.n_answer / constants.reading_tokens_per_s for one in ended])
    n_batches = sum(run.n_batches for run in runs)
    return Metrics(
        tokens / (HORIZON_S - WARM_S),
        float(latencies.mean()),
        float(np.mean(latencies <= expected)),
        sum(run.n_out_of_memory for run in runs) / n_batches if n_batches else 0.0,
        sum(run.n_preempted for run in runs) / len(requests),
        sum(run.peak_tokens for run in runs),
    )

"""Chats of many turns, whose prompts the device has in its KV cache as far as it computed them.

Each prompt repeats the turns before it, so most of it is cached where the device has answered, or begun to. Requests go
through the daemon's own planner, from nothing known, with the promise over 200 requests. Everything is drawn from a
seed, the server's TTFT included: no trace tells which prompts belong to one chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from disco_daemon.arrays import FloatArray, IntArray
from disco_daemon.dispatch.optimal import Optimal
from disco_daemon.dispatch.planner import Planned, Planner
from disco_daemon.simulate.figures import align
from disco_daemon.simulate.recorded import Phone
from disco_daemon.types import Attempt, Outcome, Readiness, Side, Usage

from ..formatting import number

LAPTOP = Phone("laptop", prefill_tps=400.0, decode_tps=30.0)
SERVER_MEDIAN_S, SERVER_SIGMA = 0.9, 0.5  # lognormal, each TTFT for itself
ANSWER_SIGMA, USER_SIGMA = 0.7, 0.7  # of the logarithms
LONGEST_TURN = 1000  # tokens
N_REQUESTS, N_SEEDS = 1200, 3
BUDGETS = (0.1, 0.3)


@dataclass(frozen=True, slots=True)
class Kind:
    """Chats of geometrically many turns, `most_turns` at most; what is said is lognormal. Lengths in tokens."""

    name: str
    mean_turns: float
    most_turns: int
    system: int
    user_median: float
    answer_median: float


# With a device that answers them all, the fresh tokens of the long ones are a tenth of all, of the short ones a third.
KINDS = (Kind("long", 5.0, 12, 50, 60.0, 120.0), Kind("short", 2.7, 5, 30, 75.0, 60.0))


@dataclass(frozen=True, slots=True, eq=False)
class Chats:
    """Requests of one user, chat after chat; [n]. `begins`: the first of a chat; `prompt` has all turns before it."""

    begins: NDArray[np.bool_]
    prompt: IntArray
    answer: IntArray
    server_s: FloatArray

    @classmethod
    def draw(cls, kind: Kind, n: int, seed: int) -> Chats:
        """The `n` first requests of a seed."""
        random = np.random.default_rng(seed)
        said, answer = (
            np.clip(np.rint(median * random.lognormal(0.0, sigma, n)), 1, LONGEST_TURN).astype(np.int64)
            for median, sigma in ((kind.user_median, USER_SIGMA), (kind.answer_median, ANSWER_SIGMA))
        )
        begins, prompt, turn, turns = np.zeros(n, np.bool_), np.zeros(n, np.int64), 0, 0
        for i in range(n):
            if turn == turns:
                turn, turns, begins[i] = 0, min(int(random.geometric(1 / kind.mean_turns)), kind.most_turns), True
            prompt[i] = (kind.system if begins[i] else prompt[i - 1] + answer[i - 1]) + said[i]
            turn += 1
        return cls(begins, prompt, answer, SERVER_MEDIAN_S * random.lognormal(0.0, SERVER_SIGMA, n))


class WholePrompts(Planner):
    """The peer: it books the device with the whole prompt, as the daemon did until November 2026."""

    def to_process(self, side: Side, length: int, cached: int) -> int:
        """Return the whole prompt's length."""
        del side, cached
        return length

    def processed(self, planned: Planned, attempts: Sequence[Attempt]) -> int:
        """Return the whole prompt's length if the side was started."""
        return planned.length if any(a.side is planned.constrained for a in attempts) else 0


BOOKINGS: dict[str, type[Planner]] = {"whole prompt": WholePrompts, "computed": Planner}


@dataclass(frozen=True, slots=True)
class Turn:
    """The outcome of one request: its TTFT, s, and the prompt tokens that the device computed for it."""

    ttft_s: float
    computed: int
    device_won: bool


@dataclass(frozen=True, slots=True)
class Row:
    """Device-constrained chats at one budget, means over the seeds. Times in s.

    `device_share` is what the device has computed, of all prompt tokens; `device_won` the share of requests that it
    answered.
    """

    chats: str
    booked: str
    budget: float
    mean_ttft_s: float
    p99_ttft_s: float
    device_share: float
    device_won: float


def evaluate_chats(
    kinds: Sequence[Kind] = KINDS,
    budgets: Sequence[float] = BUDGETS,
    n_seeds: int = N_SEEDS,
    n_requests: int = N_REQUESTS,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Row]:
    """A row for each kind of chats, budget and way of booking; `advance` is called after each."""
    for kind, budget, (booked, planner) in product(kinds, budgets, BOOKINGS.items()):
        drawn = [Chats.draw(kind, n_requests, seed) for seed in range(n_seeds)]
        runs = [list(play_chats(chats, planner, budget, seed)) for seed, chats in enumerate(drawn)]
        ttft, computed, won = (
            np.array([[getattr(turn, f) for turn in run] for run in runs]) for f in ("ttft_s", "computed", "device_won")
        )
        share = float(np.mean([own.sum() / chats.prompt.sum() for own, chats in zip(computed, drawn, strict=True)]))
        p99 = float(np.quantile(ttft, 0.99, axis=1).mean())
        yield Row(kind.name, booked, budget, float(ttft.mean()), p99, share, float(won.mean()))
        advance()


def summary(rows: Sequence[Row]) -> str:
    """The table of docs/lab/evaluation.md as plain text; each way of booking beside the first one at the same place."""
    head = ("chats", "booked", "b", "device share", "device won", "mean s", "P99 s", "of whole %")
    peers = {(row.chats, row.budget): row.mean_ttft_s for row in rows if row.booked == next(iter(BOOKINGS))}
    lines = [
        [
            row.chats, row.booked, f"{row.budget:g}", number(row.device_share, 3), number(row.device_won, 3),
            number(row.mean_ttft_s, 3), number(row.p99_ttft_s, 2),
            number(100 * row.mean_ttft_s / peers[row.chats, row.budget], 1),
        ]
        for row in rows
    ]  # fmt: skip
    note = "device share: prompt tokens that the device computed, of all; of whole: mean, of that where all is booked"
    return f"{align(head, lines, n_left=2)}\n{note}"


def play_chats(chats: Chats, kind: type[Planner], budget: float, seed: int) -> Iterator[Turn]:
    """Play the requests one after another through a planner of that kind, which learns from each before the next."""
    planner = kind(Optimal(), Side.DEVICE, budget, draw=np.random.default_rng(seed + 1).random)
    planner.knowledge.use_measured_speed(LAPTOP.prefill_tps)
    planner.refit()
    cached = 0
    columns = (chats.begins, chats.prompt, chats.answer, chats.server_s)
    for begins, prompt, answer, server_s in zip(*(c.tolist() for c in columns), strict=True):
        cached = 0 if begins else min(cached, prompt - 1)
        device = Readiness(prefill_tps=LAPTOP.prefill_tps, cached=cached)
        planned = planner.plan(prompt, {Side.DEVICE: device, Side.SERVER: Readiness()})
        outcome = _race(planned, cached, prompt, answer, server_s)
        planner.settle(planned, outcome)
        if planner.due:
            planner.refit()
        computed = next((a.usage.prompt_tokens for a in outcome.attempts if a.side is Side.DEVICE), 0)
        won = outcome.winner is Side.DEVICE
        cached = prompt + answer if won else cached + computed
        assert outcome.ttft_s is not None
        yield Turn(outcome.ttft_s, computed, won)


def _race(planned: Planned, cached: int, prompt: int, answer: int, server_s: float) -> Outcome:
    """Return what the daemon would have recorded; the server's first token is always seen in the end (the shadow)."""
    plan = planned.plan
    device_s = (prompt - cached) / LAPTOP.prefill_tps
    server_at, device_at = plan.server_s + server_s, plan.device_s + device_s
    ttft_s, device_won = min(server_at, device_at), device_at < server_at
    attempts = []
    if plan.server_s < device_at:
        attempts.append(Attempt(Side.SERVER, "server", plan.server_s, server_s, censored=False, usage=Usage()))
    if plan.device_s < server_at:
        ran_s = ttft_s - plan.device_s
        usage = Usage(min(prompt - cached, max(1, round(ran_s * LAPTOP.prefill_tps))), cached_tokens=cached)
        attempts.append(Attempt(Side.DEVICE, "laptop", plan.device_s, ran_s, censored=not device_won, usage=usage))
    winner = Side.DEVICE if device_won else Side.SERVER
    return Outcome(
        request_id="", created=0.0, model="disco", policy="optimal", plan=plan, prompt_tokens=prompt, winner=winner,
        finish_reason="stop", error=None, ttft_s=ttft_s, duration_s=ttft_s, handoffs=0, tokens={winner: answer},
        attempts=tuple(attempts), cost_usd=0.0, energy_j=0.0,
    )  # fmt: skip

"""The daemon's own planner, from nothing known, learning from what it gets to see.

Unlike the offline player there is no fit beforehand: the planner starts with its priors, sees a server's TTFT only when
the server was asked, and with the shadow off only that it was longer where the device had won.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from disco_daemon.dispatch.optimal import Optimal
from disco_daemon.dispatch.planner import Planner
from disco_daemon.dispatch.policies import FIXED
from disco_daemon.dispatch.policy import Policy
from disco_daemon.errors import ConfigError
from disco_daemon.simulate.recorded import Phone
from disco_daemon.types import Attempt, Outcome, Plan, Readiness, Side, Usage

from .evaluate import POLICIES, Cell, EvaluationSetup, make, measure
from .player import Played, Stream
from .traces import LatencyTrace, Requests

SHADOW_S = 10.0  # a server that lost the race is listened to for this long, as the daemon does
LEARNING = tuple(name for name in POLICIES if name not in (*FIXED, "optimal-unconditioned"))
_BOTH = {side: Readiness() for side in Side}


@dataclass(frozen=True, slots=True)
class Seen:
    """One request of an online run: the plan and what it led to; times in s.

    `insured`: the scarce side was to start only where the other one would be silent for longer than ever.
    """

    plan: Plan
    ttft_s: float
    device_won: bool
    device_ran: bool
    server_ran: bool
    insured: bool = False


def evaluate_online(
    traces: Sequence[LatencyTrace],
    requests: Requests,
    setup: EvaluationSetup,
    advance: Callable[[], None] = lambda: None,
    *,
    shadow: bool = True,
) -> Iterator[Cell]:
    """Yield all cells, each played request by request from the priors on. Raises ConfigError for a fixed policy."""
    wrong = [p for p in setup.policies if p not in LEARNING]
    if wrong:
        msg = f"{wrong[0]} does not learn: with --online choose from {', '.join(LEARNING)}"
        raise ConfigError(msg)
    for trace in traces:
        stream = Stream.draw(trace.ttft_s, requests, setup.n_requests, range(setup.n_seeds))
        for constrained in setup.constraints:
            for phone in setup.phones:
                for name in setup.policies:
                    for budget in setup.budgets:
                        played = _lanes(stream, phone, make(name, setup), constrained, budget, setup.windowed, shadow)
                        yield measure(
                            stream, trace.name, phone, constrained, name, budget, played, 0, n_tested=len(trace.ttft_s)
                        )
                advance()


def _lanes(
    stream: Stream, phone: Phone, policy: Policy, constrained: Side, budget: float, windowed: bool, shadow: bool
) -> Played:
    seeds = range(stream.prompt.shape[1])
    lanes = [
        list(
            play_online(
                stream, seed, phone, planner(policy, constrained, budget, seed, windowed=windowed), shadow=shadow
            )
        )
        for seed in seeds
    ]
    ttft, won, device, server = (
        np.array([[getattr(seen, f) for seen in lane] for lane in lanes]).T[:, None, :]
        for f in ("ttft_s", "device_won", "device_ran", "server_ran")
    )
    used = device if constrained is Side.DEVICE else server
    length = stream.prompt[:, None, :]
    return Played(ttft, won, device, server, (used * length).sum(axis=0) / length.sum(axis=0))


def planner(policy: Policy, constrained: Side, budget: float, seed: int, *, windowed: bool = True) -> Planner:
    """A planner that knows nothing yet, drawing from its own generator."""
    if isinstance(policy, Optimal):
        policy = Optimal(policy.kappa)  # the daemon's buckets, not the simulator's exact lengths
    return Planner(policy, constrained, budget, draw=np.random.default_rng(seed + 1).random, windowed=windowed)


def play_online(stream: Stream, seed: int, phone: Phone, planner: Planner, *, shadow: bool = True) -> Iterator[Seen]:
    """Play one lane through `planner`, which learns from each outcome before the next plan."""
    device_s = phone.ttft_s(stream.prompt[:, seed])
    planner.knowledge.use_measured_speed(phone.prefill_tps)
    planner.refit()
    columns = (stream.prompt[:, seed], stream.output[:, seed], stream.server_s[:, seed], device_s)
    for number, (prompt, output, server, device) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        planned = planner.plan(int(prompt), _BOTH)
        patience_s = planner.patience_s(int(prompt), _BOTH[Side.DEVICE])
        seen = replace(
            _race(planned.plan, server, device), insured=planned.plan.delay(planner.constrained) >= patience_s
        )
        planner.settle(planned, _outcome(number, planner, planned.plan, seen, prompt, output, server, device, shadow))
        if planner.due:
            planner.refit()
        yield seen


def _race(plan: Plan, server_s: float, device_s: float) -> Seen:
    server_at, device_at = plan.server_s + server_s, plan.device_s + device_s
    ttft = min(server_at, device_at)
    return Seen(plan, ttft, device_at < server_at, plan.device_s < server_at, plan.server_s < device_at)


def _outcome(
    number: int,
    planner: Planner,
    plan: Plan,
    seen: Seen,
    prompt: float,
    output: float,
    server_s: float,
    device_s: float,
    shadow: bool,
) -> Outcome:
    """Return what the daemon would have recorded."""
    attempts = []
    if seen.server_ran:
        lost_s = seen.ttft_s - plan.server_s + (SHADOW_S if shadow else 0.0)
        unheard = seen.device_won and lost_s < server_s
        attempts.append(_attempt(Side.SERVER, plan.server_s, lost_s if unheard else server_s, censored=unheard))
    if seen.device_ran:
        waited = device_s if seen.device_won else seen.ttft_s - plan.device_s
        attempts.append(_attempt(Side.DEVICE, plan.device_s, waited, censored=not seen.device_won))
    winner = Side.DEVICE if seen.device_won else Side.SERVER
    return Outcome(
        request_id=str(number), created=0.0, model="disco", policy=planner.policy.name, plan=plan,
        prompt_tokens=int(prompt), winner=winner, finish_reason="stop", error=None, ttft_s=seen.ttft_s,
        duration_s=seen.ttft_s, handoffs=0, tokens={winner: int(output)}, attempts=tuple(attempts), cost_usd=0.0,
        energy_j=0.0,
    )  # fmt: skip


def _attempt(side: Side, started_s: float, ttft_s: float, *, censored: bool) -> Attempt:
    return Attempt(side, side.value, started_s, ttft_s, censored, Usage())

"""Plans every start: the policy's table for what is known, the pacer's budget, and what the two sides are up to now."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..arrays import distinct
from ..estimation.knowledge import Knowledge, Snapshot
from ..estimation.silence import LEAST_S
from ..estimation.ttft_context import Contexts
from ..types import BOTH, EQUAL, Attempt, Outcome, Plan, Readiness, Relation, Side, Unequal, finite
from .hedge import HedgeAllowance
from .hedge import fit as fit_hedged
from .pacer import Pacer
from .policy import Policy, PolicyInput
from .table import RequestContext, Table

DEVICE_BEYOND = 3.0  # times the TTFT expected of the device: later than that is unlike anything seen …
DEVICE_LEAST_S = 1.0  # … and no sooner than this, for a server that is asked costs money
DEVICE_ENOUGH = 20  # first tokens of the device before anything can be called unusual
DOUBT_S = 2.0  # a better server that mostly fails is waited for no longer: most servers that are back begin by then
UNRELIABLE = 0.5  # a server that fails more often is asked, to see whether it is back, but not waited for
QUANTILES = (0.05, 0.5, 0.9, 0.95, 0.99)  # of F, shown in `disco status`
N_PICTURE = 64  # lengths in the picture of w(l): a terminal's width
READY = Readiness()  # a side of which nothing is said
REFIT_EVERY = 10  # finished answers; a fit takes some 10 ms of another thread


@dataclass(frozen=True, slots=True)
class Planned:
    """One committed plan, to be settled exactly once. `reserved` tokens of the budget are held for it.

    `constrained` is the side whose budget that was, and `pacer` kept the account: both may be others by then. `cached`
    tokens of the prompt were in the device's KV cache.
    """

    plan: Plan
    length: int
    constrained: Side
    pacer: Pacer
    reserved: float = 0.0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class FitRequest:
    """The input of a fit: a snapshot, the policy, and the side whose use is limited to which share of the tokens.

    The server may be sent the share `hedge` of them a second time.
    """

    snapshot: Snapshot
    policy: Policy
    constrained: Side
    budget: float
    hedge: float = 0.0


class Planner:
    """Owns what is known and the table in force. All methods are quick but `fit`, which reads its argument only."""

    def __init__(
        self,
        policy: Policy,
        constrained: Side,
        budget: float,
        knowledge: Knowledge | None = None,
        draw: Callable[[], float] = lambda: 0.5,
        *,
        windowed: bool = True,
        hedge_share: float = 0.0,
    ) -> None:
        self.policy = policy
        self.constrained = constrained
        self.budget = budget
        self.knowledge = knowledge or Knowledge()
        self._draw = draw
        self._windowed = windowed
        self.pacer = Pacer(budget, self.knowledge.prompts.distribution().mean, windowed=windowed)
        self.hedges = HedgeAllowance(hedge_share)
        self._wanted = (policy, constrained, budget)
        self._hedgeable = True  # the server, when last it was planned with
        self._fitted_hedge = self._wanted_hedge
        self._n_new = 0
        self._n_shifts = 0
        self._snapshot = self.knowledge.snapshot()
        self.table = self.fit(FitRequest(self._snapshot, policy, constrained, budget, self._wanted_hedge))

    # --- the request path ----------------------------------------------------------------------------------------

    def plan(self, length: int, readiness: Mapping[Side, Readiness]) -> Planned:
        """Commit to the start delays of a prompt of `length` tokens; the budget it may use is reserved."""
        device = readiness.get(Side.DEVICE, READY)
        if device.prefill_tps is not None and self.knowledge.use_measured_speed(device.prefill_tps):
            self._n_new += REFIT_EVERY
        if (server := readiness.get(Side.SERVER)) is not None:
            self._hedgeable = server.hedgeable
        self.hedges.offer(length)
        plan, patience_s = self._preview(length, readiness, self._draw(), 0.0)
        if not self.policy.learns:
            return Planned(plan, length, self.constrained, self.pacer)
        delay, tokens = plan.delay(self.constrained), self.to_process(self.constrained, length, device.cached)
        # What starts at the end of the other side's patience hardly ever does: nothing is held for it.
        reserved = tokens * (1.0 if delay == 0 else self.budget) if delay < patience_s else 0.0
        self.pacer.reserve(length, reserved)
        return Planned(plan, length, self.constrained, self.pacer, reserved, device.cached)

    def to_process(self, side: Side, length: int, cached: int) -> int:
        """Prompt tokens that a start of `side` is booked with: a server bills what the device has in its KV cache."""
        return max(1, length - cached) if side is Side.DEVICE else length

    def allows(self, side: Side, length: int, cached: int = 0) -> bool:
        """Whether that side may process a prompt now, of which the device has `cached` tokens: by the budget alone."""
        return side is not self.constrained or bool(self.pacer.allows(length, self.to_process(side, length, cached)))

    def preview(self, length: int, readiness: Mapping[Side, Readiness], draw: float, waited_s: float = 0.0) -> Plan:
        """Return the plan for now; commits to nothing."""
        return self._preview(length, readiness, draw, waited_s)[0]

    def _preview(
        self, length: int, readiness: Mapping[Side, Readiness], draw: float, waited_s: float
    ) -> tuple[Plan, float]:
        """Return the plan for now, and how long the side that is not scarce may be silent, s."""
        if not self.policy.learns:
            return self.table.plan(length, RequestContext(self.budget, waited_s=waited_s)), math.inf
        device, server = readiness.get(Side.DEVICE, READY), readiness.get(Side.SERVER, READY)
        patience_s = self.patience_s(length, device)
        if server.down_s > 0 and device.down_s <= 0:
            return Plan(0.0, math.inf), patience_s
        if self.knowledge.server.availability() < UNRELIABLE:
            plan = Plan(0.0, 0.0)
        else:
            plan = self.table.plan(length, self._request_context(length, device, draw, waited_s))
            plan = self._hedged(plan, server, waited_s)
        if math.isfinite(plan.delay(self.constrained)) and not self.allows(self.constrained, length, device.cached):
            plan = Plan(math.inf, 0.0, plan.hedge_s) if self.constrained is Side.DEVICE else Plan(0.0, math.inf)
        return self._insured(plan, patience_s, waited_s), patience_s

    def patience_s(self, length: int, device: Readiness) -> float:
        """Return how long the side that is not scarce may be silent before the scarce one starts, budget or not, s.

        A server that mostly fails has hardly any time: waiting for its failures costs the reader more.
        Beyond anything that was seen of it no sample lies, so that no wait costs budget there, and none is chosen.
        """
        if self.constrained is Side.DEVICE and self.knowledge.server.availability() < UNRELIABLE:
            return LEAST_S
        return self.silence_s(self.constrained.other, length, device)

    def silence_s(self, side: Side, length: int, device: Readiness) -> float:
        """Return how long a side is silent at most, by all that was seen of it, s; infinite while too little was."""
        if side is Side.SERVER:
            return self.knowledge.server.silence_s
        if self.knowledge.device.n < DEVICE_ENOUGH:
            return math.inf
        return max(DEVICE_LEAST_S, DEVICE_BEYOND * self.device_s(length, device))

    def graded(
        self, plan: Plan, relation: Relation, length: int, device: Readiness, *, goes_on: bool, waited_s: float = 0.0
    ) -> Plan:
        """Return the plan where a side is a stand-in: the better one begins, the stand-in ends its silence.

        A server that mostly fails is waited for as well, since it may be back, but not for long: it may be one that
        nobody hears from. A stand-in begins instead where it may show the first words, and the better side `goes_on`
        with them. A policy that does not learn is the user's own choice of a side, and stays.
        """
        lower = relation.lower
        if lower is None or not self.policy.learns:
            return plan
        first = lower if goes_on and relation.unequal is Unequal.FIRST_WORDS else lower.other
        silence_s = self.silence_s(first, length, device)
        if first is Side.SERVER and self.knowledge.server.availability() < UNRELIABLE:
            silence_s = min(silence_s, DOUBT_S)
        later_s = max(0.0, silence_s - waited_s)
        device_s, server_s = (0.0, later_s) if first is Side.DEVICE else (later_s, 0.0)
        return Plan(device_s, server_s, plan.hedge_s)

    def _hedged(self, plan: Plan, server: Readiness, waited_s: float) -> Plan:
        """The plan, with a second request to a server that may have one; whether it is sent is decided when it is due.

        Nothing is held for it: most requests are answered before.
        """
        if self.table.hedge_s == math.inf or not server.hedgeable or self.hedges.share == 0:
            return plan
        return Plan(plan.device_s, plan.server_s, max(0.0, self.table.hedge_s - waited_s))

    def _insured(self, plan: Plan, patience_s: float, waited_s: float) -> Plan:
        """The plan, with an end to the other side's silence. What that costs is booked, and saved again later."""
        if plan.delay(self.constrained) <= patience_s:
            return plan
        if self.constrained is Side.DEVICE:
            return Plan(max(0.0, patience_s - waited_s), plan.server_s, plan.hedge_s)
        return Plan(plan.device_s, patience_s)

    def _request_context(self, length: int, device: Readiness, draw: float, waited_s: float) -> RequestContext:
        knowledge = self.knowledge
        slowdown = 1.0
        if device.n_busy:
            missing = max(1, length - device.cached)
            slowdown = knowledge.device.predict(missing, device.n_busy) / knowledge.device.predict(missing)
        return RequestContext(
            budget=float(self.pacer.handed_out()),
            score=self._score(),
            draw=draw,
            load_s=device.load_s,
            slowdown=slowdown,
            waited_s=waited_s,
            cached=device.cached,
        )

    def _score(self) -> float:
        predictor = self._snapshot.predictor
        return float(predictor.score(self.knowledge.server.levels)) if predictor.foretells else 0.0

    def settle(self, planned: Planned, outcome: Outcome) -> None:
        """Book what the answer really used, and learn from it."""
        if self.policy.learns:
            planned.pacer.release(planned.length, planned.reserved)
            planned.pacer.settle(planned.length, self.processed(planned, outcome.attempts))
        self.knowledge.learn(outcome)
        self._n_new += 1

    def processed(self, planned: Planned, attempts: Sequence[Attempt]) -> int:
        """Prompt tokens that the constrained side has processed, or bills: what the budget is booked with.

        A server bills the whole prompt once it is asked. The device reports what it has computed; where it has reported
        nothing, it is taken to have computed all that was not in its KV cache.
        """
        length, used = planned.length, [a for a in attempts if a.side is planned.constrained]
        if planned.constrained is Side.SERVER or not used:
            return length if used else 0
        return min(length, sum(_computed(a, length, planned.cached) for a in used))

    # --- telling -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the estimates and their sample counts: JSON for people and programs. Times in s, lengths in tokens."""
        know = self.knowledge
        curve, lengths = know.server.curve(), know.prompts.distribution()
        return {
            "policy": self.policy.name,
            "constrained": self.constrained.value,
            "budget": self.budget,
            "handed_out": round(float(self.pacer.handed_out()), 4),
            "realised": self.pacer.realised(),
            "server_ttft": {
                "n": know.server.n,
                "censored_share": round(know.server.censored_share, 4),
                "availability": round(know.server.availability(), 4),
                "shifts": know.server.n_shifts,
                "silence_s": finite(know.server.silence_s),
                "quantiles_s": {f"p{100 * q:g}": round(float(curve.quantile(q)), 4) for q in QUANTILES},
            },
            "device_ttft": {"n": know.device.n, "k_s_per_token": know.device.k, "c_s": know.device.c},
            "prompts": {"n": know.prompts.n, "mean": round(lengths.mean, 1)},
            "hedge": {
                "share": self.hedges.share,
                "after_s": finite(self.table.hedge_s),
                "used": round(self.hedges.used, 4),
            },
            "outputs": {"n": round(know.outputs.curve().n), "mean": round(know.outputs.expected_remaining(0), 1)},
        }

    def explain(
        self,
        length: int,
        readiness: Mapping[Side, Readiness],
        waited_s: float = 0.0,
        available: frozenset[Side] = BOTH,
        relation: Relation = EQUAL,
    ) -> dict[str, Any]:
        """Return the plan for `length` tokens now, and its reasons; w(l) over the lengths for a picture."""
        device = readiness.get(Side.DEVICE, Readiness())

        def delays(n: int) -> dict[str, float | None]:
            return _delays(planned(n))

        def planned(n: int) -> Plan:
            plan = self.preview(n, readiness, 0.5, waited_s)
            better = relation.better
            if available >= BOTH and better is not None and not readiness.get(better, READY).down_s > 0:
                plan = self.graded(plan, relation, n, device, goes_on=False, waited_s=waited_s)
            return plan.restricted(available)

        lengths = distinct(np.geomspace(4, max(256, 4 * length), N_PICTURE).astype(int)).tolist()
        return {
            "tokens": length,
            "plan": delays(length) | {"hedge_s": finite(planned(length).hedge_s)},
            "device_ttft_s": round(self.device_s(length, device), 4),
            "grades": relation.to_json(),
            "readiness": {side.value: asdict(r) | {"down_s": finite(r.down_s)} for side, r in readiness.items()},
            "context": bisect_left(self.table.bounds, self._score()),
            "contexts": len(self.table.bounds) + 1,
            "picture": [{"tokens": n, **delays(n)} for n in lengths],
            "learned": self.state(),
        }

    def device_s(self, length: int, device: Readiness) -> float:
        """The device's expected TTFT as busy as it is now, s."""
        return float(self.knowledge.device.predict(max(1, length - device.cached), device.n_busy, device.load_s))

    def restore(self, knowledge: Knowledge) -> None:
        """Go on from knowledge that was saved."""
        self.knowledge = knowledge
        self.refit()

    def succeed(self, before: Planner) -> None:
        """Go on with the account of a planner whose place this one takes, where it is of the same limit."""
        if (before.constrained, before.budget) == (self.constrained, self.budget):
            self.pacer = before.pacer
            self.pacer.mean_length = self._snapshot.lengths.mean
        before.hedges.share, self.hedges = self.hedges.share, before.hedges

    # --- fitting -------------------------------------------------------------------------------------------------

    def constrain(self, side: Side, budget: float) -> None:
        """Limit the use of that side to that share of the prompt tokens, from the next fit on."""
        self._wanted = (self._wanted[0], side, budget)

    def pursue(self, policy: Policy) -> None:
        """Plan by that policy, the same one with other knobs, from the next fit on."""
        self._wanted = (policy, *self._wanted[1:])

    def allow_hedges(self, share: float) -> None:
        """Let the server be sent that share of the prompt tokens a second time; less at once, more by the next fit."""
        self.hedges.share = share

    @property
    def _wanted_hedge(self) -> float:
        return self.hedges.share if self._hedgeable else 0.0

    @property
    def due(self) -> bool:
        """Whether enough has been learned for another fit, a regime shift found, or another limit or knob set.

        Or whether the server may be asked twice, and may not have been.
        """
        shifted = self.knowledge.server.n_shifts != self._n_shifts
        learned = self.policy.learns and (self._n_new >= REFIT_EVERY or (shifted and self._n_new > 0))
        of_hedge = self.policy.learns and self._wanted_hedge != self._fitted_hedge
        return learned or of_hedge or self._wanted != (self.policy, self.constrained, self.budget)

    def begin_fit(self) -> FitRequest:
        """Return the input of the next fit; it counts as fitted from here on."""
        self._n_new, self._n_shifts = 0, self.knowledge.server.n_shifts
        return FitRequest(self.knowledge.snapshot(), *self._wanted, self._wanted_hedge)

    def fit(self, request: FitRequest) -> Table:
        """Return the table for a request; pure, may run in any thread."""
        known = request.snapshot
        contexts: Contexts | None = known.contexts() if request.policy.learns else None
        inputs = PolicyInput(known.server, known.lengths, known.device_s, request.constrained, request.budget, contexts)
        return fit_hedged(request.policy, inputs, request.hedge)

    def adopt(self, request: FitRequest, table: Table) -> None:
        """Plan with the new table from now on. Another limit begins a new account of what is used."""
        if (request.constrained, request.budget) != (self.constrained, self.budget):
            self.constrained, self.budget = request.constrained, request.budget
            self.pacer = Pacer(request.budget, request.snapshot.lengths.mean, windowed=self._windowed)
        self.policy, self._snapshot = request.policy, request.snapshot
        self.table, self._fitted_hedge = table, request.hedge
        self.pacer.mean_length = request.snapshot.lengths.mean

    def refit(self) -> None:
        """Fit at once, where time does not matter: in the simulator."""
        request = self.begin_fit()
        self.adopt(request, self.fit(request))


def _computed(attempt: Attempt, length: int, cached: int) -> int:
    """Tokens of a prompt that one start of the device has computed; those of the answer so far come after them."""
    usage = attempt.usage
    if usage.prompt_tokens + usage.cached_tokens == 0:
        return max(1, length - cached)
    return min(usage.prompt_tokens, max(0, length - usage.cached_tokens))


def _delays(plan: Plan) -> dict[str, float | None]:
    return {"device_s": finite(plan.device_s), "server_s": finite(plan.server_s)}

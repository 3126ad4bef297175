"""The record of an answer: what each start has cost, what that teaches, and how the answer was to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..answer import Answer
from ..delivery.qoe import reading
from ..delivery.trace import Trace
from ..dispatch.planner import Planned
from ..endpoints.hedge import RequestAccount
from ..errors import DiscoError, EndpointError
from ..money.prices import J_PER_KWH
from ..money.spending import Reservation
from ..types import (
    EQUAL,
    Attempt,
    GenerationRequest,
    HedgeResult,
    Infill,
    Outcome,
    Plan,
    Reading,
    Reason,
    Relation,
    Side,
    most_tokens,
    n_choices,
)
from .answer_server import as_one_server
from .context import AnswerContext, CurrentDelivery, Sink
from .eligible import ignored_by, narrowed_by
from .endpoint_run import EndpointRun, PromptSize
from .plan import reason_of
from .runs import EndpointRuns

TURNS = "messages.order"  # named as ignored where the device's model has them in another one
GAP = "▮"  # where the answer stands, in the history's text of a prompt with a suffix


class Recorder:
    """Settles one answer when it has ended, and makes its outcome; `began` is when it did, s."""

    def __init__(
        self,
        context: AnswerContext,
        request: GenerationRequest,
        model: str,
        answer: Answer,
        runs: EndpointRuns,
        prompt: PromptSize,
        delivery: CurrentDelivery,
        relation: Relation,
    ) -> None:
        self._context, self._request, self._model, self._relation = context, request, model, relation
        self._answer, self._runs, self._prompt, self._delivery = answer, runs, prompt, delivery
        self._created, self.began = context.clock.wall(), context.clock.now()
        self._first_at: float | None = None
        self._why: Reason | None = None

    def begin(self, sink: Sink, now: float) -> None:
        """Note the first token, and tell its reader which side begins, and why; later tokens change nothing."""
        if self._first_at is None:
            self._first_at, side = now, self._answer.maker(0)
            relation = self._relation if self._context.planner.policy.learns else EQUAL
            self._why = reason_of(side, self._request, self._answer.available, self._runs.all, relation)
            sink.route(side, self._model_of(side), self._why)

    def _model_of(self, side: Side) -> str:
        """Return the model that made a side's first tokens: of several servers another one may be asked by now."""
        begun = next((run for run in self._runs.all if run.side is side and run.n_tokens), None)
        if begun is None:
            return self._context.endpoints[side].model
        hedge = begun.controls.hedge
        is_other = hedge is not None and hedge.won and begun.other is not None
        return begun.other.endpoint.model if is_other and begun.other is not None else begun.model

    def settle(self, planned: Planned, plan: Plan, reason: str | None, error: DiscoError | None) -> Outcome:
        """Settle budget and caps, and let the planner learn. `plan` is the one as far as it fits the request."""
        answer, context, request, delivery = self._answer, self._context, self._request, self._delivery
        attempts = self._booked_attempts()
        private = request.private or context.private
        keep_text = context.keep_text and not private
        prices, arrivals = context.spending.prices, answer.buffer.arrivals
        outcome = Outcome(
            request_id=request.request_id,
            created=self._created,
            model=self._model,
            policy=context.planner.policy.name,
            plan=plan,
            prompt_tokens=self._prompt.n_tokens,
            winner=answer.winner,
            finish_reason=reason,
            error=None if error is None else error.code or type(error).__name__,
            ttft_s=None if self._first_at is None else self._first_at - self.began,
            duration_s=context.clock.now() - self.began,
            handoffs=answer.handoffs,
            tokens=tokens_of(answer.tokens, self._runs.all),
            attempts=attempts,
            cost_usd=sum(a.bill_usd + a.energy_j / J_PER_KWH * prices.usd_per_kwh for a in attempts),
            energy_j=sum(a.energy_j for a in attempts),
            prompt=transcript(request) if keep_text else None,
            answer=answer.generated.by_choice if keep_text else None,
            moves=tuple(answer.moves),
            reading=reading_of(arrivals, self.began, context.defaults.expected_ttft_s, delivery.pace_tps),
            delivery=delivery.mode,
            arrivals_s=arrivals,
            reason=self._why,
            ignored=self._ignored(is_whole=reason is not None),
            narrowed=self._narrowed(),
            choices=n_choices(request.extra),
            stop_sequence=answer.stop_met,
            relation=self._relation,
            stopped=answer.stopped,
            rule=request.rule,
            kind=None if private or request.prompt is not None else request.kind,
            earlier=None if private else request.earlier,
            private=private,
            key=request.caller.name,
        )
        self._runs.release_budget(planned)
        learned = outcome
        if context.servers is not None:
            learned = replace(outcome, attempts=as_one_server(attempts))
        context.planner.settle(planned, learned)
        return outcome

    def _ignored(self, *, is_whole: bool) -> list[str]:
        """Return the fields that some part of the answer does not heed: `n` as well, where fewer choices came."""
        n = n_choices(self._request.extra)
        n_said = len({piece.index for piece in self._answer.generated.pieces}) if is_whole and n > 1 else n
        fewer = ["n"] if 0 < n_said < n else []
        sides = [side for side, n in self._answer.tokens.items() if n] or [Side.SERVER]
        endpoints = (self._context.endpoints.get(side) for side in sides)
        found = {*fewer, *(name for endpoint in endpoints for name in ignored_by(endpoint, self._request))}
        if any(run.usage.rearranged and run.side in sides for run in self._runs.all):
            found.add(TURNS)
        return sorted(found)

    def _narrowed(self) -> list[str]:
        """Return what a schema allows that no endpoint of the answer would have said."""
        endpoints = (self._context.endpoints.get(side) for side, n in self._answer.tokens.items() if n)
        return sorted({name for endpoint in endpoints for name in narrowed_by(endpoint, self._request)})

    def trace(self, outcome: Outcome) -> Trace:
        """When its tokens came and were shown. Without its text, which the history keeps if anybody wants it."""
        outcome = replace(outcome, prompt=None, answer=None, stop_sequence=None, arrivals_s=())
        expected, pace = self._context.defaults.expected_ttft_s, self._delivery.pace_tps
        return Trace.of(outcome, self._answer.buffer, self.began, pace_tps=pace, expected_ttft_s=expected)

    def _booked_attempts(self) -> tuple[Attempt, ...]:
        """Return all starts with their prices: these take the place of what was reserved for them."""
        context, prompt, runs = self._context, self._prompt, self._runs.all
        for run in runs:
            if run.whole:
                prompt.measure(run)
        attempts: list[Attempt] = []
        for run in runs:
            if n_choices(self._request.extra) == 1 and (tps := decode_tps(run, context)) is not None:
                context.mover.observe(run.side, tps)
            attempts.append(self._settled(first_request(run), run.grant))
            if (second := second_request(run)) is not None:
                attempts.append(self._settled(second, run.hedge_grant, self._hedge_result(run)))
            run.grant = run.hedge_grant = None
        return tuple(attempts)

    def _settled(self, run: EndpointRun, grant: Reservation | None, hedge: HedgeResult | None = None) -> Attempt:
        """Return one request with its price, which takes the place of what was reserved for it."""
        context = self._context
        attempt = attempt_of(run, context, self.began, self._prompt.n_tokens, self._request, hedge)
        if grant is not None:
            (run.spending or context.spending).settle(grant, attempt)
        return attempt

    def _hedge_result(self, run: EndpointRun) -> HedgeResult:
        hedge = run.controls.hedge
        assert hedge is not None
        if hedge.won and run.shadow is None and self._answer.winner is run.side:
            return "won"
        return "lost" if hedge.second.error is None else "failed"


def first_request(run: EndpointRun) -> EndpointRun:
    """Return the run as its first request alone went."""
    hedge = run.controls.hedge
    if hedge is None or hedge.sent_at is None:
        return run
    return _lost(run, run.started, hedge.first) if hedge.won or hedge.first.error is not None else run


def second_request(run: EndpointRun) -> EndpointRun | None:
    """Return the run as its second request alone went, if there was one."""
    hedge = run.controls.hedge
    if hedge is None or hedge.sent_at is None:
        return None
    if (other := run.other) is not None:
        run = replace(run, model=other.endpoint.model, server=other.server, spending=other.spending)
    return replace(run, started=hedge.sent_at) if hedge.won else _lost(run, hedge.sent_at, hedge.second)


def _lost(run: EndpointRun, started: float, account: RequestAccount) -> EndpointRun:
    """Return one of two requests of a run that showed no token."""
    ended_at = run.ended_at if account.over_at is None else account.over_at
    error = None if account.error is None else EndpointError(run.side, account.error, "")
    return replace(
        run, started=started, usage=account.usage, first_at=None, lost_at=None, ended_at=ended_at, whole=False,
        error=error,
    )  # fmt: skip


def attempt_of(
    run: EndpointRun,
    context: AnswerContext,
    began: float,
    length: int,
    request: GenerationRequest,
    hedge: HedgeResult | None = None,
) -> Attempt:
    """Return one start with its price. A server that was asked and gave no usage is booked for the whole prompt.

    One that was closed before its end, and goes on generating for all we know, is booked for what answers as long as
    this one have left, and at most `max_tokens` of the request: its full price (docs/explain/design.md#handoff).
    """
    first_at = run.first_at if run.lost_at is None else None  # a parked loser's first token is of the handoff
    end = next((t for t in (first_at, run.lost_at, run.ended_at) if t is not None), context.clock.now())
    usage = replace(run.usage)
    asked = run.side is Side.SERVER and not run.turned_away
    if asked and usage.prompt_tokens + usage.cached_tokens == 0:
        usage.prompt_tokens = length + run.n_before
    attempt = Attempt(
        side=run.side,
        model=run.model,
        started_s=run.started - began,
        ttft_s=end - run.started,
        censored=first_at is None,
        usage=usage,
        error=run.error.reason if run.error else None,
        load_s=run.usage.load_s,
        n_busy=run.met.n_busy,
        continued=run.n_before > 0,
        disturbed=context.disturbed(run.started, end),
        unseen_tokens=_unseen(run, context, length, request) if asked and not run.whole else 0,
        hedge=hedge,
        server=run.server,
    )
    return (run.spending or context.spending).prices.booked(attempt)


def decode_tps(run: EndpointRun, context: AnswerContext) -> float | None:
    """The decode speed of a run, token/s; None where it does not show, or is not the endpoint's alone.

    A slow reader paused it, or this machine stood still.
    """
    if run.first_at is None or run.held_up or context.disturbed(run.first_at, run.last_at):
        return None
    return run.tps


def _unseen(run: EndpointRun, context: AnswerContext, length: int, request: GenerationRequest) -> int:
    """Estimate the tokens that a closed server goes on to make."""
    if (run.spending or context.spending).stops_billing:
        return 0
    n, limit = n_choices(request.extra), most_tokens(request)
    made = run.n_before + run.usage.completion_tokens
    left = n * context.planner.knowledge.outputs.expected_remaining(made // n, length)
    if run.limit is not None:
        left = min(left, max(0, n * run.limit - run.usage.completion_tokens))
    return round(left if limit is None else min(left, max(0, limit - made)))


def tokens_of(counted: Mapping[Side, int], runs: Sequence[EndpointRun]) -> dict[Side, int]:
    """Tokens of the answer by side: as a side counts them itself, where it does and came to its own end.

    Of what it made and nobody got (a repetition, or what came too late for a handoff) the share is by our count.
    """
    tokens = dict(counted)
    for side, n in counted.items():
        made = [run for run in runs if run.side is side and run.n_tokens]
        if n and len(made) == 1 and made[0].whole and made[0].usage.told:
            tokens[side] = max(1, round(made[0].usage.completion_tokens * n / made[0].n_tokens))
    return tokens


def reading_of(arrivals: Sequence[float], began: float, expected_ttft_s: float, pace_tps: float) -> Reading | None:
    """Return how an answer was to read whose tokens were shown at `arrivals`, s; None when nothing was."""
    return reading(np.array(arrivals) - began, expected_ttft_s, pace_tps) if len(arrivals) else None


def transcript(request: GenerationRequest) -> str:
    """The prompt as text, for a history that keeps it."""
    match request.prompt:
        case str() as text:
            return text
        case Infill(prefix=prefix, suffix=suffix, begun=begun):
            return f"{prefix}{begun}{GAP}{suffix}"
        case tuple() as ids:
            return f"{len(ids)} token ids"
    return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in request.messages)

"""Chooses which of several servers answers a request: who is able and may be paid, and of them the best."""

from __future__ import annotations

from collections.abc import Sequence

from ..conductor import AnswerContext
from ..conductor.answer_server import OtherServer, ServerMember
from ..conductor.cost_limit import CostLimit
from ..dispatch.pool import Candidate, Pool
from ..dispatch.server_wishes import Offer
from ..endpoints.breaker import BreakerState
from ..endpoints.server import Server
from ..money.spending import CostBound
from ..types import GenerationRequest, PromptLength, Side, lacking, wanted

LATE_S = 1.0  # of a server on trial, where nothing is known of the best one's times; readers expect a token by then
TRIAL_AFTER_S, TRIAL_AT_LEAST_S = 5.0, 300.0  # doubling; each trial sends a prompt twice
CHARS_PER_TOKEN = 4  # English text; only what an answer would cost at one server beside another goes by it


class Trials:
    """When a server that has failed may next be tried, while its trials show nothing: to lose a race is no failure.

    One that has failed again rests as its breaker has it, and the next trial is the first of another outage.
    """

    def __init__(self) -> None:
        self._next: dict[str, tuple[int, float, float]] = {}

    def take(self, key: str, outage: int, now: float) -> bool:
        """Whether it may be tried now, s; then it may again after twice the time."""
        before, at, wait_s = self._next.get(key, (outage, now, TRIAL_AFTER_S))
        if before != outage:
            at, wait_s = now, TRIAL_AFTER_S
        if now < at:
            return False
        self._next[key] = outage, now + wait_s, min(2 * wait_s, TRIAL_AT_LEAST_S)
        return True

    def end(self, key: str) -> None:
        """Forget it: it has answered."""
        self._next.pop(key, None)


class MemberChooser:
    """Chooses the member of one answer, and the next one after a failure."""

    def __init__(
        self,
        pool: Pool,
        trials: Trials,
        base: AnswerContext,
        request: GenerationRequest,
        groups: Sequence[Sequence[ServerMember]],
    ) -> None:
        self.hedge: OtherServer | None = None
        self._trials = trials
        self._pool, self._base, self._request, self._groups = pool, base, request, groups
        self._n_prompt = max(1, request.n_chars // CHARS_PER_TOKEN)
        rest = base.planner.knowledge.outputs.expected_remaining(0, self._n_prompt)
        most = request.sampling.max_tokens
        self._n_answer = round(rest if most is None else min(rest, most))
        limits, self._bound = base.spending.caps.limits, CostBound.of(request, self._n_prompt)
        self._is_capped = limits.usd_per_day is not None or limits.usd_per_month is not None
        self._needs = bool(wanted(request)) or request.prompt is not None

    def first(self) -> ServerMember:
        """Return the member that is asked first: the best that is able; where none is, the one that says why."""
        able = [fit for group in self._groups if (fit := [one for one in group if self._is_able(one)])]
        up = next((group for group in able if any(not one.endpoint.readiness().down_s for one in group)), None)
        return self._best(up or able[0]) if able else self._groups[0][0]

    def next(self, left: Sequence[ServerMember]) -> ServerMember | None:
        """Return the best of those that are left, able and not down, in the order of the groups; None where none is."""
        for group in self._groups:
            able = self._undoubted([one for one in group if one in left and self._is_able(one)])
            named = {one.name: one for one in map(self._candidate, able) if not one.down_s > 0}
            if named:
                weighed = self._pool.weigh(list(named.values()))
                best = min(weighed, key=lambda one: (one.cost_s is None, one.cost_s or 0.0)).name
                return next(one for one in able if one.key == best)
        return None

    def _best(self, able: Sequence[ServerMember]) -> ServerMember:
        """Choose one of several; `hedge` is then who is asked as well where that one is silent."""
        if len(able) == 1:
            return able[0]
        if failed := [one for one in able if is_on_trial(one)]:
            others, now = [one for one in able if one not in failed], self._base.clock.now()
            trial = next((one for one in failed if self._may_try(one, now)), None) if others else failed[0]
            if trial is None or not others:
                return self._best(others) if trial is None else trial
            best = self._best(others)
            (weighed,) = self._pool.weigh([self._candidate(best)])
            after_s = LATE_S if weighed.p99_s is None else weighed.p99_s
            self.hedge = OtherServer(best, after_s, lambda: True)  # one request at a time, ever more rarely
            return trial
        able = self._undoubted(able)
        named = {one.key: one for one in able}
        chosen = self._pool.choose(
            [self._candidate(one) for one in able], self._base.clock.now(), self._n_prompt
        )  # fmt: skip
        if chosen.hedge is not None and chosen.hedge[0] in named:
            name, after_s = chosen.hedge
            self.hedge = OtherServer(named[name], after_s, lambda: self._pool.take_hedge(name, self._n_prompt))
        return named[chosen.name]

    def _may_try(self, one: ServerMember, now: float) -> bool:
        return self._trials.take(one.key, outage_of(one), now)

    def _undoubted(self, members: Sequence[ServerMember]) -> Sequence[ServerMember]:
        """Return those without a request in flight that will say how they are; all where there is no other."""
        now = self._base.clock.now()
        found = [
            one for one in members if not (isinstance(one.endpoint, Server) and one.endpoint.breaker.is_doubted(now))
        ]
        return found or members

    def _candidate(self, one: ServerMember) -> Candidate:
        price = one.spending.price
        usd = price.cost_usd(self._n_prompt, self._n_answer) if price.known else None
        return Candidate(one.key, usd, one.endpoint.readiness().down_s)

    def _is_able(self, one: ServerMember) -> bool:
        """Whether a member takes such a request, has room for it, and no cap or limit of the client closes it."""
        endpoint, request = one.endpoint, self._request
        if endpoint.refuses(request) is not None:
            return False
        able = endpoint.capabilities
        if self._needs and lacking("server", able, request) is not None:
            return False
        if able.context_length is not None and able.context_length < self._n_prompt // 2:
            return False
        if request.max_cost_usd is not None:
            length = PromptLength(self._n_prompt, counted=False)
            if not CostLimit(request, one.spending).allows(request, length, 0, ()):
                return False
        if not self._is_capped:
            return True
        return one.spending.check(Side.SERVER, self._bound, self._base.clock.wall()) is None


def is_on_trial(member: ServerMember) -> bool:
    """Whether a member has failed, is not down any more, and the next request finds out whether it is back."""
    endpoint = member.endpoint
    if not isinstance(endpoint, Server) or BreakerState.HALF_OPEN not in endpoint.breakers().values():
        return False
    return not endpoint.readiness().down_s > 0


def outage_of(member: ServerMember) -> int:
    """Return the number of a member's outage."""
    return member.endpoint.breaker.outage if isinstance(member.endpoint, Server) else 0


def offer_of(member: ServerMember) -> Offer:
    """Return what a client's wishes are held against."""
    price = member.spending.price
    usd = (price.input, price.output) if price.known else None
    return Offer(member.server, member.key, usd, keeps_wishes=member.passes_wishes)

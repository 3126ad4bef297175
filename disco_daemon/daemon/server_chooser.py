"""Chooses which of several servers answers a request: who is able and may be paid, and of them the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..conductor import AnswerContext
from ..conductor.answer_server import OtherServer, ServerMember
from ..conductor.cost_limit import CostLimit
from ..dispatch.pool import Candidate, Pool
from ..dispatch.server_wishes import Offer
from ..endpoints.breaker import BreakerState
from ..endpoints.server import Server
from ..money.spending import CostBound
from ..types import GenerationRequest, PromptLength, Side, lacking, wanted

LATE_S = 1.0  # of a server on trial, whose own times may be longer or are not known; readers expect a token by then
TRIAL_AFTER_S, TRIAL_AT_LEAST_S = 5.0, 300.0  # doubling; each trial sends a prompt twice
CHARS_PER_TOKEN = 4  # English text; only what an answer would cost at one server beside another goes by it


class Trials:
    """When a server that has failed may next be tried, while its trials show nothing: to lose a race is no failure.

    One that has failed again rests as its breaker has it, and the next trial is the first of another outage. Of one
    that is chosen for a trial, and then not asked, nothing is known: it may be tried soon again.
    """

    def __init__(self) -> None:
        self._next: dict[str, tuple[int, float, float]] = {}

    def take(self, key: str, outage: int, now: float) -> bool:
        """Whether it may be tried now, s; nobody else tries it meanwhile."""
        before, at, wait_s = self._next.get(key, (outage, now, TRIAL_AFTER_S))
        if before != outage:
            at, wait_s = now, TRIAL_AFTER_S
        if now < at:
            return False
        self._next[key] = outage, now + TRIAL_AFTER_S, wait_s
        return True

    def begin(self, key: str, outage: int, now: float) -> None:
        """Note that it is asked now, s: then it may be tried again after twice the time."""
        _, _, wait_s = self._next.get(key, (outage, now, TRIAL_AFTER_S))
        self._next[key] = outage, now + wait_s, min(2 * wait_s, TRIAL_AT_LEAST_S)

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
        n_prompt: int | None = None,
    ) -> None:
        """The prompt has `n_prompt` tokens; None takes it from the characters of the request."""
        self.hedge: OtherServer | None = None
        self._trials, self._trial = trials, ""
        self._pool, self._base, self._request, self._groups = pool, base, request, groups
        self._n_prompt = max(1, request.n_chars // CHARS_PER_TOKEN) if n_prompt is None else n_prompt
        whole = base.spending.caps
        limits = [caps.limits for caps in (whole, whole.keys.get(request.caller.name)) if caps is not None]
        self._is_capped = any(one.usd_per_day is not None or one.usd_per_month is not None for one in limits)
        self._needs = bool(wanted(request)) or request.prompt is not None

    @cached_property
    def _bound(self) -> CostBound:
        """What a start may cost, for caps; by bytes it would leave out servers for which there is room once counted."""
        return CostBound.of(self._request, self._n_prompt, counted=True)

    @cached_property
    def _n_answer(self) -> int:
        """The tokens of an answer to such a prompt, about; nobody asks for it where there is nothing to choose."""
        about, most = self._base.planner.knowledge.outputs.about(self._n_prompt), self._request.sampling.max_tokens
        return round(about if most is None else min(about, most))

    def first(self) -> ServerMember:
        """Return the member that is asked first: the best that is able; where none is, the one that says why.

        Where only money is in the way that is the cheapest: with its prompt counted, it may fit after all.
        """
        able = [fit for group in self._groups if (fit := [one for one in group if self._is_able(one)])]
        up = next((group for group in able if any(not self._down_s(one) for one in group)), None)
        if able:
            return self._best(up or able[0])
        priced = [one for group in self._groups for one in group if one.spending.price.known and not self._lacks(one)]
        return min(priced, key=self._usd_when_up, default=self._groups[0][0])

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

    def explain(self) -> list[dict[str, Any]]:
        """Return what is thought of each member for this request, in the order in which they would be asked.

        Nothing is counted, so a look at a server that is not the best one is not foreseen. `cost_s` is the expected
        wait with its tail and the price, all in seconds.
        """
        found = [self._explained(one) for group in self._groups for one in group]
        if all(why for why, _, _ in found):  # then a failed one is better than none
            found = [("" if is_on_trial(one) else why, one, document) for why, one, document in found]
        up = [self._candidate(one) for why, one, _ in found if not why]
        known = {one.name: one for one in self._pool.weigh(up)}
        rows = []
        for why, one, document in found:
            weighed = known.get(one.key) or self._pool.weigh([self._candidate(one)])[0]
            rows.append((bool(why), weighed.cost_s is None, weighed.cost_s or 0.0, weighed, document))
        rows.sort(key=lambda row: row[:3])
        best_s = next((cost_s for why, unknown, cost_s, _, _ in rows if not why and not unknown), None)
        return [
            document
            | {"asked": i == 0 and not why, "why": document["why"] or _thought(i, weighed.cost_s, best_s, len(up))}
            | {"ttft_mean_s": weighed.mean_s, "ttft_p50_s": weighed.p50_s, "ttft_p99_s": weighed.p99_s}
            | {"cost_s": weighed.cost_s}
            for i, (why, _, _, weighed, document) in enumerate(rows)
        ]

    def _explained(self, one: ServerMember) -> tuple[str, ServerMember, dict[str, Any]]:
        """Return why a member would not be asked, "" where it may be, with what is known of it beside its times."""
        status, why = one.endpoint.status(), str(self._why_not(one) or "")  # a refusal is a text with a parameter
        if not why and (down_s := one.endpoint.readiness().down_s) > 0:
            why = (
                "it is left alone until its settings change" if down_s == math.inf else f"left alone for {down_s:.0f} s"
            )
        if not why and is_on_trial(one):
            why = "it has failed: one request tries it now and then, beside another server"
        return why, one, {
            "name": one.server,
            "model": one.endpoint.model,
            "state": status["state"],
            "breaker": status.get("breaker"),
            "usd": self._candidate(one).usd,
            "why": why,
        }  # fmt: skip

    def asked(self, member: ServerMember) -> None:
        """Note that a member is asked now: a trial begins then, not where it is planned."""
        if member.key == self._trial:
            self._trials.begin(member.key, outage_of(member), self._base.clock.now())

    def _best(self, able: Sequence[ServerMember]) -> ServerMember:
        """Choose one of several; `hedge` is then who is asked as well where that one is silent."""
        if len(able) == 1:
            return able[0]
        if not (failed := [one for one in able if is_on_trial(one)]):
            return self._chosen(able)
        others = [one for one in able if one not in failed and not self._down_s(one) > 0]
        if not others:
            return failed[0]
        best = self._chosen(others)
        return self._tried(failed, best) or best

    def _tried(self, failed: Sequence[ServerMember], best: ServerMember) -> ServerMember | None:
        """Return a server that has failed and is tried now, with the best one beside it, None if none is.

        The best one counts as a second request. Where there may be none at all, the trial goes alone. It is asked
        after the time that both mostly take: one that is slower and cheaper would else lose each of its trials.
        """
        hedges, now = self._pool.hedges, self._base.clock.now()
        may_hedge = hedges.share > 0 and best.spending.price.known
        if may_hedge and not hedges.allows(self._n_prompt):
            return None
        trial = next((one for one in failed if self._may_try(one, now)), None)
        if trial is None:
            return None
        self._trial = trial.key
        mine, its = self._pool.weigh([self._candidate(trial), self._candidate(best)])
        after_s = LATE_S if its.p99_s is None else max(its.p99_s, min(mine.p99_s or 0.0, LATE_S))
        self.hedge = self._beside(best, after_s, is_due_anyway=True)
        return trial

    def _chosen(self, able: Sequence[ServerMember]) -> ServerMember:
        """Return the pool's choice; `hedge` is then who is asked as well where that one is silent."""
        able = self._undoubted(able)
        named = {one.key: one for one in able}
        chosen = self._pool.choose(
            [self._candidate(one) for one in able], self._base.clock.now(), self._n_prompt
        )  # fmt: skip
        if chosen.hedge is not None and chosen.hedge[0] in named:
            name, after_s = chosen.hedge
            self.hedge = self._beside(named[name], after_s)
        return named[chosen.name]

    def _beside(self, other: ServerMember, after_s: float, *, is_due_anyway: bool = False) -> OtherServer | None:
        """Return the order to ask another server as well; None where nobody knows what that costs, or none may be."""
        if not other.spending.price.known or not self._pool.hedges.share > 0:
            return None
        pool, n_prompt = self._pool, self._n_prompt  # and not this object, which would be in a cycle with its hedge
        return OtherServer(other, after_s, lambda: pool.take_hedge(other.key, n_prompt), is_due_anyway)

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
        return Candidate(one.key, usd, self._down_s(one))

    def _down_s(self, one: ServerMember) -> float:
        """How long a member must not be asked, s: its whole readiness takes three times as long to ask for."""
        endpoint = one.endpoint
        if isinstance(endpoint, Server):
            return endpoint.breaker.down_s(self._base.clock.now())
        return endpoint.readiness().down_s

    def _is_able(self, one: ServerMember) -> bool:
        return self._why_not(one) is None

    def _usd_when_up(self, one: ServerMember) -> tuple[bool, float]:
        return self._down_s(one) > 0, self._candidate(one).usd or 0.0

    def _lacks(self, one: ServerMember) -> str | None:
        """Return why a member cannot take such a request, or has no room for it."""
        endpoint, request = one.endpoint, self._request
        if (refusal := endpoint.refuses(request)) is not None:
            return refusal
        able = endpoint.capabilities
        if self._needs and (lacks := lacking("server", able, request)) is not None:
            return lacks
        if able.context_length is not None and able.context_length < self._n_prompt // 2:
            return f"its context has {able.context_length:,} tokens"
        return None

    def _why_not(self, one: ServerMember) -> str | None:
        """Return why a member does not take such a request: it cannot, has no room, or a cap or limit closes it."""
        request = self._request
        if (lacks := self._lacks(one)) is not None:
            return lacks
        if request.max_cost_usd is not None:
            length = PromptLength(self._n_prompt, counted=False)
            if not CostLimit(request, one.spending).allows(request, length, 0, ()):
                return "it would cost more than the request allows"
        if not self._is_capped:
            return None
        refused = one.spending.check(Side.SERVER, self._bound, self._base.clock.wall())
        return None if refused is None else refused.reason


def _thought(place: int, cost_s: float | None, best_s: float | None, n_up: int) -> str:
    """Return why a member that may be asked comes first, or what it costs more than the first one."""
    if n_up == 1:
        return "no other one can be asked"
    if cost_s is None:
        return "not known yet: a share of the requests looks how fast it is"
    if place == 0 or best_s is None:
        return "the least of wait, tail and price"
    return f"{cost_s - best_s:.2f} s worse, its price counted as waiting"


def is_on_trial(member: ServerMember) -> bool:
    """Whether a member has failed, is not down any more, and the next request finds out whether it is back."""
    endpoint = member.endpoint
    if not isinstance(endpoint, Server) or endpoint.breaker.is_well:
        return False
    if BreakerState.HALF_OPEN not in endpoint.breakers().values():
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

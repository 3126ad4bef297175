"""`disco eval --history --rules`: where the user's own requests would have gone by other rules, with cost and wait.

A rule is decided by what the history keeps of a request: the name that was asked for, its time, and the prompt's
length; its kind only while a rule asked for a learned chance. Where a rule that might fit asks for anything else, it is
not known which rule decides: such a request is counted, and left out of all waits and bills.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from ..arrays import BoolArray
from ..dispatch.policy import Policy
from ..dispatch.request_facts import SaidFacts, Surroundings
from ..dispatch.rules import NobodyLeft, Rule, Standing, decide, narrowed
from ..errors import ConfigError
from ..estimation.will_do import KINDS
from ..plain import count_of
from ..types import BOTH, GenerationRequest, Outcome, Side
from .figures import align
from .recorded import MIN_REQUESTS, Recorded, replayable
from .whatif import WhatIf, WhatIfPoint, WhatIfSetting, WhatIfTerms
from .whatif_servers import LEAST_DAYS

KEPT = ("model", "hours", "days", "prompt_at_least", "prompt_at_most")  # conditions that each row of a history decides
NO_RULE, PRIVATE = "no rule", "private"
TO = {Side.DEVICE: "this machine", Side.SERVER: "a server"}
RACE, PLAN, REFUSED, UNKNOWN = "both at once", "as planned", "refused", "not known"


@dataclass(frozen=True, slots=True)
class RuleList:
    """Rules to play, read top down; with `private` nothing leaves this machine."""

    name: str
    rules: tuple[Rule, ...]
    private: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes by `rule`, in words. It starts on `sides`; () where that cannot be played."""

    rule: str
    to: str
    sides: tuple[Side, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RulesOutcome:
    """What one list of rules would have come to; `routes` counts all requests, `point` the played ones alone."""

    name: str
    routes: dict[tuple[str, str], int]
    point: WhatIfPoint

    def to_json(self, days: float) -> dict[str, Any]:
        """Return it as plain JSON: TTFTs in s, $ and Wh a day."""
        days = max(days, LEAST_DAYS)
        return {
            "name": self.name,
            "mean_ttft_s": self.point.mean_ttft_s,
            "p99_ttft_s": self.point.p99_ttft_s,
            "usd_per_day": self.point.server_usd / days,
            "wh_per_day": self.point.device_wh / days,
            "device_won": self.point.device_won,
            "routes": [{"rule": rule, "to": to, "requests": n} for (rule, to), n in self.routes.items()],
        }


class Router:
    """Says where requests go, between the `sides` that there are.

    `grades` tells how good the models are by a rule, and `side_of` which side has a model that a rule names: None where
    it is not the model that the side's times are of.
    """

    def __init__(
        self, sides: frozenset[Side], grades: Callable[[Rule], Standing], side_of: Callable[[str], Side | None]
    ) -> None:
        self._sides, self._grades, self._side_of = sides, grades, side_of

    def route(self, outcome: Outcome, rules: RuleList, bound: Collection[Side]) -> Route:
        """Return where a request goes by these rules, whose name is `bound` to some sides; to () for either."""
        if outcome.model.startswith("disco/") and not bound:  # another model of this machine, whose times are its own
            return Route(NO_RULE, outcome.model)
        allowed = self._sides & (frozenset(bound) or BOTH)
        if rules.private or outcome.private:
            allowed &= {Side.DEVICE}
        if not allowed:
            return Route(PRIVATE if rules.private or outcome.private else NO_RULE, REFUSED)
        rule = _decided(rules.rules, outcome)
        if isinstance(rule, str):
            return Route(rule, UNKNOWN)
        if rule is not None and rule.model:
            side = self._side_of(rule.model)
            if side is not None and side not in allowed:
                return Route(rule.name, REFUSED)
            return Route(rule.name, rule.model, () if side is None else (side,))
        request = GenerationRequest(outcome.request_id, (), allowed=allowed, private=outcome.private)
        relation = self._grades(rule or Rule("", "plan")).relation
        if rule is not None:
            try:
                request = narrowed(request, rule, relation)
            except NobodyLeft:
                return Route(rule.name, REFUSED)
        name = NO_RULE if rule is None else rule.name
        if request.race:
            return Route(name, RACE, tuple(Side))
        if len(request.allowed) == 1:
            (only,) = request.allowed
            return Route(name, TO[only], (only,))
        if (first := request.prefers or relation.better) is not None:
            return Route(name, f"{TO[first]} first", (first,))
        return Route(name, PLAN, tuple(Side))


@dataclass(frozen=True, slots=True, eq=False)
class RulesFindings:
    """What each list would have come to; `played` [n] marks the requests that can be played under each of them."""

    recorded: Recorded
    played: BoolArray
    lists: tuple[RulesOutcome, ...]

    @property
    def was(self) -> dict[str, float]:
        """The recorded waits of the same requests, s."""
        ttft_s = self.recorded.facts.ttft_s[self.played]
        return {"mean_ttft_s": float(ttft_s.mean()), "p99_ttft_s": float(np.quantile(ttft_s, 0.99))}

    @property
    def notes(self) -> list[str]:
        """What is simulated, and on how much that rests, in sentences."""
        n, drawn = self.recorded.n, self.recorded.n_drawn
        played = f"{self.played.sum():,} that can be played under each of these lists"
        seen = f"was seen for {n - drawn:,} of {n:,}, and is drawn for the others"
        lines = [
            f"Simulated: where {count_of(n, 'request')} would have gone. Waits and bills are of the {played}.",
            f"The server's first token {seen}. Several servers count as one.",
            "A side that goes first is played alone: failures and long silences are not played.",
        ]
        if any(to == UNKNOWN for one in self.lists for _, to in one.routes):
            kept = ", ".join(KEPT)
            lines.append(f"'{UNKNOWN}': the rule may fit or not, as the history keeps of what rules ask only {kept}.")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return it all as plain JSON."""
        return {
            "requests": self.recorded.n,
            "played": int(self.played.sum()),
            "days": self.recorded.days,
            "recorded": self.was,
            "lists": [one.to_json(self.recorded.days) for one in self.lists],
            "notes": self.notes,
        }

    def summary(self) -> str:
        """Return a table of the lists, one of where requests go, and what they rest on."""
        days = max(self.recorded.days, LEAST_DAYS)
        rows = [["as it was", *(f"{x:.3f}" for x in self.was.values()), "", "", ""]]
        for name, point in ((one.name, one.point) for one in self.lists):
            waits = f"{point.mean_ttft_s:.3f}", f"{point.p99_ttft_s:.3f}"
            usd, wh = f"{point.server_usd / days:.4f}", f"{point.device_wh / days:.2f}"
            rows.append([name, *waits, usd, wh, f"{100 * point.device_won:.1f}"])
        to = [[one.name, *route, f"{n:,}"] for one in self.lists for route, n in one.routes.items()]
        lists = align(("rules", "mean s", "P99 s", "$ a day", "Wh a day", "device %"), rows)
        routes = align(("rules", "decided by", "goes to", "requests"), to, n_left=3)
        return "\n\n".join([lists, routes, "\n".join(self.notes)])


def play(
    outcomes: Sequence[Outcome],
    terms: Callable[[Recorded], WhatIfTerms],
    policy: Policy,
    now: WhatIfSetting,
    lists: Sequence[RuleList],
    router: Router,
) -> RulesFindings:
    """Return what each of `lists` would have made of the requests that can be played under all of them.

    Raises ConfigError where these are too few to say anything.
    """
    requests, recorded = replayable(outcomes), Recorded.of(outcomes)
    bound = [[side for side, only in zip(Side, mask, strict=True) if only] for mask in recorded.bound.T.tolist()]
    routes = [[router.route(o, one, sides) for o, sides in zip(requests, bound, strict=True)] for one in lists]
    played = np.array([all(one.sides for one in of_request) for of_request in zip(*routes, strict=True)])
    if played.sum() < MIN_REQUESTS:
        stuck = Counter(f"'{one.rule}' ({one.to})" for of_list in routes for one in of_list if not one.sides)
        why = ", ".join(f"{n} by {what}" for what, n in stuck.most_common(3))
        msg = (
            f"of {count_of(len(requests), 'request')} only {played.sum()} can be played under all these rules, and "
            f"{MIN_REQUESTS} are needed: {why}. Of what rules ask the history keeps {', '.join(KEPT)}: leave other "
            f"rules out of a file for --rules"
        )
        raise ConfigError(msg)
    found = []
    for one, of_list in zip(lists, routes, strict=True):
        alone = np.array([[route.sides == (side,) for route in of_list] for side in Side])
        race = np.array([route.to == RACE for route in of_list])
        own = replace(recorded, bound=alone, race=race).only(played)
        point = WhatIf(own, terms(recorded), policy).predict(now.usd_per_kwh, now.budget)
        counts = Counter((route.rule, route.to) for route in of_list)
        found.append(RulesOutcome(one.name, dict(counts.most_common()), point))
    return RulesFindings(recorded, played, tuple(found))


def _decided(rules: Sequence[Rule], outcome: Outcome) -> Rule | str | None:
    """Return the first rule that fits, None for no rule, or the name of one of which that is not known."""
    kinds = outcome.kind.split(",") if outcome.kind else ()
    at = datetime.fromtimestamp(outcome.created)  # noqa: DTZ006 - the user's own time of day is wanted
    around = Surroundings(lambda: at, lambda: None, lambda: 0.0)
    facts = SaidFacts(
        around, outcome.prompt_tokens, outcome.model, tools="tools" in kinds, schema="schema" in kinds,
        code="code" in kinds, thinking="thinking" in kinds,
    )  # fmt: skip
    kept = {*KEPT, *(KINDS if kinds else ())}
    for rule in rules:
        known = tuple(one for one in rule.when if one[0] in kept)
        if decide([replace(rule, when=known)], facts) is not None:
            return rule if known == rule.when else rule.name
    return None

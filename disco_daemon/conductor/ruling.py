"""The rules in force: which of them decides a request, and the request as it then may be answered.

A daemon without rules loads nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..dispatch.request_facts import RequestFacts, SaidFacts, Surroundings
from ..dispatch.rules import UNCOUNTED, NobodyLeft, Rule, Standing, Uncounted, decide, narrowed
from ..errors import RequestError
from ..types import GenerationRequest, Relation, Side, Unequal, raced
from .context import AnswerContext
from .plan import prompt_length


class LearnedAnswers(Protocol):
    """What the history teaches of the device's answers."""

    def relearn(self) -> None:
        """Begin to bring it up to date, if need be."""
        ...

    async def learn(self) -> None:
        """Bring it up to date."""
        ...


class Ruling:
    """Applies `rules`, which are read top down.

    `grades` tells how good the models are that may answer a request by a rule, of each side, also of one alone.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        around: Surroundings,
        grades: Callable[[GenerationRequest, Rule], Standing],
        answers: LearnedAnswers | None = None,
    ) -> None:
        """`answers` is what is known of the device's answers; only rules that ask for it need that."""
        self.rules, self._around, self._grades = tuple(rules), around, grades
        self._answers = answers if any(rule.asks_chance for rule in self.rules) else None

    async def apply(
        self, request: GenerationRequest, model: str, headers: Mapping[str, str], context: AnswerContext
    ) -> tuple[GenerationRequest, str]:
        """Return the request as the first rule that fits narrows it, and the name of the model that this asks for.

        The name is "" where the rule says a side, and where no rule fits. Raises RequestError that names the rule.
        """
        facts = RequestFacts(request, model, headers, self._around)
        if self._answers is not None:
            self._answers.relearn()
            if not request.private:
                request = replace(request, kind=",".join(facts.learned_kinds))
        if (rule := decide(self.rules, facts)) is UNCOUNTED:
            sides = frozenset(context.endpoints) & request.allowed
            facts.tokens = (await prompt_length(request, sides, context)).tokens
            rule = decide(self.rules, facts)
        if not isinstance(rule, Rule):
            return request, ""
        try:
            return self.narrow(request, rule), rule.model
        except NobodyLeft as e:
            raise nobody_left(str(e)) from e

    def narrow(self, request: GenerationRequest, rule: Rule) -> GenerationRequest:
        """Return the request as that rule lets it be answered. Raises NobodyLeft."""
        stands = self._grades(request, rule)
        return narrowed(request, rule, stands.relation, stands.servers)

    async def learn(self) -> None:
        """Bring what is known of the device's answers up to date, if a rule asks for it."""
        if self._answers is not None:
            await self._answers.learn()

    def explain(
        self, tokens: int, kind: Mapping[str, Any], available: frozenset[Side], relation: Relation
    ) -> tuple[dict[str, Any], frozenset[Side], Relation]:
        """Return the rule that would decide a request of this kind and length, for `disco plan`.

        With it come the sides that it leaves, and how they stand to each other for such a request.
        """
        facts = SaidFacts(self._around, tokens, **kind)
        rule = decide(self.rules, facts)
        found, available, relation = self._explained(rule, available, relation)
        if self._answers is not None:
            found["device_chance"] = self._around.will_do().to_json(tokens, facts.learned_kinds)
        return found, available, relation

    def _explained(
        self, rule: Rule | Uncounted | None, available: frozenset[Side], relation: Relation
    ) -> tuple[dict[str, Any], frozenset[Side], Relation]:
        if not isinstance(rule, Rule):
            return {"rule": None}, available, relation
        said = {"name": rule.name, "use": rule.use, "of_set": rule.of_set, "nobody": None}
        try:
            asked = GenerationRequest("plan", (), allowed=available)
            found = narrowed(asked, rule, self._grades(asked, rule).relation)
        except NobodyLeft as e:
            return {"rule": said | {"nobody": str(e)}}, frozenset(), relation
        if found.race:
            return {"rule": said}, found.allowed, raced(relation)
        if found.prefers is None:
            return {"rule": said}, found.allowed, relation
        why = f"By {rule} the {found.prefers} begins, and the {found.prefers.other} helps where that fails."
        return (
            {"rule": said},
            found.allowed,
            replace(relation, stand_in=found.prefers.other, unequal=Unequal.STAND_IN, why=why),
        )


def nobody_left(why: str) -> RequestError:
    """Return the error for a request that a rule leaves nobody for."""
    msg = f"{why}. `disco plan` shows which rule decides; [[rules]] of config.toml has them."
    return RequestError(msg, status=403, param="model", code="rule")

"""Makes the rules in force, with what they look at: clock, battery, caps, and how good the models are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from ..clock import Clock
from ..conductor.context import Servers
from ..conductor.ruling import Ruling
from ..config.rule_settings import effective_rules
from ..dispatch.request_facts import Surroundings
from ..dispatch.rules import Rule, Standing, standing
from ..errors import ConfigError
from ..machines.resident_models import settings_of
from ..types import GenerationRequest, Grade, Relation, Side
from .assembly import Parts
from .device_answers import DeviceAnswers
from .grading import device_grade, server_grade


def make_ruling(parts: Parts, clock: Clock, answers: DeviceAnswers) -> Ruling | None:
    """Return the rules of these parts' settings; None where they have none."""
    rules = effective_rules(parts.config)
    if not rules:
        return None
    spending = parts.spending
    around = Surroundings(
        now=lambda: datetime.fromtimestamp(clock.wall()),  # noqa: DTZ006 - the user's own time of day is wanted
        battery=lambda: spending.charge,
        cap_used=lambda: spending.cap_used(clock.wall()),
        will_do=lambda: answers.known,
    )
    return Ruling(rules, around, ModelGrades.of(parts, any(rule.has_floor for rule in rules)), answers)


@dataclass(frozen=True, slots=True)
class ModelGrades:
    """How good the models are that may answer a request: those of the race, one of `local`, or some of `servers`."""

    race: Callable[[], Relation]
    local: Mapping[str, Grade]
    servers: Servers | None

    @classmethod
    def of(cls, parts: Parts, has_floor: bool) -> ModelGrades:
        """Read files now, and not while a request waits, where a rule asks for a floor at all."""
        if not has_floor:
            return cls(parts.context.relation, {}, None)
        config, race, local = parts.config, parts.context.relation, dict[str, Grade]()
        if len(parts.endpoints) == 1:  # of one side alone nobody has asked how good it is
            device = device_grade(config) if Side.DEVICE in parts.endpoints else Grade()
            server = server_grade(config) if Side.SERVER in parts.endpoints else Grade()
            race = partial(Relation, device=device, server=server)
        for model in config.models:
            try:
                local[model.name] = device_grade(settings_of(config, model))
            except ConfigError:  # its file is gone: nothing is known of it
                local[model.name] = Grade()
        return cls(race, local, parts.context.servers)

    def __call__(self, request: GenerationRequest, rule: Rule) -> Standing:
        """Return how good they are, and of which of several servers that is said."""
        found, local = self.race(), request.local or rule.model.removeprefix("disco/")
        if local in self.local:
            return Standing(replace(found, device=self.local[local]))
        if self.servers is None or not rule.has_floor:
            return Standing(found)
        return standing(found, self.servers.grades(self.servers.find(rule.model) or request.servers), rule)

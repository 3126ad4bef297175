"""Makes the rules in force, with what they look at: clock, battery, caps, and how good the models are."""

from __future__ import annotations

from datetime import datetime

from ..clock import Clock
from ..conductor.ruling import Ruling
from ..config.rule_settings import effective_rules
from ..dispatch.request_facts import Surroundings
from ..types import Grade, Relation, Side
from .assembly import Parts
from .device_answers import DeviceAnswers
from .grading import device_grade, server_grade


def make_ruling(parts: Parts, clock: Clock, answers: DeviceAnswers) -> Ruling | None:
    """Return the rules of these parts' settings; None where they have none."""
    rules = effective_rules(parts.config)
    if not rules:
        return None
    spending, relation = parts.spending, parts.context.relation
    around = Surroundings(
        now=lambda: datetime.fromtimestamp(clock.wall()),  # noqa: DTZ006 - the user's own time of day is wanted
        battery=lambda: spending.charge,
        cap_used=lambda: spending.cap_used(clock.wall()),
        will_do=lambda: answers.known,
    )
    if len(parts.endpoints) > 1 or not any(rule.has_floor for rule in rules):
        return Ruling(rules, around, relation, answers)
    # Of one side alone nobody has asked how good it is. Its file is read now, and not while a request waits.
    device = device_grade(parts.config) if Side.DEVICE in parts.endpoints else Grade()
    server = server_grade(parts.config) if Side.SERVER in parts.endpoints else Grade()
    alone = Relation(device=device, server=server)
    return Ruling(rules, around, lambda: alone, answers)

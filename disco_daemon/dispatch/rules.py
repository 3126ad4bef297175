"""Which of the user's rules decides a request: read top down, the first that fits. Pure.

A rule says of what requests it speaks (`when`), and who may answer those (`use`, and floors of the model's quality). It
narrows a request as the client's own `disco` object would, and never widens it: what the client has said stays, and so
does `private`, whoever says it. docs/howto/rules.md is for users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time
from enum import Enum, StrEnum
from fnmatch import fnmatchcase
from typing import Any, Protocol

from ..types import GenerationRequest, Grade, Relation, Side
from ..types import relation as related

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")  # as `datetime.weekday` counts them


class Use(StrEnum):
    """Who may answer, by a word; any other `use` is the name of a model."""

    DEVICE = "device"
    SERVER = "server"
    PREFER_DEVICE = "prefer-device"  # it begins alone, and the server is there if it fails
    PREFER_SERVER = "prefer-server"
    BETTER = "better"  # so begins the side with the better model, by its grade
    RACE = "race"  # both begin at once, and the first token wins
    PLAN = "plan"  # either, as the policy plans
    PRIVATE = "private"  # as a `private` request


_PREFERRED: Mapping[str, Side] = {Use.PREFER_DEVICE: Side.DEVICE, Use.PREFER_SERVER: Side.SERVER}
_ONLY: Mapping[str, Side] = {Use.DEVICE: Side.DEVICE, Use.SERVER: Side.SERVER, Use.PRIVATE: Side.DEVICE}
WORDS = frozenset(use.value for use in Use)


class RuleFacts(Protocol):
    """What a request is, and what holds at its moment; each fact is found when a rule asks for it."""

    @property
    def tools(self) -> bool:
        """Whether tools may be called."""
        ...

    @property
    def images(self) -> bool:
        """Whether there are pictures in it."""
        ...

    @property
    def schema(self) -> bool:
        """Whether the answer is to be data, by a schema, a grammar or a choice of texts."""
        ...

    @property
    def code(self) -> bool:
        """Whether there is program code in what the user says."""
        ...

    @property
    def thinking(self) -> bool:
        """Whether thoughts are asked for."""
        ...

    @property
    def language(self) -> str:
        """The code of the language of the latest question, such as `de`; "" where that is not plain."""
        ...

    @property
    def model(self) -> str:
        """The name that was asked for."""
        ...

    @property
    def user(self) -> str:
        """The request's `user`; "" where there is none."""
        ...

    def header(self, name: str) -> str | None:
        """Return a header of the HTTP request."""
        ...

    @property
    def now(self) -> datetime:
        """The local time."""
        ...

    @property
    def battery(self) -> float | None:
        """The charge of the battery that this machine runs on, 0 to 1; None on mains."""
        ...

    @property
    def cap_used(self) -> float:
        """The share that is used of the cap that is nearest to its end; 0 without caps."""
        ...

    @property
    def device_chance(self) -> float | None:
        """The learned chance that an answer by the device will do; None while too little is known."""
        ...

    @property
    def tokens(self) -> int | None:
        """The length of the prompt; None while nobody has counted it."""
        ...


def is_within(hours: tuple[time, time], now: time) -> bool:
    """Whether a time of day lies in a span that may go over midnight; its end is not in it."""
    first, end = hours
    return first <= now < end if first < end else now >= first or now < end


def hours_of(text: str) -> tuple[time, time]:
    """Return the span of `22:00-06:00`. Raises ValueError."""
    first, dash, end = text.partition("-")
    if not dash:
        raise ValueError(text)
    return time.fromisoformat(first.strip()), time.fromisoformat(end.strip())


def _is_like(name: str | None, patterns: Sequence[str]) -> bool:
    return name is not None and any(fnmatchcase(name.casefold(), pattern.casefold()) for pattern in patterns)


# By the name of its setting: whether what a rule wants is so. The cheap ones stand first, and are asked first.
CONDITIONS: Mapping[str, Callable[[Any, RuleFacts], bool]] = {
    "model": lambda patterns, facts: _is_like(facts.model, patterns),
    "user": lambda patterns, facts: _is_like(facts.user, patterns),
    "headers": lambda wanted, facts: all(_is_like(facts.header(name), [like]) for name, like in wanted.items()),
    "hours": lambda hours, facts: is_within(hours_of(hours), facts.now.time()),
    "days": lambda days, facts: DAYS[facts.now.weekday()] in days,
    "battery_below": lambda share, facts: facts.battery is not None and facts.battery < share,
    "cap_above": lambda share, facts: facts.cap_used >= share,
    "tools": lambda wanted, facts: facts.tools is wanted,
    "schema": lambda wanted, facts: facts.schema is wanted,
    "thinking": lambda wanted, facts: facts.thinking is wanted,
    "images": lambda wanted, facts: facts.images is wanted,
    "code": lambda wanted, facts: facts.code is wanted,
    "language": lambda codes, facts: facts.language in codes,
}
# These ask an engine for the length, and so come last of all.
LENGTHS: Mapping[str, Callable[[Any, int, RuleFacts], bool]] = {
    "prompt_at_least": lambda least, tokens, _: tokens >= least,
    "prompt_at_most": lambda most, tokens, _: tokens <= most,
    "device_chance_below": lambda share, _, facts: (chance := facts.device_chance) is not None and chance < share,
}
_LISTS = ("model", "user", "language", "days")
NAMES = (*CONDITIONS, *LENGTHS)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: `when` has its conditions, name and what is wanted, all of which have to hold.

    A side may answer whose model has `min_parameters`, in billions, and `min_grade`; what is not known of a model is
    not enough. `of_set` is the ready-made set that it comes from, "" for the user's own.
    """

    name: str
    use: str
    when: tuple[tuple[str, Any], ...] = ()
    min_parameters: float | None = None
    min_grade: float | None = None
    of_set: str = ""

    @classmethod
    def of(cls, wanted: Mapping[str, Any], name: str, of_set: str = "") -> Rule:
        """Return the rule of some settings; those that are None, or empty, ask for nothing."""
        when = tuple((key, _listed(key, wanted[key])) for key in NAMES if wanted.get(key) not in (None, "", (), [], {}))
        return cls(name, wanted["use"], when, wanted.get("min_parameters"), wanted.get("min_grade"), of_set)

    @property
    def model(self) -> str:
        """The name of the model that is to answer; "" where it says a side."""
        return "" if self.use in WORDS else self.use

    @property
    def asks_chance(self) -> bool:
        """Whether it asks how likely an answer by the device is to do."""
        return any(name == "device_chance_below" for name, _ in self.when)

    @property
    def has_floor(self) -> bool:
        """Whether it asks how good a model is."""
        return self.min_parameters is not None or self.min_grade is not None or self.use == Use.BETTER

    def __str__(self) -> str:
        return f"rule '{self.name}'" + (f" of the set {self.of_set}" if self.of_set else "")


def _listed(key: str, value: Any) -> Any:
    """Return what is wanted as conditions take it: one of a list as a list of one."""
    if key in _LISTS and isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class Uncounted(Enum):
    """The prompt has to be counted before it can be said which rule decides."""

    UNCOUNTED = "uncounted"


UNCOUNTED = Uncounted.UNCOUNTED


def decide(rules: Iterable[Rule], facts: RuleFacts) -> Rule | Uncounted | None:
    """Return the first rule that fits; None where none does. No fact is asked for that nothing depends on."""
    for rule in rules:
        fits = _fits(rule, facts)
        if fits is UNCOUNTED:
            return UNCOUNTED
        if fits:
            return rule
    return None


def _fits(rule: Rule, facts: RuleFacts) -> bool | Uncounted:
    for name, wanted in rule.when:
        if (condition := CONDITIONS.get(name)) is not None:
            if not condition(wanted, facts):
                return False
        elif (tokens := facts.tokens) is None:
            return UNCOUNTED
        elif not LENGTHS[name](wanted, tokens, facts):
            return False
    return True


class NobodyLeft(Exception):
    """A rule leaves nobody who may answer; its text says why."""


def narrowed(
    request: GenerationRequest, rule: Rule, relation: Relation, servers: tuple[str, ...] = ()
) -> GenerationRequest:
    """Return the request as a rule lets it be answered; a named model is left to whoever knows names.

    `relation` has the grades of both sides, for this request; of several servers it is that of `servers`, the only ones
    left beside a device. Each has to reach the floors as well, which the request has from now on. Raises NobodyLeft.
    """
    allowed, prefers = request.allowed, request.prefers
    if (only := _only(rule)) is not None:
        allowed &= {only}
    allowed = frozenset(side for side in allowed if is_good_enough(rule, grade_of(relation, side)))
    if not allowed:
        raise NobodyLeft(_nobody(request, rule, relation))
    if prefers is None and len(allowed) > 1:
        prefers = better(relation) if rule.use == Use.BETTER else _PREFERRED.get(rule.use)
    private = request.private or rule.use == Use.PRIVATE
    race = rule.use == Use.RACE and prefers is None and len(allowed) > 1
    changed = race or (allowed, prefers, private) != (request.allowed, request.prefers, request.private)
    return replace(
        request, allowed=allowed, prefers=prefers, private=private, race=race, rule=rule.name, ruled=changed,
        min_parameters=rule.min_parameters, min_grade=rule.min_grade,
        servers=servers if servers and len(allowed) > 1 else request.servers,
    )  # fmt: skip


def _only(rule: Rule) -> Side | None:
    """Return the one side that a rule leaves by its word; None for either, and for a model's name."""
    return _ONLY.get(rule.use)


def grade_of(relation: Relation, side: Side) -> Grade:
    """Return the grade of a side's model."""
    return relation.device if side is Side.DEVICE else relation.server


def is_good_enough(rule: Rule, grade: Grade) -> bool:
    """Whether a model reaches the floors of a rule; what is not known does not."""
    return grade.reaches(rule.min_parameters, rule.min_grade)


@dataclass(frozen=True, slots=True)
class Standing:
    """How the sides' models stand to each other for one request, and for which of several servers that holds.

    `servers` are `SERVER/MODEL`; () where it holds for all of them.
    """

    relation: Relation
    servers: tuple[str, ...] = ()


def standing(found: Relation, servers: Mapping[str, Grade], rule: Rule) -> Standing:
    """Return how a device and several servers stand to each other, by `found`, which has the device's grade.

    Servers below the floors are left out. Under `better` only those of one kind are left, so that the same holds for
    whichever is chosen: those that are better than the device, or else those of which that is not known, or all.
    """
    fit = {key: grade for key, grade in servers.items() if is_good_enough(rule, grade)}
    if rule.use != Use.BETTER or not fit:
        best = next(iter((fit or servers).values()), Grade())
        return Standing(replace(found, server=best))
    compared = {key: related(found.device, grade, found.unequal) for key, grade in fit.items()}
    for wanted in (Side.SERVER, None, Side.DEVICE):
        if left := {key: one for key, one in compared.items() if better(one) is wanted}:
            return Standing(next(iter(left.values())), () if len(left) == len(servers) else tuple(left))
    raise AssertionError("each server is of one kind")


def better(relation: Relation) -> Side | None:
    """Return the side with the better model, as far as that is known, also where the difference is small."""
    if relation.stand_in is not None:
        return relation.stand_in.other
    device, server = relation.device, relation.server
    if device.is_same(server) or device.number is None or server.number is None or device.number == server.number:
        return None
    return Side.DEVICE if device.number > server.number else Side.SERVER


def _nobody(request: GenerationRequest, rule: Rule, relation: Relation) -> str:
    """Say why a rule leaves nobody: the request allows the other side only, or no model is good enough."""
    asked = " or ".join(sorted(request.allowed))
    why_here = "is private" if request.private else f"is for the {asked} only"
    if (only := _only(rule)) is not None and only not in request.allowed:
        return f"{_said(rule)} lets only the {only} answer this, and the request {why_here}"
    floors = [
        *([] if rule.min_parameters is None else [f"{rule.min_parameters:g} billion parameters"]),
        *([] if rule.min_grade is None else [f"a grade of {rule.min_grade:g}"]),
    ]
    sides = [only] if only is not None else sorted(request.allowed)
    have = ", ".join(_known(side, grade_of(relation, side)) for side in sides)
    return f"{_said(rule)} asks for {' and '.join(floors)}, and no model has that: {have}"


def _said(rule: Rule) -> str:
    said = str(rule)
    return said[:1].upper() + said[1:]


def _known(side: Side, grade: Grade) -> str:
    size = "unknown size" if grade.parameters is None else f"{grade.parameters:g} billion parameters"
    number = "unknown grade" if grade.number is None else f"grade {grade.number:.0f}"
    return f"{side} {size}, {number} (`disco config set {side}.grade N` says how good it is)"

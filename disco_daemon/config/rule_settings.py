"""Checks of `[[rules]]`: what is wrong with a rule, on which line, and what would be right."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..dispatch.language import LANGUAGES
from ..dispatch.rules import NAMES, WORDS, Rule, hours_of
from ..errors import ConfigError
from ..plain import in_words, pointed_to, which
from .lines import line_of_rule
from .policy_sets import rules_of_set
from .schema import Config, RuleSettings
from .servers import servers_of

_OWN = "disco/"  # before the names of this daemon's models
_SIDES = ("disco", "disco/device", "disco/server")


def effective_rules(config: Config) -> tuple[Rule, ...]:
    """Return the rules in force: the user's own, and behind them those of the set that is chosen."""
    own = (Rule.of(msgspec.to_builtins(rule), name_of(rule, i)) for i, rule in enumerate(config.rules))
    return (*own, *rules_of_set(config.policy.set))


def name_of(rule: RuleSettings, index: int) -> str:
    """Return what a rule is called: its name, or its place in the file."""
    return rule.name or str(index + 1)


def check_rules(config: Config, path: Path) -> None:
    """Raise ConfigError for the first rule that cannot be meant."""
    names: set[str] = set()
    for index, rule in enumerate(config.rules):
        name = name_of(rule, index)
        if name in names:
            raise _wrong(path, index, "name", name, f"another rule is called '{name}' already: give it another name")
        names.add(name)
        for key, why in _faults(rule, config):
            raise _wrong(path, index, key, name, why)
        if index + 1 < len(config.rules) and not Rule.of(msgspec.to_builtins(rule), name).when:
            why = f"fits every request, so no rule below it is ever read: put it last, or give it one of {_known()}"
            raise _wrong(path, index, "", name, why)


def refuse_unreadable(values: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Raise ConfigError for the first of these tables that is no rule; nothing where all are."""
    for index, table in enumerate(values):
        try:
            msgspec.convert(table, RuleSettings)
        except msgspec.ValidationError as e:
            said = in_words(str(e), RuleSettings)
            unknown = re.search(r"unknown field `(\w+)`", str(e))
            where = "" if unknown else pointed_to(str(e))
            key = unknown[1] if unknown else re.split(r"[.\[]", where)[0]
            name = table.get("name") if isinstance(table, Mapping) else None
            if "missing required field `use`" in str(e):
                where, said = "", f"lacks 'use': say who may answer, {', '.join(sorted(WORDS))} or a model's name"
            raise _wrong(path, index, key, str(name or index + 1), f"{where} {said}".strip()) from e


def _faults(rule: RuleSettings, config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a rule: the key, and why."""
    if why := _unknown_use(rule.use, config):
        yield "use", why
    for code in _list(rule.language):
        if code not in LANGUAGES:
            yield "language", f"language {code!r}: {which(code, LANGUAGES)}; known are {', '.join(LANGUAGES)}"
    for key in ("model", "user"):
        if "" in _list(getattr(rule, key)):
            yield key, f"{key} has an empty pattern: name one, in which * is any characters"
    if rule.hours:
        try:
            first, end = hours_of(rule.hours)
        except ValueError:
            yield "hours", f"hours = {rule.hours!r}: give a span such as '22:00-06:00'"
        else:
            if first == end:
                yield "hours", f"hours = {rule.hours!r} is no time at all: leave it out for the whole day"
    least, most = rule.prompt_at_least, rule.prompt_at_most
    if least is not None and most is not None and least > most:
        yield "prompt_at_most", f"no prompt has at least {least} and at most {most} tokens"
    floors = [key for key in ("min_parameters", "min_grade") if getattr(rule, key) is not None]
    if floors and rule.use not in WORDS:
        yield floors[0], f"{floors[0]} says which side may answer, and '{rule.use}' is a model: leave out one of them"


def _unknown_use(use: str, config: Config) -> str:
    """Return why nobody is called so; "" where somebody is, or may be once a server tells its models."""
    if use in WORDS or use in config.api.aliases or use in (config.server.model, config.device.model):
        return ""
    local = [f"{_OWN}{model.name}" for model in config.models]
    adapters = [f"{_OWN}device:{name}" for name in config.device.adapters]
    if use in local or use in adapters:
        return ""
    if use in _SIDES:
        word = {"disco": "plan"}.get(use, use.removeprefix(_OWN))
        return f"use = {use!r}: for a side say '{word}'"
    if any(use in one.map or use == one.model for one in config.servers):
        return ""
    servers = list(servers_of(config)) if config.servers else []
    if "/" in use and use.partition("/")[0] in servers:
        return ""
    more = f", a name of [[servers]] with a model behind it ({', '.join(servers)}/…)" if servers else ""
    words = ", ".join(sorted(WORDS))
    near = which(use, [*sorted(WORDS), *local, *adapters, *config.api.aliases], "")
    return f"use = {use!r} is nobody: {near or f'say one of {words}, or the name of a model'}{more}"


def _list(value: str | Sequence[str]) -> Sequence[str]:
    return (value,) if isinstance(value, str) else value


def _known() -> str:
    return ", ".join(NAMES)


def _wrong(path: Path, index: int, key: str, name: str, why: str) -> ConfigError:
    return ConfigError(f"{path}{line_of_rule(path, index, key)}: rule '{name}' {why}")

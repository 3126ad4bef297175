"""The ready-made sets of settings and rules: data in profiles/policy_sets.toml, chosen by `policy.set`.

A set lies below what the user has set: a setting of one's own goes before it, and one's own rules are read first. Only
`policy.private` is on where either says so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from importlib.resources import files
from typing import Any

from ..dispatch.rules import Rule
from ..errors import ConfigError

NONE = "balanced"  # the set that sets nothing: the defaults
PRIVATE = "policy.private"


@cache
def policy_sets() -> dict[str, dict[str, Any]]:
    """Return all sets, each with `about`, `settings` and `rules`, as the file has them."""
    return tomllib.loads((files("disco_daemon.profiles") / "policy_sets.toml").read_text("utf-8"))


def settings_of(name: str) -> Mapping[str, Any]:
    """Return the settings of a set, `section.name` to value; none for a name that there is not."""
    found: Mapping[str, Any] = policy_sets().get(name, {}).get("settings", {})
    return found


def keys_of_sets() -> frozenset[str]:
    """Return the settings that some set has, all of which a running daemon takes up."""
    return frozenset(key for name in policy_sets() for key in settings_of(name))


def rules_of_set(name: str) -> tuple[Rule, ...]:
    """Return the rules of a set; the one that sets nothing is not even looked up."""
    if name == NONE:
        return ()
    return tuple(Rule.of(rule, rule["name"], name) for rule in policy_sets().get(name, {}).get("rules", ()))


def above_set(values: dict[str, Any], name: object) -> dict[str, Any]:
    """Return settings with those of the set below them: what is there already stays, and `private` wins."""
    if name == NONE or not isinstance(name, str):
        return values
    values = deepcopy(values)
    for key, value in settings_of(name).items():
        section, field = key.split(".")
        table = values.setdefault(section, {})
        if isinstance(table, dict):
            table[field] = value if key == PRIVATE else table.get(field, value)
    return values


def require_not_held(changes: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError for a change that the chosen set would not let happen."""
    if changes.get(PRIVATE) in (False, "false") and settings_of(name).get(PRIVATE):
        msg = f"policy.set = '{name}' keeps every request on this machine: choose another set, such as '{NONE}', first"
        raise ConfigError(msg)

"""The rules of `disco eval --history --rules` and `--set`: those in force, and those to play beside them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.schema import Config
    from ..dispatch.rules import Rule, Standing
    from ..simulate.whatif_rules import Router, RuleList
    from ..types import Side


def lists_of(file: str | None, sets: str | None, config: Config) -> list[RuleList]:
    """Return the rules in force, then those of a file, then those of each set of `sets`, with commas between them.

    A file takes the place of the user's own rules, and a set that of the chosen one. Raises ConfigError.
    """
    from ..config.layers import load
    from ..config.policy_sets import policy_sets
    from ..config.rule_settings import effective_rules
    from ..plain import which
    from ..simulate.whatif_rules import RuleList

    found = [RuleList("in force", effective_rules(config), config.policy.private)]
    if file is not None:
        found.append(RuleList(Path(file).name, effective_rules(_with_rules(Path(file), config)), config.policy.private))
    for name in dict.fromkeys(word.strip() for word in sets.split(",")) if sets is not None else ():
        if name not in policy_sets():
            raise ConfigError(f"--set: no set is called {name!r}: {which(name, policy_sets())}")
        of_set = load(flags={"policy.set": name})
        found.append(RuleList(f"set {name}", effective_rules(of_set), of_set.policy.private))
    return found


def _with_rules(file: Path, config: Config) -> Config:
    import msgspec

    from ..config.rule_settings import check_rules, refuse_unreadable
    from ..config.schema import RuleSettings
    from ..system.smallfile import read_text

    try:
        tables = tomllib.loads(read_text(file.expanduser(), "--rules: ")).get("rules", [])
    except ValueError as e:
        raise ConfigError(f"--rules: {file} is no TOML: {e}") from e
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"--rules: {file} has no [[rules]]: write some as in config.toml")
    refuse_unreadable(tables, file)
    changed = msgspec.structs.replace(config, rules=msgspec.convert(tables, tuple[RuleSettings, ...]))
    check_rules(changed, file)
    return changed


def router_of(config: Config) -> Router:
    """Return what says where requests go by rules, with the sides and models of the settings."""
    from ..config.servers import alone, first_server, servers_of
    from ..daemon.grading import device_grade, server_grade
    from ..daemon.prediction import policy_of
    from ..dispatch.rules import Standing, standing
    from ..simulate.whatif_rules import Router
    from ..types import Grade, Relation, Side, Unequal, relation

    servers = {f"{name}/{one.model}": one for name, one in servers_of(config).items() if one.model}
    sides = frozenset({*([Side.DEVICE] if config.device.enabled else []), *([Side.SERVER] if servers else [])})
    first = first_server(config)
    device = device_grade(config) if config.device.enabled else Grade()
    server, unequal = server_grade(first), Unequal(config.policy.unequal)
    if not policy_of(config.policy).learns:  # the user's own choice of a side stays, whatever the grades
        unequal = Unequal.RACE
    between = relation(device, server, unequal) if len(sides) > 1 else Relation(device=device, server=server)
    graded = {key: server_grade(alone(config, one)) for key, one in servers.items()}

    def grades(rule: Rule) -> Standing:
        return standing(between, graded, rule) if config.servers and rule.has_floor else Standing(between)

    def side_of(model: str) -> Side | None:
        if model == config.device.model:
            return Side.DEVICE
        return Side.SERVER if model == first.server.model or list(servers)[:1] == [model] else None

    return Router(sides, grades, side_of)

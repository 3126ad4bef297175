"""The servers of `disco eval --history --servers`: those of the settings, with their prices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..config.schema import Config
    from ..simulate.whatif_servers import ServersReplay
    from ..types import Outcome

ALL = "all"


def replay_of(names: str, config: Config, own: Path, past: Sequence[Outcome]) -> ServersReplay:
    """Return the history as those servers can be played on it: by name, with commas between them, or ALL of them.

    `own` is the folder of the user's own price lists. Raises ConfigError that says what to do.
    """
    from ..config.pricelist import load as load_prices
    from ..config.schema import NamedServer
    from ..config.servers import alone, servers_of
    from ..daemon.money import price_of
    from ..plain import which
    from ..simulate.whatif_servers import ServersReplay, ServerTerms

    servers = {name: one for name, one in servers_of(config).items() if one.model}
    if not servers:
        msg = "no server of the settings answers 'disco': `disco setup` adds one, or set `model` in its [[servers]]"
        raise ConfigError(msg)
    by_key = {f"{name}/{one.model}": name for name, one in servers.items()}
    wanted = dict.fromkeys(name.strip() for name in names.split(",")) if names != ALL else servers
    chosen = [by_key.get(name, name) for name in wanted]
    if unknown := [name for name in chosen if name not in servers]:
        msg = f"--servers: no server that answers 'disco' is called {unknown[0]!r}: {which(unknown[0], servers)}"
        raise ConfigError(msg)
    catalog = load_prices(own)
    members = [
        ServerTerms(f"{name}/{one.model}", price_of(alone(config, one), catalog), catalog.stops_billing(one.base_url))
        for name in dict.fromkeys(chosen)
        for one in [servers[name]]
    ]
    maps = (one.map for one in config.servers if isinstance(one, NamedServer))
    named = {*(one.model for one in servers.values()), *(asked for one in maps for asked in one)}
    return ServersReplay(past, members, named, config.policy.hedge)

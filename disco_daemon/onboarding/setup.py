"""The first steps, shared by the terminal, the flags and the daemon's API."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..config import pricelist
from ..config.layers import load
from ..config.schema import Config
from ..config.servers import servers_of
from ..errors import ConfigError
from ..money.catalog import Catalog, is_private
from ..plain import which
from ..system.net import hostname, with_scheme
from . import checking, providers, saving
from .checking import Checked
from .providers import Provider, ServerKey
from .saving import Choice, SavedChoice


@dataclass(frozen=True, slots=True)
class Onboarding:
    """First steps with config.toml at `path`, the files beside it, and the variables. Blocks on disk.

    `own_port` is the daemon's, and `switch` its `policy.private`; without a daemon the written setting counts.
    """

    path: Path
    env: Mapping[str, str] = field(repr=False)
    own_port: int | None = None
    switch: Callable[[], bool] | None = None

    def config(self) -> Config:
        """Return the settings of the next start, with variables. Raises ConfigError."""
        return load(self.path, self.env)

    def private(self) -> bool:
        """Whether nothing may leave this machine, so that no server is asked. Raises ConfigError."""
        return self.switch() if self.switch is not None else self.config().policy.private

    def catalog(self) -> Catalog:
        """Return the price lists, ours and the user's. Raises ConfigError."""
        return pricelist.load(self.path.parent / "servers")

    def providers(self) -> list[Provider]:
        """Return the known servers."""
        return providers.providers(self.catalog())

    def address(self, name: str) -> str:
        """Return the base URL of a provider by its name, or `name` itself if it is an address. Raises ConfigError.

        An address without a scheme gets one, so that no key is asked for before it is known to be an address.
        """
        found = providers.find_provider(self.catalog(), name)
        if found is not None:
            return found.base_url
        if url := with_scheme(name):
            return url
        near = which(name, [p.name for p in self.providers()], "`disco setup` without flags lists those that are known")
        msg = f"{name!r} is no known server, and no URL such as https://llm.example.com/v1: {near}"
        raise ConfigError(msg)

    def free_name(self, base_url: str) -> str:
        """Return a name for one more server at an address that no other one has: its provider's, or its host's."""
        config, provider = self.config(), providers.at(self.catalog(), base_url)
        named = provider.name if provider is not None and not is_private(hostname(base_url)) else hostname(base_url)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", named).strip("-._")[:48] or "box"
        taken = {"server", "device", "disco", *(one.name for one in config.servers)}
        more = (f"{name}-{i}" for i in itertools.count(2))
        return next(one for one in itertools.chain([name], more) if one not in taken)

    def key(self, base_url: str, given: str = "", name: str = "") -> ServerKey:
        """Return the given key, or the existing one, also for one of `[[servers]]`. Raises ConfigError."""
        if given:
            return providers.new_key(self.path, base_url, given, name)
        return providers.known_key(self.path, self.config(), base_url, self.catalog(), self.env, name)

    def has_key(self, base_url: str, name: str = "") -> str:
        """Return the source of the key that `key` would return, "" if there is none."""
        return providers.has_key(self.path, self.config(), base_url, self.catalog(), self.env, name)

    def check(self, base_url: str, key: ServerKey, model: str = "", name: str = "") -> Checked:
        """Check a server: its models, and with a model one short answer. Raises ConfigError."""
        config = self.config()
        own = servers_of(config).get(name) if name else config.server
        insecure = own is not None and own.insecure
        prices = str(self.path.parent / "servers" / "own.toml")
        return checking.check(
            base_url, key.value, model, self.catalog(), prices=prices, own_port=self.own_port,
            insecure=insecure, private=self.private,
        )  # fmt: skip

    def problem(self, base_url: str, key: str = "") -> checking.Problem | None:
        """Return the problem of an address or a key by their texts alone."""
        return checking.address_problem(base_url, self.own_port) or checking.key_problem(key)

    def plan(self, choice: Choice) -> SavedChoice:
        """Return what `save` would change, and write nothing. Raises ConfigError."""
        return saving.plan(self.path, choice, self.env)

    def save(self, choice: Choice) -> SavedChoice:
        """Write a choice down, all or nothing; return what was changed. Raises ConfigError."""
        return saving.save(self.path, choice, self.env)

    def take_back(self, saved: SavedChoice) -> SavedChoice:
        """Write what was there before a choice was saved; return what was changed. Raises ConfigError."""
        return saving.take_back(self.path, saved)

    def previous_name(self) -> str:
        """Return the name of what `use_previous` would go back to; "" if it would not."""
        return saving.previous_name(self.path, self.env)

    def use_previous(self) -> SavedChoice:
        """Go back to the local model before this one; return what was changed. Raises ConfigError."""
        return saving.use_previous(self.path, self.env)

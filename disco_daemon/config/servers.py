"""The servers of the settings by name: `[server]`, and those of `[[servers]]`. Pure."""

from __future__ import annotations

import msgspec

from ..continuations import CONTINUATIONS
from ..errors import ConfigError
from ..plain import which
from ..system.net import is_http_url, origin
from .schema import SAID_OF, Config, NamedServer, ServerSettings

SERVER = "server"  # what `[server]` is called among several


def servers_of(config: Config) -> dict[str, ServerSettings]:
    """Return all configured servers by name, `[server]` first, then in the order of the file."""
    first = {SERVER: config.server} if config.server.base_url else {}
    return first | {one.name: one for one in config.servers}


def first_server(config: Config) -> Config:
    """Return the settings with `[server]` set: where it is not, it is the first one that `disco` is answered by."""
    if config.server.base_url or not config.servers:
        return config
    return alone(config, next((one for one in config.servers if one.model), config.servers[0]))


def alone(config: Config, server: ServerSettings) -> Config:
    """Return the settings as if that were the only server."""
    return msgspec.structs.replace(config, server=server, servers=())


def of_model(server: ServerSettings, model: str) -> ServerSettings:
    """Return a server's settings for one of its models: what is said of its own one is not said of another."""
    if not server.model or server.model == model:
        return msgspec.structs.replace(server, model=model)
    plain = ServerSettings()
    names = (key.partition(".")[2] for key in SAID_OF["server.model"])
    return msgspec.structs.replace(server, model=model, **{name: getattr(plain, name) for name in names})


def place_of(server: ServerSettings) -> str:
    """Return what stands before the name of one of its settings in errors."""
    return f"[[servers]] {server.name}: " if isinstance(server, NamedServer) else "server."


def price_settings(server: ServerSettings, model: str) -> str:
    """Return where the user says the price of a model: in its server's settings, where that is the server's own."""
    if server.model not in ("", model):
        return f"the price of {model} in a list of your own (`disco prices` shows where)"
    if isinstance(server, NamedServer):
        return f"input_usd_per_mtok and output_usd_per_mtok of [[servers]] {server.name}"
    return "server.input_usd_per_mtok and server.output_usd_per_mtok"


def foreign_key(server: ServerSettings, owner: str, asked: str) -> str:
    """Return why a server's key, which is for the origin `owner`, is not given to another one, with the mend."""
    if isinstance(server, NamedServer):
        return (
            f"the API key of [[servers]] {server.name} is for {owner} and is not given to {asked}: give it a key "
            f"of its own there, or key_origin = '{asked}' if this one is for it"
        )
    return (
        f"the API key is for {owner} (server.key_origin) and is not given to {asked}: `disco setup` sets a server "
        f"with its own key; if this key is for {asked}, `disco config set server.key_origin {asked}`"
    )


def check_servers(config: Config) -> None:
    """Raise ConfigError if a server of `[[servers]]` is not one, or has another one's name."""
    names = [one.name for one in config.servers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"[[servers]] has two servers called {twice}: give each a name of its own")
    for one in config.servers:
        where = f"[[servers]] {one.name}:"
        if not is_http_url(one.base_url):
            raise ConfigError(f"{where} base_url = {one.base_url!r} is not a URL such as https://api.openai.com/v1")
        if one.continuation not in CONTINUATIONS:
            msg = f"{where} continuation = {one.continuation!r}: {which(one.continuation, CONTINUATIONS)}"
            raise ConfigError(msg)
        if one.key_origin and not origin(one.key_origin):
            raise ConfigError(f"{where} key_origin = {one.key_origin!r} is no origin such as https://api.openai.com")
        if one.models and one.model and one.model not in one.models:
            raise ConfigError(f"{where} model = {one.model!r} is not among its models: name it there, too")

"""Makes the configured endpoints: this machine's own engine or server, and the remote one.

The server's client is imported where a server is made: the OpenAI library takes half of what a daemon needs to start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..clock import Clock
from ..config.layers import KeyRefusedError, server_api_key
from ..config.schema import Config, NamedServer
from ..endpoints.base import Endpoint, Tokenizer
from ..endpoints.server_off import Off
from ..errors import ConfigError
from ..machines.kinds import kind_of
from ..machines.managed_device import Making, ManagedDevice
from ..types import UNKNOWN, Capabilities, Side

if TYPE_CHECKING:
    from ..endpoints.server_client import ServerClient

log = logging.getLogger("disco.daemon")


def make_endpoints(
    config: Config,
    making: Making,
    before: Mapping[Side, Endpoint] | None = None,
    *,
    listed: Capabilities = UNKNOWN,
    several: Callable[[Endpoint | None], Endpoint] | None = None,
) -> dict[Side, Endpoint]:
    """Return the configured endpoints; the device is the one `before`, if it would be the same.

    A server is given the tokenizer of the device beside it, and what price lists have `listed` of it; `several` makes
    one of many. Raises ConfigError when no endpoint is configured.
    """
    endpoints: dict[Side, Endpoint] = {}
    if config.device.enabled:
        device = kind_of(config).make(config, making)
        endpoints[Side.DEVICE] = reuse_device(device, (before or {}).get(Side.DEVICE))
    if several is not None:
        endpoints[Side.SERVER] = several(endpoints.get(Side.DEVICE))
    elif config.server.base_url:
        endpoints[Side.SERVER] = make_server(config, making.clock, endpoints.get(Side.DEVICE), listed)
    if not endpoints:
        msg = (
            "neither device nor server is configured: `disco setup` adds a server, `disco config set device.enabled "
            "true` takes this machine's model"
        )
        raise ConfigError(msg)
    return endpoints


def reuse_device(new: Endpoint, old: Endpoint | None) -> Endpoint:
    """Return the old device if the new one would be the same and the old one is well: its model is in memory.

    Neither is changed: what the old one takes up of other settings is set when the new parts are taken.
    """
    keeps = old is not None and isinstance(new, ManagedDevice) and new.is_same(old) and old.may_serve()
    return old if old is not None and keeps else new


def make_server(
    config: Config,
    clock: Clock,
    device: Endpoint | None,
    listed: Capabilities,
    shared: Callable[[], ServerClient] | None = None,
    read_key: Callable[[Config], str] = server_api_key,
) -> Endpoint:
    """Return the endpoint of the server that these settings have, over `shared` connections or its own.

    One whose key may not go there is off. Raises ConfigError where `read_key` does, for a key's file.
    """
    from ..endpoints.server import Server, ServerConfig

    settings = config.server
    try:
        api_key = read_key(config)
    except KeyRefusedError as e:
        log.warning("the server is off: %s", e)
        return Off(settings.base_url, settings.model, str(e), known_since=clock.wall())
    return Server(
        ServerConfig(
            base_url=settings.base_url,
            model=settings.model,
            api_key=api_key,
            first_token_timeout_s=settings.first_token_timeout_s,
            token_timeout_s=settings.token_timeout_s,
            thinking_timeout_s=settings.thinking_timeout_s,
            continuation=settings.continuation,
            stream_usage=settings.stream_usage,
            insecure=settings.insecure,
            chosen=Capabilities.of(settings.capabilities, context_length=settings.context_length or None),
            listed=listed,
            shared=shared,
            name=settings.name if isinstance(settings, NamedServer) else "",
        ),
        clock=clock,
        tokens=device.token_ids if isinstance(device, Tokenizer) else None,
        render=device.render if isinstance(device, Tokenizer) else None,
    )

"""Makes the configured endpoints: this machine's own engine or server, and the remote one.

The server's client is imported where a server is made: the OpenAI library takes half of what a daemon needs to start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..clock import Clock
from ..config.layers import KeyRefusedError, cache_path, server_api_key
from ..config.schema import AdapterSettings, Config, DeviceSettings
from ..endpoints.base import Endpoint
from ..endpoints.device import Device
from ..endpoints.off import Off
from ..endpoints.shaper import Shape, Shaped
from ..engine import wire
from ..engine.config import EngineConfig
from ..engine.early import EarlyEngine
from ..engine.supervisor import Engine
from ..errors import ConfigError
from ..machines.device_settings import (
    is_exact,
    is_exact_but_for_rounding,
    knobs_for,
    model_path,
    n_gpu_layers,
    require_regular,
)
from ..machines.fleet.fleet_device import FleetDevice, FleetStatus
from ..machines.fleet.members import FleetMembers
from ..machines.split.check import checksum
from ..machines.split.joined_model import JoinedFolder
from ..machines.split.split_device import SplitDevice
from ..models import places
from ..system import smallfile
from ..types import UNKNOWN, Capabilities, Side

KEEP_WHOLE_S = 300.0  # that the whole model stays in memory behind the last private request, beside layers in use
log = logging.getLogger("disco.daemon")


def make_endpoints(
    config: Config,
    clock: Clock,
    shape: Shape | None,
    before: Mapping[Side, Endpoint] | None = None,
    members: FleetMembers | None = None,
    *,
    listed: Capabilities = UNKNOWN,
    early: EarlyEngine | None = None,
) -> dict[Side, Endpoint]:
    """Return the configured endpoints; the device is the one `before`, if it would be the same.

    `members` lend hosts to a fleet. A server is given the tokenizer of the device beside it, and what price lists have
    `listed` of it. A whole model is loaded by the `early` process if nobody has taken that. Raises ConfigError when no
    endpoint is configured.
    """
    endpoints: dict[Side, Endpoint] = {}
    if config.device.enabled:
        device = _device(config, clock, shape, members, early)
        endpoints[Side.DEVICE] = reuse_device(device, (before or {}).get(Side.DEVICE))
    if config.server.base_url:
        endpoints[Side.SERVER] = _server(config, clock, endpoints.get(Side.DEVICE), listed)
    if not endpoints:
        msg = "neither device nor server is configured: enable the device, or `disco config set server.base_url URL`"
        raise ConfigError(msg)
    return endpoints


def reuse_device(new: Endpoint, old: Endpoint | None) -> Endpoint:
    """Return the old device if the new one would be the same and the old one is well: its model is in memory.

    Neither is changed: what the old one takes up of other settings is set when the new parts are taken.
    """
    if not isinstance(new, Device | Shaped) or not isinstance(old, Device | Shaped):
        return new
    if isinstance(new, SplitDevice):
        is_same = isinstance(old, SplitDevice) and new.link.is_same(old.link) and _whole_of(new) == _whole_of(old)
        if not is_same:
            return new
    if not (new.engine.config == old.engine.config and old.may_serve()):
        return new
    if isinstance(new, FleetDevice) and isinstance(old, FleetDevice) and not _has_same_hosts(new.fleet, old.fleet):
        return new
    return old


def _has_same_hosts(one: FleetStatus, other: FleetStatus) -> bool:
    return (one.may_borrow, one.n_hosts) == (other.may_borrow, other.n_hosts)


def _whole_of(device: SplitDevice) -> EngineConfig | None:
    return None if device.whole is None else device.whole.engine.config


def _server(config: Config, clock: Clock, device: Endpoint | None, listed: Capabilities) -> Endpoint:
    from ..endpoints.server import Server, ServerConfig

    settings = config.server
    try:
        api_key = server_api_key(config)
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
        ),
        clock=clock,
        tokens=device.token_ids if isinstance(device, Device | Shaped) else None,
        render=device.render if isinstance(device, Device | Shaped) else None,
    )


def _device(
    config: Config, clock: Clock, shape: Shape | None, members: FleetMembers | None, early: EarlyEngine | None
) -> Endpoint:
    settings = config.device
    if config.split.enabled:
        if shape is not None:
            raise ConfigError("--shape-ttft and --shape-tps work with a whole model only, not with split.enabled")
        from ..machines.split.edge_device import make_edge  # takes long to load, as a fleet does, and few have one

        split = make_edge(config, clock)
        split.whole = _whole_here(config, clock)
        return split
    if settings.base_url:
        if shape is not None:
            raise ConfigError("--shape-ttft and --shape-tps work with the engine only, not with device.base_url")
        from ..endpoints.server import Server, ServerConfig

        return Server(ServerConfig(settings.base_url, settings.model, api_key=""), Side.DEVICE)
    path = model_path(settings)
    if config.fleet.enabled:
        from ..machines.fleet.local_fleet import make_fleet, n_hosts

        if n_hosts(config, members):
            if shape is not None:
                raise ConfigError("--shape-ttft and --shape-tps work with a whole model only, not with fleet.enabled")
            return make_fleet(config, _whole_config(config, path), _name(path), clock, members)
    device = Device(Engine(_whole_config(config, path), clock, early=early), _name(path))
    return device if shape is None else Shaped(device, shape, clock)


def _whole_here(config: Config, clock: Clock) -> Device | None:
    """Return the model that the partner computes, as a whole, if the configured file is just that; it is not loaded."""
    try:
        path = model_path(config.device)
        if checksum(path) != JoinedFolder().load().fingerprint:
            return None
    except ConfigError:
        return None
    loaded = _whole_config(config, path)
    keep_s = loaded.keep_alive_s or KEEP_WHOLE_S
    return Device(Engine(replace(loaded, keep_alive_s=keep_s), clock), _name(path))


def _whole_config(config: Config, path: Path) -> EngineConfig:
    settings = config.device
    knobs = knobs_for(config, path)
    sizes = (settings.n_ctx, knobs.n_threads, n_gpu_layers(settings), settings.n_cells)
    exact = is_exact(config, path)
    if is_exact_but_for_rounding(config, path):
        log.warning("%s: rows of its weights do not round alike, so its answers are exact but for that", path)
    return EngineConfig(
        path, *sizes, settings.scheduler, exact, _adapters(settings), speculate=settings.speculation == "auto",
        chat_template=_chat_template(settings), disk=_disk(settings),
        draft_path=_file_of("device.draft_model", settings.draft_model) if settings.draft_model else "",
        n_threads_batch=knobs.n_threads_batch, n_ubatch=knobs.n_ubatch, flash_attn=knobs.flash_attn,
        kv_type=settings.kv_type, keep_alive_s=settings.keep_alive_s, repack=knobs.repack,
    )  # fmt: skip


def _name(path: Path) -> str:
    """Return a name for a model whose file is named by its checksum, as Ollama's are; "" for others."""
    if path.suffix:
        return ""
    return next((found.name for found in places.find() if found.path == path), "")


def _disk(settings: DeviceSettings) -> wire.Disk:
    return wire.Disk(
        folder=str(cache_path() / "kv"), max_bytes=int(settings.spill_gib * 2**30), idle_s=settings.spill_after_s
    )


def _chat_template(settings: DeviceSettings) -> str:
    """Return the text of `device.chat_template`. Raises ConfigError."""
    if not settings.chat_template:
        return ""
    return smallfile.read_text(Path(settings.chat_template).expanduser(), "device.chat_template ", hidden=0o002)


def _adapters(settings: DeviceSettings) -> tuple[wire.AdapterFile, ...]:
    wanted = {name: AdapterSettings(a) if isinstance(a, str) else a for name, a in settings.adapters.items()}
    return tuple(
        wire.AdapterFile(name=name, path=_file_of(f"device.adapters.{name}", adapter.path), scale=adapter.scale)
        for name, adapter in wanted.items()
    )


def _file_of(key: str, text: str) -> str:
    """Return the path that a setting names. Raises ConfigError where that is no file."""
    path = Path(text).expanduser()
    require_regular(key, path)
    return str(path)

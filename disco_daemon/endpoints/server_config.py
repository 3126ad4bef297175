"""How to reach a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..types import UNKNOWN, Capabilities

if TYPE_CHECKING:
    from .server_client import ServerClient


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How to reach a server. Time-outs in s; `continuation` is one of CONTINUATIONS, see docs/explain/handoff.md.

    The user has `chosen` what it can do, and price lists have it as `listed`, each as far as it is known. `name` is
    that of one of several servers, for what errors say of the settings.
    """

    base_url: str
    model: str
    api_key: str = field(repr=False)
    first_token_timeout_s: float = 20.0
    token_timeout_s: float = 15.0
    thinking_timeout_s: float = 600.0
    continuation: str = "auto"
    stream_usage: bool = True
    insecure: bool = False  # the key may go to any host by plain http
    chosen: Capabilities = UNKNOWN
    listed: Capabilities = UNKNOWN
    shared: Callable[[], ServerClient] | None = None  # whose connections its other models use as well
    name: str = ""

"""What one server can do, as far as it is known: by the settings, its refusals, what it tells, and the price lists."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..clock import Clock
from ..errors import EndpointError
from ..types import UNKNOWN, Capabilities, GenerationRequest, wanted
from .refused import LIMITS, Understood, understand

REMEMBERED_S = 86_400.0  # a refusal; servers are updated, and get other models and flags
ASKED_AGAIN_S = 86_400.0  # what a server tells


@dataclass(frozen=True, slots=True)
class Remembered:
    """A refusal: what it said, and until when it counts, s of the clock."""

    understood: Understood
    said: str
    until: float


@dataclass(slots=True)
class ServerCapabilities:
    """The capabilities of one server. What the user has `chosen` goes before its refusals, those before what it tells.

    All mutable state: what it told, its refusals, and all that is known together, until one of them ends. None of it
    is kept on disk: after a restart one request more is refused, and goes to the device if that can take it. A server
    that may have been started anew is asked anew.
    """

    clock: Clock
    chosen: Capabilities = UNKNOWN
    listed: Capabilities = UNKNOWN
    _told: Capabilities = UNKNOWN
    _told_at: float | None = None
    _refusals: dict[str, Remembered] = field(default_factory=dict)
    _known: Capabilities = UNKNOWN
    _known_until: float = -math.inf

    @property
    def known(self) -> Capabilities:
        """All that is known now; each request asks for it some times."""
        now = self.clock.now()
        if now >= self._known_until:
            self._refusals = {name: kept for name, kept in self._refusals.items() if kept.until > now}
            self._known = self.chosen.over(self._refused()).over(self._told).over(self.listed)
            self._known_until = min((kept.until for kept in self._refusals.values()), default=math.inf)
        return self._known

    @property
    def is_due(self) -> bool:
        """Whether the server has told nothing, or so long ago that it may be another one by now."""
        return self._told_at is None or self.clock.now() - self._told_at >= ASKED_AGAIN_S

    def tell(self, told: Capabilities) -> None:
        """Take what the server tells."""
        self._told, self._told_at, self._known_until = told, self.clock.now(), -math.inf

    def learn(self, status: int, document: object, said: str, request: GenerationRequest) -> Understood | None:
        """Remember what a refusal says of the server, and return it; None if it says nothing that is sure.

        `said` is the refusal, fit to be shown.
        """
        understood = understand(status, document, wanted(request))
        if understood is not None and (understood.capability or understood.context_length):
            name = understood.capability.value if understood.capability else "context_length"
            self._refusals[name] = Remembered(understood, said, self.clock.now() + REMEMBERED_S)
            self._known_until = -math.inf
        return understood

    def rename(self, limit: str, said: str) -> None:
        """Remember that a limit has to go by its other name: the server `said` that it knows none by this one."""
        self._refusals.pop(LIMITS[limit], None)
        self._refusals[limit] = Remembered(Understood(limit=limit), said, self.clock.now() + REMEMBERED_S)
        self._known_until = -math.inf

    def renamed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request with its limit by the name that the server knows, as far as it has said."""
        limit = next((name for name in LIMITS if name in body and name in self._refusals), None)
        if limit is None or self._refusals[limit].until <= self.clock.now():
            return body
        return with_other_limit(body, limit)

    def forget(self) -> None:
        """Forget all refusals, and have what it tells asked for again."""
        self._refusals.clear()
        self._told_at, self._known_until = None, -math.inf

    def status(self) -> dict[str, Any]:
        """Return `capabilities`, and with `refused` what is false because of a refusal, and for how long, s."""
        known, now = self.known, self.clock.now()
        lengths = {"context_length": known.context_length, "max_output": known.max_output}
        return {
            "capabilities": lengths | known.to_json(),
            "refused": [
                {"what": name, "said": kept.said, "for_s": round(kept.until - now)}
                for name, kept in self._refusals.items()
            ],
        }

    def _refused(self) -> Capabilities:
        """Return what the refusals say."""
        live = [kept.understood for kept in self._refusals.values()]
        lacks = frozenset(one.capability for one in live if one.capability is not None)
        length = next((one.context_length for one in live if one.context_length), None)
        return Capabilities.of(dict.fromkeys(lacks, False), context_length=length, refused=lacks)


def with_other_limit(body: dict[str, Any], limit: str) -> dict[str, Any]:
    """Return a request whose limit has its other name."""
    return {LIMITS[name] if name == limit else name: value for name, value in body.items()}


def lack_of(understood: Understood, error: EndpointError, request: GenerationRequest) -> EndpointError:
    """Return what a client is told in place of a refusal that was understood."""
    if understood.capability is None:
        message, param, code = str(error), "messages", "context_length_exceeded"
    else:
        param, code = wanted(request)[understood.capability], "unsupported"
        message = f"the {error.side} does not support {understood.capability.words} ('{param}'): {error}"
    return EndpointError(error.side, "refused", message, your_fault=True, param=param, code=code)

"""The device as two machines: this one has the lower layers in its engine, a partner has the rest and draws the tokens.

The engine answers as that of a whole model does, and fails with `partner_gone` while the link is down. So all that is
different here is what cannot be served this way, and what is said about the link.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from ..engine import wire
from ..engine.supervisor import Engine
from ..errors import EndpointError
from ..types import Embedding, GenerationRequest, Readiness, Refusal
from .device import Device

TRY_AGAIN_S = 1.0  # for which a device without its partner is left alone, if there is a server
PRIVATE = (
    "a private request is not sent to the partner that has the upper layers of the device's model, and this machine "
    "alone cannot answer: it has no early exit"
)


class PartnerLink(Protocol):
    """The way to the partner, as the device needs it."""

    @property
    def is_up(self) -> bool:
        """Whether rows reach the partner now."""
        ...

    @property
    def why_down(self) -> str:
        """Why they do not, in words for the user; empty while they do."""
        ...

    def is_same(self, other: object) -> bool:
        """Whether another link would be this one."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the link for `disco status`: `state`, `partner`, `mode`, `cut`, `codec`, `rtt_ms`, `same_bits`."""
        ...

    async def start(self) -> None:
        """Begin to connect, and go on trying."""
        ...

    async def hold(self, *, private: bool) -> None:
        """Send nothing any more while `private`: when this returns the link is down. It comes back without."""
        ...

    async def close(self) -> None:
        """Disconnect, and wait until all is stopped; idempotent."""
        ...


class SplitDevice(Device):
    """`Endpoint` over an engine that has the lower layers only, and the `link` to the machine with the others.

    `adapters` are the names of the configured LoRA adapters, of which none can be used.
    """

    def __init__(self, engine: Engine, link: PartnerLink, name: str, adapters: tuple[str, ...] = ()) -> None:
        super().__init__(engine, name)
        self._link = link
        self._unused = dict.fromkeys(adapters, "the device is split, and an adapter is for a whole model")

    @property
    def link(self) -> PartnerLink:
        """The way to the partner."""
        return self._link

    @property
    def adapters(self) -> dict[str, str]:
        """The configured adapters, and why none can be used."""
        return self._unused

    def refuses(self, request: GenerationRequest) -> str | None:
        """As a whole device, and nothing private: rows can be turned back into text by whoever has the model."""
        if request.private:
            return Refusal(PRIVATE, "disco")
        return super().refuses(request)

    def may_serve(self) -> bool:
        """Whether the engine is up, or about to be, and so is the link."""
        return super().may_serve() and self._link.is_up

    def readiness(self) -> Readiness:
        """As a whole device; down while the partner is."""
        found = super().readiness()
        return found if self._link.is_up else replace(found, down_s=TRY_AGAIN_S)

    async def embed(self, given: str | tuple[int, ...]) -> Embedding:
        """Refuse: the engine has only a part of the layers. Raises EndpointError."""
        del given
        message = "the device is split over two machines, and makes no embeddings: ask a machine with the whole model"
        raise EndpointError(self.side, "unsupported", message, your_fault=True)

    def describe_split(self, done: wire.Done) -> dict[str, Any] | None:
        """Return the partner's part of an answer. What it spends on it is not known here."""
        use, layers = done.split, self.engine.config.layers
        if use is None or layers is None:
            return None
        link = self._link.status()
        return {
            "mode": link["mode"],
            "quality": "whole",
            "theta": None,
            "alone_from": None,
            "codec": link["codec"],
            "same_bits": link["same_bits"],
            "n_rows": use.partner_rows,
            "round_trips": use.round_trips,
            "drafted": use.drafted,
            "accepted": use.accepted,
            "layer_tokens": {
                "edge": use.edge_rows * layers.n_layers,
                "partner": use.partner_rows * (layers.of - layers.n_layers),
            },
            "bytes": {"up": use.bytes_up, "down": use.bytes_down},
            "partner_s": use.partner_s,
            "partner_j": None,
            "partner_usd": None,
        }

    def status(self) -> dict[str, Any]:
        """Engine state, last failure and the link."""
        found = super().status()
        why = self._link.why_down
        return found | {"split": self._link.status(), "last_error": why or found["last_error"]}

    async def start(self) -> None:
        """Connect, and load the lower layers, both in the background."""
        await self._link.start()
        await super().start()

    async def close(self) -> None:
        """Stop the engine, then the link."""
        await super().close()
        await self._link.close()

"""A server that is configured and must not be asked: it stands where all look for the reason and the mend."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ..errors import EndpointError
from ..system.net import without_credentials
from ..types import (
    Capabilities,
    CaughtUp,
    Continuation,
    Finish,
    GenerationRequest,
    PromptLength,
    Readiness,
    Side,
    Token,
    Usage,
)
from .base import Controls, Resumption


class Off:
    """`Endpoint` that serves nothing, and gives `why` as the reason."""

    can_hold = False
    resumption = Resumption.UNSURE
    continuation = Continuation.NONE
    capabilities = Capabilities()

    def __init__(
        self, base_url: str, model: str, why: str, side: Side = Side.SERVER, *, known_since: float = 0.0
    ) -> None:
        self.side = side
        self.model = model
        self.why = why
        self.known_since = known_since
        self.adapters: dict[str, str] = {}
        self._base_url = base_url

    def refuses(self, request: GenerationRequest) -> str | None:
        """Everything, with the mend."""
        del request
        return f"the {self.side.value} is off: {self.why}"

    def overlap_of(self, request: GenerationRequest) -> str | None:
        """Nothing."""
        del request
        return None

    def may_serve(self) -> bool:
        """Not before the configuration is mended."""
        return False

    def readiness(self) -> Readiness:
        """It would not be asked in any case."""
        return Readiness()

    async def count(self, request: GenerationRequest) -> PromptLength | None:
        """It has no tokenizer."""
        del request
        return None

    async def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Finish, None]:
        """Raise EndpointError; nothing is yielded."""
        del usage, controls
        nothing: tuple[Token, ...] = ()
        for token in nothing:
            yield token
        raise EndpointError(self.side, "off", str(self.refuses(request)))

    def status(self) -> dict[str, Any]:
        """Return a server's status, with the reason in place of its last failure."""
        return {
            "kind": "openai",
            "base_url": without_credentials(self._base_url),
            "model": self.model,
            "state": "off",
            "continuation": "none",
            "probed": None,
            "failures": 0,
            "down_s": 0.0,
            "last_error": self.why,
        }

    async def start(self) -> None:
        """Nothing to begin."""

    async def close(self) -> None:
        """Nothing to end."""

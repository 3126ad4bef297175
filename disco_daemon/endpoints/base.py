"""What the conductor knows of an endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from ..types import Continuation, Finish, GenerationRequest, Readiness, Side, Token, Usage


class Endpoint(Protocol):
    """A place where answers come from. A new one is one file that implements this."""

    side: Side
    model: str
    continuation: Continuation

    def refuses(self, request: GenerationRequest) -> str | None:
        """Why this endpoint can never serve such a request (a missing capability), or None."""
        ...

    def may_serve(self) -> bool:
        """Whether trying now makes sense; for `/health`. A device that is still loading may serve."""
        ...

    def readiness(self) -> Readiness:
        """What a request started now would meet; for the plan."""
        ...

    async def count(self, request: GenerationRequest) -> int | None:
        """Prompt length in tokens, or None when this endpoint has no tokenizer at hand."""
        ...

    def generate(self, request: GenerationRequest, usage: Usage) -> AsyncGenerator[Token | Finish, None]:
        """Yield tokens and, last, one Finish; keeps `usage` up to date.

        Closing the generator stops the generation at the endpoint. Raises EndpointError, and nothing else.
        """
        ...

    def status(self) -> dict[str, Any]:
        """What `disco status` shows: JSON, no secrets."""
        ...

    async def start(self) -> None:
        """Begin work in the background; does not wait for it."""
        ...

    async def close(self) -> None:
        """Stop, and wait until all is stopped; idempotent."""
        ...

"""The protocol of an endpoint, as the conductor knows it, and the controls of an answer there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Protocol, runtime_checkable

from ..types import (
    Capabilities,
    CaughtUp,
    Continuation,
    Embedding,
    Finish,
    GenerationRequest,
    Given,
    Order,
    Paused,
    PromptLength,
    Readiness,
    Side,
    TextTask,
    Token,
    Usage,
)
from .breaker import BreakerState
from .hedge import Hedge

# What a device knows of a request: the token ids or the text of its rendered prompt and the answer so far. None: it
# cannot say now.
Tokens = Callable[[GenerationRequest], Awaitable[tuple[int, ...] | None]]
Render = Callable[[GenerationRequest], Awaitable[str | None]]


class Resumption(Enum):
    """How sure it is that an endpoint goes on exactly with what it is given: tried, or the user's word, no table's."""

    UNSURE = auto()
    HELPED = auto()  # it is sure, where the device says the token ids or the text that it needs
    ALONE = auto()  # also where the device says nothing


class Controls:
    """Orders from the conductor to an endpoint that works on an answer; `held`: it waits from the start.

    Orders sent before the endpoint has bound them are applied then, in order. After the answer's end they do nothing.
    With a `hedge` a server that is silent may be asked again; others ignore it.
    """

    def __init__(self, *, held: bool = False, hedge: Hedge | None = None) -> None:
        self.held = held
        self.hedge = hedge
        self._early: list[Order] = []
        self._apply: Callable[[Order], None] = self._early.append

    def bind(self, apply: Callable[[Order], None]) -> None:
        """Apply what came early, then each order as it comes: the endpoint's side."""
        early, self._early = self._early, []
        self._apply = apply
        for order in early:
            apply(order)

    def send(self, order: Order) -> None:
        """Send an order: the conductor's side. Never blocks, raises nothing: a dead endpoint fails in its stream."""
        self._apply(order)


@runtime_checkable
class Graded(Protocol):
    """An endpoint whose answers differ in quality."""

    def planned_quality(self, request: GenerationRequest) -> str:
        """Return what an answer is planned to be: whole, confident or alone."""
        ...


@runtime_checkable
class Sized(Protocol):
    """An endpoint that may be told how many parameters its model has."""

    n_parameters: int | None


@runtime_checkable
class Selective(Protocol):
    """An endpoint that heeds the fields that it knows; others pass on what they do not know."""

    def ignores(self, request: GenerationRequest) -> list[str]:
        """Return the fields that ask for something, and are not heeded here."""
        ...

    def narrows(self, request: GenerationRequest) -> list[str]:
        """Return what a schema of the request allows, and is not said here all the same."""
        ...


@runtime_checkable
class Forgetful(Protocol):
    """An endpoint that remembers for a while what it was refused."""

    def forget(self) -> None:
        """Ask again for all that was refused."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """An endpoint that is left alone while it fails."""

    def breakers(self) -> Mapping[str, BreakerState]:
        """Return the state of each server's breaker, by the server's name."""
        ...


class Endpoint(Protocol):
    """A place where answers come from. A new one is one file that implements this."""

    side: Side
    model: str
    can_hold: bool
    known_since: float  # Unix time of its model's file; of a server, when this daemon got to know it

    @property
    def adapters(self) -> Mapping[str, str]:
        """LoRA adapters by name, and why each cannot be used; an empty text says that it can."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beside an answer in text; a request that asks for more is not for it."""
        ...

    @property
    def continuation(self) -> Continuation:
        """How well it continues a partial answer."""
        ...

    @property
    def resumption(self) -> Resumption:
        """How sure it is to go on exactly where it, or another endpoint, was stopped."""
        ...

    def refuses(self, request: GenerationRequest) -> str | None:
        """Why this endpoint can never serve such a request, beside the capabilities that it lacks; or None."""
        ...

    def overlap_of(self, request: GenerationRequest) -> str | None:
        """The text that it will repeat before it continues `request.answer_so_far`; None if it goes right on."""
        ...

    def may_serve(self) -> bool:
        """Whether trying now makes sense; for `/health`. A device that is still loading may serve."""
        ...

    def readiness(self) -> Readiness:
        """The state that a request started now would meet; for the plan."""
        ...

    async def count(self, request: GenerationRequest) -> PromptLength | None:
        """Prompt length in tokens, or None when this endpoint has no tokenizer at hand."""
        ...

    def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Paused | Finish, None]:
        """Yield tokens and, last, one Finish; keeps `usage` up to date. One with a scheduler of its own says Paused.

        An endpoint with `can_hold` applies the orders of `controls`, and yields CaughtUp while held, whenever it has
        nothing left to prefill. Others ignore them.

        Closing the generator stops the generation at the endpoint. Raises EndpointError, and nothing else.
        """
        ...

    def status(self) -> dict[str, Any]:
        """The part of `disco status` about it: JSON, no secrets."""
        ...

    async def start(self) -> None:
        """Begin work in the background; does not wait for it."""
        ...

    async def close(self) -> None:
        """Stop, and wait until all is stopped; idempotent."""
        ...


@runtime_checkable
class Embedder(Endpoint, Protocol):
    """An endpoint that turns texts into vectors, too."""

    async def embed(self, texts: Sequence[Given], task: TextTask, usage: Usage) -> Embedding:
        """The vectors of texts, or of token ids of its model. Raises EndpointError.

        What was computed is added to `usage`, also where this is cancelled.
        """
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """An endpoint that knows how its model reads a prompt, and tells one with the same model."""

    async def token_ids(self, request: GenerationRequest) -> tuple[int, ...] | None:
        """Token ids of the prompt and the answer so far; None while that is not known."""
        ...

    async def render(self, request: GenerationRequest) -> str | None:
        """Return prompt and answer so far as the text that the model reads; None while that is not known."""
        ...


@runtime_checkable
class Loader(Protocol):
    """An endpoint that has a model in this machine's memory while it is open."""

    def expect(self, still_s: Callable[[], float]) -> None:
        """Expect to be opened when another model is gone from memory, in `still_s()` seconds as far as is known.

        Until then it counts as loading, and whoever asks waits.
        """
        ...

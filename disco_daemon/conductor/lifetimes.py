"""Counts what is in use: answers hold contexts, contexts hold endpoints, and a held endpoint stays open. Pure.

The daemon holds the context of the next request; each answer and each request for embeddings holds the context that it
began with. A context without holders lets go of its endpoints; an endpoint without contexts is closed, once. Of those
that must be `alone`, since each has a model in memory, the next one is opened when the one before is closed; one that
nobody needs any more by then is never opened. docs/explain/daemon.md has it as a drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

S = TypeVar("S")
E = TypeVar("E")


class Phase(StrEnum):
    """Where an endpoint is in its life; before and after, it is not known."""

    WAITING = "waiting"  # for another one to be closed
    OPEN = "open"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class Open(Generic[E]):
    """Start this endpoint."""

    endpoint: E


@dataclass(frozen=True, slots=True)
class Close(Generic[E]):
    """Close this endpoint, and say `closed` when that is done."""

    endpoint: E


class Lifetimes(Generic[S, E]):
    """Counts holders, and returns the endpoints to open and to close for them, in order.

    All mutable state: the number of holders of each context, its endpoints, and the phase of each endpoint, in the
    order in which they came.
    """

    def __init__(self, alone: Callable[[E], bool]) -> None:
        self._alone = alone
        self._holders: dict[S, int] = {}
        self._endpoints: dict[S, tuple[E, ...]] = {}
        self._phases: dict[E, Phase] = {}
        self._ended = False

    def phase(self, endpoint: E) -> Phase | None:
        """Where that endpoint is in its life; None before it and after."""
        return self._phases.get(endpoint)

    @property
    def phases(self) -> Mapping[E, Phase]:
        """All endpoints of now, in the order in which they came."""
        return self._phases

    def use(self, context: S, endpoints: Iterable[E]) -> list[Open[E]]:
        """A new context with one holder, the daemon; it may share endpoints with others. Raises ValueError."""
        needed = tuple(endpoints)
        gone = [e for e in needed if self.phase(e) is Phase.CLOSING]
        if self._ended or context in self._holders or gone:
            msg = f"{context} cannot be used: the end has come, it is in use already, or its endpoints close: {gone}"
            raise ValueError(msg)
        self._holders[context], self._endpoints[context] = 1, needed
        for endpoint in needed:
            self._phases.setdefault(endpoint, Phase.WAITING)
        return list(self._opened())

    def hold(self, context: S) -> None:
        """Add a holder of a context. Raises KeyError if it has none: then its endpoints are gone."""
        self._holders[context] += 1

    def leave(self, context: S) -> list[Open[E] | Close[E]]:
        """One holder less. Raises KeyError for one too many."""
        self._holders[context] -= 1
        if self._holders[context]:
            return []
        del self._holders[context]
        closing = list(self._let_go(self._endpoints.pop(context)))
        return [*closing, *self._opened()]

    def closed(self, endpoint: E) -> list[Open[E]]:
        """That endpoint is closed, as was asked for. Raises ValueError if it was not."""
        if self.phase(endpoint) is not Phase.CLOSING:
            msg = f"{endpoint} was not to be closed: it is {self.phase(endpoint)}"
            raise ValueError(msg)
        del self._phases[endpoint]
        return list(self._opened())

    def end(self) -> list[Close[E]]:
        """Close everything that is open, whatever holds it, and open nothing any more."""
        self._ended = True
        self._phases = {e: phase for e, phase in self._phases.items() if phase is not Phase.WAITING}
        return list(self._close(e for e, phase in self._phases.items() if phase is Phase.OPEN))

    def _let_go(self, endpoints: Iterable[E]) -> Iterator[Close[E]]:
        """Close the endpoints of a context that no other one has, or forget them if they were never opened."""
        held = {e for others in self._endpoints.values() for e in others}
        unused = [e for e in endpoints if e not in held]
        yield from self._close(e for e in unused if self.phase(e) is Phase.OPEN)
        for endpoint in unused:
            if self.phase(endpoint) is Phase.WAITING:
                del self._phases[endpoint]

    def _close(self, endpoints: Iterable[E]) -> Iterator[Close[E]]:
        for endpoint in tuple(endpoints):
            self._phases[endpoint] = Phase.CLOSING
            yield Close(endpoint)

    def _opened(self) -> Iterator[Open[E]]:
        """Open what waits and may be; of those that must be alone the one that came first."""
        if self._ended:
            return
        taken = any(self._alone(e) for e, phase in self._phases.items() if phase is not Phase.WAITING)
        for endpoint, phase in tuple(self._phases.items()):
            if phase is not Phase.WAITING or (taken and self._alone(endpoint)):
                continue
            taken |= self._alone(endpoint)
            self._phases[endpoint] = Phase.OPEN
            yield Open(endpoint)

"""The server side of one answer where there are several servers: the one that is asked now, and who comes after it.

The state table and the plan know one server. Which of several that is, is chosen when the answer begins and again when
the chosen one has failed; each is asked once at most for one answer, and each start is booked at its own price.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from ..endpoints.base import Controls, Endpoint, Resumption
from ..endpoints.breaker import Breaker
from ..endpoints.hedge import Hedge, ServerEvents
from ..errors import EndpointError
from ..money.spending import Spending
from ..types import (
    Attempt,
    Capabilities,
    CaughtUp,
    Continuation,
    Finish,
    GenerationRequest,
    Paused,
    PromptLength,
    Readiness,
    Relation,
    Side,
    Token,
    Usage,
)

MAX_AT_FAULT = 2  # servers that say that the request is at fault: it is, then, whatever a third one would say
LACKS = ("unsupported", "context_length_exceeded")  # … but where it is understood what this server lacks of others


@dataclass(frozen=True, slots=True, eq=False)
class ServerMember:
    """One model of one server, `SERVER/MODEL`: what answers there, at which price, and how good that model is.

    `passes_wishes`: it routes to others itself, and gets what the client says of `provider`.
    """

    server: str
    key: str
    endpoint: Endpoint
    spending: Spending
    relation: Callable[[], Relation]
    passes_wishes: bool = False


@dataclass(frozen=True, slots=True)
class OtherServer:
    """Who is asked as well after a silence of `after_s`, s; `take` says whether that may be now, and counts it.

    `is_due_anyway`: it would have been asked alone, but for the trial of another one, so it needs no room to spare.
    """

    member: ServerMember
    after_s: float
    take: Callable[[], bool]
    is_due_anyway: bool = False


Choose = Callable[[Sequence[ServerMember]], ServerMember | None]  # of those that are left, the best one to be asked now
Fits = Callable[[ServerMember], bool]  # whether caps and the limit of the client leave room for a start there


class AnswerServer:
    """`Endpoint` of the server side for one answer, made of several.

    All mutable state: the member that is asked `now`, those that are `left`, whether that one has failed here, and
    whether nobody is asked any more.
    """

    side = Side.SERVER
    can_hold = False
    adapters: Mapping[str, str] = {}

    def __init__(
        self,
        first: ServerMember,
        others: Sequence[ServerMember],
        choose: Choose,
        failed: Callable[[ServerMember], None] = lambda member: None,
        hedge: OtherServer | None = None,
        asked: Callable[[ServerMember], None] = lambda member: None,
    ) -> None:
        """`failed` is told of each member that fails, when it does, and `asked` of each that is asked.

        With a `hedge` another one may be asked as well.
        """
        self.now, self.left = first, [one for one in others if one is not first]
        self.model, self.known_since = first.endpoint.model, first.endpoint.known_since
        self._choose, self._told, self._asking = choose, failed, asked
        self._has_failed = self._is_over = False
        self._n_at_fault, self._told_of = 0, set[str]()
        self._hedge, self._sent = hedge, None if hedge is None else hedge.member
        self._asked_twice: Hedge | None = None

    @property
    def hedge(self) -> OtherServer | None:
        """Who may be asked as well, before anybody has failed."""
        return self._hedge

    def ask_twice(self, hedge: Hedge) -> None:
        """Take the order by which the other one may be asked as well, once; its account says what comes of it."""
        self._hedge, self._asked_twice = None, hedge

    def look_back(self, *, heard: bool = True) -> bool:
        """Take what became of a second request: True where its server is the one that is asked now.

        Whoever failed of the two is told of. Of a run that is not `heard` any more nothing but that is taken.
        """
        hedge, other = self._asked_twice, self._sent
        self._asked_twice = None
        if hedge is None or other is None or hedge.sent_at is None:
            return False
        if hedge.won or hedge.second.error is not None:  # else it has lost a race, and may still go on with the answer
            self.left = [one for one in self.left if one is not other]
        for member, account in ((self.now, hedge.first), (other, hedge.second)):
            if account.error is not None and not account.at_fault:
                self._tell(member)
        if hedge.won and heard:
            self._become(other)
        return hedge.won and heard

    def _tell(self, member: ServerMember) -> None:
        if member.key not in self._told_of:
            self._told_of.add(member.key)
            self._told(member)

    def _become(self, member: ServerMember) -> None:
        self.now, self._has_failed = member, False
        self.model, self.known_since = member.endpoint.model, member.endpoint.known_since

    @property
    def is_fresh(self) -> bool:
        """Whether the one that would be asked now has not failed for this answer."""
        return not self._has_failed

    def give_up(self) -> None:
        """Ask nobody any more for this answer: privacy or a limit is in the way, which says nothing of a member."""
        self._hedge, self._has_failed, self._is_over = None, True, True

    def leave(self, error: EndpointError, fits: Fits, *, begun: bool = False) -> bool:
        """Let another member be asked from now on, one that `fits`; False where none is left that may be.

        With an answer `begun` only one that may go on with it.
        """
        if self._is_over:
            return False
        self.look_back()
        self._has_failed = True
        if not error.your_fault:
            self._tell(self.now)
        self._n_at_fault += error.your_fault and error.code not in LACKS
        return self._n_at_fault < MAX_AT_FAULT and self.pass_over(fits, begun=begun)

    def pass_over(self, fits: Fits, *, begun: bool) -> bool:
        """Let another member that `fits` be asked in the place of one that may not be, of which that says nothing."""
        found = None if self._is_over else self._next(fits, begun=begun)
        if found is None:
            return False
        self.left.remove(found)
        self._become(found)
        return True

    def _next(self, fits: Fits, *, begun: bool) -> ServerMember | None:
        able = [one for one in self.left if not begun or one.endpoint.continuation is not Continuation.NONE]
        able = [one for one in able if fits(one)]
        tried = [one for one in able if begun and one.endpoint.continuation is not Continuation.UNTRIED]
        return self._choose(tried or able)

    def may_pass_on(self, fits: Fits, *, begun: bool) -> bool:
        """Whether another one that `fits` would answer, or go on with an answer that has `begun`."""
        return self._next(fits, begun=begun) is not None

    def is_silent(self, now: float) -> bool:
        """Whether the one that is asked now is silent for longer than is usual of it."""
        breaker: Breaker | None = getattr(self.now.endpoint, "breaker", None)
        return breaker is not None and breaker.is_silent(now)

    # --- Endpoint: what the one says that is asked now ----------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self.now.endpoint.capabilities

    @property
    def continuation(self) -> Continuation:
        """How well it continues a partial answer."""
        return self.now.endpoint.continuation

    @property
    def resumption(self) -> Resumption:
        """How sure it is to go on exactly."""
        return self.now.endpoint.resumption

    def refuses(self, request: GenerationRequest) -> str | None:
        """Why it can never serve such a request; or None."""
        return self.now.endpoint.refuses(request)

    def overlap_of(self, request: GenerationRequest) -> str | None:
        """The text that it will repeat before it continues."""
        return self.now.endpoint.overlap_of(request)

    def may_serve(self) -> bool:
        """Whether trying it makes sense."""
        return self.now.endpoint.may_serve()

    def readiness(self) -> Readiness:
        """The state that a request started now would meet."""
        return self.now.endpoint.readiness()

    async def count(self, request: GenerationRequest) -> PromptLength | None:
        """Unknown: servers do not tell before they bill."""
        del request
        return None

    def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Paused | Finish, None]:
        """Stream one answer of it, or of the other one that is asked as well where it is silent."""
        if controls is not None and controls.hedge is not None and self._sent is not None:
            other = self._sent
            controls.hedge.elsewhere = lambda own: _asked(other, request, own)
        self._asking(self.now)
        return self.now.endpoint.generate(_said_to(self.now, request), usage, controls)

    def status(self) -> dict[str, Any]:
        """Its part of `disco status`."""
        return self.now.endpoint.status()

    async def start(self) -> None:
        """Nothing to begin: whoever has the members opens and closes them."""

    async def close(self) -> None:
        """Nothing to end."""


def _said_to(member: ServerMember, request: GenerationRequest) -> GenerationRequest:
    """Return the request as a member gets it: whom to ask is said to whoever routes, and most servers refuse it."""
    if "provider" not in request.extra or member.passes_wishes:
        return request
    return replace(request, extra={name: value for name, value in request.extra.items() if name != "provider"})


async def _asked(member: ServerMember, request: GenerationRequest, usage: Usage) -> ServerEvents:
    """Yield the events of a request to another member, which no hedge is for."""
    async with aclosing(member.endpoint.generate(_said_to(member, request), usage)) as events:
        async for event in events:
            if isinstance(event, Token | Finish):
                yield event


def as_one_server(attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
    """Return the starts as whoever plans with one server meets them.

    A member that failed before its first token, and in whose place another one was asked, is a part of that one's
    time: the server side has not failed, it took longer.
    """
    found: list[Attempt] = []
    began: float | None = None
    for at, one in enumerate(attempts):
        rest = attempts[at + 1 :]
        if one.server is None or one.continued or one.hedge is not None:
            found.append(one)
        elif one.error is not None and one.censored and any(_is_in_its_place(other, one) for other in rest):
            began = one.started_s if began is None else began
        else:
            late_s = 0.0 if began is None else one.started_s - began
            found.append(replace(one, started_s=one.started_s - late_s, ttft_s=one.ttft_s + late_s))
            began = None
    return tuple(found)


def _is_in_its_place(other: Attempt, failed: Attempt) -> bool:
    is_first = not other.continued and other.hedge is None
    return other.server is not None and is_first and other.started_s >= failed.started_s

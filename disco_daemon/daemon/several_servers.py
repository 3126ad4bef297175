"""Several servers as one endpoint, for whoever asks how the server side is: no answer is this endpoint's own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ..conductor.answer_server import ServerMember
from ..dispatch.pool import Candidate, Pool
from ..endpoints.base import Controls, Endpoint, Guarded, Resumption
from ..endpoints.breaker import BreakerState
from ..endpoints.server_off import Off
from ..errors import EndpointError
from ..types import (
    Capabilities,
    CaughtUp,
    Continuation,
    Finish,
    GenerationRequest,
    Paused,
    PromptLength,
    Readiness,
    Side,
    Token,
    Usage,
    together,
)

USUAL_TOKENS = (500, 200)  # of a prompt and an answer, where servers are weighed without a request

NOBODY = "no server answers 'disco': ask for one of its models as SERVER/MODEL, or set `model` in its [[servers]]"


class SeveralServers:
    """The parts of `Endpoint` that need no request; `own` are the members that answer `disco`, by `SERVER/MODEL`."""

    side = Side.SERVER
    can_hold = False
    adapters: Mapping[str, str] = {}
    model: str  # that of the first one
    known_since: float
    own: Mapping[str, ServerMember]
    choice: Pool

    @property
    def asked_now(self) -> ServerMember | None:
        """The one of those that answer `disco` which would be asked now, as far as the request does not matter."""
        up = [one for one in self.own.values() if not one.endpoint.readiness().down_s > 0] or list(self.own.values())
        candidates = []
        for one in up:
            price = one.spending.price
            candidates.append(Candidate(one.key, price.cost_usd(*USUAL_TOKENS) if price.known else None))
        weighed = self.choice.weigh(candidates)
        best = min(weighed, key=lambda one: (one.cost_s is None, one.cost_s or 0.0), default=None)
        return None if best is None else self.own[best.name]

    @property
    def _first(self) -> Endpoint | None:
        return next((one.endpoint for one in self.own.values()), None)

    @property
    def n_parameters(self) -> int | None:
        """The number of its parameters, once its catalogue has told."""
        return getattr(self._first, "n_parameters", None)

    @property
    def capabilities(self) -> Capabilities:
        """What those that answer `disco` can do together."""
        return together(one.endpoint.capabilities for one in self.own.values())

    @property
    def continuation(self) -> Continuation:
        """How well the first one continues a partial answer."""
        return Continuation.NONE if self._first is None else self._first.continuation

    @property
    def resumption(self) -> Resumption:
        """How sure that one is to go on exactly."""
        return Resumption.UNSURE if self._first is None else self._first.resumption

    def refuses(self, request: GenerationRequest) -> str | None:
        """Why none of them can serve such a request; or None, also where it names others."""
        if not self.own.keys() >= set(request.servers):
            return None
        refusals = [self.own[key].endpoint.refuses(request) for key in request.servers or self.own]
        return NOBODY if not refusals else refusals[0] if all(refusals) else None

    def overlap_of(self, request: GenerationRequest) -> str | None:
        """Nothing: no answer is this endpoint's, but one of its members'."""
        del request
        return None

    def may_serve(self) -> bool:
        """Whether one of them may be tried."""
        return any(one.endpoint.may_serve() for one in self.own.values())

    def readiness(self) -> Readiness:
        """The state of the one that is down for the shortest time."""
        found = [one.endpoint.readiness() for one in self.own.values()]
        return min(found, key=lambda one: one.down_s, default=Readiness())

    def breakers(self) -> dict[str, BreakerState]:
        """Return the state of each one's breaker, by `SERVER/MODEL`."""
        guarded = ((key, one.endpoint) for key, one in self.own.items())
        return {key: s for key, one in guarded if isinstance(one, Guarded) for s in one.breakers().values()}

    async def count(self, request: GenerationRequest) -> PromptLength | None:
        """Unknown: servers do not tell before they bill."""
        del request
        return None

    async def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Paused | Finish, None]:
        """Raise EndpointError: an answer has one of the members as its server (`context`)."""
        del request, usage, controls
        nothing: tuple[Token, ...] = ()
        for token in nothing:
            yield token
        raise EndpointError(Side.SERVER, "off", NOBODY)

    def status(self) -> dict[str, Any]:
        """Return the status of the first one that is well, as one server's."""
        found = [one.endpoint.status() for one in self.own.values()]
        well = [one for one in found if one["state"] != "off" and not one.get("failing") and not one["down_s"]]
        nothing = Off("", "", NOBODY, known_since=self.known_since).status()
        return next(iter(well or found), nothing)

"""One request to a server, as its breaker learns of it: it begins, shows a token, and ends once, however that is."""

from __future__ import annotations

from ..clock import Clock
from ..errors import EndpointError
from ..types import GenerationRequest, Infill
from .breaker import BreakerCall
from .server_errors import ServerErrors, is_of_model
from .stream import Patience


class ServerCall:
    """The account of one request. `close` it: one that has not ended by then was let go, or broke by a bug of ours.

    One that is not `noted`, such as a probe's, is none of the breaker's: what it asks may be new to the server.
    """

    __slots__ = ("_call", "_clock", "_errors", "_is_noted", "_patience", "_thinks")

    def __init__(self, errors: ServerErrors, clock: Clock, *, noted: bool) -> None:
        self._errors, self._clock, self._is_noted = errors, clock, noted
        self._call: BreakerCall | None = None
        self._patience: Patience | None = None
        self._thinks = False

    def begin(self, patience: Patience, *, thinks: bool) -> None:
        """Begin: it is about to be sent. The silence of a model that `thinks` says nothing of its server."""
        if self._is_noted:
            self._call, self._patience, self._thinks = self._errors.breaker.begin(self._clock.now()), patience, thinks
            patience.on_first = self._speak

    def _speak(self, waited_s: float) -> None:
        if self._call is not None:
            self._errors.breaker.speak(self._call, waited_s)

    def succeed(self) -> None:
        """End it: the server has answered, be it that the request is at fault."""
        if self._call is not None:
            self._errors.breaker.succeed(self._call)

    def fail(self, error: EndpointError, request: GenerationRequest) -> None:
        """End it: the server has failed.

        That a path for half an answer is not there says nothing of the model, nor that nobody has what a request wants.
        """
        if self._call is not None:
            is_plain = not request.answer_so_far and not isinstance(request.prompt, Infill)
            is_plain &= error.reason != "not_found" or is_of_model(error, request)
            self._errors.broke(self._call, error, is_plain=is_plain)

    def close(self) -> None:
        """Let it go, if it has not ended."""
        if self._call is not None and self._patience is not None:
            silent_s = None if self._thinks else self._patience.silent_s
            self._errors.breaker.leave(self._call, silent_s, self._clock.now())
            self._patience.on_first = None
            self._call = self._patience = None

"""The daemon's end of the socket to the engine, and the requests in flight on it; one for all lives of the process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator

from ..clock import Clock
from ..errors import EndpointError
from ..types import Side
from . import framing, wire
from .inbox import EngineGone, ReplyInbox


class RequestChannel:
    """Messages to the engine, and an inbox for the replies to each request.

    All mutable state: the socket of the present life, the inboxes (the context bounds their length, since the engine
    ends an answer there), when the engine was last heard, and when it was last used; by `clock`, in s.
    """

    def __init__(self, clock: Clock, why_closed: Callable[[], str | None]) -> None:
        """`why_closed` says what ended the life before; None if none has ended."""
        self._clock, self._why_closed = clock, why_closed
        self._ids = itertools.count(1)
        self._inboxes: dict[str, ReplyInbox] = {}
        self._writer: asyncio.StreamWriter | None = None
        self.heard_at = self.used_at = clock.now()

    @property
    def n_in_flight(self) -> int:
        """The number of requests the engine has not finished yet."""
        return len(self._inboxes)

    @property
    def owes_reply(self) -> bool:
        """Whether the engine owes a reply: else its silence is no hang."""
        return not all(inbox.idle for inbox in self._inboxes.values())

    # --- the socket ----------------------------------------------------------------------------------------------

    def open(self, writer: asyncio.StreamWriter) -> None:
        """Send to this socket from now on."""
        self._writer = writer

    def close(self) -> None:
        """Close the socket, and with it the engine process; idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def write(self, message: wire.Message) -> None:
        """Send a message. Raises EngineGone, and EndpointError if it cannot be sent."""
        try:
            data = framing.frame(message)
        except framing.Unsendable as e:
            raise EndpointError(Side.DEVICE, "unsendable", str(e), your_fault=True) from e
        self._send(data)

    def _send(self, data: bytes) -> None:
        if self._writer is None or self._writer.is_closing():
            raise EngineGone(self._why_closed() or "the engine is not running")
        self._writer.write(data)

    # --- requests ------------------------------------------------------------------------------------------------

    def expect(self, kind: str) -> tuple[str, ReplyInbox]:
        """Open an inbox. An idle engine's silence is no hang: silence counts from the first reply it owes."""
        self.used_at = self._clock.now()
        if not self.owes_reply:
            self.heard_at = self.used_at
        request_id = f"{kind}{next(self._ids)}"
        inbox = self._inboxes[request_id] = ReplyInbox()
        return request_id, inbox

    def forget(self, request_id: str) -> None:
        """Remove an inbox: its request is over."""
        self._inboxes.pop(request_id, None)

    @contextlib.contextmanager
    def inbox(self) -> Iterator[tuple[str, ReplyInbox]]:
        """Open an inbox for a question that is asked and answered in one place; left unanswered, it is withdrawn."""
        request_id, inbox = self.expect("q")
        try:
            yield request_id, inbox
        except (TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(EngineGone):
                self.write(wire.CancelRequest(id=request_id))
            raise
        finally:
            self.forget(request_id)

    def order(self, inbox: ReplyInbox, message: wire.ToAnswer) -> None:
        """Send an order for an answer in flight; the engine owes a reply from now on. Raises EngineGone.

        An order that cannot be sent, such as one with a server's token ids of 65 bits, ends the answer.
        """
        try:
            data = framing.frame(message)
        except framing.Unsendable as e:
            self._send(framing.frame(wire.CancelRequest(id=message.id)))
            inbox.put(wire.Failed(id=message.id, reason="engine_error", message=str(e), your_fault=False))
            return
        if not isinstance(message, wire.SetPace):
            if not self.owes_reply:
                self.heard_at = self._clock.now()
            inbox.idle = False
            inbox.n_orders += not isinstance(message, wire.CancelRequest)
        self._send(data)

    def deliver(self, message: wire.Reply) -> None:
        """Put a reply into the inbox of its request."""
        inbox = self._inboxes.get(message.id)
        if inbox is not None:  # else its request is over, as after a cancelled count
            inbox.put(message)

    def fail_all(self, gone: EngineGone) -> None:
        """Let all requests in flight know that the engine has gone."""
        for inbox in self._inboxes.values():
            inbox.put(gone)

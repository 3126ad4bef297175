"""One request in the engine, from the daemon's side: the messages that come of it, and the orders that go to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import EndpointError
from ..types import Hold, Order, Side, Usage
from . import wire
from .requests import order_message

CANCEL_TIMEOUT_S = 0.5  # for the final counts of a cancelled answer; a decode stops in 0.5-20 ms, more means a hang


class EngineGone(EndpointError):
    """The engine process died, or cannot be used; running answers must go on elsewhere."""

    def __init__(self, message: str) -> None:
        super().__init__(Side.DEVICE, "engine_gone", message)


Answer = wire.PrefillProgress | wire.TextPiece | wire.CallPiece | wire.PauseChange | wire.Done | wire.Failed
Reply = wire.Reply | EngineGone


@dataclass(slots=True, eq=False)
class ReplyInbox:
    """The messages of one request that have arrived.

    `n_orders` HoldAnswer and AppendText messages were sent; `idle`: all are carried out, and no reply is owed.
    """

    replies: asyncio.Queue[Reply] = field(default_factory=asyncio.Queue)
    n_orders: int = 0
    idle: bool = False

    def put(self, message: Reply) -> None:
        """Take a message; a held answer that waits for orders or for room is silent by design."""
        if isinstance(message, wire.PrefillProgress):
            self.idle = message.idle and message.n_orders == self.n_orders
        elif not isinstance(message, wire.TextPiece | wire.CallPiece):  # the last message, or the engine has gone
            self.idle = True
        self.replies.put_nowait(message)


SendOrder = Callable[[ReplyInbox, wire.ToAnswer], None]


class EngineAnswer:
    """One answer in flight: iterate it for messages, `close` it in any case. `done` has the final counts."""

    def __init__(self, request_id: str, inbox: ReplyInbox, send: SendOrder, forget: Callable[[str], None]) -> None:
        self._send, self._forget = send, forget
        self._id = request_id
        self._inbox = inbox
        self._ended = False
        self._n_applied = 0  # orders carried out, according to the messages read
        self._held_at = 0  # number of orders up to the last Hold
        self.done: wire.Done | None = None

    @property
    def up_to_date(self) -> bool:
        """Whether the message just read was sent after all orders were carried out."""
        return self._n_applied == self._inbox.n_orders

    @property
    def outdated(self) -> bool:
        """Whether the piece just read was made before a HoldAnswer that discards it."""
        return self._n_applied < self._held_at

    def __aiter__(self) -> EngineAnswer:
        return self

    async def __anext__(self) -> Answer:
        if self._ended:
            raise StopAsyncIteration
        message = await self._inbox.replies.get()
        match message:
            case EngineGone():
                self._ended = True
                raise EngineGone(str(message))  # of its own: all answers in flight got the same one
            case wire.Done():
                self._ended, self.done = True, message
                return message
            case wire.Failed():
                self._ended = True
                return message
            case wire.PrefillProgress(n_orders=n_orders):
                self._n_applied = n_orders
                return message
            case wire.TextPiece() | wire.CallPiece() | wire.PauseChange():
                return message
            case other:
                raise TypeError(f"unexpected {type(other).__name__}")

    def send(self, order: Order) -> None:
        """Send an order, unless the engine has died: the messages say so. A Hold makes the pieces so far outdated."""
        if not self._ended:
            with contextlib.suppress(EngineGone):
                self._send(self._inbox, order_message(order, self._id))
        if isinstance(order, Hold):
            self._held_at = self._inbox.n_orders

    async def close(self) -> None:
        """Cancel if still running, and wait shortly for the final counts; idempotent, safe while being cancelled."""
        try:
            if not self._ended:
                self._send(self._inbox, wire.CancelRequest(id=self._id))
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    async for _ in self:
                        pass
        except (EngineGone, TimeoutError):
            pass
        finally:
            self._ended = True
            self._forget(self._id)


async def wait_for_embedding(
    inbox: ReplyInbox, usage: Usage, withdraw: Callable[[], None]
) -> wire.Embedded | wire.Failed:
    """Wait for an embedding, and add to `usage` what it took. Raises EngineGone.

    Cancelled it does `withdraw`, and waits shortly for what was computed until then.
    """
    reply: wire.Embedded | wire.Failed | None = None
    try:
        reply = await _embedded(inbox)
        return reply
    except asyncio.CancelledError:
        with contextlib.suppress(EngineGone, TimeoutError):
            withdraw()
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                reply = await _embedded(inbox)
        raise
    finally:
        if isinstance(reply, wire.Embedded):
            usage.prompt_tokens += reply.n_tokens
            usage.busy_s += reply.busy_s


async def _embedded(inbox: ReplyInbox) -> wire.Embedded | wire.Failed:
    while True:
        match await inbox.replies.get():  # ends: the supervisor kills an engine that hangs
            case EngineGone() as gone:
                raise gone
            case wire.Embedded() | wire.Failed() as reply:
                return reply

"""How messages between daemon and engine become bytes: frames (`system.frames`) of one msgpack message each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..system.frames import HEADER, BadFrameError, FrameFormat
from .wire import Message

if TYPE_CHECKING:
    import asyncio  # the engine has no loop, and would load it for this

MAX_FRAME = 64 * 1024 * 1024  # bytes; a request body is at most 8 MiB, so this only catches a broken peer
FRAMES = FrameFormat(MAX_FRAME)
_encoder = msgspec.msgpack.Encoder()


class Unsendable(ValueError):
    """A message cannot be encoded; the error's text is fit for a user."""


def frame(message: Message) -> bytes:
    """Encode one message with its lengths in front. Raises Unsendable."""
    try:
        return FRAMES.head(len(body := _encoder.encode(message))) + body
    except BadFrameError as e:
        raise Unsendable(f"the request is too large for the engine: {e}") from e
    except (OverflowError, TypeError, ValueError, RecursionError) as e:  # an integer of 65 bits, half a character
        raise Unsendable(f"the request cannot be sent to the engine: {e}") from e


async def read_async(reader: asyncio.StreamReader) -> bytes | None:
    """Read one message in the daemon; None when the engine has gone. Raises BadFrameError."""
    try:
        n_body, _, _ = FRAMES.lengths(await reader.readexactly(HEADER.size))
        return await reader.readexactly(n_body)
    except (EOFError, ConnectionError):  # that it is incomplete is an EOFError
        return None

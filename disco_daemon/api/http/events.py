"""Server-sent events, as they are on the wire. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from ...plain import one_line

MAX_NOTE = 1000  # characters of a comment
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which no client shows; those of `disco chat` begin with "disco"
DONE = b"data: [DONE]\n\n"  # the end of a stream of OpenAI's chunks

_encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """Return one server-sent event, never with an `id:` field: the openai client then trips over comments."""
    return b"data: " + _encode(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """Return one whose name is the `type` of its payload, as Anthropic's and the Responses API have them."""
    return _head(payload["type"]) + _encode(payload) + b"\n\n"


@lru_cache(64)  # there are some twenty
def _head(name: str) -> bytes:
    return b"event: " + name.encode() + b"\ndata: "


def comment(text: str) -> bytes:
    """Return one comment, which clients skip; always one line, whatever the text.

    An empty line follows, so that a client that cuts at empty lines does not lose the event after it.
    """
    return f": disco {one_line(text, MAX_NOTE)}\n\n".encode("utf-8", "replace")

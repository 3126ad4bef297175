"""What may be the first message on a connection, which says what it is for, and the answers. Pure.

`Hello` begins the connection for calls, `BindRows` the one for rows. Both belong to one link, whose name the edge
draws. A machine without a certificate may send `AskAuthority` and `AskPair` only, while a code is live. All frames are
those of `messages`.
"""

from __future__ import annotations

import msgspec

from .messages import HEADER, BadFrameError, Build, Hello, PeerMessage, Refused, Welcome, check_lengths

MAX_FIRST = 1 << 16  # bytes of a first message: a request for a certificate has 1 KB


class BindRows(PeerMessage, frozen=True, kw_only=True):
    """The connection for the rows of the link of this name, which a Hello has begun; answered by RowsBound."""

    link: str


class RowsBound(PeerMessage, frozen=True, kw_only=True):
    """The link stands: both connections have found each other."""


class AskAuthority(PeerMessage, frozen=True, kw_only=True):
    """A machine that has a code wants to see the authority's certificate, to compare its fingerprint."""


class TheAuthority(PeerMessage, frozen=True, kw_only=True):
    """The authority's certificate (PEM)."""

    certificate: str


class AskPair(PeerMessage, frozen=True, kw_only=True):
    """A machine that wants to be called `name` has the secret of a code, and a request for a certificate (PEM)."""

    secret: bytes
    csr: str
    name: str


class PairGranted(PeerMessage, frozen=True, kw_only=True):
    """The certificate (PEM). `build` and `n_ctx` tell of the model that is served, if one is in memory."""

    certificate: str
    build: Build | None = None
    n_ctx: int = 0


class AskFile(PeerMessage, frozen=True, kw_only=True):
    """A member wants the model's layers up to `cut` as a file, from byte `offset` on if it still has this SHA-256."""

    cut: int
    offset: int = 0
    sha256: str = ""


class FileFollows(PeerMessage, frozen=True, kw_only=True):
    """The file has `n_bytes` bytes and this SHA-256 (hex); those from `offset` on follow, raw, up to its end."""

    n_bytes: int
    sha256: str
    offset: int


First = Hello | BindRows | AskAuthority | AskPair | AskFile
FirstReply = Welcome | Refused | RowsBound | TheAuthority | PairGranted | FileFollows

_encoder = msgspec.msgpack.Encoder()
_first: msgspec.msgpack.Decoder[First] = msgspec.msgpack.Decoder(First)
_reply: msgspec.msgpack.Decoder[FirstReply] = msgspec.msgpack.Decoder(FirstReply)


def first_frame(message: First | FirstReply) -> bytes:
    """Return a message as a frame. Raises BadFrameError if it is too large."""
    body = _encoder.encode(message)
    check_lengths(len(body), 0)
    return HEADER.pack(len(body), 0, 0) + body


def decode_first(body: bytes) -> First:
    """Return the first message of a connection. Raises BadFrameError."""
    try:
        return _first.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        msg = f"no first message of this protocol: {e}"
        raise BadFrameError(msg) from e


def decode_reply(body: bytes) -> FirstReply:
    """Return the answer to a first message. Raises BadFrameError."""
    try:
        return _reply.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        msg = f"no answer of this protocol: {e}"
        raise BadFrameError(msg) from e

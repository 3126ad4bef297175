"""The schema of everything that crosses the socket pair between daemon and engine.

A frame is a 4-byte little-endian length and one msgpack-encoded message. Every message is a tagged struct, so an
unknown or malformed one is an error at the door and never a surprise inside.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgspec

MAX_FRAME = 64 * 1024 * 1024  # bytes; a request body is at most 8 MiB, so this only catches a broken peer
PREFILL_CHUNK = 128  # tokens; as fast as 512 on CPUs, and a short prompt need not wait for a long one's chunk
_HEADER = struct.Struct("<I")


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of all messages."""


# --- daemon -> engine ---------------------------------------------------------------------------------------------


class Load(Message, frozen=True):
    """Load a model. First message of every engine process; `n_ctx` in tokens, 0 = what the model was trained on."""

    model_path: str
    n_ctx: int
    n_threads: int
    n_gpu_layers: int


class Count(Message, frozen=True):
    """Ask for the prompt length of rendered `messages`."""

    id: str
    messages: list[dict[str, Any]]


class Generate(Message, frozen=True):
    """Prefill the rendered `messages` and `answer_so_far`, then generate, unless `hold` asks to wait for an Append."""

    id: str
    messages: list[dict[str, Any]]
    answer_so_far: str = ""
    hold: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class Append(Message, frozen=True):
    """Add answer text that came from elsewhere to a held sequence; with `go` it generates from there."""

    id: str
    text: str
    go: bool


class Cancel(Message, frozen=True):
    """Stop one sequence, in the middle of a prefill too. Answered by Done("cancelled")."""

    id: str


class AskStats(Message, frozen=True):
    """Ask for Stats."""

    id: str


# --- engine -> daemon ---------------------------------------------------------------------------------------------


class Loaded(Message, frozen=True):
    """The model is in memory. `load_s` in s, `prefill_tps` in token/s, measured on a short warm-up prefill."""

    model: str
    n_ctx: int
    n_seq_max: int
    load_s: float
    prefill_tps: float


class LoadFailed(Message, frozen=True):
    """The model cannot be loaded; trying again without a change is of no use."""

    message: str


class Counted(Message, frozen=True):
    """Prompt length in tokens."""

    id: str
    n_tokens: int


class Progress(Message, frozen=True):
    """A prefill chunk is done: `n_past` of `n_prompt` tokens are in the KV cache."""

    id: str
    n_past: int
    n_prompt: int


class Piece(Message, frozen=True):
    """Text of `n_tokens` further tokens, cut at whole code points."""

    id: str
    text: str
    n_tokens: int


class Done(Message, frozen=True):
    """A sequence has ended: `stop`, `length` or `cancelled`. Counts are tokens really computed, `busy_s` in s."""

    id: str
    reason: str
    n_prompt: int
    n_completion: int
    busy_s: float


class Failed(Message, frozen=True):
    """A sequence cannot be served. `your_fault`: the request is to blame."""

    id: str
    reason: str
    message: str
    your_fault: bool


class Stats(Message, frozen=True):
    """Counters since the engine's start, tokens and s."""

    id: str
    running: int
    waiting: int
    prompt_tokens: int
    completion_tokens: int
    busy_s: float


ToEngine = Load | Count | Generate | Append | Cancel | AskStats
FromEngine = Loaded | LoadFailed | Counted | Progress | Piece | Done | Failed | Stats

_encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: Message) -> bytes:
    """Encode one message with its length in front."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


def _length(header: bytes) -> int:
    (n,) = _HEADER.unpack(header)
    if n > MAX_FRAME:
        msg = f"a frame of {n} bytes exceeds the limit of {MAX_FRAME}"
        raise ValueError(msg)
    return int(n)


def read_blocking(sock: socket.socket) -> bytes | None:
    """Read one frame's body in the engine process; None when the daemon has gone."""
    header = _read_exactly(sock, _HEADER.size)
    return None if header is None else _read_exactly(sock, _length(header))


def _read_exactly(sock: socket.socket, n: int) -> bytes | None:
    parts: list[bytes] = []
    while n:
        part = sock.recv(min(n, 1 << 20))
        if not part:
            return None
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


async def read_async(reader: asyncio.StreamReader) -> bytes | None:
    """Read one frame's body in the daemon; None when the engine has gone."""
    try:
        header = await reader.readexactly(_HEADER.size)
        return await reader.readexactly(_length(header))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None

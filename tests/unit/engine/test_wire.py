from __future__ import annotations

import asyncio
import contextlib
import socket
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine import framing, wire
from disco_daemon.system.frames import HEADER

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
fields: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bool: st.booleans(),
    bytes: st.binary(),
    type(None): st.none(),
    dict[str, str]: st.dictionaries(st.text(), st.text(), max_size=3),
    tuple[int, ...]: st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4).map(tuple),
    list[str]: st.lists(st.text(), max_size=4),
    tuple[str, ...]: st.lists(st.text(), max_size=4).map(tuple),
    dict[str, Any]: st.dictionaries(st.text(), json_values, max_size=3),
    list[dict[str, Any]]: st.lists(st.dictionaries(st.text(), json_values, max_size=3), max_size=3),
}


def of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type; a union gives all of its types."""
    if kind in fields:
        return fields[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return built(kind)
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and parts[-1] is ...:
        return st.lists(of(parts[0]), max_size=3).map(tuple)
    if typing.get_origin(kind) is tuple:
        return st.tuples(*map(of, parts))
    return st.one_of(*(of(part) for part in parts))


def built(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: of(hints[name]) for name in kind.__struct_fields__})


def messages(*kinds: type[wire.Message]) -> st.SearchStrategy[wire.Message]:
    return st.one_of(*map(built, kinds))


to_engine = messages(*typing.get_args(wire.ToEngine))
from_engine = messages(*typing.get_args(wire.FromEngine))


def body(data: bytes) -> bytes:
    n, _, _ = HEADER.unpack_from(data)
    assert n == len(data) - HEADER.size
    return data[HEADER.size :]


async def read(data: bytes) -> bytes | None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await framing.read_async(reader)


def read_blocking(data: bytes) -> bytes | None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        with theirs.makefile("rb") as stream:
            return found[0] if (found := framing.FRAMES.read(stream)) is not None else None


@given(to_engine)
def test_every_message_to_the_engine_arrives_as_it_was_sent(message: wire.Message) -> None:
    assert wire.decode_to_engine(body(framing.frame(message))) == message


@given(from_engine)
def test_every_message_from_the_engine_arrives_as_it_was_sent(message: wire.Message) -> None:
    assert wire.decode_from_engine(body(framing.frame(message))) == message


@given(st.lists(to_engine, max_size=4))
def test_frames_in_a_row_are_told_apart_on_both_ends(sent: list[wire.Message]) -> None:
    data = b"".join(framing.frame(m) for m in sent)

    async def read_all() -> list[Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return [
            wire.decode_to_engine(b) for b in iter([await framing.read_async(reader) for _ in sent]) if b is not None
        ]

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        with theirs.makefile("rb") as stream:
            blocking = [wire.decode_to_engine(f) for f, _, _ in iter(lambda: framing.FRAMES.read(stream), None)]
    assert blocking == sent
    assert asyncio.run(read_all()) == sent


@given(from_engine, st.data())
def test_a_truncated_frame_means_that_the_peer_has_gone(message: wire.Message, data: st.DataObject) -> None:
    whole = framing.frame(message)
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    assert read_blocking(part) is None
    assert asyncio.run(read(part)) is None


@given(to_engine)
def test_a_daemon_that_goes_with_frames_unread_has_gone(message: wire.Message) -> None:
    # the kernel then says "connection reset", in place of the end of the stream
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            theirs.sendall(b"which nobody reads")
            ours.sendall(framing.frame(message))
        with theirs.makefile("rb") as stream:
            found = framing.FRAMES.read(stream)
            assert found is None or wire.decode_to_engine(found[0]) == message
            assert framing.FRAMES.read(stream) is None


def test_an_oversize_frame_is_refused_before_it_is_read() -> None:
    header = HEADER.pack(framing.FRAMES.max_body + 1, 0, 0)
    with pytest.raises(ValueError, match="are allowed"):
        read_blocking(header)
    with pytest.raises(ValueError, match="are allowed"):
        asyncio.run(read(header))


def test_an_empty_frame_is_no_message() -> None:
    assert read_blocking(HEADER.pack(0, 0, 0)) == b""
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(b"")


@pytest.mark.parametrize(
    "raw",
    [{"type": "Nonsense"}, {"type": "Cancel"}, {"type": "Cancel", "id": 3}, {"id": "a"}, [], 7, {"type": "Piece"}],
)
def test_an_unknown_or_malformed_message_is_refused_at_the_door(raw: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_engine(msgspec.msgpack.encode(raw))


def test_what_goes_one_way_is_not_taken_the_other_way() -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_engine(body(framing.frame(wire.TextPiece(id="a", text="b", n_tokens=1))))
    with pytest.raises(msgspec.ValidationError):
        wire.decode_from_engine(body(framing.frame(wire.CancelRequest(id="a"))))


@given(st.binary(max_size=60))
def test_noise_is_refused_and_never_worse(noise: bytes) -> None:
    for decode in (wire.decode_to_engine, wire.decode_from_engine):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            decode(noise)

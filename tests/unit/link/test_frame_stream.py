"""Frames and control messages come out of a stream of bytes as they went in, however it is cut into pieces."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.link.protocol import (
    MAX_HEADER,
    MAX_PAYLOAD,
    BadFrameError,
    CloseAnswer,
    Credit,
    PeerFrame,
    Refused,
    SendRows,
    decode,
    frame,
)
from disco_daemon.link.relay.frame_stream import FrameStream
from disco_daemon.link.relay.handshake import AskFile, BindRows, decode_first, decode_reply, first_frame
from disco_daemon.link.relay.orders import (
    FRAMES,
    Address,
    EngineSocket,
    FileAsked,
    Identity,
    Listening,
    Member,
    OfferFile,
    RelayEvent,
    ServeMembers,
    StopRole,
    ToRelay,
    relay_event,
    to_relay,
)
from disco_daemon.link.trust.refusals import LinkEndedError, check_builds
from disco_daemon.system.control_socket import MAX_WAITING, ControlClosedError, ControlSocket, encode
from disco_daemon.system.frames import HEADER
from tests.fixtures.peers import BUILD, HELLO, WELCOME

messages = st.one_of(
    st.builds(lambda n: Credit(rows=n), st.integers(0, 1 << 24)),
    st.builds(lambda text: CloseAnswer(id=text), st.text(max_size=64)),
    st.builds(lambda tokens: SendRows(id="g", turn=1, pos=3, tokens=tuple(tokens)), st.lists(st.integers(0, 1 << 20))),
)
frames = st.tuples(messages, st.one_of(st.binary(max_size=300), st.just(b"\x07" * 200_000)), st.integers(0, 1 << 31))


@asynccontextmanager
async def stream_of(data: bytes, cuts: list[int]) -> AsyncIterator[FrameStream]:
    """A stream that gets these bytes in pieces that end at `cuts`, and then ends."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)

    async def feed() -> None:
        loop = asyncio.get_running_loop()
        with theirs:
            for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                await loop.sock_sendall(theirs, data[begin:end])
                await asyncio.sleep(0)

    stream = FrameStream(*await asyncio.open_connection(sock=ours))
    feeding = asyncio.create_task(feed())
    try:
        yield stream
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        await stream.close()


@settings(max_examples=60)
@given(st.lists(frames, max_size=6), st.data())
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    sent: list[tuple[PeerFrame, bytes, int]], data: st.DataObject
) -> None:
    whole = b"".join(frame(*one) for one in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))

    async def check() -> None:
        async with stream_of(whole, cuts) as stream:
            for message, payload, peer in sent:
                body, came, number = await stream.read()
                assert (decode(body), came, number) == (message, payload, peer)
            with pytest.raises(LinkEndedError) as caught:
                await stream.read()
            assert caught.value.reason == "closed"
            assert stream.n_received == len(whole)

    asyncio.run(check())


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_lengths_beyond_the_limits_are_refused_before_a_byte_is_read(n_body: int, n_payload: int) -> None:
    async def check() -> None:
        async with stream_of(HEADER.pack(n_body, n_payload, 0), []) as stream:
            with pytest.raises(LinkEndedError) as caught:
                await stream.read()
            too_large = n_body > MAX_HEADER or n_payload > MAX_PAYLOAD
            ends = n_body + n_payload > 0 or too_large
            assert not ends or caught.value.reason == ("too_large" if too_large else "closed")

    if n_body + n_payload:
        asyncio.run(check())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error_of_ours(data: bytes) -> None:
    for read in (decode, decode_first, decode_reply):
        with suppress(BadFrameError):
            read(data)


def test_a_first_message_is_told_from_all_others() -> None:
    for first in (HELLO, BindRows(link="x"), AskFile(cut=3, offset=7)):
        assert decode_first(first_frame(first)[HEADER.size :]) == first
    for reply in (WELCOME, Refused(reason="model", message="other")):
        assert decode_reply(first_frame(reply)[HEADER.size :]) == reply
        with pytest.raises(BadFrameError):
            decode_first(first_frame(reply)[HEADER.size :])


def test_another_build_of_llama_is_no_reason_to_refuse() -> None:
    check_builds(BUILD, msgspec.structs.replace(BUILD, llama="other", disco="9.9.9"), 24, 24)


# --- control ------------------------------------------------------------------------------------------------------

IDENTITY = Identity(certificate="c", key="k", ca="a")
ORDERS: list[ToRelay] = [
    ServeMembers(
        identity=IDENTITY,
        listen=Address(host="::1", port=0),
        members=(Member(name="a", serial="1f", salt=7),),
        welcome=WELCOME,
    ),
    EngineSocket(there=True),
    StopRole(),
    OfferFile(cut=3, n_bytes=5, sha256="0" * 64),
    EngineSocket(there=False),
]


async def test_each_descriptor_comes_with_its_message() -> None:
    ours, theirs = socket.socketpair()
    daemon, relay = ControlSocket(ours, FRAMES), ControlSocket(theirs, FRAMES)
    pipes = [os.pipe() for _ in range(200)]

    async def send() -> None:
        for i, (_, write_end) in enumerate(pipes):
            await daemon.send(ORDERS[i % len(ORDERS)], write_end if i % 2 else None)

    sending = asyncio.create_task(send())
    for i, (read_end, write_end) in enumerate(pipes):
        body, taken = await relay.receive()
        order = to_relay.decode(body)
        assert order == ORDERS[i % len(ORDERS)]
        os.close(write_end)
        assert (taken is not None) == (i % 2 == 1)
        if taken is not None:
            os.write(taken, b"%d" % i)
            os.close(taken)
        assert os.read(read_end, 9) == (b"%d" % i if i % 2 else b"")
        os.close(read_end)
    await sending
    daemon.close()
    with pytest.raises(ControlClosedError):
        await relay.receive()
    with pytest.raises(ControlClosedError):
        await relay.send(Listening(port=1))
    relay.close()
    relay.close()


STRANGE: dict[str, bytes] = {
    "a length beyond the limit": HEADER.pack(FRAMES.max_body + 1, 0, 0),
    "the longest lengths": b"\xff" * HEADER.size,
    "bytes behind a message": HEADER.pack(1, 1, 0),
    "half a length": b"\1\0",
    "half a message": HEADER.pack(100, 0, 0) + b"\x81",
    "a message without its descriptor": HEADER.pack(1, 0, 1) + b"\x80",
    "a page's request": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a page's question": b"OPTIONS * HTTP/1.1\r\nAccess-Control-Request-Private-Network: true\r\n\r\n",
    "a handshake of TLS": b"\x16\x03\x01\x02\x00" + bytes(60),
}


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE)
async def test_what_is_no_control_message_ends_the_socket_and_is_not_waited_for(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    daemon = ControlSocket(ours, FRAMES)
    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ControlClosedError):
            await daemon.receive()
    daemon.close()


async def test_descriptors_that_belong_to_no_message_are_few() -> None:
    ours, theirs = socket.socketpair()
    daemon, (read_end, write_end) = ControlSocket(ours, FRAMES), os.pipe()
    with theirs:
        theirs.sendall(HEADER.pack(FRAMES.max_body, 0, 0))
        for _ in range(2 * MAX_WAITING):
            socket.send_fds(theirs, [b"x"], [write_end])
        with pytest.raises(ControlClosedError, match="belong to no message"):
            await daemon.receive()
    daemon.close()
    os.close(write_end)
    assert os.read(read_end, 1) == b"", "all that came are closed"
    os.close(read_end)


NO_EVENTS = [
    b"", b"\xc0", b"\x80", b"\x90", b"\xc1", b"\xff" * 9, b"\xdf\xff\xff\xff\xff", b"\x91" * 5000,
    *(encode(order) for order in ORDERS), encode(Listening(port=7)) + b"\0", encode(Listening(port=7))[:-1],
    msgspec.msgpack.encode({"type": "Listening", "port": "7"}),
    msgspec.msgpack.encode({"type": "listening", "port": 7}),
    msgspec.msgpack.encode({"port": 7}), msgspec.msgpack.encode({"type": "Listening"}),
]  # fmt: skip


@pytest.mark.parametrize("body", NO_EVENTS, ids=range(len(NO_EVENTS)))
def test_what_is_no_event_of_a_relay_is_refused(body: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError, RecursionError)):
        relay_event.decode(body)


@pytest.mark.parametrize("event", [Listening(port=7, error="x"), FileAsked(name="a", cut=3)], ids=repr)
def test_an_event_is_what_it_was(event: RelayEvent) -> None:
    assert relay_event.decode(encode(event)) == event
    assert "k" not in repr(IDENTITY)

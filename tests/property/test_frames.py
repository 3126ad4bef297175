"""Frames between processes: however their bytes are cut, the same frames come out; and what is none is refused."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.system.frames import HEADER, BadFrameError, Frame, FrameBuffer, FrameFormat

FORM = FrameFormat(max_body=64, max_behind=300)
TAGS = st.integers(0, 2**32 - 1)
FRAMES = st.lists(st.tuples(st.binary(max_size=64), st.binary(max_size=300), TAGS), max_size=6)
LENGTHS = st.one_of(st.integers(0, 400), st.integers(0, 2**32 - 1))


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    edges = [0, *sorted(cuts), len(data)]
    for first, last in itertools.pairwise(edges):
        yield data[first:last]


def all_of(buffer: FrameBuffer) -> list[Frame]:
    return list(iter(buffer.take, None))


@given(sent=FRAMES, data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_same_frames_come_out_however_their_bytes_are_cut(sent: list[Frame], data: st.DataObject) -> None:
    whole = b"".join(FORM.pack(*frame) for frame in sent)
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=12))
    buffer, came = FrameBuffer(FORM), list[Frame]()
    for piece in pieces(whole, cuts):
        buffer.feed(piece)
        came += all_of(buffer)
    assert came == sent


@given(sent=FRAMES, n_left=st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_a_stream_has_the_same_frames_until_it_ends_also_within_one(sent: list[Frame], n_left: int) -> None:
    whole = b"".join(FORM.pack(*frame) for frame in sent)
    stream = io.BytesIO(whole)
    assert list(iter(lambda: FORM.read(stream), None)) == sent
    if not sent:
        return
    cut = io.BytesIO(whole[: len(whole) - min(n_left, HEADER.size + sum(map(len, sent[-1][:2])))])
    assert list(iter(lambda: FORM.read(cut), None)) == sent[:-1]


@given(sent=FRAMES)
@settings(max_examples=50, deadline=None)
def test_the_loop_reads_the_same_frames(sent: list[Frame]) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(FORM.pack(*frame) for frame in sent))
        reader.feed_eof()
        for frame in sent:
            assert await FORM.receive(reader.readexactly) == frame
        with pytest.raises(asyncio.IncompleteReadError):
            await FORM.receive(reader.readexactly)

    asyncio.run(read())


@given(n_body=LENGTHS, n_behind=LENGTHS, tag=TAGS)
@settings(max_examples=200, deadline=None)
def test_a_frame_that_is_too_large_is_refused_by_its_lengths_before_anything_of_it_is_kept(
    n_body: int, n_behind: int, tag: int
) -> None:
    head, buffer = HEADER.pack(n_body, n_behind, tag), FrameBuffer(FORM)
    buffer.feed(head)
    if n_body <= 64 and n_behind <= 300:
        assert buffer.take() == ((b"", b"", tag) if n_body + n_behind == 0 else None)
        return
    for read in (buffer.take, lambda: FORM.read(io.BytesIO(head)), lambda: FORM.head(n_body, n_behind)):
        with pytest.raises(BadFrameError, match=f"a frame of {n_body} . {n_behind} bytes, where 64 . 300 are allowed"):
            read()


@given(data=st.binary(max_size=2000), cuts=st.lists(st.integers(0, 2000), max_size=10))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_frames_within_the_limits_or_an_error_of_ours(data: bytes, cuts: list[int]) -> None:
    buffer, n_bytes = FrameBuffer(FORM), 0
    try:
        for piece in pieces(data, [min(cut, len(data)) for cut in cuts]):
            buffer.feed(piece)
            for body, behind, _ in all_of(buffer):
                assert len(body) <= 64
                assert len(behind) <= 300
                n_bytes += HEADER.size + len(body) + len(behind)
    except BadFrameError:
        return
    assert len(data) - n_bytes < HEADER.size + 64 + 300  # that wait for the rest of one frame


@given(sent=FRAMES, data=st.data())
@settings(max_examples=100, deadline=None)
def test_each_message_says_how_much_may_be_behind_it_and_its_own_length_alone_counts(
    sent: list[Frame], data: st.DataObject
) -> None:
    most = {(body, tag): data.draw(st.integers(0, 300)) for body, _, tag in sent}
    whole = b"".join(FORM.pack(*frame) for frame in sent)
    buffer, came = FrameBuffer(FORM, lambda body, tag: most[body, tag]), list[Frame]()
    fits = [len(behind) <= most[body, tag] for body, behind, tag in sent]
    try:
        for piece in pieces(whole, data.draw(st.lists(st.integers(0, len(whole)), max_size=8))):
            buffer.feed(piece)
            while (frame := buffer.take()) is not None:
                came.append(frame)
    except BadFrameError:
        assert not all(fits)
    else:
        assert all(fits)
    assert came == (sent if all(fits) else sent[: fits.index(False)])

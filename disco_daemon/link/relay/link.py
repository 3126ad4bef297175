"""One link between two machines: two connections, so that a small call is never behind bulk rows.

Both ends send pings on both connections. A machine that is silent for as long as two pings take, and then some, has
gone; so has one whose socket is closed. Its own end is told at once, and the relay that connects tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from itertools import count
from statistics import median

from ..protocol import (
    AnswerClosed,
    AnswerFailed,
    AnswerOpened,
    BadFrameError,
    BeginDrawing,
    CloseAnswer,
    Credit,
    CutAnswer,
    DraftVerdict,
    JudgeDrafts,
    NeedRows,
    OpenAnswer,
    PeerFrame,
    Ping,
    Pong,
    Refused,
    SendRows,
    decode,
    frame,
)
from ..trust.refusals import LinkEndedError, told_by
from .engine_hub import EngineHub
from .frame_stream import FrameStream
from .orders import LinkStats

PING_S = 0.25  # between two pings on a connection
SILENT_S = 0.8  # after which a silent machine has gone: two pings missed, and time for a third. Noticed within 1.1 s
SILENT_RTTS = 4  # round trips that it may be silent at least: over a bad radio link a ping takes longer
MAX_SILENT_S = 5.0  # of silence, whatever a round trip takes
ROWS_SILENT_S = 10.0  # of the connection for rows, where a ping waits behind rows: the one for calls says it first
STATS_S = 1.0  # between two reports of what a link carries
N_RTTS = 256  # round trips that are remembered
PIECE = 1 << 16  # bytes of rows that are encrypted at a time: 50 µs, in which no call is sent
ROWS_WAITING = 1 << 26  # bytes of rows that wait for a machine before its own engine does: four frames of the largest
CALLS_WAITING = 1 << 23  # bytes of calls that wait for a machine before it is given up
SIGNS_WAITING = 1000  # pings and their answers that wait behind rows: minutes of them
FRAMES_S = 5000.0  # frames that a machine may send in a second; a token takes a few
FRAMES_BURST = 10_000.0  # frames that it may send at once
FRAMES_AT_ONCE = 64  # frames that are read between two turns of the loop

Received = type[PeerFrame]
FROM_EDGE = (OpenAnswer, SendRows, BeginDrawing, JudgeDrafts, CutAnswer, CloseAnswer)
FROM_PARTNER = (AnswerOpened, DraftVerdict, NeedRows, Credit, AnswerFailed, AnswerClosed)


class PeerLink:
    """A link to the machine `name`; `run` it once. `allowed` are the messages that it may send: not our engine's own.

    All mutable state: rows that wait, the times of pings under way, round trips measured, counters, and the reason why
    somebody here ends the link.
    """

    def __init__(
        self,
        hub: EngineHub,
        name: str,
        calls: FrameStream,
        rows: FrameStream,
        allowed: tuple[type, ...],
        *,
        salt: int = 0,
        credits: int = 0,
        n_ctx: int = 0,
    ) -> None:
        self.number, self.name, self.salt, self.life = hub.next_number(), name, salt, 0
        self.credits, self.n_ctx = credits, n_ctx
        self._hub, self._calls, self._rows, self._allowed = hub, calls, rows, allowed
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[LinkEndedError] = self._loop.create_future()
        self._queue: deque[bytes] = deque()
        self._signs: deque[bytes] = deque()  # of life, on the connection for rows: between two frames, never in one
        self._blocked: set[FrameStream] = set()
        self._n_waiting = 0
        self._queued, self._taken = asyncio.Event(), asyncio.Event()
        self._rtts_s: deque[float] = deque(maxlen=N_RTTS)
        self._pings: dict[int, float] = {}
        self._n_pings = self._n_rows = self._n_frames = 0
        self._n_reported = -1  # so that a link's round trip is told once even if it carries nothing
        self._allowance, self._allowed_at = FRAMES_BURST, self._loop.time()
        self.ended = asyncio.Event()

    # --- for the hub ----------------------------------------------------------------------------------------------

    def send(self, message: PeerFrame, data: bytes) -> None:
        """Send a frame of our engine. A machine that does not take what is sent to it is given up."""
        self._n_frames += 1
        if isinstance(message, SendRows):
            self._n_rows += len(message.tokens)
            self._queue.append(data)
            self._n_waiting += len(data)
            self._queued.set()
            if self._n_waiting > 2 * ROWS_WAITING:
                self.end("slow", "the machine does not take the rows that are sent to it", tell=True)
            return
        self._calls.write(data)
        if self._calls.n_waiting > CALLS_WAITING:
            self.end("slow", "the machine does not take what is sent to it", tell=True)

    async def room(self) -> None:
        """Wait until less than ROWS_WAITING bytes of rows wait, or the link has ended."""
        while self._n_waiting > ROWS_WAITING and not self._ending.done():
            self._taken.clear()
            await self._taken.wait()

    def end(self, reason: str, message: str, *, tell: bool = False) -> None:
        """End the link soon; the first reason counts."""
        if not self._ending.done():
            self._ending.set_result(LinkEndedError(reason, message, tell=tell))
            self._taken.set()

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self, report: Callable[[LinkStats], None], joined: Callable[[], None]) -> LinkEndedError:
        """Carry frames until the link ends; return why. `joined` is called once the engine has been told of it."""
        why = LinkEndedError("stopped", "this machine has ended the link")
        try:
            self._hub.join(self)
            joined()
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._read(self._calls))
                    group.create_task(self._read(self._rows))
                    group.create_task(self._send_rows())
                    group.create_task(self._beat(report))
                    group.create_task(self._watch())
            except* LinkEndedError as errors:
                why = _first(errors)
        except LinkEndedError as e:  # there is no engine
            why = e
        finally:
            self.end(why.reason, why.message)
            self._hub.leave(self, why.message)
            self.ended.set()
            self._rows.abort()
            self._calls.abort() if not why.tell else None
        if why.tell:
            await self._calls.refuse(why.reason, why.message)
        return why

    async def _watch(self) -> None:
        raise await self._ending

    async def _read(self, stream: FrameStream) -> None:
        """Pass on what the machine sends, whatever connection it takes.

        Frames that have come already are read without a pause: after some of them others have their turn, whose signs
        of life a flood would keep waiting otherwise.
        """
        for n_read in count(1):
            body, payload, _ = await stream.read()
            if n_read % FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)
            self._count_frame()
            try:
                message = decode(body)
            except BadFrameError as e:
                raise LinkEndedError("malformed", str(e), tell=True) from e
            match message:
                case Ping(n=n):
                    self._send_sign(stream, frame(Pong(n=n)))
                case Pong(n=n):
                    if (sent_at := self._pings.pop(n, None)) is not None:
                        self._rtts_s.append(self._loop.time() - sent_at)
                case Refused():
                    raise told_by(message)
                case _ if isinstance(message, self._allowed) and (not payload or isinstance(message, SendRows)):
                    self._n_rows += len(message.tokens) if isinstance(message, SendRows) else 0
                    self._n_frames += 1
                    await self._deliver(stream, body, payload)
                case _:
                    text = f"{type(message).__name__} is not for this machine to send"
                    raise LinkEndedError("malformed", text, tell=True)

    async def _deliver(self, stream: FrameStream, body: bytes, payload: bytes) -> None:
        """Give our engine a frame. As long as it has too much to read, this stream's silence is not the machine's."""
        self._blocked.add(stream)
        try:
            await self._hub.deliver(self, body, payload)
        finally:
            self._blocked.discard(stream)
            stream.heard_at = self._loop.time()

    def _send_sign(self, stream: FrameStream, data: bytes) -> None:
        """Send a ping, or the answer to one. Raises LinkEndedError if those before it were not taken."""
        if stream is self._rows:
            self._signs.append(data)
            self._queued.set()
        else:
            stream.write(data)
        if stream.n_waiting > CALLS_WAITING or len(self._signs) > SIGNS_WAITING:
            raise LinkEndedError("slow", "the machine does not take the answers to its pings", tell=True)

    def _count_frame(self) -> None:
        """Count a frame against what a machine may send. Raises LinkEndedError."""
        self._allowance -= 1.0
        if self._allowance < 0.0:
            now = self._loop.time()
            self._allowance = min(FRAMES_BURST, self._allowance + (now - self._allowed_at) * FRAMES_S)
            self._allowed_at = now
            if self._allowance < 0.0:
                text = f"more than {FRAMES_S:g} frames a second came"
                raise LinkEndedError("flood", text, tell=True)

    async def _send_rows(self) -> None:
        """Send rows in pieces, so that calls are encrypted between them."""
        while True:
            while self._signs or self._queue:
                while self._signs:
                    self._rows.write(self._signs.popleft())
                if not self._queue:
                    break
                data = memoryview(self._queue.popleft())
                for start in range(0, len(data), PIECE):
                    self._rows.write(data[start : start + PIECE])
                    await self._rows.drain()
                    self._n_waiting -= min(PIECE, len(data) - start)
                    self._taken.set()
                    if self._queue or start + PIECE < len(data):
                        await asyncio.sleep(0)  # `drain` does not wait while the kernel takes all: others have a turn
                self._n_frames += 1  # again, now that its bytes are counted
            self._queued.clear()
            await self._queued.wait()

    async def _beat(self, report: Callable[[LinkStats], None]) -> None:
        """Send pings, notice silence, and report what was carried."""
        due = self._loop.time()
        reported_at, self._calls.heard_at, self._rows.heard_at = due, due, due
        while True:
            now = self._loop.time()
            self._n_pings += 1
            self._pings[self._n_pings] = now
            self._pings.pop(self._n_pings - N_RTTS, None)
            self._calls.write(frame(Ping(n=self._n_pings)))
            self._send_sign(self._rows, frame(Ping(n=0)))  # its round trip is not measured: rows may be before it
            if now - reported_at >= STATS_S and self._n_frames != self._n_reported:
                reported_at, self._n_reported = now, self._n_frames
                report(self.stats())
            due = now + PING_S
            await asyncio.sleep(PING_S)
            if self._loop.time() - due < PING_S:  # else it was this process that stood still
                self._check_silence(self._loop.time())

    def _check_silence(self, now: float) -> None:
        limit_s = SILENT_S
        if self._rtts_s:
            limit_s = min(MAX_SILENT_S, max(limit_s, SILENT_RTTS * max(self._rtts_s)))
        for stream, most_s in ((self._calls, limit_s), (self._rows, ROWS_SILENT_S)):
            if (silent_s := now - stream.heard_at) > most_s and stream not in self._blocked:
                raise LinkEndedError("silent", f"no sign of life came for {silent_s:.1f} s")

    def stats(self) -> LinkStats:
        """Return what was carried and measured so far."""
        rtts_ms = sorted(1000 * rtt_s for rtt_s in self._rtts_s)
        return LinkStats(
            name=self.name,
            rtt_ms=median(rtts_ms) if rtts_ms else None,
            rtt_p99_ms=rtts_ms[int(0.99 * (len(rtts_ms) - 1))] if rtts_ms else None,
            n_bytes_sent=self._calls.n_sent + self._rows.n_sent,
            n_bytes_received=self._calls.n_received + self._rows.n_received,
            n_rows=self._n_rows,
        )


def _first(errors: BaseExceptionGroup[LinkEndedError]) -> LinkEndedError:
    """Return the first reason of a group."""
    for error in errors.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError


async def drop(*streams: FrameStream) -> None:
    """Close connections that came to nothing, all at a time."""
    with contextlib.suppress(Exception):
        await asyncio.gather(*(stream.close() for stream in streams))

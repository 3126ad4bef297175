"""What the relay asks its daemon for on behalf of others: certificates, cuts, files of a model's layers, hosts."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass

import msgspec

from ..protocol import BadFrameError, Build, Welcome
from ..trust.refusals import LinkEndedError
from .frame_stream import FrameStream
from .handshake import (
    FIRST_FRAMES,
    MEASURED_BYTES,
    MEASURED_MAX,
    AskCuts,
    Asked,
    AskFile,
    AskPair,
    AskRay,
    AskSegments,
    FileFollows,
    First,
    LeavePartner,
    LinkMeasured,
    MeasureLink,
    MemberLeft,
    OfferHost,
    PairGranted,
    TellLoad,
    TheCuts,
    TheRay,
    TheSegments,
    decode_first,
    first_frame,
)
from .host_pipe import HostPipes, Report
from .orders import (
    FileAsked,
    MachineTold,
    MemberAnswer,
    MemberAsks,
    MemberLeaves,
    OfferFile,
    RefuseFile,
)

PAIR_S = 20.0  # for the daemon to sign a certificate: milliseconds, unless it is writing a model's layers
FILE_S = 120.0  # for the daemon to cut a model: seconds on a slow disk, copying where the file system cannot share
TAKE_S = 30.0  # for a member to take a piece of a file
CUTS_S = 60.0  # for the daemon to read the model's header, and once the whole file for its checksum
FILE_PIECE = 1 << 18  # bytes of a file that are read at once
FILES_OF_MEMBER = 2  # files that one member fetches at a time
MAX_FILES = 64  # that are kept open for whoever asks next: layers that move are in ever other files
TOLD_S = 30.0  # in which a machine says again how it is: it does so every few seconds
TOLD_LEAST_S = 0.5  # between two times that it is listened to
MAX_ASKING = 8  # questions of one kind that the daemon is asked at a time, such as for a certificate
ASKING_OF_MEMBER = 2  # of them by one machine: none keeps the others from asking

Layers = tuple[int, int, str]  # from the first of them up to the second; whose they are, "" = anybody's


@dataclass(frozen=True, slots=True)
class OfferedFile:
    """A file that is open for reading, and what it should be; it is closed when nobody has it any more."""

    descriptor: int
    n_bytes: int
    sha256: str

    def __del__(self) -> None:
        """Close the file: it is offered no longer, and the last who took of it has done so."""
        os.close(self.descriptor)


class Offers:
    """Questions to the daemon that wait for an answer, and the files that it has handed over, by their layers."""

    def __init__(self, report: Report) -> None:
        self._report, self._hosts = report, HostPipes(report)
        self._numbers = itertools.count(1)
        self._asking: dict[int, asyncio.Future[MemberAnswer]] = {}
        self._files: dict[Layers, OfferedFile] = {}
        self._wanted: dict[Layers, asyncio.Future[OfferedFile]] = {}
        self._fetching: Counter[str] = Counter()
        self._n_asking: Counter[str | type] = Counter()  # by machine, and by what is asked
        self.welcome: Welcome | None = None
        self.only_llama = ""
        self.ray: TheRay | None = None

    def drop_files(self) -> None:
        """Offer no file any more: who wants one has the daemon asked for it again."""
        self._files.clear()

    # --- the daemon's answers -------------------------------------------------------------------------------------

    def answer(self, answer: MemberAnswer) -> None:
        """Take the daemon's answer to a MemberAsks; one that comes too late is dropped."""
        if (waiting := self._asking.pop(answer.n, None)) is not None and not waiting.done():
            waiting.set_result(answer)

    def offer(self, message: OfferFile, descriptor: int) -> None:
        """Take a file, in place of a former one with these layers."""
        layers = message.first, message.cut, message.member
        self._files.pop(layers, None)
        file = self._files[layers] = OfferedFile(descriptor, message.n_bytes, message.sha256)
        if len(self._files) > MAX_FILES:
            del self._files[next(iter(self._files))]  # the daemon is asked for it again
        if (waiting := self._wanted.pop(layers, None)) is not None and not waiting.done():
            waiting.set_result(file)

    def refuse_file(self, message: RefuseFile) -> None:
        """Take the daemon's word that there is no such file."""
        if (
            waiting := self._wanted.pop((message.first, message.cut, message.member), None)
        ) is not None and not waiting.done():
            waiting.set_exception(LinkEndedError("no_file", message.message, tell=True))

    # --- for others -----------------------------------------------------------------------------------------------

    async def pair(self, stream: FrameStream, asked: AskPair, host: str) -> None:
        """Answer a machine that has a code; closes its connection. Raises LinkEndedError to refuse it."""
        granted = await self._ask(asked, asked.name, PAIR_S, host)
        assert isinstance(granted, PairGranted)
        build, n_ctx = _described(self.welcome)
        stream.write(first_frame(msgspec.structs.replace(granted, build=build, n_ctx=n_ctx)))
        await stream.drain()
        await stream.close()

    async def _ask(
        self, asked: AskPair | AskCuts | AskSegments, name: str, patience_s: float = CUTS_S, host: str = ""
    ) -> PairGranted | TheCuts | TheSegments:
        """Ask the daemon for a machine, and return what that gets, for which there is `patience_s`.

        Raises LinkEndedError.
        """
        kind = type(asked)
        if self._n_asking[kind] >= MAX_ASKING or self._n_asking[name] >= ASKING_OF_MEMBER:
            raise LinkEndedError("crowded", "too many machines are asking: try again", tell=True)
        n = next(self._numbers)
        waiting: asyncio.Future[MemberAnswer] = asyncio.get_running_loop().create_future()
        self._asking[n] = waiting
        self._n_asking.update((kind, name))
        self._report(MemberAsks(n=n, name=name, asked=asked, address=host))
        try:
            async with asyncio.timeout(patience_s):
                answer = await waiting
        except TimeoutError as e:
            raise LinkEndedError("late", "the daemon there does not answer: try again", tell=True) from e
        finally:
            self._asking.pop(n, None)
            self._n_asking.subtract((kind, name))
            self._n_asking += Counter()  # drops machines that ask nothing
        if answer.given is None:
            raise LinkEndedError(answer.reason, answer.message, tell=True)
        return answer.given

    async def serve(self, stream: FrameStream, asked: Asked, name: str) -> None:
        """Answer a member that wants no link. Raises LinkEndedError."""
        match asked:
            case AskFile():
                await self._send_file(stream, asked, name)
            case AskCuts() | AskSegments():
                stream.write(first_frame(await self._ask(asked, name)))
                await stream.drain()
            case MeasureLink():
                await _measure(stream, asked, _described(self.welcome)[0])
            case OfferHost():
                await self._hosts.serve(stream, asked, name, self.welcome, self.only_llama)
            case TellLoad():
                await self._hear_loads(stream, asked, name)
            case AskRay():
                stream.write(first_frame(self.ray or TheRay()))
                await stream.drain()
            case LeavePartner():
                stream.write(first_frame(MemberLeft()))
                await stream.drain()
                await stream.close()  # before the daemon hears of it: with the last member this process ends
                self._report(MemberLeaves(name=name))

    async def _hear_loads(self, stream: FrameStream, load: TellLoad, name: str) -> None:
        """Pass on how a member's machine is, as long as it says so. Raises LinkEndedError."""
        while True:
            self._report(MachineTold(name=name, load=load))
            await asyncio.sleep(TOLD_LEAST_S)
            again = await _further(stream, TOLD_S)
            if again is None:
                return
            if not isinstance(again, TellLoad):
                raise LinkEndedError("malformed", f"{type(again).__name__} does not say how a machine is", tell=True)
            load = again

    async def _send_file(self, stream: FrameStream, asked: AskFile, name: str) -> None:
        """Send a file to a member, from the byte it asks for. Raises LinkEndedError."""
        if self._fetching[name] >= FILES_OF_MEMBER:
            raise LinkEndedError("crowded", f"{name} is fetching {FILES_OF_MEMBER} files already", tell=True)
        self._fetching[name] += 1
        try:
            file = await self._want(asked, name)
            offset = asked.offset if asked.sha256 == file.sha256 and 0 <= asked.offset <= file.n_bytes else 0
            stream.write(first_frame(FileFollows(n_bytes=file.n_bytes, sha256=file.sha256, offset=offset)))
            await _send(stream, file.descriptor, offset, file.n_bytes)
        finally:
            self._fetching[name] -= 1

    async def _want(self, asked: AskFile, name: str) -> OfferedFile:
        """Return a file, for which the daemon is asked once: for all who want the first layers, and by whom else it is.

        Inner layers are a certain machine's own, and only the daemon knows whose.
        """
        layers = asked.first, asked.cut, name if asked.first else ""
        if (file := self._files.get(layers)) is not None:
            return file
        waiting = self._wanted.get(layers)
        if waiting is None:
            waiting = self._wanted[layers] = asyncio.get_running_loop().create_future()
            self._report(FileAsked(name=name, cut=asked.cut, first=asked.first))
        try:
            async with asyncio.timeout(FILE_S):
                return await asyncio.shield(waiting)
        except TimeoutError as e:
            self._wanted.pop(layers, None)
            raise LinkEndedError("late", "the layers could not be written in time: try again", tell=True) from e


async def _measure(stream: FrameStream, asked: MeasureLink, build: Build | None) -> None:
    """Take what is sent to measure the way, and send something back, as long as more is asked. Raises LinkEndedError.

    The bytes are random: nothing on the way can make them fewer.
    """
    for _ in range(MEASURED_MAX):
        if not (0 <= asked.n_up <= MEASURED_BYTES and 0 <= asked.n_down <= MEASURED_BYTES):
            raise LinkEndedError("too_large", f"{MEASURED_BYTES} bytes are enough to measure a link", tell=True)
        try:
            async with asyncio.timeout(TAKE_S):
                await stream.read_exactly(asked.n_up)
                stream.write(first_frame(LinkMeasured(now=time.time(), build=build)))
                stream.write(os.urandom(asked.n_down))
                await stream.drain()
                body = await _next(stream)
            if body is None:
                return
            again = decode_first(body)
        except TimeoutError as e:
            raise LinkEndedError("late", "nothing more came to measure", tell=True) from e
        except BadFrameError as e:
            raise LinkEndedError("malformed", str(e), tell=True) from e
        if not isinstance(again, MeasureLink):
            raise LinkEndedError("malformed", f"{type(again).__name__} does not measure a link", tell=True)
        asked = again
    raise LinkEndedError("flood", f"a link is measured {MEASURED_MAX} times at most", tell=True)


async def _further(stream: FrameStream, patience_s: float) -> First | None:
    """Return what comes by a connection after its first message; None at its end. Raises LinkEndedError."""
    try:
        async with asyncio.timeout(patience_s):
            body = await _next(stream)
        return None if body is None else decode_first(body)
    except TimeoutError as e:
        raise LinkEndedError("late", f"nothing more came within {patience_s:g} s", tell=True) from e
    except BadFrameError as e:
        raise LinkEndedError("malformed", str(e), tell=True) from e


async def _next(stream: FrameStream) -> bytes | None:
    """Return the next message's body; None if the other side has ended the connection. Raises LinkEndedError."""
    try:
        return (await stream.read(FIRST_FRAMES))[0]
    except LinkEndedError as e:
        if e.reason == "closed":
            return None
        raise


async def _send(stream: FrameStream, descriptor: int, start: int, end: int) -> None:
    """Send the bytes of a file from `start` to `end`; it is read in a thread, since a disk may be slow."""
    while start < end:
        data = await asyncio.to_thread(os.pread, descriptor, min(FILE_PIECE, end - start), start)
        if not data:
            raise LinkEndedError("no_file", "the file has become shorter")
        stream.write(data)
        try:
            async with asyncio.timeout(TAKE_S):
                await stream.drain()
        except TimeoutError as e:
            raise LinkEndedError("slow", "the machine does not take the file") from e
        start += len(data)


def _described(welcome: Welcome | None) -> tuple[Build | None, int]:
    return (welcome.build, welcome.n_ctx) if welcome is not None else (None, 0)

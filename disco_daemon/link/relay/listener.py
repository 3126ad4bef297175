"""The relay of the machine that is connected to: it lets members in, and strangers who have a code.

1. Nothing listens without a member or a live code.
2. A stranger has a few seconds for the handshake and for its first message, and there are few of them at a time
   (`strangers`); whoever has shown a member's certificate is none from then on.
3. A certificate that the authority did not sign ends the handshake; one that is not a member's is refused.
4. The first message says what the connection is for: a link's calls, its rows, a certificate, or a question.
5. Who is a member is looked up where it is used, not before a wait; and each connection of one that is none any more
   ends with the message that says so, whatever it waits for.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from ...plain import plain
from ...system.tasks import TaskSet, cancel_all
from ..protocol import BadFrameError, Hello, Welcome
from ..rows.codec import salt_for
from ..trust import tls
from ..trust.refusals import REVOKED, LinkEndedError, check_builds
from ..trust.strangers import StrangerPlaces, owner_of
from .engine_hub import EngineHub
from .frame_stream import READ_AHEAD, FrameStream, ended_by, say_last
from .handshake import (
    FIRST_FRAMES,
    AskAuthority,
    AskCuts,
    Asked,
    AskFile,
    AskPair,
    AskRay,
    AskSegments,
    BindRows,
    First,
    LeavePartner,
    MeasureLink,
    OfferHost,
    RowsBound,
    TellLoad,
    TheAuthority,
    decode_first,
    first_frame,
)
from .link import FROM_EDGE, PeerLink, drop
from .orders import LinkDown, LinkUp, Listening, Member, RefusalCounts, RelayEvent, ServeMembers, TwoAddresses

FIRST_S = 3.0  # for the first message of a connection
BIND_S = 5.0  # for the second connection of a link, and for the end of the link before
PER_MEMBER_MAX = 8  # connections of one member: three hosts, two files, a question, and how its machine is
BACKLOG = 64  # connections that wait to be taken
COUNTS_S = 1.0  # between two reports of what was refused
NO_DESCRIPTORS_S = 0.2  # pause if no connection can be taken, such as for want of file descriptors

WRONG_CODE = "the code is not the latest one: print a new one on the other machine"

Ask = Callable[[FrameStream, AskPair, str], Coroutine[None, None, None]]
Serve = Callable[[FrameStream, Asked, str], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True)
class MemberConnection:
    """A connection from `host` that has shown a member's certificate, and how it is ended."""

    member: Member
    host: str
    end: Callable[[], object]


class MemberListener:
    """Serves members as `configure` says. `pair` answers those who want a certificate, `serve` those who want no link.

    All mutable state: what is configured, the listening socket and its task, the tasks of connections, those of
    strangers by their places and those of members, the links, what waits for its second connection, and what was
    refused.
    """

    def __init__(self, hub: EngineHub, report: Callable[[RelayEvent], None], pair: Ask, serve: Serve) -> None:
        self._hub, self._report, self._pair, self._serve_asked = hub, report, pair, serve
        self._config: ServeMembers | None = None
        self._context: ssl.SSLContext | None = None
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks = TaskSet()
        self._places = StrangerPlaces()
        self._strangers: dict[int, asyncio.Task[None]] = {}
        self._of_members: dict[asyncio.Task[None], MemberConnection] = {}
        self._links: dict[str, PeerLink] = {}
        self._waiting: dict[str, tuple[str, asyncio.Future[FrameStream]]] = {}
        self._moved: dict[str, set[str]] = {}  # members that were at two addresses at a time, and at which ones
        self._refused: Counter[str] = Counter()
        self._counting: asyncio.TimerHandle | None = None

    async def configure(self, config: ServeMembers) -> None:
        """Serve these members from now on; links of others end. Raises ssl.SSLError for a key that is none."""
        before, self._config = self._config, config
        if before is None or before.identity != config.identity:
            self._context = tls.server_context(config.identity)
        names = {member.name for member in config.members}
        self._moved = {name: hosts for name, hosts in self._moved.items() if name in names}
        for one in [one for one in self._of_members.values() if one.member not in config.members]:
            one.end()
        if not (config.members or config.code):
            await self._stop_listening()
        elif self._socket is None or before is None or before.listen != config.listen:
            await self._stop_listening(tell=False)
            self._listen()

    async def close(self) -> None:
        """Stop listening and end all connections."""
        await self._stop_listening()
        await cancel_all(*self._tasks)
        if self._counting is not None:
            self._counting.cancel()
        self._config = None

    # --- listening ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._config is not None
        listen = self._config.listen
        try:
            family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
            both = listen.host == "::" and socket.has_dualstack_ipv6()
            made = socket.create_server((listen.host, listen.port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as e:
            self._report(Listening(port=0, error=f"{listen} cannot be listened on: {e.strerror or e}"))
            return
        made.setblocking(False)
        self._socket = made
        self._accepting = asyncio.create_task(self._accept(made), name="accept peers")
        self._report(Listening(port=made.getsockname()[1]))

    async def _stop_listening(self, *, tell: bool = True) -> None:
        await cancel_all(self._accepting)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if tell:
                self._report(Listening(port=0))

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(NO_DESCRIPTORS_S)
                continue
            host, now = str(address[0]), loop.time()
            place, displaced = self._places.enter(host, now)
            if displaced is not None:
                self._count("crowded")
                self._strangers.pop(displaced).cancel()
            if place is None:
                sock.close()
                self._count("crowded")
                continue
            self._strangers[place] = self._tasks.begin(self._serve(sock, host, place), "peer connection")

    def _count(self, reason: str) -> None:
        """Count a refusal, and report all of them soon."""
        self._refused[reason] += 1
        if self._counting is None:
            self._counting = asyncio.get_running_loop().call_later(COUNTS_S, self._report_counts)

    def _report_counts(self) -> None:
        self._counting = None
        self._report(RefusalCounts(counts=dict(self._refused)))

    # --- one connection -------------------------------------------------------------------------------------------

    async def _serve(self, sock: socket.socket, host: str, place: int) -> None:
        """Find out what a connection is for, and serve it to its end."""
        stream: FrameStream | None = None
        task = asyncio.current_task()
        assert task is not None
        try:
            stream = await self._shake_hands(sock)
            if (member := self._member(stream)) is not None:
                self._know(task, member, place, host)
            first = await self._first(stream)
            if isinstance(first, AskPair | AskAuthority):
                await self._answer_pair(stream, first, host, place)
                return
            member = self._check_member(stream)
            if task not in self._of_members:  # it has become one since
                self._know(task, member, place, host)
            await self._serve_member(stream, member, first, host)
        except LinkEndedError as e:
            self._count(e.reason)
            if stream is not None:
                await (stream.refuse(e.reason, e.message) if e.tell else stream.close())
        except BaseException:  # a cancellation too; it is raised again
            if stream is not None:
                stream.abort()
            raise
        finally:
            self._of_members.pop(task, None)
            self._leave_place(place)

    def _know(self, task: asyncio.Task[None], member: Member, place: int, host: str) -> None:
        """Let a connection be a member's from now on. Raises LinkEndedError if that has enough of them."""
        others = [one.host for one in self._of_members.values() if one.member == member]
        if len(others) >= PER_MEMBER_MAX:
            raise LinkEndedError("crowded", f"{member.name} has {PER_MEMBER_MAX} connections already", tell=True)
        before = next((other for other in others if owner_of(other) != owner_of(host)), None)
        if before is not None and self._moved.get(member.name) != {before, host}:  # once, not at each connection
            self._moved[member.name] = {before, host}
            self._report(TwoAddresses(name=member.name, before=before, address=host))
        self._of_members[task] = MemberConnection(member, host, task.cancel)
        self._leave_place(place)
        self._places.forgive(host, asyncio.get_running_loop().time())

    def _leave_place(self, place: int) -> None:
        self._strangers.pop(place, None)
        self._places.leave(place)

    async def _answer_pair(self, stream: FrameStream, asked: AskPair | AskAuthority, host: str, place: int) -> None:
        """Show who this is; or ask the daemon for a certificate, on behalf of who has the secret and of nobody else."""
        config = self._config
        if config is None or not config.code:
            raise LinkEndedError("no_code", "no code is valid there: `disco machines pair` prints one", tell=True)
        if isinstance(asked, AskAuthority):
            stream.write(first_frame(TheAuthority(certificate=config.identity.ca)))
            await stream.close()
            return
        if not hmac.compare_digest(hashlib.sha256(asked.secret).digest(), config.code):
            raise LinkEndedError("wrong_code", WRONG_CODE, tell=True)
        self._leave_place(place)  # the owner of this machine has sent it
        await self._pair(stream, asked, host)

    async def _shake_hands(self, sock: socket.socket) -> FrameStream:
        """Do the TLS handshake. Raises LinkEndedError."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=READ_AHEAD, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        with sock.dup() as kept:  # the loop closes `sock` when the handshake fails, before the alert is out
            try:
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=tls.HANDSHAKE_S,
                    ssl_shutdown_timeout=tls.SHUTDOWN_S,
                )  # fmt: skip
            except OSError as e:
                await say_last(kept, tls.alert_of(e))
                raise ended_by(e) from e
        return FrameStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def _first(self, stream: FrameStream) -> First:
        try:
            async with asyncio.timeout(FIRST_S):
                body, _, _ = await stream.read(FIRST_FRAMES)
            return decode_first(body)
        except TimeoutError as e:
            raise LinkEndedError("late", f"no first message came within {FIRST_S:g} s", tell=True) from e
        except BadFrameError as e:
            raise LinkEndedError("malformed", str(e), tell=True) from e

    def _member(self, stream: FrameStream) -> Member | None:
        """Return the member whose certificate this is; None for a stranger or one that was revoked."""
        shown = stream.writer.get_extra_info("peercert") or {}
        names = {value for part in shown.get("subject", ()) for key, value in part if key == "commonName"}
        serial = str(shown.get("serialNumber", "")).lower().lstrip("0")
        assert self._config is not None
        fits = (member for member in self._config.members if member.serial == serial and member.name in names)
        return next(fits, None)

    def _check_member(self, stream: FrameStream) -> Member:
        """Return the member that this is now, whatever it was before. Raises LinkEndedError for others."""
        if (member := self._member(stream)) is not None:
            return member
        if stream.writer.get_extra_info("peercert"):
            raise LinkEndedError("revoked", REVOKED, tell=True)
        raise LinkEndedError("no_certificate", tls.MESSAGES["none"], tell=True)

    async def _serve_member(
        self, stream: FrameStream, member: Member, first: Hello | BindRows | Asked, host: str
    ) -> None:
        match first:
            case Hello():
                await self._begin_link(stream, member, first, host)
            case BindRows(link=link):
                name, waiting = self._waiting.get(member.name, ("", None))
                if waiting is None or name != link or waiting.done():
                    raise LinkEndedError("late", "no link of this name waits for its second connection", tell=True)
                waiting.set_result(stream)  # the link has it from here on
            case (
                AskFile() | AskCuts() | MeasureLink() | LeavePartner()
                | AskSegments() | OfferHost() | AskRay() | TellLoad()
            ):  # fmt: skip
                await self._serve_asked(stream, first, member.name)
                await stream.close()

    # --- a link ---------------------------------------------------------------------------------------------------

    async def _begin_link(self, calls: FrameStream, member: Member, hello: Hello, host: str) -> None:
        """Answer a Hello, wait for the second connection, and carry frames."""
        self._welcome_for(hello)  # who does not fit ends no link
        await self._end_before(member.name)
        welcome = self._welcome_for(hello)  # that of now: waiting has taken a while
        waiting: asyncio.Future[FrameStream] = asyncio.get_running_loop().create_future()
        self._waiting[member.name] = hello.link, waiting
        calls.write(first_frame(welcome))
        try:
            rows = await self._bound(waiting)
        finally:
            if self._waiting.get(member.name) == (hello.link, waiting):
                del self._waiting[member.name]
        salt = salt_for(member.salt, hello.codecs)
        link = self._links[member.name] = PeerLink(self._hub, member.name, calls, rows, FROM_EDGE, salt=salt)
        task = asyncio.current_task()
        assert task is not None
        self._of_members[task] = MemberConnection(member, host, lambda: link.end("revoked", REVOKED, tell=True))

        def joined() -> None:
            rows.write(first_frame(RowsBound()))
            up = LinkUp(peer=link.number, name=member.name, build=hello.build, address=host)
            self._report(up)

        try:
            why = await link.run(self._report, joined)
        finally:
            if self._links.get(member.name) is link:
                del self._links[member.name]
        if why.tell:
            self._count(why.reason)
        self._report(LinkDown(name=member.name, reason=why.reason, message=plain(why.message)))
        await drop(calls, rows)

    def _welcome_for(self, hello: Hello) -> Welcome:
        """Return the answer to a Hello. Raises LinkEndedError where there is none, or where the two do not fit."""
        assert self._config is not None
        welcome = self._config.welcome
        if welcome is None or not self._hub.attached.is_set():
            raise LinkEndedError("not_ready", "no model is in memory there yet", tell=True)
        check_builds(welcome.build, hello.build, welcome.cut, hello.cut)
        return welcome

    async def _bound(self, waiting: asyncio.Future[FrameStream]) -> FrameStream:
        """Return a link's second connection. Raises LinkEndedError if it does not come.

        One that comes in the very moment in which nobody waits for it any more is cut.
        """
        rows: FrameStream | None = None
        try:
            async with asyncio.timeout(BIND_S):
                rows = await waiting
        except TimeoutError as e:
            raise LinkEndedError("late", f"the connection for rows did not come within {BIND_S:g} s", tell=True) from e
        finally:
            if rows is None and not waiting.cancel() and not waiting.cancelled() and waiting.exception() is None:
                waiting.result().abort()
        return rows

    async def _end_before(self, name: str) -> None:
        """End a link of the same machine: it has come anew, and knows of no other one."""
        _, waiting = self._waiting.pop(name, ("", None))
        if waiting is not None and not waiting.done():
            waiting.set_exception(LinkEndedError("replaced", "the machine has connected anew"))
        if (before := self._links.get(name)) is not None:
            before.end("replaced", "the machine has connected anew")
            try:
                async with asyncio.timeout(BIND_S):
                    await before.ended.wait()
            except TimeoutError as e:
                raise LinkEndedError("crowded", "the link before has not ended yet: try again", tell=True) from e

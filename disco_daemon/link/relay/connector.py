"""The relay of the machine that connects: it reaches its partner, and tries again whenever the link has ended."""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from ...plain import plain
from ..protocol import BadFrameError, Hello, Refused, Welcome
from ..trust import tls
from ..trust.refusals import RETRIED, LinkEndedError, check_builds, told_by
from .engine_hub import EngineHub
from .frame_stream import READ_AHEAD, FrameStream, ended_by
from .handshake import FIRST_FRAMES, BindRows, FirstReply, RowsBound, decode_reply, first_frame
from .link import FROM_PARTNER, PeerLink, drop
from .orders import Address, JoinPartner, LinkDown, LinkUp, RelayEvent

CONNECT_S = 3.0  # for TCP; within a house it takes 1 ms
REPLY_S = 5.0  # for the answer to a first message; the partner ends a former link first
RETRY_FIRST_S = 0.1  # a link that broke is mostly there again at once
RETRY_SOON_S = 0.5  # the longest pause during the first RETRY_FAST_S: an answer is exact again within a second
RETRY_FAST_S = 60.0  # after which the partner is taken for switched off
RETRY_MAX_S = 15.0  # the longest pause then: a laptop on the road does not spend its battery on this
RETRY_REFUSED_S = 1.0  # after a refusal that lasts until somebody changes something; doubled each time
RETRY_REFUSED_MAX_S = 30.0  # the longest pause then: a new model or version there is noticed within a minute
STAGGER_S = 0.3  # between the attempts at two addresses of one machine: the next one need not wait for the first
JITTER = 0.5  # of a pause: machines that lost one partner together do not come back together

Reply = TypeVar("Reply", bound=FirstReply)


class Connector:
    """Keeps one link to the partner that `config` names, while an engine is there; `run` it until it is cancelled."""

    def __init__(self, hub: EngineHub, report: Callable[[RelayEvent], None], config: JoinPartner) -> None:
        """Raises ssl.SSLError for a key that is none."""
        self._hub, self._report, self._config = hub, report, config
        self._context = tls.client_context(config.identity)
        self._addresses = list(config.addresses)

    async def run(self) -> None:
        """Connect, carry frames, and begin again."""
        loop = asyncio.get_running_loop()
        lost_at, pause_s, refused_s, told = loop.time(), RETRY_FIRST_S, RETRY_REFUSED_S, ""
        while True:
            await self._hub.attached.wait()
            up = False

            def joined() -> None:
                nonlocal up
                up = True

            why = await self._link(joined)
            if up:
                lost_at, pause_s, refused_s, told = loop.time(), RETRY_FIRST_S, RETRY_REFUSED_S, ""
            final = why.reason not in RETRIED and isinstance(why, RefusedError)
            if (said := f"{why.reason} {why.message} {final}") != told:  # once, not at each attempt
                told = said
                down = LinkDown(name=self._config.name, reason=why.reason, message=plain(why.message), final=final)
                self._report(down)
            fast = loop.time() - lost_at < RETRY_FAST_S
            await asyncio.sleep((refused_s if final else pause_s) * random.uniform(1 - JITTER, 1))
            if final:
                refused_s = min(2 * refused_s, RETRY_REFUSED_MAX_S)
                continue
            pause_s = min(2 * pause_s, RETRY_SOON_S if fast else RETRY_MAX_S)

    async def _link(self, joined: Callable[[], None]) -> LinkEndedError:
        """Make both connections and carry frames until the link ends; return why."""
        streams: list[FrameStream] = []
        try:
            calls, address = await self._reach()
            streams.append(calls)
            name = secrets.token_hex(8)
            hello = msgspec.structs.replace(self._config.hello, link=name)
            welcome = await self._ask(calls, hello, Welcome)
            check_builds(hello.build, welcome.build, hello.cut, welcome.cut)
            rows = await self._connect(address)
            streams.append(rows)
            await self._ask(rows, BindRows(link=name), RowsBound)
            bounds = {"credits": welcome.credits, "n_ctx": welcome.n_ctx}
            link = PeerLink(self._hub, self._config.name, calls, rows, FROM_PARTNER, **bounds)

            def stands() -> None:
                joined()
                up = LinkUp(
                    peer=link.number, name=link.name, build=welcome.build, address=str(address), welcome=welcome
                )
                self._report(up)

            return await link.run(self._report, stands)
        except LinkEndedError as e:
            return RefusedError(e.reason, e.message) if e.tell else e
        finally:
            await drop(*streams)

    async def _reach(self) -> tuple[FrameStream, Address]:
        """Return a connection to the address that answers first; it is the first to be tried from then on."""
        stream, address = await connect_first(self._addresses, self._context, tls.tls_name(self._config.name))
        self._addresses.remove(address)
        self._addresses.insert(0, address)
        return stream, address

    async def _connect(self, address: Address) -> FrameStream:
        return await connect(address, self._context, tls.tls_name(self._config.name))

    async def _ask(self, stream: FrameStream, first: Hello | BindRows, kind: type[Reply]) -> Reply:
        return await ask(stream, first_frame(first), kind)


class RefusedError(LinkEndedError):
    """The other side, or this one, refuses to work together."""


async def connect(address: Address, context: ssl.SSLContext, name: str | None) -> FrameStream:
    """Connect to a machine whose certificate has that name. Raises LinkEndedError: unreachable, certificate."""
    try:
        async with asyncio.timeout(CONNECT_S + tls.HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=context, server_hostname=name or address.host, limit=READ_AHEAD,
                ssl_handshake_timeout=tls.HANDSHAKE_S, ssl_shutdown_timeout=tls.SHUTDOWN_S,
            )  # fmt: skip
    except TimeoutError as e:
        raise LinkEndedError("unreachable", f"{address} does not answer") from e
    except ssl.SSLError as e:
        raise ended_by(e) from e
    except (OSError, UnicodeError) as e:
        why = getattr(e, "strerror", None) or e
        raise LinkEndedError("unreachable", f"{address} cannot be reached: {why}") from e
    return FrameStream(reader, writer)


async def connect_first(
    addresses: Sequence[Address], context: ssl.SSLContext, name: str | None
) -> tuple[FrameStream, Address]:
    """Connect to the first of a machine's addresses that answers, as RFC 8305 does. Raises LinkEndedError."""
    left, errors = list(addresses), list[LinkEndedError]()
    trying: dict[asyncio.Task[FrameStream], Address] = {}
    won: asyncio.Task[FrameStream] | None = None
    try:
        while won is None and (left or trying):
            if left:
                address = left.pop(0)
                trying[asyncio.create_task(connect(address, context, name), name=f"connect to {address}")] = address
            wait_s = STAGGER_S if left else None
            done, _ = await asyncio.wait(trying, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    won = task
                    return task.result(), trying[task]
                if not isinstance(error, LinkEndedError):
                    raise error
                errors.append(error)
                del trying[task]
    finally:
        for task in trying:
            task.cancel()
        for ended in await asyncio.gather(*trying, return_exceptions=True):
            if isinstance(ended, FrameStream) and (won is None or ended is not won.result()):
                ended.abort()
    if not errors:
        raise LinkEndedError("unreachable", "the other machine has no address")
    raise next((e for e in errors if e.reason != "unreachable"), errors[0])


async def ask(stream: FrameStream, first: bytes, kind: type[Reply], timeout_s: float = REPLY_S) -> Reply:
    """Send a first message and return its answer, of this `kind`. Raises LinkEndedError, RefusedError."""
    stream.write(first)
    try:
        async with asyncio.timeout(timeout_s):
            body, _, _ = await stream.read(FIRST_FRAMES)
        reply = decode_reply(body)
    except TimeoutError as e:
        raise LinkEndedError("silent", f"no answer came within {timeout_s:g} s") from e
    except BadFrameError as e:
        raise LinkEndedError("malformed", str(e)) from e
    if isinstance(reply, Refused):
        said = told_by(reply)
        raise RefusedError(said.reason, said.message)
    if not isinstance(reply, kind):
        raise LinkEndedError("malformed", f"{type(reply).__name__} is no answer to this")
    return reply

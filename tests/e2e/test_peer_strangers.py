"""Strangers and hostile members at the relay's port: refused with a reason, at once, while it serves on."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from disco_daemon.config.schema import Config
from disco_daemon.daemon.member_service import MemberService
from disco_daemon.errors import ConfigError
from disco_daemon.peer import tls
from disco_daemon.peer.certificates import new_request
from disco_daemon.peer.connector import connect
from disco_daemon.peer.control import (
    Address,
    CutsAsked,
    Identity,
    LinkDown,
    Listening,
    MachineTold,
    Member,
    PairAsked,
    RefusalCounts,
    TwoAddresses,
)
from disco_daemon.peer.daemon_side import RelayProcess
from disco_daemon.peer.first_frames import (
    AskAuthority,
    AskCuts,
    AskFile,
    AskPair,
    AskSegments,
    BindRows,
    First,
    LinkMeasured,
    MeasureLink,
    OfferHost,
    PairGranted,
    TellLoad,
    decode_reply,
    first_frame,
)
from disco_daemon.peer.frame_stream import FrameStream
from disco_daemon.peer.messages import (
    HEADER,
    MAX_HEADER,
    MAX_PAYLOAD,
    Build,
    Credit,
    JudgeDrafts,
    OpenAnswer,
    PeerFrame,
    PeerJoined,
    PeerLeft,
    Ping,
    Refused,
    decode,
    frame,
)
from disco_daemon.peer.pairing import Issuer, answer_pair
from disco_daemon.peer.refusals import LinkEndedError
from disco_daemon.peer.strangers import STRANGERS_OF_HOST_MAX
from tests.fixtures.peers import BUILD, HELLO, HOST, SOON_S, EngineEnd, Machine, Pairs, machine, undisturbed
from tests.fixtures.stopwatch import least_of_three

CUT_OFF_S = 1.0  # for all connections of a machine that was revoked: 10 ms are printed on a quiet machine
AT_ONCE_S = 0.1  # from what is not to be served to its refusal; 0.5 to 8 ms are printed on a quiet machine


@dataclass
class Partner:
    """A partner that listens, with one member whose link stands."""

    machine: Machine
    upper: EngineEnd
    port: int
    pairs: Pairs
    laptop: Identity

    async def connect(self, identity: Identity | None, local: str = HOST) -> FrameStream:
        """Connect as a machine that has this certificate, or none, from this address."""
        context = tls.client_context(identity) if identity else tls.stranger_context(self.pairs.issuer.identity().ca)
        streams = await asyncio.open_connection(
            HOST, self.port, ssl=context, server_hostname=tls.tls_name(self.pairs.name), local_addr=(local, 0)
        )
        return FrameStream(*streams)

    async def link(self, identity: Identity) -> tuple[FrameStream, FrameStream]:
        """Make both connections by hand."""
        calls = await self.connect(identity)
        calls.write(first_frame(msgspec.structs.replace(HELLO, link="by-hand")))
        await calls.read()
        rows = await self.connect(identity)
        rows.write(first_frame(BindRows(link="by-hand")))
        await rows.read()
        await self.upper.joined()
        return calls, rows


@asynccontextmanager
async def listening(folder: Path, *, pairing: bool = False) -> AsyncIterator[Partner]:
    pairs = Pairs(folder)
    laptop = pairs.member("laptop")
    async with machine() as partner:
        upper = await partner.engine()
        partner.relay.serve(pairs.serve(pairing=pairing))
        yield Partner(partner, upper, (await partner.wait(Listening)).port, pairs, laptop)


@asynccontextmanager
async def serving_on(partner: Partner) -> AsyncIterator[None]:
    """An honest member is linked before and after."""
    async with machine() as edge:
        lower = await edge.engine()
        honest = partner.pairs.member("honest")
        partner.machine.relay.serve(partner.pairs.serve())
        edge.relay.join(partner.pairs.join(honest, partner.port))
        number = await partner.upper.joined()
        await lower.joined()
        edge.events.clear()
        yield
        partner.upper.send(Credit(rows=1), peer=number)
        assert await lower.message() == Credit(rows=1)
        assert not [event for event in edge.events if isinstance(event, LinkDown)], "its link has not ended"


async def refusal(connect: Callable[[], Awaitable[FrameStream]], data: bytes) -> Refused:
    """Connect and send bytes; return the refusal, which comes at once and is the last there is."""
    refusals: list[Refused] = []

    async def refused_s() -> float:
        stream = await connect()
        began = time.monotonic()
        stream.write(data)
        refusals.append(await next_refusal(stream))
        took_s = time.monotonic() - began
        assert await stream.read_some(1) == b""
        await stream.close()
        print(f"refused ({refusals[-1].reason}) after {1000 * took_s:.1f} ms")
        return took_s

    assert await least_of_three(refused_s, AT_ONCE_S) < AT_ONCE_S
    assert {refused.reason for refused in refusals} == {refusals[0].reason}
    return refusals[0]


@asynccontextmanager
async def connected(partner: Partner, identity: Identity) -> AsyncIterator[tuple[FrameStream, FrameStream]]:
    """A link that was made by hand."""
    calls, rows = await partner.link(identity)
    try:
        yield calls, rows
    finally:
        calls.abort()
        rows.abort()


async def revoke(partner: Partner, name: str) -> None:
    """Revoke a machine; the relay has heard of it when this returns."""
    partner.pairs.issuer.revoke(name)
    await serve_members(partner)


async def serve_members(partner: Partner, local: str = HOST) -> None:
    """Tell the relay who is a member; it has heard of it when this returns."""
    partner.machine.relay.serve(partner.pairs.serve())
    stream = await partner.connect(partner.laptop, local)
    stream.write(first_frame(MeasureLink()))
    await stream.read()  # what was said before, the relay knows by then
    await stream.close()


async def ended(stream: FrameStream) -> None:
    """Wait until the other side has ended a connection; an answer before that is an error."""
    async with asyncio.timeout(SOON_S):
        with suppress(LinkEndedError):
            while await stream.read_some(1 << 16):
                pass
    stream.abort()


async def next_refusal(stream: FrameStream) -> Refused:
    while True:
        message = decode((await stream.read())[0])
        if isinstance(message, Refused):
            return message
        assert isinstance(message, Ping)


@undisturbed
async def test_a_certificate_of_another_authority_ends_the_handshake(tmp_path: Path) -> None:
    async with listening(tmp_path / "a") as partner, serving_on(partner):
        other = Pairs(tmp_path / "b").member("laptop")

        async def ended_s() -> float:
            stream = await partner.connect(msgspec.structs.replace(other, ca=partner.laptop.ca))
            began = time.monotonic()
            stream.write(first_frame(HELLO))
            with pytest.raises(LinkEndedError, match="pair them again") as caught:
                await stream.read()
            took_s = time.monotonic() - began
            assert caught.value.reason == "certificate"
            await stream.close()
            return took_s

        assert await least_of_three(ended_s, AT_ONCE_S) < AT_ONCE_S


async def test_a_partner_of_another_authority_is_not_talked_to(tmp_path: Path) -> None:
    async with listening(tmp_path / "a") as partner, machine() as edge:
        stranger = Pairs(tmp_path / "b")
        await edge.engine()
        edge.relay.join(partner.pairs.join(stranger.member("laptop"), partner.port))
        down = await edge.wait(LinkDown)
        assert down.reason == "certificate"
        assert "pair them again" in down.message


async def test_an_old_tls_is_not_spoken(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner:
        context = ssl.create_default_context(cadata=partner.laptop.ca)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection(HOST, partner.port, ssl=context, server_hostname=tls.tls_name("desk"))


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (HELLO, "no_certificate"),
        (BindRows(link="x"), "no_certificate"),
        (AskFile(cut=24), "no_certificate"),
        (AskSegments(), "no_certificate"),
        (OfferHost(build=BUILD), "no_certificate"),
        (AskPair(secret=b"0" * 16, csr="", name="x"), "no_code"),
        (AskAuthority(), "no_code"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
@undisturbed
async def test_a_stranger_without_a_code_gets_nothing(tmp_path: Path, first: First, reason: str) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        assert (await refusal(lambda: partner.connect(None), first_frame(first))).reason == reason


@undisturbed
async def test_a_revoked_machine_is_refused(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        gone = partner.pairs.member("gone")
        partner.pairs.issuer.revoke("gone")
        assert (await refusal(lambda: partner.connect(gone), first_frame(HELLO))).reason == "revoked"


@undisturbed
async def test_an_idle_connection_does_not_outlive_its_machines_revocation(tmp_path: Path) -> None:
    """Whatever it waits for: its first message, the second connection of a link, more of what it measures or says."""
    async with listening(tmp_path) as partner, serving_on(partner):
        gone = partner.pairs.member("gone")
        partner.machine.relay.serve(partner.pairs.serve())
        held = [await partner.connect(gone) for _ in range(5)]
        held[1].write(first_frame(msgspec.structs.replace(HELLO, link="half")))
        await held[1].read()
        held[2].write(first_frame(MeasureLink(n_down=8)))
        await held[2].read()
        await held[2].read_exactly(8)
        held[3].write(first_frame(TellLoad(n_cpus=1, others_share=0.0, memory_bytes=1, memory_free_bytes=1)))
        await partner.machine.wait(MachineTold)
        held[4].write(first_frame(AskSegments())[:7])  # half a message
        async with connected(partner, gone) as (calls, rows):
            await revoke(partner, "gone")
            began = time.monotonic()
            assert (await next_refusal(calls)).reason == "revoked"
            for stream in (*held, rows):
                stream.write(first_frame(AskCuts()))
                await ended(stream)
            print(f"all {len(held) + 2} connections had ended after {1000 * (time.monotonic() - began):.0f} ms")
            assert time.monotonic() - began < CUT_OFF_S
        assert not [one for one in partner.machine.events if isinstance(one, CutsAsked)], "nothing of it was served"


@undisturbed
async def test_a_member_that_keeps_opening_idle_connections_is_served_by_none_after_its_revocation(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        gone = partner.pairs.member("gone")
        partner.machine.relay.serve(partner.pairs.serve())
        stop = asyncio.Event()
        answered: list[bytes] = []

        async def keep_opening() -> None:
            while not stop.is_set():
                with suppress(LinkEndedError, OSError):
                    stream = await partner.connect(gone)
                    await asyncio.sleep(0.02)
                    stream.write(first_frame(MeasureLink(n_down=8)))
                    body, _, _ = await stream.read()
                    if stop_counting.is_set() and not isinstance(decode_reply(body), Refused):
                        answered.append(body)
                    stream.abort()

        stop_counting = asyncio.Event()
        opening = [asyncio.create_task(keep_opening()) for _ in range(3)]
        await asyncio.sleep(0.1)  # some are at each step
        await revoke(partner, "gone")
        stop_counting.set()
        await asyncio.sleep(0.3)  # longer than any of those waited
        stop.set()
        await asyncio.gather(*opening)
        assert not answered


@undisturbed
async def test_a_name_that_is_given_again_serves_the_new_machine_only(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        old = partner.pairs.member("twin")
        partner.machine.relay.serve(partner.pairs.serve())
        idle = await partner.connect(old)
        async with connected(partner, old) as (calls, _):
            partner.pairs.issuer.revoke("twin")
            new = partner.pairs.member("twin")
            partner.machine.relay.serve(partner.pairs.serve())  # in one message
            assert (await next_refusal(calls)).reason == "revoked"
            await ended(idle)
            assert isinstance(await partner.upper.message(), PeerLeft)
            stream = await partner.connect(new)
            stream.write(first_frame(MeasureLink()))
            assert isinstance(decode_reply((await stream.read())[0]), LinkMeasured)
            stream.abort()


@undisturbed
async def test_a_stranger_that_was_paired_while_its_connection_was_idle_is_cut_off_like_any_other(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        late = partner.pairs.member("late")
        stream = await partner.connect(late)  # the relay does not know of it yet
        await serve_members(partner)
        stream.write(first_frame(MeasureLink()))
        assert isinstance(decode_reply((await stream.read())[0]), LinkMeasured)
        await revoke(partner, "late")
        await ended(stream)


@undisturbed
async def test_a_hundred_joins_and_leaves_leave_nothing_behind(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        relay = psutil.Process(partner.machine.relay.pid)
        n_before = relay.num_fds()
        gone = partner.pairs.member("gone")
        for _ in range(25):  # of four connections each
            partner.machine.relay.serve(partner.pairs.serve())
            held = [await partner.connect(gone) for _ in range(4)]
            held[0].write(first_frame(msgspec.structs.replace(HELLO, link="half")))
            await held[0].read()
            partner.pairs.issuer.revoke("gone")
            gone = partner.pairs.member("gone")
            partner.machine.relay.serve(partner.pairs.serve())
            for stream in held:
                await ended(stream)
        async with asyncio.timeout(SOON_S):
            while relay.num_fds() > n_before:
                await asyncio.sleep(0.01)


class Busy(MemberService):
    """A service that is busy with something else, or fails at it, when a machine is revoked; `relay` is what it has."""

    log = logging.getLogger("disco.partner")
    listen_s, needs_own_model = 1.0, ""

    def __init__(self, folder: Path, relay: RelayProcess) -> None:
        super().__init__(folder)
        self._relay, self._config = relay, Config()
        self.may_go_on, self.fails = asyncio.Event(), False

    def _is_enabled(self, config: Config) -> bool:
        return True

    def _listen_host(self, config: Config) -> str:
        return HOST

    async def _build_of(self, config: Config) -> Build:
        await self.may_go_on.wait()
        if self.fails:
            raise ConfigError("the model has gone")
        return BUILD

    async def _serve_members(self, config: Config, build: Build, members: tuple[Member, ...]) -> None:
        pass

    def _forget(self, name: str) -> None:
        pass

    def _hear_more(self, event: object) -> None:
        pass

    async def _stop_computing(self) -> None:
        pass

    def _drop_machines(self) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True], ids=["is slow", "fails"])
@undisturbed
async def test_a_revoked_machine_is_cut_off_before_anything_that_is_slow_or_fails(tmp_path: Path, fails: bool) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        gone = partner.pairs.member("gone")
        await serve_members(partner)
        service = Busy(tmp_path, partner.machine.relay)
        service.fails = fails
        async with connected(partner, gone) as (calls, _):
            changing = asyncio.create_task(service.follow(Config()))  # it waits for its model, and holds the lock
            await asyncio.sleep(0)
            revoking = asyncio.create_task(service.revoke("gone"))
            assert (await next_refusal(calls)).reason == "revoked"
            assert not revoking.done()
            service.may_go_on.set()
            await changing
            assert await revoking == {"revoked": "gone"}


@undisturbed
async def test_a_member_neither_takes_anothers_link_nor_hears_of_it(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        curious = partner.pairs.member("curious")
        await serve_members(partner)
        calls = await partner.connect(partner.laptop)
        calls.write(first_frame(msgspec.structs.replace(HELLO, link="half")))
        await calls.read()
        told = list[str]()
        for first in (
            BindRows(link="half"),  # as if it were the laptop's second connection
            BindRows(link=""),
            msgspec.structs.replace(HELLO, cut=12),
            msgspec.structs.replace(HELLO, build=msgspec.structs.replace(BUILD, model="b" * 64)),
        ):
            stream = await partner.connect(curious)
            stream.write(first_frame(first))
            told.append((await next_refusal(stream)).message)
            stream.abort()
        assert "laptop" not in " ".join(told)
        assert "half" not in " ".join(told)
        rows = await partner.connect(partner.laptop)
        rows.write(first_frame(BindRows(link="half")))
        await rows.read()
        joined = await partner.upper.message()
        assert isinstance(joined, PeerJoined)
        assert joined.name == "laptop", "its link stands, with its own two connections"
        calls.abort()
        rows.abort()


@undisturbed
async def test_a_member_at_two_addresses_at_a_time_is_told_of(tmp_path: Path) -> None:
    """A stolen key is that member until it is revoked: its owner sees from where it is used."""
    async with listening(tmp_path) as partner, serving_on(partner):
        here = await partner.connect(partner.laptop)
        here.write(first_frame(MeasureLink()))
        await here.read()
        for _ in range(2):
            thief = await partner.connect(partner.laptop, local="127.0.0.9")
            thief.write(first_frame(MeasureLink()))
            await thief.read()
            thief.abort()
        told = await partner.machine.wait(TwoAddresses)
        assert (told.name, told.before, told.address) == ("laptop", HOST, "127.0.0.9")
        assert not [one for one in partner.machine.events if isinstance(one, TwoAddresses)], "once"
        here.abort()


@undisturbed
async def test_guesses_at_a_code_cost_the_daemon_nothing_and_crowd_nobody_out(tmp_path: Path) -> None:
    async with listening(tmp_path, pairing=True) as partner:
        code = partner.pairs.issuer.new_code([Address(host=HOST, port=1)])
        partner.machine.relay.serve(partner.pairs.serve(pairing=True))
        _, csr = new_request("real")
        guesses = [AskPair(secret=bytes([i]) * 16, csr=csr, name="thief") for i in range(20)]
        for guess in (*guesses, AskPair(secret=b"", csr=csr, name="thief")):
            stream = await partner.connect(None)
            stream.write(first_frame(guess))
            assert (await next_refusal(stream)).reason == "wrong_code"
            stream.abort()
        held = [await partner.connect(None) for _ in range(8)]  # askers that say nothing yet
        real = await partner.connect(None)
        real.write(first_frame(AskPair(secret=code.secret, csr=csr, name="real")))
        asked = await partner.machine.wait(PairAsked)
        assert asked.name == "real"
        answer = answer_pair(partner.pairs.issuer, asked)
        partner.machine.relay.send(answer)
        granted = decode_reply((await real.read())[0])
        assert isinstance(granted, PairGranted)
        assert not [one for one in partner.machine.events if isinstance(one, PairAsked)], "no guess was asked of it"
        counts = await partner.machine.wait(RefusalCounts, lambda event: event.counts.get("wrong_code", 0) == 21)
        print(counts)
        for stream in (*held, real):
            stream.abort()
        again = await partner.connect(None)  # played again, as somebody who has heard it all would
        again.write(first_frame(AskPair(secret=code.secret, csr=csr, name="thief")))
        asked = await partner.machine.wait(PairAsked)
        partner.machine.relay.send(answer_pair(partner.pairs.issuer, asked))
        assert (await next_refusal(again)).reason == "used_code"
        again.abort()


@undisturbed
async def test_strangers_cost_the_relay_little(tmp_path: Path) -> None:
    """They have few descriptors, some memory each, and no line of a log; and give them back."""
    async with listening(tmp_path) as partner:
        relay = psutil.Process(partner.machine.relay.pid)
        await serve_members(partner)
        n_fds, rss = relay.num_fds(), relay.memory_info().rss
        silent = [await asyncio.open_connection(HOST, partner.port) for _ in range(300)]
        await serve_members(partner, "127.0.0.2")  # the strangers' address has had all its tries
        print(f"{relay.num_fds() - n_fds} descriptors, {(relay.memory_info().rss - rss) / 1e6:.0f} MB")
        assert relay.num_fds() - n_fds <= 2 * STRANGERS_OF_HOST_MAX + 8  # each has a duplicate for its alert
        assert relay.memory_info().rss - rss < STRANGERS_OF_HOST_MAX * (1 << 20)
        counts = await partner.machine.wait(RefusalCounts, lambda event: event.counts.get("crowded", 0) > 200)
        assert len(counts.counts) <= 3
        for _, writer in silent:
            writer.close()
        async with asyncio.timeout(SOON_S):
            while relay.num_fds() > n_fds:
                await asyncio.sleep(0.01)


async def test_a_partner_that_speaks_an_older_tls_only_is_not_talked_to(tmp_path: Path) -> None:
    """A man in the middle cannot have the two agree on less: neither side offers it."""
    pairs = Pairs(tmp_path)
    context = tls.server_context(pairs.issuer.identity())
    context.minimum_version, context.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, ssl.TLSVersion.TLSv1_2
    server = await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    try:
        for ours in (
            tls.client_context(pairs.member("laptop")),
            tls.stranger_context(pairs.issuer.identity().ca),
            tls.unchecked_context(),
        ):
            name = tls.tls_name("desk") if ours.check_hostname else None
            with pytest.raises(LinkEndedError) as caught:
                await connect(Address(host=HOST, port=port), ours, name)
            assert caught.value.reason in ("certificate", "closed", "unreachable")
    finally:
        server.close()


GARBAGE = {
    "zeros": b"\0" * 4096,
    "noise": random.Random(1).randbytes(12) + b"x" * 64,
    "http": b"GET / HTTP/1.1\r\nHost: disco\r\n\r\n" * 4,
    "a length beyond the limit": HEADER.pack(MAX_HEADER + 1, 0, 0),
    "bytes beyond the limit": HEADER.pack(10, MAX_PAYLOAD + 1, 0),
    "the largest length of all": HEADER.pack(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
    "a message that is none": HEADER.pack(4, 0, 0) + b"\x81\xa1x\x01",
    "deep nesting": HEADER.pack(60_000, 0, 0) + b"\x91" * 60_000,
    "another's message": frame(PeerJoined(name="root")),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
@undisturbed
async def test_garbage_in_place_of_a_first_message_is_refused(tmp_path: Path, data: bytes) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        refused = await refusal(lambda: partner.connect(partner.laptop), data)
        assert refused.reason in ("malformed", "too_large")


LATER = GARBAGE | {
    "rows behind a call": frame(JudgeDrafts(id="g", turn=0, start=0, end=1), b"1234"),
    "the other side's message": frame(Credit(rows=1)),
    "the relay's own message": frame(PeerLeft(reason="x")),
}


@pytest.mark.parametrize("data", LATER.values(), ids=LATER)
@undisturbed
async def test_garbage_on_a_link_ends_it_with_the_reason(tmp_path: Path, data: bytes) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        opened: list[FrameStream] = []

        async def connect() -> FrameStream:
            if opened:
                assert isinstance(await partner.upper.message(), PeerLeft)
            calls, rows = await partner.link(partner.laptop)
            opened.append(rows)
            return calls

        assert (await refusal(connect, data)).reason in ("malformed", "too_large")
        for rows in opened:
            await rows.close()
        assert isinstance(await partner.upper.message(), PeerLeft), "and nothing of it reached the engine"


@undisturbed
async def test_a_refusal_may_say_anything_at_any_length(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        pid = partner.machine.relay.pid
        calls, rows = await partner.link(partner.laptop)
        calls.write(frame(Refused(reason="\x1b[2Jx" * 99, message="\x1b[2J" + "x" * 1_000_000)))
        down = await partner.machine.wait(LinkDown, lambda down: down.name == "laptop")
        assert down.reason == "refused"
        assert len(down.message) <= 600
        assert "\x1b" not in down.message
        assert isinstance(await partner.upper.message(), PeerLeft)
        assert partner.machine.relay.pid == pid, "its daemon still understands it"
        await calls.close()
        await rows.close()


@undisturbed
async def test_a_flood_of_calls_is_refused(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        calls, rows = await partner.link(partner.laptop)
        seen = asyncio.create_task(next_refusal(calls))
        flood = frame(OpenAnswer(id="g", tokens=(1,))) * 1000
        n_calls = 0
        while not seen.done() and n_calls < 200_000:
            calls.write(flood)
            n_calls += 1000
            await asyncio.sleep(0)
        assert (await seen).reason == "flood"
        came: list[PeerFrame] = []
        while not came or not isinstance(came[-1], PeerLeft):
            came.append(await partner.upper.message())
        assert len(came) < 40_000
        await calls.close()
        await rows.close()


@undisturbed
async def test_silent_strangers_do_not_keep_members_out_for_long(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner:
        silent = [await asyncio.open_connection(HOST, partner.port) for _ in range(100)]
        async with serving_on(partner):
            pass
        await partner.machine.wait(RefusalCounts, lambda event: event.counts.get("crowded", 0) > 50)
        for _, writer in silent:
            writer.close()


async def test_a_certificate_that_is_not_valid_at_this_time_says_so(tmp_path: Path) -> None:
    clock = [time.time() - 20 * 365 * 86400.0]
    pairs = Pairs(tmp_path)
    pairs.issuer = Issuer(tmp_path / "old", lambda: clock[0])
    pairs.issuer.new_code([Address(host=HOST, port=1)], "desk")
    clock[0] += 15 * 365 * 86400.0  # the authority is still valid
    laptop = pairs.member("laptop")
    clock[0] = time.time()
    async with machine() as partner, machine() as edge:
        await partner.engine()
        partner.relay.serve(pairs.serve())
        port = (await partner.wait(Listening)).port
        await edge.engine()
        edge.relay.join(pairs.join(laptop, port))
        down = await edge.wait(LinkDown)
        assert down.reason == "certificate"
        assert "expired" in down.message

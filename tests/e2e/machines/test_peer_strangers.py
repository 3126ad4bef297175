"""Strangers and hostile members at the relay's port: refused with a reason, at once, while it serves on."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from disco_daemon.link.protocol import (
    MAX_HEADER,
    MAX_PAYLOAD,
    Credit,
    JudgeDrafts,
    OpenAnswer,
    PeerFrame,
    PeerJoined,
    PeerLeft,
    Ping,
    Pong,
    Refused,
    decode,
    frame,
)
from disco_daemon.link.relay.connector import connect
from disco_daemon.link.relay.frame_stream import FrameStream
from disco_daemon.link.relay.handshake import (
    AskAuthority,
    AskFile,
    AskPair,
    AskSegments,
    BindRows,
    MeasureLink,
    OfferHost,
    PairGranted,
    decode_reply,
    first_frame,
)
from disco_daemon.link.relay.link import FRAMES_BURST, FRAMES_S
from disco_daemon.link.relay.orders import Address, LinkDown, Listening, MemberAsks, RefusalCounts, TwoAddresses
from disco_daemon.link.trust import tls
from disco_daemon.link.trust.certificates import new_request
from disco_daemon.link.trust.pairing import Issuer, answer_pair
from disco_daemon.link.trust.refusals import LinkEndedError
from disco_daemon.link.trust.strangers import STRANGERS_OF_HOST_MAX
from disco_daemon.system.frames import HEADER
from tests.fixtures.partner import (
    AT_ONCE_S,
    listening,
    next_refusal,
    refusal,
    serve_members,
    serving_on,
)
from tests.fixtures.peers import BUILD, HELLO, HOST, SOON_S, Pairs, machine, undisturbed
from tests.fixtures.stopwatch import least_of_three


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


ASKED = {
    "no_certificate": (
        HELLO, BindRows(link="x"), AskFile(cut=24), AskSegments(), OfferHost(build=BUILD),
    ),
    "no_code": (AskPair(secret=b"0" * 16, csr="", name="x"), AskAuthority()),
}  # fmt: skip


@undisturbed
async def test_a_stranger_without_a_code_gets_nothing(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        for reason, firsts in ASKED.items():
            for number, first in enumerate(firsts):  # each from an address of its own: one has few tries
                refused = await refusal(partial(partner.connect, None, f"127.0.0.{number + 9}"), first_frame(first))
                assert refused.reason == reason, first


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
        asked = await partner.machine.wait(MemberAsks)
        assert asked.name == "real"
        answer = answer_pair(partner.pairs.issuer, asked)
        partner.machine.relay.send(answer)
        granted = decode_reply((await real.read())[0])
        assert isinstance(granted, PairGranted)
        assert not [one for one in partner.machine.events if isinstance(one, MemberAsks)], "no guess was asked of it"
        counts = await partner.machine.wait(RefusalCounts, lambda event: event.counts.get("wrong_code", 0) == 21)
        print(counts)
        for stream in (*held, real):
            stream.abort()
        again = await partner.connect(None)  # played again, as somebody who has heard it all would
        again.write(first_frame(AskPair(secret=code.secret, csr=csr, name="thief")))
        asked = await partner.machine.wait(MemberAsks)
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


@undisturbed
async def test_garbage_in_place_of_a_first_message_is_refused(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        for name, data in GARBAGE.items():
            refused = await refusal(lambda: partner.connect(partner.laptop), data)
            assert refused.reason in ("malformed", "too_large"), name


LATER = GARBAGE | {
    "rows behind a call": frame(JudgeDrafts(id="g", turn=0, start=0, end=1), b"1234"),
    "the other side's message": frame(Credit(rows=1)),
    "the relay's own message": frame(PeerLeft(reason="x")),
}


@undisturbed
async def test_garbage_on_a_link_ends_it_with_the_reason(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        opened: list[FrameStream] = []

        async def connect() -> FrameStream:
            if opened:
                assert isinstance(await partner.upper.message(), PeerLeft), "and nothing of it reached the engine"
            calls, rows = await partner.link(partner.laptop)
            opened.append(rows)
            return calls

        for name, data in LATER.items():
            assert (await refusal(connect, data)).reason in ("malformed", "too_large"), name
        assert isinstance(await partner.upper.message(), PeerLeft)
        for rows in opened:
            await rows.close()


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


async def answer_pings(stream: FrameStream) -> None:
    while True:
        match decode((await stream.read())[0]):
            case Ping(n=n):
                stream.write(frame(Pong(n=n)))


@undisturbed
async def test_a_flood_of_calls_is_refused(tmp_path: Path) -> None:
    async with listening(tmp_path) as partner, serving_on(partner):
        began = time.monotonic()
        calls, rows = await partner.link(partner.laptop)
        seen, alive = asyncio.create_task(next_refusal(calls)), asyncio.create_task(answer_pings(rows))
        # Mostly of what costs a relay next to nothing: on a busy machine it might take no more calls than are allowed.
        flood = (frame(OpenAnswer(id="g", tokens=(1,))) + 9 * frame(Pong(n=0))) * 100
        calls.write(200 * flood)
        assert (await seen).reason == "flood"
        took_s = time.monotonic() - began
        alive.cancel()
        came: list[PeerFrame] = []
        while not came or not isinstance(came[-1], PeerLeft):
            came.append(await partner.upper.message())
        assert 10 * (len(came) - 1) <= FRAMES_BURST + FRAMES_S * took_s + 10
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

"""Relays of two machines carry the bytes of a fleet's host between two socket pairs, for those who may only."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from disco_daemon.link.protocol import Refused
from disco_daemon.link.relay.connector import connect
from disco_daemon.link.relay.handshake import (
    AskRay,
    AskSegments,
    OfferHost,
    SegmentFact,
    TellLoad,
    TheSegments,
    decode_reply,
    first_frame,
)
from disco_daemon.link.relay.join import ask_machine
from disco_daemon.link.relay.orders import (
    Address,
    HomeEnded,
    HomeReached,
    HostEnded,
    HostOffered,
    Identity,
    LendHosts,
    LinkDown,
    Listening,
    MachineTold,
    MemberAnswer,
    MemberAsks,
    TellHome,
)
from disco_daemon.link.relay.relay_process import RelayProcess
from disco_daemon.link.trust import tls
from disco_daemon.link.trust.pairing import PairedPartner
from tests.fixtures.peers import BUILD, HOST, SOON_S, WELCOME, Machine, Pairs

OFFER = OfferHost(build=BUILD, has=("a.gguf",), n_threads=2)
LOAD = TellLoad(n_cpus=2, others_share=0.1, memory_bytes=1 << 30, memory_free_bytes=1 << 29)
SIGN = b"here"  # what a host's process says first; relays know no more of it than that it is something


@dataclass
class HostMachine(Machine):
    """A relay whose hosts the test plays: their sockets, with what was said of each."""

    hosts: asyncio.Queue[tuple[HostOffered | HomeReached, socket.socket]] = field(default_factory=asyncio.Queue)

    had: list[socket.socket] = field(default_factory=list)

    async def host(self) -> tuple[HostOffered | HomeReached, socket.socket]:
        """The next one; it has said that it is there, and home has heard that."""
        event, sock = await self.silent_host()
        if isinstance(event, HomeReached):
            sock.send(SIGN)
        else:
            assert await received(sock, len(SIGN)) == SIGN
        return event, sock

    async def silent_host(self) -> tuple[HostOffered | HomeReached, socket.socket]:
        """The next one; of one that has just begun nothing was heard yet."""
        async with asyncio.timeout(SOON_S):
            event, sock = await self.hosts.get()
        sock.setblocking(False)
        self.had.append(sock)
        return event, sock


@asynccontextmanager
async def machine() -> AsyncIterator[HostMachine]:
    def take(event: object) -> None:
        found.events.append(event)  # type: ignore[arg-type] # it is an event of a relay
        found.changed.set()
        found.changed = asyncio.Event()

    found = HostMachine(RelayProcess(take, lambda event, sock: found.hosts.put_nowait((event, sock))))
    found.relay.start()
    try:
        yield found
    finally:
        await found.relay.close()
        while not found.hosts.empty():
            found.had.append(found.hosts.get_nowait()[1])
        for sock in found.had:
            sock.close()


async def received(sock: socket.socket, n_bytes: int) -> bytes:
    """That many bytes, or fewer at the end."""
    loop, found = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(SOON_S):
        while len(found) < n_bytes and (data := await loop.sock_recv(sock, n_bytes - len(found))):
            found += data
    return bytes(found)


@dataclass
class Home:
    """A home that listens, and what its members have."""

    machine: HostMachine
    pairs: Pairs
    port: int

    def role(self, identity: Identity, offer: OfferHost = OFFER) -> LendHosts:
        return LendHosts(
            identity=identity, name=self.pairs.name, addresses=(Address(host=HOST, port=self.port),), offer=offer
        )


@asynccontextmanager
async def at_home(folder: Path, only_llama: str = "") -> AsyncIterator[Home]:
    pairs = Pairs(folder)
    pairs.member("attic")
    async with machine() as home:
        home.relay.serve(replace(pairs.serve(), only_llama=only_llama))
        yield Home(home, pairs, (await home.wait(Listening)).port)


async def test_what_one_end_says_the_other_one_hears_until_one_of_them_ends(tmp_path: Path) -> None:
    async with at_home(tmp_path) as home, machine() as attic:
        identity = home.pairs.member("cellar")
        home.machine.relay.serve(home.pairs.serve())
        attic.relay.join(home.role(identity))
        _, here = await attic.host()
        offered, there = await home.machine.host()
        assert isinstance(offered, HostOffered)
        assert (offered.name, replace(offered.offer, now=0.0)) == ("cellar", OFFER)
        assert abs(offered.offer.now - time.time()) < 60, "the time there comes with each offer"
        loop, big = asyncio.get_running_loop(), bytes(range(256)) * 4096
        for one, other in ((there, here), (here, there)):
            sending = asyncio.create_task(loop.sock_sendall(one, big))
            assert await received(other, len(big)) == big
            await sending

        await attic.host()
        _, spare = await home.machine.host()  # the next one waits already
        here.close()
        assert await received(there, 1) == b""
        ended = await home.machine.wait(HostEnded)
        assert (ended.name, ended.life, ended.n_bytes) == ("cellar", offered.life, len(SIGN + big))
        assert not ended.given_up
        await attic.wait(HomeEnded)

        spare.close()  # home does not want this one
        assert (await home.machine.wait(HostEnded)).given_up
        await attic.wait(HomeEnded)
        await attic.host()
        await home.machine.host()
        home.pairs.issuer.revoke("cellar")
        home.machine.relay.serve(home.pairs.serve())
        await home.machine.wait(HostEnded)
        assert (await attic.wait(LinkDown)).reason == "revoked"


@pytest.mark.parametrize(
    ("build", "only_llama", "reason"),
    [
        (replace(BUILD, model="b" * 64), "", "model"),
        (replace(BUILD, protocol=99), "", "protocol"),
        (replace(BUILD, llama="b2 avx2"), BUILD.llama, "build"),
        (replace(BUILD, llama="b2 avx2"), "", None),
    ],
)
async def test_a_host_of_another_model_or_build_is_refused_with_the_reason(
    tmp_path: Path, build: object, only_llama: str, reason: str | None
) -> None:
    async with at_home(tmp_path, only_llama) as home, machine() as attic:
        identity = home.pairs.member("cellar")
        home.machine.relay.serve(replace(home.pairs.serve(), only_llama=only_llama))
        attic.relay.join(home.role(identity, replace(OFFER, build=build)))
        if reason is None:
            await attic.host()
            await home.machine.host()
            return
        down = await attic.wait(LinkDown)
        assert (down.reason, down.final) == (reason, True)
        assert home.machine.hosts.empty(), "the engine never hears of it"
        attic.relay.join(home.role(identity))  # what is offered next is taken at once
        await attic.host()
        await home.machine.host()


async def test_a_home_without_a_model_takes_no_host_yet(tmp_path: Path) -> None:
    async with at_home(tmp_path) as home, machine() as attic:
        identity = home.pairs.member("cellar")
        home.machine.relay.serve(home.pairs.serve(welcome=None))
        attic.relay.join(home.role(identity))
        down = await attic.wait(LinkDown)
        assert (down.reason, down.final) == ("not_ready", False)
        home.machine.relay.serve(home.pairs.serve(welcome=WELCOME))
        await attic.host()
        await home.machine.host()


async def test_a_certificate_of_another_authority_lends_nothing(tmp_path: Path) -> None:
    async with at_home(tmp_path / "home") as home, machine() as attic:
        foreign = Pairs(tmp_path / "elsewhere", home.pairs.name)
        identity = replace(foreign.member("attic"), ca=home.pairs.issuer.identity().ca)
        attic.relay.join(home.role(identity))
        await attic.wait(LinkDown)
        assert home.machine.hosts.empty()


async def layers_of(home: Home, identity: Identity) -> tuple[str, TheSegments, TheSegments]:
    """Have a member ask for its layers: who asked, what home answered, and what came."""
    paired = PairedPartner(
        name=home.pairs.name, own_name="cellar", addresses=(Address(host=HOST, port=home.port),), identity=identity
    )
    asking = asyncio.create_task(ask_machine(paired, AskSegments(), TheSegments))
    asked = await home.machine.wait(MemberAsks)
    own = TheSegments(build=BUILD, segments=(SegmentFact(5, 22, "a.gguf"),))
    home.machine.relay.send(MemberAnswer(n=asked.n, given=own))
    return asked.name, own, await asking


async def test_a_machine_is_told_which_layers_are_its_own(tmp_path: Path) -> None:
    async with at_home(tmp_path) as home:
        identity = home.pairs.member("cellar")
        home.machine.relay.serve(home.pairs.serve())
        name, own, told = await layers_of(home, identity)
        assert (name, told) == ("cellar", own)


async def test_home_hears_how_a_machine_is_that_lends(tmp_path: Path) -> None:
    async with at_home(tmp_path) as home, machine() as attic:
        identity = home.pairs.member("cellar")
        home.machine.relay.serve(home.pairs.serve())
        attic.relay.send(TellHome(load=LOAD))  # nobody is there yet to hear it
        attic.relay.join(home.role(identity))
        for load in (replace(LOAD, others_share=0.5), replace(LOAD, leaving="somebody works there")):
            attic.relay.send(TellHome(load=load))
            assert await home.machine.wait(MachineTold) == MachineTold(name="cellar", load=load)


async def test_a_machine_that_says_something_else_in_between_is_refused(tmp_path: Path) -> None:
    async with at_home(tmp_path) as home:
        identity = home.pairs.member("cellar")
        home.machine.relay.serve(home.pairs.serve())
        address = Address(host=HOST, port=home.port)
        for wrong in (AskRay(), replace(LOAD, n_cpus=0)):
            stream = await connect(address, tls.client_context(identity), tls.tls_name(home.pairs.name))
            stream.write(first_frame(LOAD))
            await home.machine.wait(MachineTold)
            stream.write(first_frame(wrong))
            async with asyncio.timeout(SOON_S):
                body, _, _ = await stream.read()
            reply = decode_reply(body)
            assert isinstance(reply, Refused)
            assert reply.reason == "malformed"
            await stream.close()


async def test_a_host_is_offered_once_its_process_has_said_something(tmp_path: Path) -> None:
    async with at_home(tmp_path) as home, machine() as attic:
        identity = home.pairs.member("cellar")
        home.machine.relay.serve(home.pairs.serve())
        attic.relay.join(home.role(identity))
        _, here = await attic.silent_host()
        await layers_of(home, identity)  # home's daemon has heard all that its relay had to say before
        assert home.machine.hosts.empty()
        here.send(SIGN)
        offered, _ = await home.machine.host()
        assert isinstance(offered, HostOffered)

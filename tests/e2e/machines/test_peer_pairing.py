"""Pairing over the wire, and fetching a part of the model: real relays, real TLS, a proxy that breaks it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from benchmarks.soak.proxy import Proxy
from disco_daemon.link.relay import join
from disco_daemon.link.relay.handshake import TheAuthority, first_frame
from disco_daemon.link.relay.orders import Address, FileAsked, Identity, Listening, MemberAsks, OfferFile, RefuseFile
from disco_daemon.link.trust import tls
from disco_daemon.link.trust.pairing import Issuer, Membership, PairedPartner, answer_pair
from disco_daemon.link.trust.pairing_code import PairingCode, PairingError, format_code, parse_code
from tests.fixtures.peers import BUILD, HOST, Machine, Pairs, machine


@dataclass
class Desk:
    """A partner whose test is its daemon: it answers those who want a certificate."""

    machine: Machine
    pairs: Pairs
    port: int
    answering: asyncio.Task[None]
    pairing: bool

    def code(self) -> PairingCode:
        code = self.pairs.issuer.new_code([Address(host=HOST, port=self.port)])
        if self.pairing:
            self.machine.relay.serve(self.pairs.serve(pairing=True))
        return parse_code(format_code(code))

    async def paired(self, name: str = "laptop") -> PairedPartner:
        partner, _ = await join.pair(self.code(), name)
        return partner


@asynccontextmanager
async def desk(folder: Path, *, pairing: bool = True) -> AsyncIterator[Desk]:
    pairs = Pairs(folder / "peers")
    async with machine() as partner:

        async def answer_all() -> None:
            while True:
                answer = answer_pair(pairs.issuer, await partner.wait(MemberAsks, patient=True))
                partner.relay.serve(pairs.serve(pairing=True))  # first: the new member may come at once
                partner.relay.send(answer)

        if not pairing:
            pairs.member("somebody")  # so that something listens
        partner.relay.serve(pairs.serve(pairing=pairing))
        port = (await partner.wait(Listening)).port
        answering = asyncio.create_task(answer_all())
        try:
            yield Desk(partner, pairs, port, answering, pairing)
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


async def reason_of(code: PairingCode, name: str = "laptop") -> str:
    with pytest.raises(PairingError) as caught:
        await join.pair(code, name)
    print(caught.value)
    return caught.value.reason


async def test_a_code_makes_two_machines_know_each_other(tmp_path: Path) -> None:
    async with desk(tmp_path) as there:
        partner, build = await join.pair(there.code(), "laptop")
        assert (partner.name, partner.own_name, build) == ("desk", "laptop", BUILD)
        Membership(tmp_path / "joined").save(partner)
        assert [member.name for member in there.pairs.issuer.members()] == ["laptop"]
        there.machine.relay.serve(there.pairs.serve())
        async with machine() as edge:
            upper, lower = await there.machine.engine(), await edge.engine()
            kept = Membership(tmp_path / "joined").partner()
            assert kept is not None
            edge.relay.join(there.pairs.join(kept.identity, there.port))
            await upper.joined()
            await lower.joined()


async def test_an_address_that_leads_nowhere_does_not_hold_up_the_one_that_answers(tmp_path: Path) -> None:
    async with desk(tmp_path) as there:
        code = there.code()
        nowhere = Address(host="192.0.2.1", port=there.port)  # RFC 5737: of nobody
        partner, _ = await join.pair(PairingCode((nowhere, *code.addresses), code.secret, code.fingerprint), "laptop")
        assert partner.addresses == (*code.addresses, nowhere), "the one that answered comes first"


async def test_each_way_to_fail_has_its_own_reason(tmp_path: Path) -> None:
    async with desk(tmp_path) as there:
        code = there.code()
        wrong = PairingCode(code.addresses, b"0" * 16, code.fingerprint)
        assert await reason_of(wrong) == "wrong_code"
        assert await reason_of(code, "desk") == "bad_name"
        assert await reason_of(code, "No Name") == "bad_name"
        await join.pair(code, "laptop")
        assert await reason_of(code, "other") == "used_code"
        assert await reason_of(there.code(), "laptop") == "bad_name", "it is taken"
        there.pairs.issuer = Issuer(tmp_path / "peers", lambda: 1.0)
        late = there.code()
        there.pairs.issuer._wall = lambda: 602.0
        assert await reason_of(late, "late") == "expired_code"
        nowhere = PairingCode((Address(host=HOST, port=1),), code.secret, code.fingerprint)
        assert await reason_of(nowhere) == "unreachable"


async def test_a_machine_that_is_not_the_one_of_the_code_never_gets_the_secret(tmp_path: Path) -> None:
    async with desk(tmp_path / "a") as there, desk(tmp_path / "b") as impostor:
        code = there.code()
        address = Address(host=HOST, port=impostor.port)
        assert await reason_of(PairingCode((address,), code.secret, code.fingerprint)) == "fingerprint"
        assert not [event for event in impostor.machine.events if isinstance(event, MemberAsks)]
        await join.pair(code, "laptop")


class Middle:
    """Somebody between the two, who hears all and shows `ca` as the authority; it keeps what it could read."""

    def __init__(self, identity: Identity, ca: str) -> None:
        self.ca, self.heard = ca, bytearray()
        self.context = tls.server_context(identity)
        self.context.verify_mode = ssl.CERT_NONE

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                self.heard += data
                writer.write(first_frame(TheAuthority(certificate=self.ca)))
        writer.close()


@pytest.mark.parametrize("shows", ["the true authority", "its own"])
async def test_a_man_in_the_middle_never_hears_the_secret(tmp_path: Path, shows: str) -> None:
    async with desk(tmp_path / "a") as there:
        code = there.code()
        true, own = there.pairs.issuer.identity(), Pairs(tmp_path / "b").issuer.identity()
        middle = Middle(own, true.ca if shows == "the true authority" else own.ca)
        server = await asyncio.start_server(middle.serve, HOST, 0, ssl=middle.context)
        address = Address(host=HOST, port=server.sockets[0].getsockname()[1])
        reason = await reason_of(PairingCode((address,), code.secret, code.fingerprint))
        assert reason == ("certificate" if shows == "the true authority" else "fingerprint")
        assert code.secret not in middle.heard
        assert hashlib.sha256(code.secret).digest() not in middle.heard
        server.close()
        await server.wait_closed()
        await join.pair(code, "laptop")  # it is as good as before


async def test_what_was_said_at_a_pairing_is_of_no_use_to_who_plays_it_again(tmp_path: Path) -> None:
    async with desk(tmp_path) as there:
        recorded: list[bytearray] = []

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            said = bytearray()
            recorded.append(said)
            up, down = await asyncio.open_connection(HOST, there.port)

            async def back() -> None:
                with suppress(OSError):
                    while data := await up.read(1 << 16):
                        writer.write(data)
                writer.close()

            answering = asyncio.create_task(back())
            with suppress(OSError):
                while data := await reader.read(1 << 16):
                    said += data
                    down.write(data)
            down.close()
            await answering

        server = await asyncio.start_server(pass_on, HOST, 0)
        code = there.code()
        address = Address(host=HOST, port=server.sockets[0].getsockname()[1])
        await join.pair(PairingCode((address,), code.secret, code.fingerprint), "laptop")
        assert len(recorded) == 2
        assert not [said for said in recorded if code.secret in said], "it goes by TLS"
        before = there.pairs.issuer.members()
        for said in recorded:
            reader, writer = await asyncio.open_connection(HOST, there.port)
            writer.write(bytes(said))
            writer.write_eof()
            with suppress(OSError):
                while await reader.read(1 << 16):  # what the relay says to a stranger's hello, and then an alert
                    pass
            writer.close()
        server.close()
        assert there.pairs.issuer.members() == before
        assert not [event for event in there.machine.events if isinstance(event, MemberAsks)]


async def test_without_a_live_code_nobody_is_paired(tmp_path: Path) -> None:
    async with desk(tmp_path, pairing=False) as there:
        assert await reason_of(there.code()) == "no_code"


# --- fetching ------------------------------------------------------------------------------------------------------

CUT = 24


@dataclass
class Model:
    """A file that is offered, larger than all buffers on its way."""

    path: Path
    data: bytes

    def offer(self, machine: Machine) -> None:
        handle = os.open(self.path, os.O_RDONLY)
        message = OfferFile(cut=CUT, n_bytes=len(self.data), sha256=hashlib.sha256(self.data).hexdigest())
        machine.relay.offer(message, handle)
        os.close(handle)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    data = random.Random(3).randbytes(24 << 20)
    path = tmp_path / "segment.gguf"
    path.write_bytes(data)
    return Model(path, data)


async def test_a_member_fetches_its_part_which_is_made_when_it_asks(tmp_path: Path, model: Model) -> None:
    async with desk(tmp_path) as there:
        partner = await there.paired()
        seen: list[tuple[int, int]] = []
        fetching = asyncio.create_task(join.fetch(partner, CUT, tmp_path / "new" / "x.gguf", lambda *n: seen.append(n)))
        assert await there.machine.wait(FileAsked) == FileAsked(name="laptop", cut=CUT)
        model.offer(there.machine)
        await fetching
        assert (tmp_path / "new" / "x.gguf").read_bytes() == model.data
        assert [file.name for file in (tmp_path / "new").iterdir()] == ["x.gguf"]
        assert seen[-1] == (len(model.data), len(model.data))
        assert seen == sorted(seen)


async def test_a_fetch_that_breaks_goes_on_where_it_stopped(tmp_path: Path, model: Model) -> None:
    async with desk(tmp_path) as there, Proxy(there.port) as proxy:
        partner = msgspec.structs.replace(await there.paired(), addresses=(Address(host=HOST, port=proxy.port),))
        model.offer(there.machine)
        target, seen = tmp_path / "x.gguf", list[int]()

        def cut(done: int, n_bytes: int) -> None:
            seen.append(done)
            if len(seen) in (2, 5):
                proxy.cut()

        await join.fetch(partner, CUT, target, cut)
        assert target.read_bytes() == model.data
        assert proxy.passed > 1
        assert seen == sorted(set(seen)), "no byte came twice"

        proxy.cut_after = 5 << 20  # the next one breaks, and so do all after it: then it is said
        target.unlink()
        async with proxy.closed():
            with pytest.raises(PairingError, match="cannot be reached"):
                await join.fetch(partner, CUT, target)
        assert not target.exists()


async def test_a_part_of_another_file_is_thrown_away(tmp_path: Path, model: Model) -> None:
    async with desk(tmp_path) as there:
        partner = await there.paired()
        (tmp_path / ".x.gguf.part").write_bytes(b"of another file" * 1000)
        (tmp_path / ".x.gguf.sum").write_text("0" * 64)
        model.offer(there.machine)
        await join.fetch(partner, CUT, tmp_path / "x.gguf")
        assert (tmp_path / "x.gguf").read_bytes() == model.data


async def test_a_damaged_file_is_not_kept(tmp_path: Path, model: Model) -> None:
    async with desk(tmp_path) as there:
        partner = await there.paired()
        model.offer(there.machine)
        model.path.write_bytes(model.data[:-1] + b"?")
        with pytest.raises(PairingError, match="damaged"):
            await join.fetch(partner, CUT, tmp_path / "x.gguf")
        assert not (tmp_path / "x.gguf").exists()
        model.path.write_bytes(model.data)
        await join.fetch(partner, CUT, tmp_path / "x.gguf")


async def test_what_cannot_be_fetched_says_why(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk(tmp_path) as there:
        partner = await there.paired()
        fetching = asyncio.create_task(join.fetch(partner, 3, tmp_path / "x.gguf"))
        await there.machine.wait(FileAsked)
        there.machine.relay.send(RefuseFile(cut=3, message="the model has 2 layers"))
        with pytest.raises(PairingError, match="the model has 2 layers"):
            await fetching

        model.offer(there.machine)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=50_000_000))
            with pytest.raises(PairingError, match=r"needs 92 MB, .* has 50 MB free"):
                await join.fetch(partner, CUT, tmp_path / "x.gguf")

        there.pairs.issuer.revoke("laptop")
        there.machine.relay.serve(there.pairs.serve(pairing=True))
        with pytest.raises(PairingError) as caught:
            await join.fetch(partner, CUT, tmp_path / "x.gguf")
        assert caught.value.reason == "revoked"
        assert not (tmp_path / "x.gguf").exists()

"""A machine that was revoked is served by nothing, whatever it holds, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import psutil
import pytest

from disco_daemon.config.schema import Config
from disco_daemon.errors import ConfigError
from disco_daemon.link.protocol import Build, PeerLeft, Refused
from disco_daemon.link.relay.handshake import (
    AskCuts,
    AskSegments,
    LinkMeasured,
    MeasureLink,
    TellLoad,
    decode_reply,
    first_frame,
)
from disco_daemon.link.relay.orders import Identity, MachineTold, Member, MemberAsks
from disco_daemon.link.relay.relay_process import RelayProcess
from disco_daemon.link.trust import tls
from disco_daemon.link.trust.roles import Role
from disco_daemon.machines.member_service import MemberService
from disco_daemon.system.frames import HEADER
from tests.fixtures.partner import (
    Partner,
    connected,
    ended,
    listening,
    next_refusal,
    refusal,
    revoke,
    serve_members,
    serving_on,
)
from tests.fixtures.peers import BUILD, HELLO, HOST, SOON_S, undisturbed

CUT_OFF_S = 1.0  # for all connections of a machine that was revoked: 10 ms are printed on a quiet machine


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
        assert not [one for one in partner.machine.events if isinstance(one, MemberAsks)], "nothing of it was served"


@undisturbed
async def test_a_connection_that_a_member_is_opening_at_its_revocation_is_not_served(tmp_path: Path) -> None:
    """Before the handshake, at each step in it, and behind it."""
    async with listening(tmp_path) as partner, serving_on(partner):
        gone = partner.pairs.member("gone")
        await serve_members(partner)
        served = Opening(partner, gone)
        await served.begin(0)
        assert len(await served.served(first_frame(MeasureLink(n_down=8)))) > 8, "as long as it is a member"
        opening = [Opening(partner, gone) for _ in range(N_STEPS)]
        for n_steps, one in enumerate(opening):
            await one.begin(n_steps)
        await revoke(partner, "gone")
        for one in opening:
            assert await one.served(first_frame(MeasureLink(n_down=8))) in (b"", "revoked")
        for one in (served, *opening):
            one.close()


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


N_STEPS = 4  # a connection, half of the client's first words, all of them, and the rest with its certificate


class Opening:
    """A connection that is opened step by step, by hand."""

    def __init__(self, partner: Partner, identity: Identity) -> None:
        self._port, self._in, self._out = partner.port, ssl.MemoryBIO(), ssl.MemoryBIO()
        name = tls.tls_name(partner.pairs.name)
        self._tls = tls.client_context(identity).wrap_bio(self._in, self._out, server_hostname=name)
        self._unsent = b""

    async def begin(self, n_steps: int) -> None:
        """Take so many of the steps."""
        self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        hello = self._out.read()
        sent = hello[: (0, len(hello) // 2, len(hello), len(hello))[n_steps]]
        self._unsent = hello[len(sent) :]
        self._writer.write(sent)
        if n_steps >= 3:
            await self._shake_hands()

    async def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._hear()
                continue
            self._writer.write(self._out.read())
            return

    async def _hear(self) -> None:
        self._writer.write(self._out.read())
        if not (data := await self._reader.read(1 << 16)):
            raise EOFError
        self._in.write(data)

    async def served(self, first: bytes) -> bytes | str:
        """Take all other steps, and ask; return why it is refused, or what came else."""
        try:
            async with asyncio.timeout(SOON_S):
                self._writer.write(self._unsent)
                await self._shake_hands()
                self._tls.write(first)
                while True:
                    with suppress(ssl.SSLWantReadError):
                        data = self._tls.read(1 << 16)
                        n_body = HEADER.unpack_from(data)[0] if data else 0
                        message = decode_reply(data[HEADER.size : HEADER.size + n_body]) if data else None
                        return message.reason if isinstance(message, Refused) else data
                    await self._hear()
        except (EOFError, OSError):
            return b""

    def close(self) -> None:
        self._writer.transport.abort()


class Busy(MemberService):
    """A service that is busy with something else, or fails at it, when a machine is revoked; `relay` is what it has."""

    log = logging.getLogger("disco.partner")
    listen_s, needs_own_model = 1.0, ""
    role = Role.SPLIT
    turned_on = MappingProxyType({"partner.enabled": True})

    def __init__(self, folder: Path, relay: RelayProcess) -> None:
        super().__init__(folder)
        self._relay, self._config = relay, Config()
        self.may_go_on, self.fails = asyncio.Event(), False

    def _listen_host(self, config: Config) -> str:
        return HOST

    async def _build_of(self, config: Config) -> Build:
        await self.may_go_on.wait()
        if self.fails:
            raise ConfigError("the model has gone")
        return BUILD

    async def _serve_members(self, config: Config, build: Build, members: tuple[Member, ...]) -> None:
        pass

    def is_enabled(self, config: Config) -> bool:
        return True

    def document(self) -> dict[str, Any]:
        return {}

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

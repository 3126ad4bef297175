"""The link between two machines: real relay processes and real TLS; the tests have the engines' ends of the sockets."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from benchmarks.soak.proxy import Proxy
from disco_daemon.link.protocol import (
    Credit,
    DraftVerdict,
    JudgeDrafts,
    OpenAnswer,
    PeerFrame,
    PeerJoined,
    PeerLeft,
    SendRows,
)
from disco_daemon.link.relay.orders import LinkDown, LinkStats, LinkUp, Listening, RelayReady
from disco_daemon.link.relay.relay_process import RelayLost
from tests.fixtures.peers import BUILD, HELLO, SOON_S, WELCOME, EngineEnd, Machine, Pairs, machine, rows, undisturbed


@dataclass
class Linked:
    """Two machines whose link stands; the edge reaches its partner by a proxy."""

    partner: Machine
    edge: Machine
    upper: EngineEnd
    lower: EngineEnd
    proxy: Proxy
    pairs: Pairs


@asynccontextmanager
async def linked(folder: Path) -> AsyncIterator[Linked]:
    pairs = Pairs(folder)
    laptop = pairs.member("laptop")
    async with machine() as partner:
        upper = await partner.engine()
        partner.relay.serve(pairs.serve())
        port = (await partner.wait(Listening)).port
        async with Proxy(port) as proxy, machine() as edge:
            lower = await edge.engine()
            edge.relay.join(pairs.join(laptop, proxy.port))
            assert await upper.joined() == await lower.joined() == 1
            yield Linked(partner, edge, upper, lower, proxy, pairs)


@undisturbed
async def test_both_engines_hear_of_the_machine_and_both_daemons_of_the_link(tmp_path: Path) -> None:
    pairs = Pairs(tmp_path)
    laptop = pairs.member("laptop")
    other_bits = msgspec.structs.replace(BUILD, llama="b2 neon")
    async with machine() as partner, machine() as edge:
        upper = await partner.engine()
        partner.relay.serve(pairs.serve())
        port = (await partner.wait(Listening)).port
        lower = await edge.engine()
        edge.relay.join(pairs.join(laptop, port, hello=msgspec.structs.replace(HELLO, build=other_bits)))
        [member] = pairs.issuer.members()
        assert await upper.message() == PeerJoined(name="laptop", salt=member.salt)
        assert await lower.message() == PeerJoined(name="desk", credits=WELCOME.credits, n_ctx=WELCOME.n_ctx)
        up = await edge.wait(LinkUp)
        assert (up.name, up.build, up.welcome) == ("desk", BUILD, WELCOME)
        up = await partner.wait(LinkUp)
        assert (up.name, up.build, up.welcome) == ("laptop", other_bits, None), "another build is served, and told"


@undisturbed
async def test_frames_arrive_whole_and_in_order_both_ways(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        sizes = [0, 1, 65535, 65536, 65537, 1 << 20, 3_000_001, 16 << 20, 576 * 4]
        for i, size in enumerate(sizes):
            link.lower.send(*rows(size, pos=i))
        for i, size in enumerate(sizes):
            assert await link.upper.frame() == (*rows(size, pos=i), 1)
        verdicts = [DraftVerdict(id="g1", turn=i, start=i, tokens=tuple(range(i))) for i in range(2000)]
        for verdict in verdicts:
            link.upper.send(verdict)
        assert [await link.lower.message() for _ in verdicts] == verdicts
        stats = await link.edge.wait(
            LinkStats, lambda stats: stats.n_bytes_sent > sum(sizes) and stats.rtt_ms is not None
        )
        assert stats.n_rows == 3 * len(sizes)
        assert stats.rtt_ms is not None
        assert stats.rtt_p99_ms is not None
        assert 0.0 < stats.rtt_ms <= stats.rtt_p99_ms


@undisturbed
async def test_a_small_call_overtakes_a_bulk_upload(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        for i in range(12):
            link.lower.send(*rows(4 << 20, pos=i))
        judge = JudgeDrafts(id="g2", turn=0, start=0, end=1)
        link.lower.send(judge)
        came: list[PeerFrame] = []
        while len(came) < 13:
            came.append(await link.upper.message())
        assert came.index(judge) < 12
        assert [m.pos for m in came if isinstance(m, SendRows)] == list(range(12)), "rows stay in their order"


@undisturbed
async def test_a_machine_that_takes_nothing_does_not_starve_others(tmp_path: Path) -> None:
    pairs = Pairs(tmp_path)
    identities = [pairs.member("slow"), pairs.member("quick")]
    async with machine() as partner, machine() as slow, machine() as quick:
        upper = await partner.engine()
        partner.relay.serve(pairs.serve())
        port = (await partner.wait(Listening)).port
        ends = []
        for edge, identity in zip((slow, quick), identities, strict=True):
            ends.append(await edge.engine())
            edge.relay.join(pairs.join(identity, port))
            await upper.joined()
            await ends[-1].joined()
        verdict = DraftVerdict(id="g", turn=1, start=0, tokens=tuple(range(20_000)))
        for _ in range(500):  # 30 MB for an engine that reads nothing
            upper.send(verdict, peer=1)
        upper.send(Credit(rows=7), peer=2)
        assert await ends[1].message() == Credit(rows=7)


@undisturbed
async def test_a_cut_link_is_told_at_once_and_stands_again(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        link.proxy.cut()
        assert isinstance(await link.lower.message(), PeerLeft)
        assert isinstance(await link.upper.message(), PeerLeft)
        assert (await link.edge.wait(LinkDown)).reason == "closed"
        assert await link.lower.joined() == await link.upper.joined() == 2, "a number is never used again"
        link.lower.send(OpenAnswer(id="g", tokens=(1,)), peer=2)
        assert await link.upper.frame() == (OpenAnswer(id="g", tokens=(1,)), b"", 2)


async def test_a_stalled_link_has_gone_after_two_pings(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        loop = asyncio.get_running_loop()
        async with link.proxy.stalled():
            began = loop.time()
            assert isinstance(await link.lower.message(), PeerLeft)
            assert isinstance(await link.upper.message(), PeerLeft)
            assert (await link.edge.wait(LinkDown)).reason == "silent"
            print(f"silence was noticed after {loop.time() - began:.2f} s")
        await link.lower.joined()
        await link.upper.joined()


@undisturbed
async def test_a_killed_relay_is_started_again_and_the_link_with_it(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        assert link.edge.relay.pid is not None
        os.kill(link.edge.relay.pid, signal.SIGKILL)
        assert "signal 9" in (await link.edge.wait(RelayLost)).why
        assert isinstance(await link.upper.message(), PeerLeft)
        assert await link.lower.reader.read() == b"", "the engine sees that its socket has gone"
        lower = await link.edge.engine()
        await lower.joined()
        await link.upper.joined()


@undisturbed
async def test_a_relay_gives_up_what_it_never_does(tmp_path: Path) -> None:
    async with machine() as one:
        ready = await one.wait(RelayReady)
        assert {"no core dumps", "no writing to files"} <= set(ready.confined)
        if sys.platform == "linux":
            assert one.relay.pid is not None
            text = Path(f"/proc/{one.relay.pid}/status").read_text("ascii")
            seen = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
            assert seen["NoNewPrivs"] == "1"
            assert seen["Seccomp"] == "2" or "seccomp" not in ready.confined


@undisturbed
async def test_an_order_that_comes_before_the_relay_is_there_is_not_lost(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        assert link.partner.relay.pid is not None
        os.kill(link.partner.relay.pid, signal.SIGKILL)
        await link.partner.wait(RelayLost)
        upper = await link.partner.engine()  # its relay is still to be started
        port = (await link.partner.wait(Listening)).port  # any free one, as the test wants it
        identity = link.pairs.member("other")
        link.partner.relay.serve(link.pairs.serve())
        async with machine() as other:
            await other.engine()
            other.relay.join(link.pairs.join(identity, port))
            await upper.joined()


@undisturbed
async def test_an_engine_that_goes_ends_its_links_until_the_next_one(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        link.partner.relay.give_engine(None)
        assert isinstance(await link.lower.message(), PeerLeft)
        assert (await link.partner.wait(LinkDown)).reason == "engine_gone"
        assert (await link.edge.wait(LinkDown, lambda down: down.reason == "not_ready")).final is False
        upper = await link.partner.engine()
        await upper.joined()
        await link.lower.joined()


@undisturbed
async def test_a_revoked_machine_is_cut_off_at_once_and_for_good(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        link.pairs.issuer.revoke("laptop")
        link.pairs.member("other")  # else nothing would listen
        link.partner.relay.serve(link.pairs.serve())
        down = await link.edge.wait(LinkDown)
        assert (down.reason, down.name) == ("revoked", "desk")
        assert isinstance(await link.upper.message(), PeerLeft)
        assert (await link.edge.wait(LinkDown)).final, "it is refused when it comes again"


@pytest.mark.parametrize(
    ("change", "reason", "says"),
    [
        ({"build": msgspec.structs.replace(BUILD, protocol=99, disco="0.2.0")}, "protocol", "which has 0.1.0"),
        ({"build": msgspec.structs.replace(BUILD, protocol=0, disco="0.0.9")}, "protocol", "which has 0.0.9"),
        ({"build": msgspec.structs.replace(BUILD, model="b" * 64)}, "model", "b" * 16),
        ({"cut": 12}, "cut", "at layer 24"),
    ],
    ids=["a newer protocol", "an older protocol", "another model", "another cut"],
)
@undisturbed
async def test_a_machine_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, object], reason: str, says: str
) -> None:
    pairs = Pairs(tmp_path)
    laptop = pairs.member("laptop")
    async with machine() as partner, machine() as edge:
        await partner.engine()
        partner.relay.serve(pairs.serve())
        port = (await partner.wait(Listening)).port
        await edge.engine()
        edge.relay.join(pairs.join(laptop, port, hello=msgspec.structs.replace(HELLO, **change)))
        down = await edge.wait(LinkDown)
        assert (down.reason, down.final) == (reason, True)
        assert says in down.message


async def test_cuts_at_random_moments_lose_nothing_within_a_link_and_carry_nothing_over(tmp_path: Path) -> None:
    """Between PeerJoined and PeerLeft each connection's frames come in order, without a gap, and of that link only."""
    rng = random.Random(22)
    cuts = 25

    async def send(end: EngineEnd, make: Callable[[int], tuple[PeerFrame, bytes]]) -> None:
        """Send numbered frames to the machine of the day; each says of which link it is."""
        while True:
            number = end.peer
            for i in itertools.count():
                if end.peer != number or not number:
                    break
                message, payload = make(number * 10_000 + i)
                end.send(message, payload, peer=number)
                await end.writer.drain()
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.001)

    async def take(end: EngineEnd) -> None:
        """Check the order of what comes, and note which machine is there."""
        due: dict[type[PeerFrame], int] = {}
        while True:
            message, payload, peer = await end.frame()
            match message:
                case PeerJoined():
                    assert not end.peer
                    end.peer, due = peer, {}
                    end.joins.release()
                case PeerLeft():
                    assert end.peer == peer
                    end.peer = 0
                case SendRows(pos=n) | JudgeDrafts(turn=n) | DraftVerdict(turn=n):
                    assert end.peer == peer
                    assert n == due.get(type(message), n - n % 10_000), "no gap, no repeat, nothing of another link"
                    assert n % 10_000 == 0 or type(message) in due
                    assert not isinstance(message, SendRows) or payload == rows(100_000, pos=n)[1]
                    due[type(message)] = n + 1
                    end.n_taken += 1

    async with linked(tmp_path) as link:
        for end in (link.upper, link.lower):
            end.peer = 1
        tasks = [
            asyncio.create_task(work)
            for work in (
                take(link.upper),
                take(link.lower),
                send(link.lower, lambda n: rows(100_000, pos=n)),
                send(link.lower, lambda n: (JudgeDrafts(id="g", turn=n, start=0, end=1), b"")),
                send(link.upper, lambda n: (DraftVerdict(id="g", turn=n, start=0, tokens=(1,)), b"")),
            )
        ]
        try:
            for _ in range(cuts):
                await asyncio.sleep(rng.uniform(0.0, 0.2))
                link.proxy.cut()
                async with asyncio.timeout(SOON_S):
                    await link.lower.joins.acquire()
                    await link.upper.joins.acquire()
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert min(link.upper.n_taken, link.lower.n_taken) > cuts


@undisturbed
async def test_nothing_listens_without_a_member_or_a_code(tmp_path: Path) -> None:
    pairs = Pairs(tmp_path)
    async with machine() as partner:
        partner.relay.serve(pairs.serve(pairing=True))
        port = (await partner.wait(Listening)).port
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        partner.relay.serve(pairs.serve())
        assert (await partner.wait(Listening)).port == 0
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)

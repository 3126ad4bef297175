"""Every fault of a server, in every phase of an answer, whoever else can serve: one oracle, `Stand.assert_kept`.

What the reader got is one answer, or a beginning of it; its end is told; history, ledger and caps agree; no task, no
socket, child or inbox is left. `tests.fixtures.matrix` says how an answer comes to have one text.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from disco_daemon.system import socketfile
from tests.fixtures.matrix import (
    FIRST,
    LATER,
    LONG,
    PATIENCE_S,
    PROXIED,
    Asked,
    Fault,
    Stand,
    check_books,
    entered,
    first_of,
    kept_on_disk,
    standing,
)

# The daemons. Who else can serve is part of the name; each is up only while its own cases run.
STANDS: Mapping[str, Mapping[str, Any]] = {
    "nobody else can": {"device": False, "policy": "all-server"},
    "the device can go on": {"device": True, "policy": "all-server"},
    "the device is racing": {"device": True, "policy": "race", "timeout_s": 0.3, "ttft_s": 0.5},
    "the device hands over": {
        "device": True, "policy": "all-device", "prompt": LONG, "more": ("--force-handoff", "3-6"),
    },
    "the device takes over": {
        "device": True, "policy": "all-server", "prompt": LONG, "interval_s": 0.03, "ttft_s": 0.3,
        "more": ("--force-handoff", "1-2"),
    },
    "the device rests while it hands over": {
        "device": True, "policy": "all-device", "prompt": LONG, "pace_tps": 0.5, "more": ("--force-handoff", "3-6"),
    },
}  # fmt: skip
# What a target may do while its source rests, one of each kind: it says nothing, breaks, or cannot be reached.
WHILE_RESTING = ("silence", "a cut", "a proxy that lets nothing through")
DYING_AT = 5  # chunks of a server whose answer is being taken over


class Stands:
    """The stands by who else can serve; each is set up for the first case that needs it, and stays to the end."""

    def __init__(self, stack: AsyncExitStack, paths: pytest.TempPathFactory) -> None:
        self._stack, self._paths = stack, paths
        self._up: dict[str, Stand] = {}
        self._ended: dict[str, Ended] = {}

    async def get(self, who: str) -> Stand:
        if who not in self._up:
            folder = self._paths.mktemp("stand")
            self._up[who] = await self._stack.enter_async_context(standing(folder, **STANDS[who]))
        return self._up[who]

    async def ended(self, who: str) -> Ended:
        if who not in self._ended:
            self._ended[who] = await told_to_end(who, self._paths.mktemp("ended"))
        return self._ended[who]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stands(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stands]:
    async with AsyncExitStack() as stack:
        yield Stands(stack, tmp_path_factory)


def cases(when: str, faults: Mapping[str, Fault], n: int, whoever: Iterable[str]) -> list[Any]:
    """Each fault with each who else can serve; the name is a sentence."""
    return [
        pytest.param(who, fault, n, id=f"{what} {when}, {who}") for who in whoever for what, fault in faults.items()
    ]


ALONE_OR_NOT = ("nobody else can", "the device can go on")
matrix = pytest.mark.asyncio(loop_scope="module")


async def shown_up(stand: Stand) -> None:
    """A server that asked to be left alone is asked again, so that the next case means what it says."""
    if (await stand.daemon.state())["endpoints"]["server"]["down_s"]:
        await stand.reload()


@matrix
@pytest.mark.parametrize(("who", "fault", "n"), cases("before the start", FIRST, 0, ALONE_OR_NOT))
async def test_before_the_start(who: str, fault: Fault, n: int, stands: Stands) -> None:
    stand = await stands.get(who)
    await stand.assert_kept(await stand.under(fault, n), fault)
    await shown_up(stand)


@matrix
@pytest.mark.parametrize(
    ("who", "fault", "n"),
    [
        *cases("before the first token", FIRST, 0, ["the device is racing"]),
        *cases("after the first token", LATER, 1, ["the device is racing"]),
    ],
)
async def test_racing(who: str, fault: Fault, n: int, stands: Stands) -> None:
    stand = await stands.get(who)
    asked = await stand.under(fault, n)
    await stand.assert_kept(asked, fault)
    assert {"device", "server"} <= set(asked.heard.disco["endpoints"]), "it was no race"
    await shown_up(stand)


@matrix
@pytest.mark.parametrize(
    ("who", "fault", "n"),
    [
        *cases("after the first token", LATER, 1, ALONE_OR_NOT),
        *cases("after the fourth token", LATER, 4, ALONE_OR_NOT),
    ],
)
async def test_after_the_first_token(who: str, fault: Fault, n: int, stands: Stands) -> None:
    stand = await stands.get(who)
    asked = await stand.under(fault, n)
    assert stand.reference.startswith(asked.heard.text)
    assert asked.heard.text, "it was not after the first token"
    await stand.assert_kept(asked, fault)


@matrix
@pytest.mark.parametrize(
    ("who", "fault", "n"),
    [
        *cases("before its first token", FIRST, 0, ["the device hands over"]),
        *cases("after its first token", LATER, 1, ["the device hands over"]),
        *cases(f"after {DYING_AT} tokens", LATER, DYING_AT, ["the device takes over"]),
    ],
)
async def test_in_a_handoff(who: str, fault: Fault, n: int, stands: Stands) -> None:
    stand = await stands.get(who)
    asked = await stand.under(fault, n)
    await stand.assert_kept(asked, fault)
    assert asked.heard.disco["moves"] or asked.heard.disco["handoffs"], "nothing moved"
    await shown_up(stand)


@matrix
@pytest.mark.parametrize(
    ("who", "fault", "n"),
    [
        *cases(
            "before its first token",
            {what: FIRST[what if what in PROXIED else f"{what} at once"] for what in WHILE_RESTING},
            0,
            ["the device rests while it hands over"],
        ),
        *cases(
            "after its first token",
            {what: LATER[what] for what in WHILE_RESTING},
            1,
            ["the device rests while it hands over"],
        ),
    ],
)
async def test_while_the_source_rests(who: str, fault: Fault, n: int, stands: Stands) -> None:
    stand = await stands.get(who)
    asked = await stand.under(fault, n)
    await stand.assert_kept(asked, fault)
    assert asked.heard.text == stand.reference, "the device could have gone on from where it rested"
    first, *_ = asked.heard.disco["moves"]
    assert (first["source"], first["paused"]) == ("device", True), "nothing rested"
    assert (first["dropped"] is not None) == first["asked_again"] == (n == 0)
    await shown_up(stand)


@matrix
@pytest.mark.parametrize(
    ("who", "fault", "n"),
    [
        *cases("before the first token, and the settings are read again", FIRST, 0, ALONE_OR_NOT),
        *cases("after the first token, and the settings are read again", LATER, 1, ALONE_OR_NOT),
    ],
)
async def test_on_a_context_that_is_going(who: str, fault: Fault, n: int, stands: Stands) -> None:
    stand = await stands.get(who)
    asked = await stand.under(fault, n, then=stand.reload)
    await stand.assert_kept(asked, fault)
    await shown_up(stand)


# --- a daemon that is told to end -----------------------------------------------------------------------------------

ENDING = {f"{what} before the first token": (fault, 0) for what, fault in FIRST.items() if not fault.live} | {
    f"{what} after the first token": (fault, 1) for what, fault in LATER.items() if not fault.live
}
CUTS = {f"a proxy that cuts {when} the first token": n for n, when in enumerate(("before", "after"))}


class Ended:
    """Answers that were under way when a daemon was told to end, by what their server did then; and what was left."""

    def __init__(self) -> None:
        self.asked: dict[str, Asked] = {}
        self.left: list[str] = []
        self.stand: Stand | None = None
        self.rows: list[dict[str, Any]] = []
        self.days: list[dict[str, Any]] = []


async def all_under_way(stand: Stand, ended: Ended) -> None:
    """Begin an answer for each fault, tell the daemon to end, and only then let the faults happen."""
    go, cut = asyncio.Event(), asyncio.Event()
    tasks: dict[str, asyncio.Task[Asked]] = {}
    for what, (fault, n) in (ENDING | dict.fromkeys(CUTS, (None, 0))).items():
        reached, at = asyncio.Event(), CUTS.get(what, n)
        ended.asked[what] = asked = Asked()
        async with AsyncExitStack() as stack:
            stack.enter_context(
                stand.upstream.held_until(go if fault is not None else cut, at or None, reached=reached)
            )
            if fault is not None:
                await stack.enter_async_context(entered(fault.context(stand, n)))
            tasks[what] = asyncio.create_task(stand.ask(asked))
            await first_of(tasks[what], reached)
            if at:
                await first_of(tasks[what], asked.begun)
            assert not tasks[what].done()
    os.kill((await stand.daemon.state())["pid"], signal.SIGTERM)
    go.set()
    async with asyncio.timeout(3 * PATIENCE_S):
        await asyncio.gather(*(task for what, task in tasks.items() if what not in CUTS))
        stand.proxy.cut()
        await asyncio.gather(*tasks.values())


async def told_to_end(who: str, folder: Path) -> Ended:
    found = Ended()
    async with standing(folder, **STANDS[who], timeout_s=5.0) as stand:
        found.stand = stand
        processes = [psutil.Process(pid) for pid in {(await stand.daemon.state())["pid"], *stand.children}]
        await all_under_way(stand, found)
        _, alive = await asyncio.to_thread(psutil.wait_procs, processes, PATIENCE_S)
        found.left = [f"process {process.pid}" for process in alive]
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while stand.upstream.open_streams:
                    await asyncio.sleep(0.01)  # the proxy and the server are about to find that their client has gone
        if stand.upstream.open_streams:
            found.left.append("a stream at the server")
        if socketfile.found(int(stand.daemon.root.rsplit(":", 1)[1])) is not None:
            found.left.append("the socket")
        if "Traceback" in stand.daemon.log:
            found.left.append("a traceback")
        found.rows, found.days = kept_on_disk(folder / "history.sqlite")
    return found


@matrix
@pytest.mark.parametrize(
    ("who", "what"),
    [
        pytest.param(who, what, id=f"{what}, and the daemon is told to end, {who}")
        for who in ALONE_OR_NOT
        for what in (*ENDING, *CUTS)
    ],
)
async def test_draining(who: str, what: str, stands: Stands) -> None:
    ended = await stands.ended(who)
    assert ended.stand is not None
    fault, _ = ENDING.get(what, (None, 0))
    ended.stand.assert_text(ended.asked[what], fault)


@matrix
@pytest.mark.parametrize("who", ALONE_OR_NOT)
async def test_a_daemon_that_ended_under_all_faults_has_its_books_in_order_and_left_nothing(
    who: str, stands: Stands
) -> None:
    ended = await stands.ended(who)
    assert ended.stand is not None
    assert not ended.left
    check_books(ended.rows, ended.days, ended.stand.n_rows + len(ended.asked), list(ended.asked.values()))

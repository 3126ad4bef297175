"""What a relay keeps for others is bounded: open files, questions, and connections that nobody waits for any more."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disco_daemon.link.relay import listener
from disco_daemon.link.relay.engine_hub import EngineHub
from disco_daemon.link.relay.handshake import AskSegments, TheSegments
from disco_daemon.link.relay.listener import MemberListener
from disco_daemon.link.relay.offers import ASKING_OF_MEMBER, MAX_FILES, Offers
from disco_daemon.link.relay.orders import MemberAnswer, OfferFile
from disco_daemon.link.trust.refusals import LinkEndedError
from tests.fixtures.peers import BUILD


def test_the_latest_files_alone_stay_open_however_often_layers_move(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    offers = Offers(lambda *_: None)
    descriptors = [os.open(tmp_path / "m.gguf", os.O_RDONLY) for _ in range(MAX_FILES + 2)]
    for first, descriptor in enumerate(descriptors, start=1):
        offers.offer(OfferFile(first=first, cut=first + 1, member="attic", n_bytes=1, sha256=""), descriptor)
    for descriptor in descriptors[:2]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    for descriptor in descriptors[2:]:
        assert os.pread(descriptor, 1, 0) == b"x"
    offers.drop_files()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[-1])


@pytest.mark.parametrize("bound_first", [True, False])
async def test_a_second_connection_that_comes_in_the_tick_of_its_time_out_is_cut(
    monkeypatch: pytest.MonkeyPatch, bound_first: bool
) -> None:
    """Whoever waited does not have it, and whoever brought it has given it away."""
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(listener, "BIND_S", 0.01)
    cut: list[str] = []
    stream: Any = SimpleNamespace(abort=lambda: cut.append("cut"))
    nobody: Any = None
    serving = MemberListener(EngineHub(), lambda _: None, nobody, nobody)
    waiting: asyncio.Future[Any] = loop.create_future()

    def bind() -> None:
        if not waiting.done():
            waiting.set_result(stream)

    def hold_up() -> None:
        loop.call_at(loop.time() + (0.005 if bound_first else 0.015), bind)
        time.sleep(0.03)  # both are due when the loop goes on

    loop.call_soon(hold_up)
    with pytest.raises(LinkEndedError, match="did not come"):
        await serving._bound(waiting)
    assert (waiting.cancelled(), cut) == ((False, ["cut"]) if bound_first else (True, []))


OWN = TheSegments(build=BUILD, segments=())


async def test_one_machine_keeps_no_other_from_asking() -> None:
    asked: list[Any] = []
    offers = Offers(lambda event, *_: asked.append(event))

    async def ask(name: str) -> object:
        return await offers._ask(AskSegments(), name)

    ill = [asyncio.create_task(ask("ill")) for _ in range(8)]
    await asyncio.sleep(0)
    assert [type(task.exception()) for task in ill if task.done()] == [LinkEndedError] * (8 - ASKING_OF_MEMBER)
    honest = asyncio.create_task(ask("honest"))
    await asyncio.sleep(0)
    assert [one.name for one in asked] == ["ill"] * ASKING_OF_MEMBER + ["honest"]
    offers.answer(MemberAnswer(n=asked[-1].n, given=OWN))
    assert await honest == OWN
    for task in ill:
        task.cancel()
    await asyncio.gather(*ill, return_exceptions=True)
    assert not offers._n_asking
    assert not offers._asking

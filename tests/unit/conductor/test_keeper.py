"""The keeper opens and closes endpoints as they are held; what fails on the way leaves nothing open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from disco_daemon.conductor import AnswerContext, Keeper
from disco_daemon.endpoints.base import Endpoint
from disco_daemon.types import Side


class Faulty:
    """An endpoint that tells of its life, and cannot be started or closed where it is told so."""

    def __init__(self, name: str, told: list[str], *, fails: str = "") -> None:
        self.side, self._name, self._told, self._fails = Side.SERVER, name, told, fails
        self.may_close = asyncio.Event()
        self.may_close.set()

    async def start(self) -> None:
        self._tell("start")

    async def close(self) -> None:
        await self.may_close.wait()
        self._tell("close")

    def _tell(self, what: str) -> None:
        self._told.append(f"{self._name} {what}")
        if what == self._fails:
            msg = f"{self._name} cannot {what}"
            raise OSError(msg)


class Model(Faulty):
    """One with a model in memory."""

    still_s: Callable[[], float] | None = None

    def expect(self, still_s: Callable[[], float]) -> None:
        self.still_s = still_s
        self._tell("expect")


class Playing:
    """All of a context that a keeper knows."""

    def __init__(self, *endpoints: Faulty) -> None:
        self.endpoints: Mapping[int, Any] = dict(enumerate(endpoints))


def context(*endpoints: Faulty) -> AnswerContext:
    return cast("AnswerContext", Playing(*endpoints))


def still_s(but: Endpoint) -> float:
    return 7.0


async def until(told: list[str], *what: str) -> None:
    async with asyncio.timeout(30):
        while not {*what} <= {*told}:
            await asyncio.sleep(0)  # closing runs beside us


async def test_what_an_answer_holds_is_closed_when_it_has_ended_and_the_next_model_waits_for_that() -> None:
    told: list[str] = []
    old, new = Model("old", told), Model("new", told)
    keeper = Keeper(context(old))
    await keeper.start()
    with keeper.held() as held:
        await keeper.use(context(new), still_s)
        assert keeper.context is not held
        assert keeper.loaders() == [(old, False), (new, True)], "both count for the memory that others may have"
        assert told == ["old start", "new expect"]
        assert new.still_s is not None
        assert new.still_s() == 7.0
        old.may_close.clear()
    await asyncio.sleep(0)
    assert told == ["old start", "new expect"], "it is not gone from memory yet"
    old.may_close.set()
    await until(told, "new start")
    assert keeper.loaders() == [(new, False)]
    await keeper.end()
    assert told == ["old start", "new expect", "old close", "new start", "new close"]


async def test_a_context_that_cannot_be_opened_leaves_all_as_it_was() -> None:
    told: list[str] = []
    good, other, bad = Faulty("good", told), Faulty("other", told), Faulty("bad", told, fails="start")
    keeper = Keeper(context(good))
    await keeper.start()
    before = keeper.context
    with pytest.raises(OSError, match="bad cannot start"):
        await keeper.use(context(good, other, bad), still_s)
    assert keeper.context is before
    await until(told, "other close", "bad close")
    assert "good close" not in told
    await keeper.end()
    assert told.count("good close") == 1


async def test_one_that_fails_to_close_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    old, new = Model("old", told, fails="close"), Model("new", told)
    keeper = Keeper(context(old))
    await keeper.start()
    await keeper.use(context(new), still_s)
    await until(told, "new start")
    assert "closing the server failed" in caplog.text
    await keeper.end()
    assert told[-1] == "new close"

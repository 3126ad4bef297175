"""A partner trains the exit that others lack when it has nothing else to do, and stops at once when it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.config import layers as config
from disco_daemon.machines.split.exit_trainer import ExitTrainer
from disco_daemon.machines.split.hosted_range import make_exit_trainer
from disco_daemon.machines.split.trained_exits import ExitError
from tests.unit.models.test_segments import model


class Training:
    """A training that takes until `go`, and says what becomes of it."""

    def __init__(self) -> None:
        self.begun, self.go, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.cuts: list[int] = []
        self.done = False

    async def train(self, cut: int) -> bool:
        self.cuts.append(cut)
        self.begun.set()
        try:
            await self.go.wait()
            self.done = True
        finally:
            self.ended.set()
        return True

    def lacking(self) -> int | None:
        return None if self.done else 24


def trainer(training: Training, busy: Callable[[], bool], on_mains: Callable[[], bool]) -> ExitTrainer:
    return ExitTrainer(
        training.lacking, training.train, busy, SystemClock(), idle_s=0.01, undisturbed=lambda: True, on_mains=on_mains
    )  # fmt: skip


@pytest.mark.parametrize("cause", ["a request", "the battery"])
async def test_other_work_or_a_battery_ends_a_training_and_it_goes_on_later(cause: str) -> None:
    training, stops = Training(), [False]
    of_request, of_battery = cause == "a request", cause == "the battery"
    made = trainer(training, lambda: of_request and stops[0], lambda: not (of_battery and stops[0]))
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(30):
        await training.begun.wait()
        training.begun.clear()
        stops[0] = True
        await training.ended.wait()
        assert training.lacking() == 24
        stops[0] = False
        training.go.set()
        await training.begun.wait()
        while made.state != "idle":
            await asyncio.sleep(0)
    assert training.cuts[-1] == 24
    assert training.lacking() is None
    task.cancel()
    await asyncio.wait([task])


async def test_a_training_that_fails_is_not_tried_again() -> None:
    n_tried = 0

    async def fail(_cut: int) -> None:
        nonlocal n_tried
        n_tried += 1
        raise ExitError("there is too little text")

    made = ExitTrainer(lambda: 3, fail, lambda: False, SystemClock(), idle_s=0.01, undisturbed=lambda: True)
    async with asyncio.timeout(30):
        await made.run()
    assert (made.state, n_tried) == ("failed", 1)


def test_nothing_is_trained_unless_the_partner_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(model(4))
    flags = {"device.model": str(path), "partner.enabled": True}
    assert make_exit_trainer(config.load(flags=flags), lambda: False, SystemClock()) is None
    asked = config.load(flags=flags | {"partner.train_exits": True})
    assert make_exit_trainer(asked, lambda: False, SystemClock()) is not None

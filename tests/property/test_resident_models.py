"""Several models in one memory, with engines that fail in any way: one task keeps the limit, and survives everything.

The engines are stubs, and the loop's time jumps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.config.schema import ModelSettings
from disco_daemon.engine.inbox import EngineGone
from disco_daemon.engine.supervisor import EngineState
from disco_daemon.machines import resident_models
from disco_daemon.machines.resident_device import Place, ResidentModel
from disco_daemon.machines.resident_models import LOOK_S, TRY_AGAIN_S, ResidentModels
from disco_daemon.scheduler.expected_use import ExpectedUse
from disco_daemon.system.control_groups import ProcessMemory
from tests.fixtures.jumping import LoopClock, in_jumps

LOAD_S, CLOSE_S = 3.0, 2.0
FAULTS = ("", "refuses", "cannot start", "breaks", "does not end")


class Machine:
    """What all engines have together, and whether it was ever more than there is."""

    def __init__(self, limit: int) -> None:
        self.limit, self.most, self.total = limit, limit, 10**9
        self.engines = list[StubEngine]()
        self.taken = 0

    @property
    def used(self) -> int:
        return sum(engine.n_bytes for engine in self.engines if engine.pid is not None)

    def memory(self, without: Any = ()) -> tuple[int, int]:
        del without
        return self.total, self.total


class StubEngine:
    """The owner's view of an engine: one process at a time, which loads or fails, and ends or does not."""

    def __init__(self, machine: Machine, n_bytes: int, fault: str = "") -> None:
        self.machine, self.n_bytes, self.fault = machine, n_bytes, fault
        self.state, self.pid = EngineState.STOPPED, cast("int | None", None)
        self.in_flight, self.last_error, self.n_starts = 0, "it is broken", 0
        self.load_s, self.loading = LOAD_S, cast("asyncio.Task[None] | None", None)
        machine.engines.append(self)

    async def start(self) -> None:
        assert self.pid is None, "a second process of one model"
        if self.fault == "cannot start":
            raise RuntimeError("no more processes")
        self.state, self.pid = EngineState.LOADING, 10**9  # a number that no process has
        self.n_starts += 1
        self.loading = asyncio.create_task(self.load(self.fault))
        assert self.machine.used <= self.machine.limit, "more than there is"

    async def load(self, fault: str) -> None:
        await asyncio.sleep(self.load_s)
        if fault == "refuses":
            self.state, self.pid = EngineState.FAILED, None
        else:
            self.state = EngineState.READY

    async def ready(self, timeout_s: float) -> None:
        assert self.loading is not None
        if self.fault == "breaks":
            raise ValueError("nobody thought of that")
        await asyncio.wait((self.loading,), timeout=timeout_s)
        if self.state is not EngineState.READY:
            raise EngineGone(self.last_error)

    async def close(self) -> None:
        if self.loading is not None:
            self.loading.cancel()
        await asyncio.sleep(CLOSE_S)
        if self.fault == "does not end":
            self.fault = ""  # the next time it does
            raise OSError("it does not end")
        self.state, self.pid = EngineState.STOPPED, None


def a_model(machine: Machine, name: str, n_bytes: int, fault: str = "") -> ResidentModel:
    engine = StubEngine(machine, n_bytes, fault)
    device = SimpleNamespace(engine=engine, place=Place(), load_s=LOAD_S, start=engine.start, close=engine.close)
    return ResidentModel(ModelSettings(name, f"{name}.gguf"), cast(Any, device), n_bytes, ExpectedUse(0.0))


class Rate:
    """A model that is expected so often, whatever it is asked."""

    def __init__(self, per_hour: float, *, is_known: bool = False) -> None:
        self._per_hour, self.is_known = per_hour, is_known

    def observe(self, at: float) -> None:
        del at

    def per_hour(self, at: float) -> float:
        del at
        return self._per_hour


def engine_of(model: ResidentModel) -> StubEngine:
    return cast(StubEngine, model.device.engine)


@contextmanager
def of_machine(machine: Machine) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident_models, "memory", machine.memory)
        yield


@asynccontextmanager
async def resident(machine: Machine, *models: ResidentModel) -> AsyncIterator[ResidentModels]:
    owner = ResidentModels(LoopClock(), lambda: (machine.taken, ProcessMemory()), lambda: False)
    with of_machine(machine):
        owner.follow({m.settings.name: m for m in models}, machine.limit)
        try:
            yield owner
        finally:
            task = owner._task
            assert task is None or not task.done(), "the one task lives until the end"
            for engine in machine.engines:
                engine.fault = ""
            await owner.close()
            assert machine.used == 0, "no process without an owner"


async def asked(owner: ResidentModels, model: ResidentModel, for_s: float = 0.0) -> None:
    """Ask a model as a request does, and read for so long."""
    with owner.hold(model):
        await model.device.place.opened(120.0)
        while engine_of(model).state is EngineState.LOADING:
            await asyncio.sleep(0.1)
        if engine_of(model).state is not EngineState.READY:
            raise EngineGone(engine_of(model).last_error)
        await asyncio.sleep(for_s)
        assert engine_of(model).pid is not None, "closed under an answer"


@in_jumps
async def test_a_model_that_comes_back_while_it_is_asked_for_is_started_once() -> None:
    machine = Machine(20)
    a, b, c = (a_model(machine, name, 10) for name in "abc")
    async with resident(machine, a, b, c) as owner:
        for model, per_hour in ((a, 2.0), (b, 3.0), (c, 1.0)):
            model.use = cast(ExpectedUse, Rate(per_hour))
        for model in (a, b, c):
            await asked(owner, model)
        assert (a.is_here, a.has_left) == (False, True)
        a.use = cast(ExpectedUse, Rate(1e6))  # from here on it comes back by itself
        async with asyncio.timeout(60.0):
            while c.device.place.is_open:
                await asyncio.sleep(0.1)
        assert engine_of(c).pid is not None, "it is being closed"
        await asked(owner, a)
        await asyncio.sleep(3 * LOOK_S)
        assert (engine_of(a).n_starts, engine_of(b).n_starts) == (2, 1)
        assert not owner._wanted
        assert (a.is_here, b.is_here) == (True, True), "nobody need have left besides"


@in_jumps
async def test_a_load_that_fails_is_told_and_tried_again() -> None:
    machine = Machine(20)
    one, other = a_model(machine, "one", 10, "refuses"), a_model(machine, "other", 10)
    async with resident(machine, one, other) as owner:
        with pytest.raises(EngineGone, match="it is broken"):
            await asked(owner, one)
        await asyncio.sleep(CLOSE_S + 1)
        with pytest.raises(EngineGone, match="it is broken"):
            await asked(owner, one)
        assert (engine_of(one).n_starts, one.state) == (1, "failed"), "at once, it was not loaded again"
        await asked(owner, other)
        engine_of(one).fault = ""
        await asyncio.sleep(TRY_AGAIN_S)
        await asked(owner, one)
        assert one.state == "ready"


@in_jumps
async def test_one_that_failed_after_it_was_loaded_is_loaded_again() -> None:
    machine = Machine(20)
    one = a_model(machine, "one", 10)
    async with resident(machine, one) as owner:
        await asked(owner, one)
        engine_of(one).state, engine_of(one).pid = EngineState.FAILED, None  # its supervisor has given it up
        with pytest.raises(EngineGone, match="it is broken"):
            await asked(owner, one)
        await asyncio.sleep(CLOSE_S + TRY_AGAIN_S)
        await asked(owner, one)


@in_jumps
async def test_a_model_waits_for_the_answer_of_one_that_was_removed() -> None:
    machine = Machine(10)
    old, new = a_model(machine, "m", 10), a_model(machine, "m", 10)
    async with resident(machine, old) as owner:
        reading = asyncio.create_task(asked(owner, old, 60.0))
        await asyncio.sleep(LOAD_S + 1)
        owner.follow({"m": new}, machine.limit)
        await asked(owner, new)
        await reading


@in_jumps
async def test_a_refusal_reaches_one_who_begins_to_wait_only_later() -> None:
    machine = Machine(20)
    one = a_model(machine, "one", 15)
    async with resident(machine, one) as owner:
        machine.taken = 10
        with owner.hold(one):
            await asyncio.sleep(1.0)  # its prompt is counted
            assert not owner._wanted
            with pytest.raises(EngineGone, match="others use the rest"):
                async with asyncio.timeout(1.0):
                    await one.device.place.opened(120.0)
        machine.taken = 0
        await asked(owner, one)
        with pytest.raises(EngineGone, match="no longer"), owner.hold(a_model(machine, "one", 1)):
            pass


@in_jumps
async def test_an_idle_one_leaves_when_memory_gets_short_also_while_somebody_waits() -> None:
    machine = Machine(30)
    a, b, c = a_model(machine, "a", 15), a_model(machine, "b", 10), a_model(machine, "c", 25)
    async with resident(machine, a, b, c) as owner:
        await asked(owner, b)
        reading = asyncio.create_task(asked(owner, a, 60.0))
        await asyncio.sleep(LOAD_S + 1)
        waiting = asyncio.create_task(asked(owner, c))
        await asyncio.sleep(1.0)
        machine.total = 20  # others have taken the rest
        await asyncio.sleep(LOOK_S + CLOSE_S)
        assert (a.is_here, b.is_here) == (True, False)
        machine.total = 10**9
        await asyncio.gather(reading, waiting)


@in_jumps
async def test_whatever_goes_wrong_the_task_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(20)
    one, other = a_model(machine, "one", 10, "breaks"), a_model(machine, "other", 10)
    async with resident(machine, one, other) as owner:
        with pytest.raises(EngineGone):
            await asked(owner, one)
        wrong = iter((OSError("/proc"), KeyError("x")))

        def memory(without: Any = ()) -> tuple[int, int]:
            for error in wrong:
                raise error
            return machine.memory(without)

        monkeypatch.setattr(resident_models, "memory", memory)
        await asked(owner, other)
        assert other.is_here


@pytest.mark.parametrize("room", [20, 30])
@in_jumps
async def test_who_asks_for_a_model_does_not_wait_for_one_that_nobody_has_asked_for(room: int) -> None:
    machine = Machine(room)
    ahead, wanted, third = (
        a_model(machine, name, size) for name, size in (("ahead", 15), ("wanted", 10), ("third", 5))
    )
    ahead.use, engine_of(ahead).load_s = cast(ExpectedUse, Rate(1e5, is_known=True)), 100.0
    async with resident(machine, ahead, wanted, third) as owner:
        await asyncio.sleep(2 * LOOK_S)
        assert (ahead.state, engine_of(ahead).state) == ("loading", EngineState.LOADING)
        async with asyncio.timeout(CLOSE_S + LOAD_S + 1.0):
            await asked(owner, wanted)
        assert ahead.is_here is (room == 30), "where both have room it goes on beside the other one"
        ahead.use = cast(ExpectedUse, Rate(1e5 if room == 30 else 1e9, is_known=True))
        await asyncio.sleep(100.0 + CLOSE_S + 2 * LOOK_S)
        assert engine_of(ahead).state is EngineState.READY
        assert engine_of(ahead).n_starts == (1 if room == 30 else 2)
        assert third.state == "unloaded"


@in_jumps
async def test_a_load_ahead_that_fails_beside_a_wanted_one_is_told_like_any_other() -> None:
    machine = Machine(30)
    ahead, wanted = a_model(machine, "ahead", 15, "refuses"), a_model(machine, "wanted", 10)
    ahead.use, engine_of(ahead).load_s = cast(ExpectedUse, Rate(1e5, is_known=True)), 20.0
    async with resident(machine, ahead, wanted) as owner:
        await asyncio.sleep(1.0)
        await asked(owner, wanted)
        assert ahead.state == "loading"
        await asyncio.sleep(20.0 + LOOK_S)
        assert ahead.state == "failed"


actions = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 3), st.sampled_from((0.0, 0.0, 4.0, 20.0))),
    st.tuples(st.just("wait"), st.integers(0, 3), st.sampled_from((0.5, 1.5, 4.0, 40.0))),
    st.tuples(st.just("break"), st.integers(0, 3), st.sampled_from(FAULTS)),
    st.tuples(st.just("change"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("leave"), st.integers(0, 3), st.none()),
)


# Size, requests an hour that are expected, and whether it comes by itself also where it was not here yet.
kinds = st.tuples(st.integers(1, 20), st.sampled_from((0.1, 10.0, 1e5)), st.booleans())


@given(st.lists(kinds, min_size=4, max_size=4), st.lists(actions, max_size=30))
@settings(max_examples=60, deadline=None)
def test_all_stay_within_the_limit_each_has_one_process_and_who_can_be_served_is(
    kinds: list[tuple[int, float, bool]], steps: list[tuple[str, int, Any]]
) -> None:
    @in_jumps
    async def run() -> None:
        machine = Machine(25)

        def made(index: int) -> ResidentModel:
            size, per_hour, is_known = kinds[index]
            model = a_model(machine, f"m{index}", size)
            model.use = cast(ExpectedUse, Rate(per_hour, is_known=is_known))
            return model

        models = {f"m{i}": made(i) for i in range(4)}
        async with resident(machine, *models.values()) as owner:
            requests = list[asyncio.Task[None]]()
            for what, index, how in steps:
                name = f"m{index}"
                match what:
                    case "ask":
                        requests.append(asyncio.create_task(asked(owner, models[name], how)))
                    case "wait":
                        await asyncio.sleep(how)
                    case "break":
                        engine_of(models[name]).fault = how
                    case "change":
                        models[name] = made(index)
                        owner.follow(models, machine.limit)
                    case "leave" if requests:
                        requests[-1].cancel()
            for found in await asyncio.gather(*requests, return_exceptions=True):
                assert found is None or isinstance(found, EngineGone | asyncio.CancelledError), found
            for model in models.values():
                engine_of(model).fault = ""
            await asyncio.sleep(TRY_AGAIN_S + 60.0)
            for model in models.values():
                await asked(owner, model)

    run()

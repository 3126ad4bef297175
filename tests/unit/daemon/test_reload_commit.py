"""A reload that fails anywhere has changed nothing: each step of making new parts is failed in turn.

The steps are not listed here: they are all calls from the rooms that make parts, as they are seen in a reload that
succeeds. Compared is all that can be reached from the parts in use, to the last value.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from enum import Enum
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import numpy as np
import pytest
import tomlkit

import disco_daemon
from disco_daemon.api.control.metrics import Metrics
from disco_daemon.conductor import Privacy
from disco_daemon.conductor.traces import Traces
from disco_daemon.config.layers import load
from disco_daemon.config.pricelist import load as load_prices
from disco_daemon.config.schema import Config
from disco_daemon.daemon import money
from disco_daemon.daemon.assembly import Assembly, Parts, Shared
from disco_daemon.daemon.runtime import Runtime
from disco_daemon.daemon.tasks.loop_monitor import LoopMonitor
from disco_daemon.endpoints.device import Device
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine
from disco_daemon.errors import ConfigError
from disco_daemon.machines import kinds
from disco_daemon.machines.fleet.fleet_device import FleetDevice
from disco_daemon.machines.fleet.local_fleet import make_fleet
from disco_daemon.machines.managed_device import Making, ManagedDevice
from disco_daemon.machines.split.partner_service import Partner
from disco_daemon.machines.split.split_device import SplitDevice, rules_of
from disco_daemon.machines.whole_device import WholeKind
from disco_daemon.models.default import default_model_path
from disco_daemon.store import History
from disco_daemon.types import Side
from tests.fixtures.clock import StoppedClock

ROOT = Path(disco_daemon.__file__).parent
# Whose calls are the steps.
MAKERS = (
    "daemon/assembly.py", "daemon/endpoints.py", "daemon/money.py", "daemon/runtime.py", "conductor/keeper.py",
    "machines/kinds.py", "machines/whole_device.py",
)  # fmt: skip
OPAQUE = (History, LoopMonitor, Metrics, Traces, Path)  # of the process, whatever the settings become
KINDS = ["server", "split", "fleet"]
Step = tuple[CodeType, CodeType]  # the caller and the called


class BrokenStepError(Exception):
    """What a step fails with: nothing in the daemon expects it."""


class Link:
    """The link of a split device, which is never used."""

    why_down, is_up, n_ctx, power = "", True, None, None
    status = dict

    def is_same(self, other: object) -> bool:
        return isinstance(other, Link)

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def hold(self, *, private: bool) -> None: ...


def content(root: object) -> dict[str, object]:
    """Every value that can be reached from an object of ours, by the way to it."""
    found: dict[str, object] = {}
    seen: set[int] = set()

    def walk(x: object, way: str) -> None:
        if isinstance(x, np.ndarray):
            found[way] = x.tobytes()
        elif isinstance(x, int | float | str | bytes | Enum | None):
            found[way] = x
        elif id(x) in seen or isinstance(x, OPAQUE) or callable(x):
            found[way] = id(x)
        else:
            seen.add(id(x))
            found[way] = id(x) if type(x).__module__.startswith("disco_daemon") else type(x)
            for name, inner in parts(x):
                walk(inner, f"{way}.{name}")

    def parts(x: object) -> list[tuple[object, object]]:
        if isinstance(x, Mapping):
            return list(x.items())
        if isinstance(x, list | tuple | deque):
            return list(enumerate(x))
        if isinstance(x, set | frozenset):
            return list(enumerate(sorted(x, key=repr)))
        if not type(x).__module__.startswith("disco_daemon"):
            return []
        slots = [name for cls in type(x).__mro__ for name in getattr(cls, "__slots__", ())]
        own = {name: getattr(x, name) for name in slots if hasattr(x, name)} | getattr(x, "__dict__", {})
        return [(name, value) for name, value in own.items() if name != "__dict__"]

    walk(root, "")
    return found


class Steps:
    """The calls that making parts consists of, by caller and called; `fail` raises in one of them."""

    def __init__(self) -> None:
        self.seen: dict[Step, int] = {}
        self._fail: Step | None = None

    def __enter__(self) -> None:
        self._is_begun = self._is_over = False
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def failing(self, step: Step | None) -> Steps:
        self._fail = step
        return self

    def _trace(self, frame: FrameType, _: str, __: object) -> None:
        code, caller = frame.f_code, frame.f_back
        self._is_begun = self._is_begun or code is Runtime._replace.__code__
        self._is_over = self._is_over or code is Parts.commit.__code__
        if not self._is_begun or self._is_over or caller is None or not _is_step(code, caller.f_code):
            return
        step = caller.f_code, code
        self.seen.setdefault(step, len(self.seen))
        if step == self._fail:
            raise BrokenStepError(code.co_qualname)


def _is_step(code: CodeType, caller: CodeType) -> bool:
    if not code.co_filename.startswith(str(ROOT)) or code.co_name.startswith("<") or code.co_name == "in_flight":
        return False
    return caller.co_filename.startswith(tuple(str(ROOT / name) for name in MAKERS))


async def _inline(work: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Work that a thread would do, where the steps can be seen."""
    return work(*given, **named)


BEFORE: dict[str, dict[str, Any]] = {
    "caps": {"usd_per_day": 0.0004, "usd_per_month": 1.0, "wh_per_day": 2.0, "battery_floor": 0.1},
    "device": {"usd_per_kwh": 0.3, "watts": 10.0},
    "delivery": {"mode": "reserve"},
    "policy": {"budget": 0.2},
}
AFTER: dict[str, dict[str, Any]] = {
    "caps": {"usd_per_day": 1000.0, "usd_per_month": 2000.0, "wh_per_day": 3000.0, "battery_floor": 0.7},
    "device": {"usd_per_kwh": 30.0, "watts": 10.0},
    "delivery": {"mode": "paced", "pace_tps": 9.0},
    "policy": {"budget": 0.2, "hedge": 0.3},
}
# What makes it more than a change of live settings, and what a device of the kind takes up at a reload.
MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split": ({"mode": "exact", "alone": "go-on"}, {"mode": "exact", "alone": "stop", "theta": 0.5}),
    "fleet": ({"vacancy": 0.9}, {"vacancy": 0.5, "mode": "auto"}),
}


def settings(kind: str, *, after: bool) -> dict[str, dict[str, Any]]:
    """config.toml of a kind of device, before a reload or after it."""
    server = {"base_url": "http://127.0.0.1:9/v1", "model": "larger" if after else "large"}
    found = {**(AFTER if after else BEFORE), "server": server | {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0}}
    found["device"] = found["device"] | {"enabled": kind != "server", "n_threads": 1}
    if kind == "fleet":
        found["fleet"] = {"enabled": True, "hosts": 1, "cuts": [5, 22]} | MORE[kind][after]
    if kind == "split":
        found["split"] = MORE[kind][after]
    return found


@asynccontextmanager
async def running(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runtime]:
    """A runtime with a device of a kind, whose engine is not started: a reload keeps it."""
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(asyncio, "to_thread", _inline)
    monkeypatch.setattr(money, "load", cache(load_prices))  # the price lists do not change
    monkeypatch.setattr(Parts, "start_tasks", lambda _: [])  # what they do beside a reload is their own
    for cls in (Device, SplitDevice, FleetDevice):
        monkeypatch.setattr(cls, "may_serve", lambda _: True)
        monkeypatch.setattr(cls, "start", lambda _: asyncio.sleep(0))
    if kind in ("split", "fleet"):
        monkeypatch.setattr(kinds, "KINDS", [Kind(_split_device if kind == "split" else fleet_maker())])
    path, clock = tmp_path / "config.toml", StoppedClock()
    path.write_text(tomlkit.dumps(settings(kind, after=False)))
    with History(tmp_path / "history.sqlite") as history:
        metrics = Metrics(lambda: cast("Any", None))
        shared = Shared(clock, history, metrics, LoopMonitor(clock), Privacy(), Traces(), tmp_path / "servers")
        runtime = Runtime(Assembly(shared), load(path, {}), path, Partner(clock, tmp_path / "peer"))
        try:
            await runtime.start()
            yield runtime
        finally:
            await runtime.stop()
            await runtime.keeper.end()


class Kind(WholeKind):
    """A kind of device that `make_it` makes."""

    def __init__(self, make_it: Callable[[Config, Any], ManagedDevice]) -> None:
        self._make_it = make_it

    def make(self, config: Config, making: Making) -> Any:
        return self._make_it(config, making.clock)


def fleet_maker() -> Callable[..., FleetDevice]:
    """What makes the same fleet again, without reading the model's vocabulary each time."""
    made: list[FleetDevice] = []

    def make(config: Config, clock: Any) -> FleetDevice:
        if not made:
            made.append(
                make_fleet(config, wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), "", clock)
            )
        return FleetDevice(made[0].engine, made[0].fleet, "")

    return make


def _split_device(config: Config, clock: Any) -> SplitDevice:
    engine = Engine(wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), clock)
    return SplitDevice(engine, Link(), "m", (4, 4), rules=rules_of(config))


def device_of(runtime: Runtime) -> Any:
    return runtime.endpoints[Side.DEVICE]


def write(runtime: Runtime, tmp_path: Path, kind: str, *, after: bool) -> None:
    (tmp_path / "config.toml").write_text(tomlkit.dumps(settings(kind, after=after)))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reload_that_fails_at_any_step_has_changed_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(kind, tmp_path, monkeypatch) as runtime:
        steps = Steps()
        with steps:
            write(runtime, tmp_path, kind, after=True)
            await runtime.reload()
        write(runtime, tmp_path, kind, after=False)
        await runtime.reload()
        names = {code.co_qualname for _, code in steps.seen}
        assert {"make_endpoints", "make_spending", "Keeper.use", "Assembly._make_context", "Parts.prepare"} <= names
        assert ("load_measured" in names) == (kind != "server")
        write(runtime, tmp_path, kind, after=True)
        n_failed = 0
        before: dict[str, object] = {}
        for step in list(steps.seen):
            kept = runtime.parts
            before = before or content((runtime.parts, runtime.keeper.context))
            try:
                with steps.failing(step):
                    await runtime.reload()
            except BrokenStepError:
                n_failed += 1
                changed = {
                    way: (before.get(way), now)
                    for way, now in content((runtime.parts, runtime.keeper.context)).items()
                    if before.get(way, now) != now or way not in before
                }
                assert not changed, f"{step[0].co_qualname} calls {step[1].co_qualname}"
                assert runtime.parts is kept
            else:  # a step whose failure is no reason to refuse the settings
                before = {}
                write(runtime, tmp_path, kind, after=False)
                await runtime.reload()
                write(runtime, tmp_path, kind, after=True)
        assert n_failed > 40


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reload_that_succeeds_has_changed_all_that_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(kind, tmp_path, monkeypatch) as runtime:
        before = runtime.parts
        write(runtime, tmp_path, kind, after=True)
        await runtime.reload()
        assert runtime.parts is not before
        assert runtime.parts.spending.caps is before.spending.caps
        assert runtime.parts.spending.caps.limits.usd_per_day == 1000.0
        assert runtime.parts.spending.usd_per_kwh == 30.0
        assert runtime.keeper.context.defaults.pace_tps == 9.0
        assert runtime.parts.planner.pacer is before.planner.pacer
        if kind == "server":
            return
        device = device_of(runtime)
        assert id(device) == id(before.endpoints[Side.DEVICE])
        if kind == "split":
            assert (device.rules.theta, device.rules.goes_on) == (0.5, False)
            assert device.fallback is runtime.endpoints[Side.SERVER]
        if kind == "fleet":
            assert device.fleet.document()["policy"] == "measured"


async def test_a_live_setting_that_cannot_be_made_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit of this split device does not allow the mode."""
    async with running("split", tmp_path, monkeypatch) as runtime:
        before, text = content(runtime.parts), (tmp_path / "config.toml").read_text()
        with pytest.raises(ConfigError, match="needs an early exit"):
            await runtime.change({"split.mode": "alone", "caps.usd_per_day": 5.0, "device.usd_per_kwh": 5.0})
        assert content(runtime.parts) == before
        assert (tmp_path / "config.toml").read_text() == text

"""A third kind of device, written here alone: the daemon makes, follows, documents and closes it, knowing none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import tomlkit

from disco_daemon.api.control.metrics import Metrics
from disco_daemon.conductor import Privacy
from disco_daemon.conductor.traces import Traces
from disco_daemon.config.layers import load
from disco_daemon.config.schema import Config
from disco_daemon.daemon.assembly import Assembly, Shared, estimator_key
from disco_daemon.daemon.model_fetch import WantedModel
from disco_daemon.daemon.named_keys import NamedKeys
from disco_daemon.daemon.runtime import Runtime
from disco_daemon.daemon.state import StateDocuments
from disco_daemon.daemon.tasks.loop_monitor import LoopMonitor
from disco_daemon.endpoints.base import Controls, Endpoint, Resumption
from disco_daemon.errors import ConfigError
from disco_daemon.machines.fleet.members import FleetMembers
from disco_daemon.machines.kinds import KINDS, kind_of
from disco_daemon.machines.managed_device import DeviceKind, Making, ManagedDevice
from disco_daemon.machines.split.partner_service import Partner
from disco_daemon.store import History
from disco_daemon.types import (
    UNKNOWN,
    Continuation,
    DeviceHealth,
    EngineHealth,
    Finish,
    GenerationRequest,
    Outcome,
    PromptLength,
    Readiness,
    Reason,
    Side,
    Token,
    Usage,
)
from tests.fixtures.clock import StoppedClock

PARROT = "parrot"
MOST_PACE = 20.0  # token/s; this kind refuses settings with more


class Parrot(ManagedDevice):
    """A device that says what it was told."""

    side, model, can_hold, known_since = Side.DEVICE, PARROT, False, 0.0
    capabilities, continuation, resumption = UNKNOWN, Continuation.EXACT, Resumption.ALONE

    def __init__(self, words: str, log: list[str]) -> None:
        self._words, self.log, self.pace, self.server = words, log, 0.0, cast("Endpoint | None", None)
        self.adapters: dict[str, str] = {}

    def refuses(self, _: GenerationRequest) -> str | None:
        return None

    def overlap_of(self, _: GenerationRequest) -> str | None:
        return None

    def may_serve(self) -> bool:
        return True

    def readiness(self) -> Readiness:
        return Readiness(0.0)

    async def count(self, _: GenerationRequest) -> PromptLength | None:
        return PromptLength(1, 0)

    async def generate(
        self, _: GenerationRequest, usage: Usage, __: Controls | None = None
    ) -> AsyncGenerator[Token | Finish, None]:
        usage.prompt_tokens = usage.completion_tokens = 1
        yield Token(self._words, 1)
        yield Finish("stop")

    def status(self) -> dict[str, Any]:
        return {"kind": PARROT}

    async def start(self) -> None:
        self.log.append(f"start {self._words}")

    async def close(self) -> None:
        self.log.append(f"close {self._words}")

    # --- what the daemon asks of a device -----------------------------------------------------------------------------

    def is_same(self, other: Endpoint) -> bool:
        return isinstance(other, Parrot) and other._words == self._words

    def check(self, config: Config) -> None:
        if config.delivery.pace_tps > MOST_PACE:
            raise ConfigError("a parrot is not as quick")

    def follow(self, config: Config, server: Endpoint | None) -> None:
        self.pace, self.server = config.delivery.pace_tps, server

    async def hold(self, *, private: bool) -> None:
        self.log.append(f"private {private}")

    def observe(self, outcome: Outcome) -> None:
        self.log.append(f"heard {outcome.request_id}")

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {"parrot": self._molt()}

    async def _molt(self) -> None:
        self.log.append("molt")

    def document(self) -> dict[str, Any]:
        return {PARROT: {"words": self._words}}

    def health(self) -> DeviceHealth:
        return DeviceHealth(EngineHealth(True, 7))


class Page:
    """A sink that keeps the text."""

    def __init__(self) -> None:
        self.text = ""

    def prompt(self, n_tokens: int) -> None: ...
    def route(self, side: Side, model: str, reason: Reason) -> None: ...
    def note(self, text: str) -> None: ...
    def mix(self) -> None: ...

    async def flush(self) -> None: ...

    def token(self, token: Token, _: Side) -> None:
        self.text += token.text


class ParrotKind(DeviceKind):
    """Asked for by the name of its model."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def is_wanted(self, config: Config) -> bool:
        return config.device.model.startswith(PARROT)

    def identity(self, config: Config) -> str:
        return config.device.model

    def make(self, config: Config, making: Making) -> Endpoint:
        making.require_unshaped("device.model")
        return Parrot(config.device.model.partition(":")[2], self.log)


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> ParrotKind:
    found = ParrotKind()
    monkeypatch.setattr("disco_daemon.machines.kinds.KINDS", [found, *KINDS])
    return found


@pytest.fixture
async def daemon(
    kind: ParrotKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Runtime, StateDocuments, ParrotKind]]:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    path, clock = tmp_path / "config.toml", StoppedClock()
    write(path, "hello")
    with History(tmp_path / "history.sqlite") as history:
        metrics = Metrics(lambda: cast("Any", None))
        shared = Shared(clock, history, metrics, LoopMonitor(clock), Privacy(), Traces(), tmp_path / "servers")
        partner, members = Partner(clock, tmp_path / "peer"), FleetMembers()
        runtime = Runtime(Assembly(shared), load(path, {}), path, partner, members=members)
        keys = NamedKeys(path, history, clock, lambda: runtime.parts.spending.caps, lambda: runtime.conductor)
        documents = StateDocuments(shared, runtime, cast("Any", None), cast("Any", None), keys)
        await runtime.start()
        runtime.start_tasks()
        try:
            yield runtime, documents, kind
        finally:
            await runtime.stop()
            await runtime.keeper.end()


def write(path: Path, words: str, **more: dict[str, Any]) -> None:
    path.write_text(tomlkit.dumps({"device": {"model": f"{PARROT}:{words}"}} | more))


async def test_the_daemon_makes_a_third_kind_asks_it_and_closes_it(
    daemon: tuple[Runtime, StateDocuments, ParrotKind], tmp_path: Path
) -> None:
    runtime, documents, kind = daemon
    device = runtime.parts.device
    assert isinstance(device, Parrot)
    assert kind.log[:2] == ["private False", "start hello"]
    page = Page()
    request = GenerationRequest("r-1", ({"role": "user", "content": "?"},))
    outcome = await runtime.conductor.run(request, "disco", page)
    assert ([attempt.side for attempt in outcome.attempts], page.text) == ([Side.DEVICE], "hello")
    assert "heard r-1" in kind.log
    assert "molt" in kind.log
    state = documents.state()
    assert state[PARROT] == {"words": "hello"}
    assert state["endpoints"]["device"] == {"kind": PARROT}
    assert documents.health().device.engine == EngineHealth(True, 7)
    with pytest.raises(ConfigError, match="is no fleet"):
        documents.steer_fleet("pause")
    write(tmp_path / "config.toml", "good bye")
    await runtime.reload()
    assert "close hello" in kind.log
    assert documents.state()[PARROT] == {"words": "good bye"}
    await runtime.stop()
    await runtime.keeper.end()
    assert kind.log[-1] == "close good bye"


async def test_a_third_kind_follows_live_settings_and_stays_over_a_reload_of_others(
    daemon: tuple[Runtime, StateDocuments, ParrotKind], tmp_path: Path
) -> None:
    runtime, _, kind = daemon
    device = runtime.parts.device
    assert isinstance(device, Parrot)
    await runtime.change({"delivery.pace_tps": 7.0})
    assert (device.pace, device.server) == (7.0, None)
    with pytest.raises(ConfigError, match="not as quick"):
        await runtime.change({"delivery.pace_tps": 21.0})
    assert device.pace == 7.0
    assert runtime.config.delivery.pace_tps == 7.0
    await runtime.change({"policy.private": True})
    assert kind.log[-1] == "private True"
    server = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
    write(tmp_path / "config.toml", "hello", delivery={"pace_tps": 9.0}, server=server)
    await runtime.reload()
    assert id(runtime.parts.device) == id(device), "its model would be the same"
    assert (device.pace, device.server) == (9.0, runtime.endpoints[Side.SERVER])
    assert not [line for line in kind.log if line.startswith("close")]


def test_what_was_learned_of_a_third_kind_is_its_own(kind: ParrotKind, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.toml", "other.toml", "whole.toml")]
    write(paths[0], "hello")
    write(paths[1], "good bye")
    paths[2].write_text("")
    configs = [load(path, {}) for path in paths]
    assert len({estimator_key(config) for config in configs}) == 3
    assert [kind_of(config) is kind for config in configs] == [True, True, False]


async def test_private_stops_a_fetch_and_its_end_goes_on_with_it(
    daemon: tuple[Runtime, StateDocuments, ParrotKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, documents, _ = daemon

    async def last_for_ever(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("disco_daemon.daemon.model_fetch.run_job", last_for_ever)
    documents._fetches.start(WantedModel("a", "A", "a/b"))
    states = []
    for private in (True, False):
        await runtime.change({"policy.private": private})
        states += [fetch["state"] for fetch in documents.state()["fetches"]]
    assert states == ["stopped", "fetching"]
    await documents.close()

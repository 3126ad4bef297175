"""The what-if behind a slider: built once, again when it is stale, one prediction at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disco_daemon.config.schema import Config, HandoffSettings, PolicySettings, ServerSettings
from disco_daemon.daemon.prediction import MAX_MODELS, REBUILD_AFTER, REBUILD_S, HistoryReplay, as_json, terms
from disco_daemon.endpoints.continuation import Profile, Verdict
from disco_daemon.errors import RequestError, Unavailable
from disco_daemon.simulate.recorded import MIN_REQUESTS, Recorded
from disco_daemon.simulate.whatif import WhatIf, WhatIfTerms
from disco_daemon.store import History
from disco_daemon.store.writer import Writer
from tests.fixtures.clock import StoppedClock
from tests.unit.simulate.test_whatif import PRICES, history, model
from tests.unit.store.test_store import locked

WAIT_S = 30.0
SERVER = ServerSettings(base_url="http://127.0.0.1:9/v1", model="m", input_usd_per_mtok=0.15, output_usd_per_mtok=0.6)
CONFIG = Config(server=SERVER)


class Setup:
    """A history of `n` requests, and its replay; `served` is what the daemon says it has served."""

    def __init__(self, path: Path, n: int) -> None:
        self.path, self.served, self.clock = path / "h.sqlite", 0, StoppedClock()
        self.write(n)
        self.replay = HistoryReplay(History(self.path), path / "servers", self.clock, lambda: self.served)

    def write(self, n: int, seed: int = 0) -> None:
        with History(self.path) as file:
            for outcome in history(n, seed):
                file.record(outcome)
            file.flush(WAIT_S)

    async def predict(self, rate: float = 1.0, budget: float = 0.5, config: Config = CONFIG) -> dict[str, Any]:
        return await self.replay.predict(config, rate, budget)


@pytest.fixture
def few(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path, 60)
    yield setup
    setup.replay.close()


async def test_the_history_is_read_once_and_again_when_it_is_stale(few: Setup) -> None:
    for budget in (0.1, 0.5, 0.9):
        said = await few.predict(budget=budget)
        assert (said["budget"], said["requests"]) == (budget, 60)
    assert few.replay.n_builds == 1
    few.clock.at += 10 * REBUILD_S
    await few.predict()
    assert few.replay.n_builds == 1, "nobody asked anything meanwhile"
    few.served = 1
    await few.predict()
    assert few.replay.n_builds == 2
    few.served += REBUILD_AFTER - 1
    await few.predict()
    assert few.replay.n_builds == 2
    few.served += 1
    await few.predict()
    assert few.replay.n_builds == 3


async def test_a_setting_that_the_model_rests_on_makes_another_one_and_the_budget_does_not(few: Setup) -> None:
    config = Config(server=SERVER, policy=PolicySettings(scarcer="device"))
    assert (await few.predict(rate=0.01))["scarcer"] == "server"
    assert (await few.predict(rate=0.01, config=config))["scarcer"] == "device"
    assert few.replay.n_builds == 2
    await few.predict(config=Config(server=SERVER, policy=PolicySettings(scarcer="device", budget=0.2)))
    assert few.replay.n_builds == 2


@pytest.mark.parametrize(("policy", "knob", "other"), [("optimal", "kappa", 5.0), ("paper", "alpha", 0.4)])
async def test_another_value_of_the_tails_knob_is_fitted_to_the_same_history(
    few: Setup, policy: str, knob: str, other: float
) -> None:
    def config(**knobs: Any) -> Config:
        return Config(server=SERVER, policy=PolicySettings(name=policy, **knobs))

    usual = await few.predict(rate=1000.0, budget=0.2, config=config())
    turned = await few.predict(rate=1000.0, budget=0.2, config=config(**{knob: other}))
    assert usual["scarcer"] == turned["scarcer"] == "device"
    assert turned["mean_ttft_s"] != usual["mean_ttft_s"]
    assert await few.predict(rate=1000.0, budget=0.2, config=config()) == usual
    assert few.replay.n_builds == 1, "the history is not read again"
    for i in range(2 * MAX_MODELS):
        await few.predict(config=config(**{knob: 0.01 * i}))
    made = few.replay._made
    assert made is not None
    assert made.past is not None
    assert len(made.past.models) == MAX_MODELS, "a slider that is moved for long fills no memory"


def probed(**verdicts: str) -> dict[str, Any]:
    """What a probe has found of the server: a verdict for each method, the first one the best."""
    ways = [*verdicts, "none", "none"]
    found = Profile(
        f"{SERVER.base_url} m", 0.0, ways[0], ways[1], False, 200, {m: Verdict(v) for m, v in verdicts.items()}
    )
    return found.to_json()


@pytest.mark.parametrize(
    ("server", "found", "pause", "rests"),
    [
        ({}, None, True, False),
        ({}, probed(continue_final_message="exact", prefix="exact"), True, True),
        ({}, probed(continue_final_message="exact", prefix="exact"), False, False),
        ({}, probed(continue_final_message="echoes"), True, False),
        ({}, probed(token_ids="exact"), True, False),  # only with the device's help, and the device may hang
        ({}, {"of": "another version"}, True, False),
        ({"continuation": "prefix"}, None, True, True),
        ({"continuation": "instruct"}, None, True, False),
        ({"continuation": "none"}, probed(prefix="exact"), True, False),
    ],
)
async def test_sources_rest_in_the_replay_where_they_would_in_the_daemon(
    tmp_path: Path, server: dict[str, str], found: dict[str, Any] | None, pause: bool, rests: bool
) -> None:
    config = Config(server=msgspec.structs.replace(SERVER, **server), handoff=HandoffSettings(pause=pause))
    assert terms(config, Recorded.of(history(60)), tmp_path, found).rests is rests


async def test_what_a_probe_has_found_is_read_from_the_history(few: Setup) -> None:
    found = probed(prefix="exact", assistant="exact")
    with History(few.path) as file:
        file.save_profile(found["server"], 0.0, found)
        file.flush(WAIT_S)
    await few.predict()
    made = few.replay._made
    assert made is not None
    assert made.past is not None
    assert made.past.terms.rests
    await few.predict(config=Config(server=SERVER, handoff=HandoffSettings(pause=False)))
    assert few.replay.n_builds == 2, "the rest is a setting that the model rests on"


async def test_too_little_is_said_as_such_and_may_be_enough_a_request_later(tmp_path: Path) -> None:
    setup = Setup(tmp_path, MIN_REQUESTS - 1)
    for _ in range(2):
        with pytest.raises(RequestError, match="at least") as refused:
            await setup.predict()
        assert (refused.value.status, refused.value.code) == (404, "too_little")
    assert setup.replay.n_builds == 1
    setup.write(MIN_REQUESTS, seed=1)
    setup.served = 1
    assert (await setup.predict())["requests"] == 2 * MIN_REQUESTS - 1
    setup.replay.close()


async def test_requests_whose_rows_are_not_written_yet_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one has ended, its row waits for the disk, and no other request follows."""
    waits, path = threading.Event(), tmp_path / "h.sqlite"

    def flush(timeout_s: float) -> None:
        waits.set()
        Writer.flush(file._writer, timeout_s)

    with History(path) as file:
        monkeypatch.setattr(file._writer, "flush", flush)
        replay = HistoryReplay(file, tmp_path, StoppedClock(), lambda: MIN_REQUESTS)
        with locked(path):
            for outcome in history(MIN_REQUESTS):
                file.record(outcome)
            predicting = asyncio.create_task(replay.predict(CONFIG, 1.0, 0.5))
            waiting = asyncio.create_task(asyncio.to_thread(waits.wait, WAIT_S))
            await asyncio.wait({predicting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        assert (await predicting)["requests"] == MIN_REQUESTS
        replay.close()


async def test_no_history_at_all_is_unavailable(tmp_path: Path) -> None:
    replay = HistoryReplay(History(tmp_path / "none.sqlite"), tmp_path, StoppedClock(), lambda: 0)
    with pytest.raises(Unavailable):
        await replay.predict(CONFIG, 1.0, 0.5)
    replay.close()


async def test_predictions_that_nobody_waits_for_any_more_are_dropped(few: Setup) -> None:
    first = asyncio.create_task(few.predict(budget=0.5))
    rest = [asyncio.create_task(few.predict(budget=i / 50)) for i in range(50)]
    await asyncio.sleep(0)
    for task in rest[:-1]:
        task.cancel()
    assert (await first)["budget"] == 0.5
    assert (await rest[-1])["budget"] == 49 / 50
    assert all(task.cancelled() for task in rest[:-1])


def test_a_day_is_a_day_of_the_history_and_no_less_than_one() -> None:
    past = history(300)
    recorded = Recorded.of(past)
    assert recorded.days < 1
    short = as_json(model(past=past), 1.0, 0.5)
    cell = model(past=past).predict(1.0, 0.5)
    assert (short["usd_per_day"], short["wh_per_day"]) == (cell.server_usd, cell.device_wh)
    long = replace(recorded, days=10.0)
    spread = as_json(WhatIf(long, WhatIfTerms(PRICES), model(past=past).policy), 1.0, 0.5)
    assert spread["usd_per_day"] == pytest.approx(cell.server_usd / 10)
    assert spread["wh_per_day"] == pytest.approx(cell.device_wh / 10)

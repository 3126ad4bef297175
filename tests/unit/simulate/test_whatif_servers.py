"""`disco eval --history --servers`: what other lists of servers would have made of the user's own requests."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from disco_daemon.cli.main import main
from disco_daemon.errors import ConfigError
from disco_daemon.money.catalog import Price
from disco_daemon.simulate.recorded import MIN_SEEN
from disco_daemon.simulate.whatif_servers import MOST_PLAYED, ServersReplay, ServerTerms
from disco_daemon.types import Attempt, Outcome, Plan, Side, Usage
from tests.unit.simulate.test_whatif import store

BOX, CLOUD, FAR = "box/qwen", "cloud/gpt", "far/gpt"
MEDIANS_S = {BOX: 0.3, CLOUD: 0.6, FAR: 1.2}
PRICES = {BOX: Price(0.0, 0.0, 0.0), CLOUD: Price(1.0, 1.0, 4.0), FAR: Price(0.1, 0.1, 0.4)}


def attempt(key: str, ttft_s: float, written: int = 50, **more: object) -> Attempt:
    name, _, model = key.partition("/")
    sent = Attempt(Side.SERVER, model, 0.0, ttft_s, False, Usage(100, written), server=name, bill_usd=0.001)
    return replace(sent, **more)  # type: ignore[arg-type]


def request(i: int, *attempts: Attempt, model: str = "disco") -> Outcome:
    return Outcome(
        f"r-{i}", 1.7e9 + 600 * i, model, "optimal", Plan(math.inf, 0.0), 100, Side.SERVER, "stop", None,
        min(a.ttft_s for a in attempts), 2.0, 0, {Side.SERVER: 50}, attempts, 0.0, 0.0,
    )  # fmt: skip


def past(n: int = 240, keys: tuple[str, ...] = (BOX, CLOUD, FAR), stall: float = 0.0) -> list[Outcome]:
    """Each request is asked of one of the servers, in turns; a share of the first one's stalls for 20 s."""
    rng = np.random.default_rng(1)
    found = []
    for i in range(n):
        key = keys[i % len(keys)]
        wait_s = MEDIANS_S[key] * float(rng.lognormal(0.0, 0.2))
        found.append(request(i, attempt(key, wait_s + 20.0 * (key == keys[0] and rng.random() < stall))))
    return found


def terms(*keys: str, stops: bool = True) -> list[ServerTerms]:
    return [ServerTerms(key, PRICES[key], stops) for key in keys]


def test_each_server_alone_takes_its_own_times_and_the_pool_mostly_the_best() -> None:
    replay = ServersReplay(past(), terms(BOX, CLOUD, FAR))
    found = {one.servers: one for one in replay.play()}
    assert set(found) == {(BOX,), (CLOUD,), (FAR,), (BOX, CLOUD, FAR), (CLOUD, FAR), (BOX, FAR), (BOX, CLOUD)}
    for key, median_s in MEDIANS_S.items():
        alone = found[key,]
        assert alone.mean_ttft_s == pytest.approx(median_s * math.exp(0.02), rel=0.06)
        low, high = alone.mean_ttft_95
        assert low < alone.mean_ttft_s < high
        assert alone.p99_ttft_95[0] <= alone.p99_ttft_s <= alone.p99_ttft_95[1] * 1.05
        assert alone.shares == {key: 1.0}
    every = found[BOX, CLOUD, FAR]
    assert sum(every.shares.values()) == pytest.approx(1.0)
    assert every.shares[BOX] > 0.75
    assert found[BOX,].mean_ttft_s < every.mean_ttft_s < found[CLOUD,].mean_ttft_s
    # What the money is worth in waiting decides as well: CLOUD is twice as fast as FAR, and hardly dearer a request.
    assert found[CLOUD, FAR].shares[CLOUD] > 0.75


def test_bills_are_those_of_the_tokens_at_todays_prices_and_an_unknown_price_gives_none() -> None:
    one_of_cloud = PRICES[CLOUD].cost_usd(100, 50)
    outcomes = past()
    days = (outcomes[-1].created - outcomes[0].created) / 86_400
    found = {one.servers: one for one in ServersReplay(outcomes, terms(BOX, CLOUD)).play()}
    assert found[CLOUD,].usd_per_day == pytest.approx(240 * one_of_cloud / days)
    assert found[BOX,].usd_per_day == 0.0
    both = found[BOX, CLOUD].usd_per_day
    assert both is not None
    assert 0 < both < 240 * one_of_cloud / days
    unknown = ServerTerms(CLOUD, replace(PRICES[CLOUD], known=False), True)
    replay = ServersReplay(outcomes, [*terms(BOX), unknown])
    found = {one.servers: one for one in replay.play()}
    assert found[CLOUD,].usd_per_day is None
    assert found[BOX, CLOUD].usd_per_day is None
    assert found[BOX, CLOUD].hedged_share == 0.0 or found[BOX, CLOUD].shares[BOX] < 1.0
    assert f"{CLOUD}: nobody knows its price." in replay.notes()


def test_stalls_of_one_server_are_caught_by_another_within_the_share_for_second_requests() -> None:
    outcomes = past(400, (BOX, CLOUD), stall=0.04)
    found = {one.servers: one for one in ServersReplay(outcomes, terms(BOX, CLOUD), hedge_share=0.05).play()}
    alone, both = found[BOX,], found[BOX, CLOUD]
    assert alone.p99_ttft_s > 15
    assert both.p99_ttft_s < 0.5 * alone.p99_ttft_s
    assert 0 < both.hedged_share <= 0.06
    none = {one.servers: one for one in ServersReplay(outcomes, terms(BOX, CLOUD), hedge_share=0.0).play()}
    assert none[BOX, CLOUD].hedged_share == 0.0
    dear = {one.servers: one for one in ServersReplay(outcomes, terms(BOX, CLOUD, stops=False)).play()}
    assert (dear[BOX, CLOUD].usd_per_day or 0.0) > (both.usd_per_day or math.inf)


def test_what_was_recorded_of_a_request_stays_and_what_was_closed_is_drawn_beyond_that() -> None:
    outcomes = [*past(100, (BOX, CLOUD)), request(100, attempt(BOX, 2.5, censored=True))]
    replay = ServersReplay(outcomes, terms(BOX, CLOUD))
    for times in replay._times:
        assert times[0][0] == outcomes[0].attempts[0].ttft_s
        assert times[1][1] == outcomes[1].attempts[0].ttft_s
        assert times[0][100] >= 2.5
    drawn = [float(times[1][0]) for times in replay._times]
    assert len(set(drawn)) > 1


def test_requests_for_a_model_by_name_failures_and_times_of_others_are_no_choice() -> None:
    free = past(60, (BOX, CLOUD))
    pinned = [request(60 + i, attempt(CLOUD, 9.0), model=name) for i, name in enumerate(("cloud/gpt", "my-gpt"))]
    failed = request(62, attempt(BOX, 3.0, censored=True, error="http_500"), attempt(CLOUD, 0.5, started_s=3.0))
    moved = request(63, attempt(CLOUD, 0.5), attempt(BOX, 9.0, continued=True))
    replay = ServersReplay([*free, *pinned, failed, moved], terms(BOX, CLOUD), named={"my-gpt"})
    assert len(replay.requests) == 62
    box, cloud = replay.members()
    assert (box["first_tokens"], box["failed"], box["drawn"]) == (30, 1, 32)
    assert (cloud["first_tokens"], cloud["failed"], cloud["drawn"]) == (34, 0, 30)
    assert any("it failed 1 time, which is not played" in note for note in replay.notes())
    long = ServersReplay(past(MOST_PLAYED + 50, (BOX,)), terms(BOX))
    assert len(long.requests) == MOST_PLAYED
    assert long.members()[0]["first_tokens"] == MOST_PLAYED + 50


def test_too_little_history_is_said_plainly_and_a_server_without_answers_is_left_out() -> None:
    with pytest.raises(ConfigError, match="5 requests that a server was free to answer: at least 20"):
        ServersReplay(past(5), terms(BOX))
    with pytest.raises(ConfigError, match=rf"at least {MIN_SEEN} of one are needed: far/gpt 0"):
        ServersReplay(past(60, (BOX,)), terms(FAR))
    replay = ServersReplay(past(60, (BOX, CLOUD)), terms(BOX, CLOUD, FAR))
    assert [one.servers for one in replay.play()] == [(BOX,), (CLOUD,), (BOX, CLOUD)]
    assert f"{FAR} is not played: 0 first tokens on record, {MIN_SEEN} are needed." in replay.notes()
    assert [one["played"] for one in replay.members()] == [True, True, False]


def test_the_same_history_gives_the_same_figures() -> None:
    assert ServersReplay(past(90), terms(BOX, CLOUD)).play() == ServersReplay(past(90), terms(BOX, CLOUD)).play()


# --- the command, on a real store -----------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("DISCO_CONFIG", str(tmp_path / "config.toml"))
    servers = "".join(
        f'[[servers]]\nname = "{key.partition("/")[0]}"\nmodel = "{key.partition("/")[2]}"\n'
        f'base_url = "http://127.0.0.1:9/{i}/v1"\n'
        f"input_usd_per_mtok = {PRICES[key].input}\noutput_usd_per_mtok = {PRICES[key].output}\n"
        for i, key in enumerate(MEDIANS_S)
    )
    (tmp_path / "config.toml").write_text(f'[history]\npath = "{tmp_path / "h.sqlite"}"\n{servers}', "utf-8")
    store(tmp_path / "h.sqlite", past())
    return tmp_path


def test_the_command_plays_what_the_daemon_has_stored(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del home
    assert main(["eval", "--history", "--servers", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["requests"], len(told["lists"])) == (240, 7)
    assert [one["server"] for one in told["members"]] == [BOX, CLOUD, FAR]
    assert told["recorded"]["shares"] == pytest.approx(dict.fromkeys(MEDIANS_S, 1 / 3))
    assert told["recorded"]["usd_per_day"] == pytest.approx(0.24 / told["days"])
    alone = ServersReplay(past(), terms(BOX, CLOUD, FAR)).play()[1]
    assert told["lists"][1]["mean_ttft_s"] == pytest.approx(alone.mean_ttft_s)
    assert told["lists"][1]["usd_per_day"] == pytest.approx(alone.usd_per_day)
    assert main(["eval", "--history", "--servers", "far,cloud/gpt"]) == 0
    said = capsys.readouterr().out
    assert f"{FAR} alone" in said
    assert "all, by the pool's choice" in said
    assert BOX not in said.split("all, by the pool's choice")[1].splitlines()[0]
    assert "Simulated: the first token of the servers alone, for the newest 240 requests" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--servers", "boxx"], "called 'boxx': did you mean box?"),
        (["--servers", ""], "called ''"),
        (["--servers", "box,,cloud"], "called ''"),
        (["--servers", "--rates", "1"], "--servers plays the settings in force"),
        (["--servers", "--model", "qwen3-0.6b"], "--model and --servers are questions of their own"),
    ],
)
def test_the_command_says_what_is_wrong(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    del home
    assert main(["eval", "--history", *words]) == 1
    assert said in capsys.readouterr().err


def test_without_a_server_that_answers_disco_the_command_says_how_to_add_one(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "config.toml").write_text(f'[history]\npath = "{home / "h.sqlite"}"\n', "utf-8")
    assert main(["eval", "--history", "--servers"]) == 1
    assert "no server of the settings answers 'disco'" in capsys.readouterr().err

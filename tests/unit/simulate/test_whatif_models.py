"""`disco eval --history --model`: the user's own requests with another model of the list on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disco_daemon.cli.main import main
from disco_daemon.config.layers import load
from disco_daemon.dispatch.make import make_policy
from disco_daemon.machines.device_settings import profiles
from disco_daemon.machines.model_offers import n_threads
from disco_daemon.models.offered import find, shipped
from disco_daemon.profiling.measured_machine import keep_speed, machine_key
from disco_daemon.simulate.recorded import Recorded
from disco_daemon.simulate.whatif import WhatIfSetting, WhatIfTerms
from disco_daemon.simulate.whatif_models import PredictedPhone, play
from docs.recommended import MEASURED
from tests.unit.simulate.test_whatif import PRICES, history, store

NOW = WhatIfSetting(0.01, 0.5)
LIGHT, HEAVY = "qwen3-0.6b", "qwen3-8b"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "config.toml").write_text(
        f'[server]\nbase_url = "https://api.openai.com/v1"\nmodel = "gpt-4o-mini"\n[device]\nn_gpu_layers = 0\n'
        f'[history]\npath = "{tmp_path / "h.sqlite"}"\n[policy]\nbudget = 0.4\n',
        "utf-8",
    )
    monkeypatch.setenv("DISCO_CONFIG", str(tmp_path / "config.toml"))
    store(tmp_path / "h.sqlite", history(120))
    return tmp_path


def measured() -> None:
    keep_speed(profiles().folder, machine_key(n_threads(load()), "of some build"), MEASURED)


def test_a_model_like_the_present_one_saves_nothing_and_a_faster_one_waits_less() -> None:
    recorded, terms = Recorded.of(history()), WhatIfTerms(PRICES)
    phone = recorded.phone

    def times_as_fast(times: float) -> PredictedPhone:
        tps = times * phone.prefill_tps, times * phone.decode_tps
        return PredictedPhone("other", *tps, phone.start_s / times, lambda n: n / tps[0] + phone.start_s / times)

    alike, faster = times_as_fast(1.0), times_as_fast(4.0)
    present, same, quick = play(recorded, terms, make_policy("race"), NOW, [alike, faster])
    saved = same.to_json(present.point)["saved"]
    assert saved == pytest.approx(dict.fromkeys(("mean_ttft_s", "server_usd", "device_wh"), 0.0), abs=1e-9)
    assert quick.point.mean_ttft_s < present.point.mean_ttft_s
    assert quick.point.device_won > present.point.device_won
    assert [one.predicted for one in (present, same, quick)] == [False, True, True]


def test_the_command_sets_other_models_beside_the_present_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del home
    measured()
    assert main(["eval", "--history", "--model", f"{LIGHT},{HEAVY}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    present, light, heavy = told["models"]
    assert (present["predicted"], light["predicted"], heavy["predicted"]) == (False, True, True)
    assert (light["name"], heavy["name"]) == (LIGHT, HEAVY)
    decode_s = find(LIGHT, shipped()).work.decode_s(MEASURED, 100)
    assert light["device"]["decode_tps"] == pytest.approx(1 / decode_s)
    assert light["saved"]["server_usd"] == pytest.approx(present["server_usd"] - light["server_usd"])
    assert light["device"]["prefill_tps"] > heavy["device"]["prefill_tps"]
    assert light["mean_ttft_s"] < heavy["mean_ttft_s"]
    assert light["device_wh"] < heavy["device_wh"]
    assert main(["eval", "--history", "--model", LIGHT]) == 0
    said = capsys.readouterr().out
    assert f"{LIGHT} (predicted)" in said
    assert "the present one" in said
    assert "how good they are is not played" in said


def test_the_recommended_model_is_the_default(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del home
    measured()
    if main(["models", "recommend", "--json"]) == 0:
        name = json.loads(capsys.readouterr().out)["models"][0]["id"]
        assert main(["eval", "--history", "--model", "--json"]) == 0
        assert [one["name"] for one in json.loads(capsys.readouterr().out)["models"]][1:] == [name]
    else:
        assert main(["eval", "--history", "--model"]) == 1
        assert "no model is recommended here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([LIGHT, "--rates", "1"], "--model plays the settings in force"),
        (["nobody-has-this"], "no model of the list is called 'nobody-has-this'"),
    ],
)
def test_the_command_says_what_is_wrong(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    del home
    measured()
    assert main(["eval", "--history", "--model", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_machine_that_was_not_measured_is_told_how(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del home
    assert main(["eval", "--history", "--model", LIGHT]) == 1
    assert "`disco models recommend` measures" in capsys.readouterr().err

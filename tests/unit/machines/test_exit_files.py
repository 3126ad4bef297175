"""The exits of a model: kept whole or not at all, for this user alone, and removed only when that is meant."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from disco_daemon.cli.main import main
from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.measure.exit_messages import ExitFigures, ExitTrained
from disco_daemon.errors import ConfigError
from disco_daemon.link.protocol import Build, Hello, Welcome
from disco_daemon.link.relay.orders import Identity, JoinPartner, LinkUp
from disco_daemon.machines.split.edge_device import EdgeLink
from disco_daemon.machines.split.trained_exits import KeptExit, KeptExits, mark_of, told_of
from tests.unit.models.test_segments import model

NAMES = {
    "model", "cut", "head", "train_tokens", "seconds", "agreement", "perplexity", "ece", "coverage",
    "tokens_per_round_trip", "rouge_l_alone", "rouge_l_confident",
}  # fmt: skip

NORM: dict[str, Any] = {
    "shape output_norm.weight": np.array([0, 2.0]),
    "data output_norm.weight": np.frombuffer(np.ones(2, np.float32).tobytes(), np.uint8),
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(model(4))
    return path


def trained(cut: int, head: str, agreement: float, likeness: float | None = None) -> ExitTrained:
    coverage = {"0.8": 0.3, "0.9": 0.2, "0.95": 0.1}
    figures = ExitFigures("tiny.gguf", cut, head, 5000, 12.0, agreement, 9.0, 0.02, coverage, 1.7, 0.4, likeness)
    return ExitTrained(figures, f"{cut}-{head}.npz")


def keep(exits: KeptExits, folder: Path, cut: int, head: str, agreement: float) -> KeptExit:
    source = folder / "fresh.npz"
    with source.open("wb") as file:
        np.savez(
            file, coefficients=np.ones(4), scores=np.array([0.0, 1.0]),
            shares=np.array([0.2, 0.9]), **NORM,
        )  # fmt: skip
    return exits.keep(trained(cut, head, agreement), source)


def test_an_exit_is_kept_for_its_owner_alone_and_read_again(tiny: Path, tmp_path: Path) -> None:
    exits = KeptExits(tiny)
    one = keep(exits, tmp_path, 2, "linear", 0.5)
    assert sorted(path.name for path in exits.folder.iterdir()) == ["2-linear.json", "2-linear.npz"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in exits.folder.iterdir()} == {0o600}
    assert exits.all() == [one]
    assert one.tensors()["output_norm.weight"].shape == (2,)
    assert one.calibration().confidence(np.zeros((1, 3)))[0] == pytest.approx(0.9)


@pytest.mark.parametrize(("likeness", "claimed"), [(None, 0.3), (0.95, 0.3), (0.94, 0.0)])
def test_an_exit_whose_sure_answers_are_not_the_whole_models_claims_no_coverage(
    likeness: float | None, claimed: float, tiny: Path, tmp_path: Path
) -> None:
    one = keep(KeptExits(tiny), tmp_path, 2, "linear", 0.5)
    told = told_of(replace(one, figures=trained(2, "linear", 0.5, likeness).figures))
    assert told.coverage == claimed


def test_the_one_that_agrees_most_is_the_best_of_its_cut(tiny: Path, tmp_path: Path) -> None:
    exits = KeptExits(tiny)
    for cut, head, agreement in ((2, "linear", 0.4), (2, "mlp", 0.6), (3, "linear", 0.7)):
        keep(exits, tmp_path, cut, head, agreement)
    best = exits.best(2)
    assert best is not None
    assert best.figures.head == "mlp"
    assert exits.best(1) is None


def test_another_model_has_other_exits(tiny: Path, tmp_path: Path) -> None:
    keep(KeptExits(tiny), tmp_path, 2, "linear", 0.5)
    other = tmp_path / "other.gguf"
    other.write_bytes(model(5))
    assert KeptExits(other).all() == []


def test_an_exit_without_figures_is_none_and_a_damaged_one_is_told(tiny: Path, tmp_path: Path) -> None:
    exits = KeptExits(tiny)
    one = keep(exits, tmp_path, 2, "linear", 0.5)
    one.path.write_bytes(b"no exit")
    with pytest.raises(ConfigError, match="disco exits rm"):
        one.tensors()
    one.path.with_suffix(".json").unlink()
    assert exits.all() == []


def test_the_verbs_show_list_and_remove(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exits = KeptExits(tiny)
    keep(exits, tmp_path, 2, "linear", 0.5)
    keep(exits, tmp_path, 3, "mlp", 0.6)
    assert main(["exits", "show", f"--model={tiny}", "--cut=2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == NAMES
    assert set(shown["coverage"]) == {"0.8", "0.9", "0.95"}
    assert main(["exits", "list", f"--model={tiny}", "--json"]) == 0
    assert [one["cut"] for one in json.loads(capsys.readouterr().out)] == [2, 3]
    assert main(["exits", "rm", f"--model={tiny}", "--cut=2"]) == 1  # nobody there to ask
    assert len(exits.all()) == 2
    assert main(["exits", "rm", f"--model={tiny}", "--cut=2", "--yes"]) == 0
    assert [one.figures.cut for one in exits.all()] == [3]


@pytest.mark.parametrize(("likeness", "claimed"), [(None, True), (0.96, True), (0.9, False)])
def test_an_exit_whose_sure_tokens_change_answers_claims_no_coverage(
    likeness: float | None, claimed: bool, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = keep(KeptExits(tiny), tmp_path, 2, "linear", 0.5)
    one.path.with_suffix(".json").write_bytes(msgspec.json.encode(trained(2, "linear", 0.5, likeness).figures))
    assert main(["exits", "show", f"--model={tiny}"]) == 0
    shown = capsys.readouterr().out
    assert ("may leave" in shown) == claimed
    assert ("too far" in shown) != claimed


def test_showing_what_is_not_there_says_how_to_make_it(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exits", "show", f"--model={tiny}"]) == 1
    assert "disco exits train" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["0", "500", "-1", "some"])
def test_too_little_text_to_train_is_wrong_usage(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["exits", "train", f"--tokens={tokens}"])
    assert stopped.value.code == 2
    assert "--tokens" in capsys.readouterr().err


@pytest.mark.parametrize("cut", ["0", "4", "-1"])
def test_a_cut_that_leaves_no_layers_is_refused(tiny: Path, cut: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exits", "train", f"--model={tiny}", f"--cut={cut}"]) == 1
    assert "give cuts from 1 to 3" in capsys.readouterr().err


def test_a_machine_whose_exit_is_not_the_partners_is_told_so(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = keep(KeptExits(tiny), tmp_path, 2, "linear", 0.5)
    build = Build(disco="1", llama="b1", model="m", n_layers=4, n_embd=32, n_vocab=40)
    role = JoinPartner(
        identity=Identity(certificate="", key="", ca=""), name="desk", addresses=(), hello=Hello(build=build, cut=2)
    )
    link = EdgeLink(wire.Load(model_path=str(tiny), n_ctx=256, n_threads=1, exit=told_of(one)), SystemClock(), role, {})
    theirs = mark_of(told_of(one))
    assert (len(theirs), mark_of(None)) == (12, "")
    with caplog.at_level("INFO", "disco"):
        for exit_ in ("", theirs, "another"):
            welcome = Welcome(build=build, cut=2, n_ctx=256, max_answers=1, credits=64, exit=exit_)
            link._hear(LinkUp(peer=1, name="desk", build=build, address="there:1", welcome=welcome))
            assert ("newer exit" in caplog.text) == (exit_ == "another")

"""What a partner has, and what a machine that has joined it keeps: whole, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from disco_daemon.config.schema import Config, DeviceSettings
from disco_daemon.engine.measure.exit_messages import ExitFigures
from disco_daemon.engine.measure.tune_messages import Knobs, Speed, Tuned
from disco_daemon.errors import ConfigError
from disco_daemon.machines.device_settings import save
from disco_daemon.machines.split.cut_plan import ExitFacts
from disco_daemon.machines.split.hosted_range import (
    HostedCuts,
    describe_model,
    exit_facts,
    range_config,
    require_memory,
    tell_cuts,
)
from disco_daemon.machines.split.joined_model import JoinedFolder, JoinedModel
from disco_daemon.machines.split.trained_exits import KeptExits
from disco_daemon.models.default import default_model_path
from disco_daemon.types import LayerRange

UPPER = LayerRange(15, 30, 30)


def test_a_model_is_described_by_its_header_and_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    build = describe_model(default_model_path())
    assert (build.n_layers, build.n_embd, build.n_vocab) == (30, 576, 49152)
    assert len(build.model) == 64


def test_a_file_that_is_no_model_is_not_hosted(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"no model")
    with pytest.raises(ConfigError, match="no GGUF model"):
        describe_model(tmp_path / "no.gguf")


def test_a_range_that_does_not_fit_into_memory_is_refused_with_the_numbers() -> None:
    require_memory(Config(), default_model_path(), UPPER)
    large = Config(device=DeviceSettings(n_cells=10**9))
    with pytest.raises(
        ConfigError, match=r"layers 15-30 of .* GB at the partner, with 1000000000 tokens .* GB are free"
    ):
        require_memory(large, default_model_path(), UPPER)


def test_a_member_is_told_what_the_partner_measured_and_what_its_exits_weigh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    unmeasured = tell_cuts(Config())
    assert (unmeasured.token_s, unmeasured.row_s) == (0.0, 0.0)
    speed = Speed(prefill_tps=200.0, decode_tps=50.0, decode8_tps=90.0)
    save(Config(), default_model_path(), Tuned(Knobs(1, 1, 256, False), speed, speed, [], 1.0, True, 3))
    kept = KeptExits(default_model_path())
    kept.folder.mkdir(parents=True)
    figures = ExitFigures("m", 24, "linear", 1000, 1.0, 0.6, 4.0, 0.02, {}, 1.8, 0.3)
    for head, agreement, n_bytes in (("linear", 0.6, 5000), ("mlp", 0.7, 9000)):
        told = msgspec.structs.replace(figures, head=head, agreement=agreement)
        (kept.folder / f"24-{head}.json").write_bytes(msgspec.json.encode(told))
        (kept.folder / f"24-{head}.npz").write_bytes(bytes(n_bytes))
    assert exit_facts(kept) == {24: ExitFacts(0.7, 9000)}, "the one that agrees most"
    found = tell_cuts(Config())
    assert (found.token_s, found.row_s) == (0.02, 0.005)
    assert (found.cuts[23].chance, found.cuts[22].chance) == (0.7, 0.0)
    assert found.cuts[23].exit_share == pytest.approx(9000 / found.whole_bytes)


def test_a_damaged_list_of_cuts_has_none(tmp_path: Path) -> None:
    cuts = HostedCuts(tmp_path)
    assert cuts.load() == {}
    cuts.put("laptop", 15)
    cuts.put("tablet", 20)
    assert HostedCuts(tmp_path).load() == {"laptop": 15, "tablet": 20}
    assert cuts.of_others("laptop") == {"tablet": 20}
    cuts.drop("tablet")
    cuts.drop("nobody")
    assert HostedCuts(tmp_path).load() == {"laptop": 15}
    next(tmp_path.iterdir()).write_text("{")
    assert cuts.load() == {}


def test_layers_that_are_not_whole_count_as_none_and_leaving_removes_all(tmp_path: Path) -> None:
    folder = JoinedFolder(tmp_path / "split")
    joined = JoinedModel("m", "f" * 64, 30, 15, 7, "0" * 64, "desktop")
    with pytest.raises(ConfigError, match="disco machines pair"):
        folder.load()
    folder.folder.mkdir()
    folder.segment(15).write_bytes(b"1234567")
    folder.segment(10).write_bytes(b"of a join before")
    folder.save(joined)
    assert folder.load() == joined
    assert not folder.segment(10).exists()
    folder.segment(15).write_bytes(b"123456")
    assert folder.find() is None
    assert folder.remove() > 0
    assert not folder.folder.exists()


@pytest.mark.parametrize("rounding", ["exact", "fast"])
def test_a_graphics_card_computes_what_is_a_whole_model_and_need_not_be_exact(
    rounding: Literal["exact", "fast"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    config, path = Config(device=DeviceSettings(rounding=rounding, n_gpu_layers=3)), default_model_path()
    found = [range_config(config, path, r).n_gpu_layers for r in (None, LayerRange(0, 30, 30), UPPER)]
    assert found == ([3, 3, 0] if rounding == "fast" else [0, 0, 0])

"""`disco split check` on the real model: a chain of ranges gives its very logits, and what differs is found."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from disco_daemon.cli.main import main
from disco_daemon.config import layers as config
from disco_daemon.engine.measure.split_messages import SplitCompared
from disco_daemon.machines.split import check
from disco_daemon.models.default import default_model_path
from disco_daemon.models.gguf import read_header

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def compared(*cuts: int) -> SplitCompared:
    model = default_model_path()
    ranges = check.ranges_of(model, cuts)
    return asyncio.run(check.check(config.load(), model, ranges, lambda _: None, longest=40))


def test_a_chain_of_three_ranges_gives_the_very_logits_of_the_whole_model() -> None:
    found = compared(10, 20)
    assert found.is_equal
    assert (found.worst, found.agreement) == (0.0, 1.0)
    assert found.n_rows > 300
    assert found.n_tokens > 1000


def test_one_wrong_weight_is_found_and_the_verb_fails(capsys: pytest.CaptureFixture[str]) -> None:
    [_, upper] = check.segment_files().write(default_model_path(), check.ranges_of(default_model_path(), [15]))
    head = read_header(upper.read_bytes())
    norm = next(tensor for tensor in head.tensors if tensor.name == "blk.3.ffn_norm.weight")
    with upper.open("r+b") as file:
        file.seek(head.data_at + norm.offset)
        file.write(b"\0\0\0\0")
    assert main(["split", "check", "--tokens=8", "--cut=15"]) == 1
    assert "NOT equal" in capsys.readouterr().out


def test_two_ranges_give_the_very_logits_too_and_a_result_is_kept_for_the_next_question(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["split", "check", "--tokens=40", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["equal"]
    assert first["cuts"] == [15]
    assert (first["worst"], first["agreement"]) == (0.0, 1.0)
    assert first["n_rows"] > 300
    assert first["n_tokens"] > 1000
    assert main(["split", "check", "--tokens=40", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == first
    assert not said.err


@pytest.mark.parametrize("tokens", ["0", "-3", "40000", "many"])
def test_a_text_of_no_length_is_wrong_usage(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["split", "check", f"--tokens={tokens}"])
    assert stopped.value.code == 2
    assert "--tokens" in capsys.readouterr().err


@pytest.mark.parametrize("cut", ["0", "30", "31", "-1"])
def test_a_cut_that_leaves_no_layers_is_refused(cut: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["split", "check", f"--cut={cut}"]) == 1
    assert "give cuts from 1 to 29" in capsys.readouterr().err

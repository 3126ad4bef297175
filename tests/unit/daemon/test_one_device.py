"""A device is one thing: whole, or split over two machines, or a fleet; settings that say two are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_daemon.config.layers import load, set_values
from disco_daemon.config.schema import LIVE
from disco_daemon.errors import ConfigError

JOINED = '[split]\nenabled = true\npartner = "desktop.local:4748"\ncut = 15\n'


def said(tmp_path: Path, text: str) -> str:
    """Return what is wrong with such a config.toml."""
    path = tmp_path / "config.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as error:
        load(path, {})
    return str(error.value)


def test_a_joined_device_has_its_partner_its_cut_and_the_exact_mode(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(JOINED, "utf-8")
    split = load(path, {}).split
    assert (split.partner, split.cut, split.mode, split.codec) == ("desktop.local:4748", 15, "exact", "auto")


@pytest.mark.parametrize(
    ("more", "other"),
    [
        ("[partner]\nenabled = true\n", "partner.enabled"),
        ('[device]\nbase_url = "http://localhost:1"\n', "device.base_url"),
    ],
)
def test_two_kinds_of_device_are_refused_and_both_are_named(tmp_path: Path, more: str, other: str) -> None:
    text = said(tmp_path, JOINED + more)
    assert "split.enabled" in text
    assert other in text


@pytest.mark.parametrize(
    ("more", "others"),
    [
        (JOINED, ["split.enabled"]),
        ("[partner]\nenabled = true\n", ["partner.enabled"]),
        ('[device]\nbase_url = "http://localhost:1"\n', ["device.base_url"]),
        ('[device]\ndraft_model = "small.gguf"\n', ["device.draft_model"]),
        ("[device]\nn_gpu_layers = -1\n", ["device.n_gpu_layers", "processors"]),
    ],
)
def test_what_a_fleet_cannot_be_beside_is_refused_and_both_are_named(
    tmp_path: Path, more: str, others: list[str]
) -> None:
    text = said(tmp_path, "[fleet]\nenabled = true\n" + more)
    assert "fleet.enabled" in text
    assert all(other in text for other in others)


@pytest.mark.parametrize("more", ["[fleet]\nenabled = true\n", JOINED])
@pytest.mark.parametrize(
    ("other", "line"),
    [
        ("[partner]\nenabled = true\n", "partner.enabled=false"),
        ('[device]\nbase_url = "http://localhost:1"\n', "device.base_url="),
    ],
)
def test_a_refused_second_kind_says_how_to_end_the_first_and_that_works(
    tmp_path: Path, more: str, other: str, line: str
) -> None:
    """Who asks for a fleet on a partner was told only how to give up the fleet."""
    text = said(tmp_path, other + more)
    key, _, value = line.partition("=")
    shown = value or "''"
    assert f"`disco config set {key} {shown}`" in text
    set_values(tmp_path / "config.toml", {key: value})


@pytest.mark.parametrize("enabled", ["true", "false"])
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hosts = 2\ncuts = [7, 22]", "give 3 numbers"),
        ("cuts = [7]", "give 2 numbers"),
        ("cuts = [7, 7]", "each above the one before"),
        ("hosts = 3\ncuts = [7, 15, 22]", "give 4 numbers"),
    ],
)
def test_what_a_fleet_cannot_do_yet_is_refused_with_the_reason(
    tmp_path: Path, line: str, reason: str, enabled: str
) -> None:
    assert reason in said(tmp_path, f"[fleet]\nenabled = {enabled}\n{line}\n")


@pytest.mark.parametrize("line", ["hosts = -1", "cuts = [0, 5]", 'mode = "off"', "keep_home = 1", "codec = 'f32'"])
def test_a_fleet_s_value_out_of_its_range_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    assert "line 2" in said(tmp_path, f"[fleet]\n{line}\n")


def test_cuts_are_typed_with_commas(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    assert set_values(path, {"fleet.cuts": "7, 22", "fleet.enabled": "true"}).fleet.cuts == (7, 22)
    assert load(path, {}).fleet.cuts == (7, 22)
    assert load(path, {"DISCO_FLEET_CUTS": "[3, 4]"}).fleet.cuts == (3, 4)


def test_a_device_is_not_split_without_a_partner_or_a_cut(tmp_path: Path) -> None:
    assert "disco machines pair" in said(tmp_path, "[split]\nenabled = true\ncut = 3\n")
    assert "disco machines join" in said(tmp_path, '[split]\nenabled = true\npartner = "a:1"\n')


@pytest.mark.parametrize("line", ["cut = -1", "theta = 0", "theta = 1.01", 'mode = "fast"', 'codec = "f16"'])
def test_a_value_out_of_its_range_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    assert "line 2" in said(tmp_path, f"[split]\n{line}\n")


@pytest.mark.parametrize("partner", ["desktop.local", ":4748", "desktop.local:0", "desktop.local:x"])
def test_a_partner_is_a_host_and_a_port(tmp_path: Path, partner: str) -> None:
    assert "split.partner" in said(tmp_path, f'[split]\npartner = "{partner}"\n')


def test_mode_theta_and_what_follows_a_lost_partner_change_while_the_daemon_runs(tmp_path: Path) -> None:
    assert {"split.mode", "split.theta", "split.alone", "split.private_alone"} <= LIVE
    assert not {"split.enabled", "split.cut", "split.partner", "peer.port", "partner.listen"} & LIVE
    assert set_values(tmp_path / "config.toml", {"split.theta": "0.8"}).split.theta == 0.8

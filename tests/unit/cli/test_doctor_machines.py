"""What the doctor says of two machines that compute one model, from what was measured."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from disco_daemon import __version__
from disco_daemon.cli.doctor import machines
from disco_daemon.cli.doctor.finding import Level
from disco_daemon.config.schema import Config, SplitSettings
from disco_daemon.link.protocol import Build
from disco_daemon.link.relay.join import MeasuredLink

OK, WARN, WRONG = Level
BUILD = Build(disco=__version__, llama="0.3.36 AVX2", model="f" * 64, n_layers=30, n_embd=576, n_vocab=49152)
NEAR = MeasuredLink(0.003, 12.5e6, 12.5e6, 0.4, BUILD)
UP = {"state": "up", "mode": "exact", "cut": 24, "codec": "f32", "same_bits": True, "error": None}


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, OK, "up, exact, cut behind layer 24"),
        ({"same_bits": False}, OK, "answers may differ"),
        ({"state": "down", "error": "it does not answer"}, WARN, "down, exact, .* it does not answer"),
        ({"state": "refused", "error": "revoked"}, WRONG, "refused"),
    ],
)
def test_the_link_is_as_the_daemon_has_it(changes: dict[str, object], level: Level, words: str) -> None:
    found = machines.link(UP | changes)
    assert found.level is level
    assert re.search(words, found.found)


@pytest.mark.parametrize(("state", "level"), [("up", OK), ("loading", OK), ("lost", WARN), ("failed", WRONG)])
def test_the_fleet_is_as_the_daemon_has_it(state: str, level: Level) -> None:
    found = machines.fleet({"hosts": 1, "layers_away": 22, "replicas": 0, "state": state})
    assert found.level is level
    assert "22 layers" in found.found
    assert machines.fleet(None).level is OK
    assert "no new privileges" in machines.hosts_confinement(["no new privileges", "seccomp"]).found
    assert machines.hosts_confinement([]).level is not OK


def test_another_version_there_is_said_and_a_model_that_is_not_loaded() -> None:
    assert machines.version_there("partner", "desktop", NEAR).level is OK
    old = replace(NEAR, build=Build(disco="0.1", llama="", model="", n_layers=30, n_embd=1, n_vocab=1))
    assert "disco 0.1" in machines.version_there("partner", "desktop", old).found
    assert machines.version_there("partner", "desktop", old).level is WARN
    assert "no model in memory" in machines.version_there("partner", "desktop", replace(NEAR, build=None)).found


def test_slow_links_and_clocks_that_differ_are_told_with_what_to_do() -> None:
    assert machines.speed(NEAR).found == "round trip 3.0 ms, 100 Mbit/s up, 100 down"
    assert machines.speed(NEAR).level is OK
    assert "cable" in machines.speed(replace(NEAR, rtt_s=0.2)).mend
    assert "int8" in machines.speed(replace(NEAR, up_bytes_per_s=1e5)).mend
    assert machines.clocks(0.4, "the partner's", 120).level is OK
    assert machines.clocks(-300.0, "the partner's", 120).found == "the partner's is 300.0 s behind this one"
    assert machines.clocks(-300.0, "the partner's", 120).level is WARN


@pytest.mark.parametrize(("days", "level"), [(400, OK), (10, WARN), (-1, WRONG)])
def test_a_certificate_that_ends_soon_or_has_ended_is_told(days: float, level: Level) -> None:
    found = machines.certificate("certificate", 1.8e9 + days * 86400, 1.8e9)
    assert found.level is level
    assert (found.mend == "") == (level is OK)


def test_a_partner_says_whether_another_machine_reaches_its_port() -> None:
    laptop = {"name": "laptop", "connected": True}
    document = {"listening": "0.0.0.0:4748", "members": [laptop], "error": None}
    assert machines.served(document, 4748).found == "0.0.0.0:4748, reached by laptop"
    away = machines.served(document | {"members": [laptop | {"connected": False}]}, 4748)
    assert away.level is WARN
    assert "firewall let port 4748" in away.mend
    assert machines.served(document | {"listening": None, "members": []}, 4748).level is OK
    assert machines.served(document | {"error": "in use"}, 4748).level is WRONG


def test_settings_without_the_layers_say_how_to_join_again(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    config = Config(split=SplitSettings(enabled=True, partner="127.0.0.1:1", cut=15))
    [found] = machines.checks(config, None, "")
    assert found.level is WRONG
    assert "disco machines join CODE" in found.mend
    assert list(machines.checks(Config(), None, "")) == []

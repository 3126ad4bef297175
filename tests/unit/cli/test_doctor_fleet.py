"""What the doctor says of the machines of a fleet, from what they said of themselves, and of the way to home."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Any

import pytest

from disco_daemon import __version__
from disco_daemon.cli.doctor import machines
from disco_daemon.cli.doctor.finding import Finding, Level
from disco_daemon.config.schema import Config
from disco_daemon.fleet_keeper.keeper_messages import INSTALL
from disco_daemon.link.relay.handshake import TheRay
from disco_daemon.link.relay.orders import Address, Identity
from disco_daemon.link.trust.pairing import PairedPartner
from disco_daemon.link.trust.pairing_code import PairingError

OK, WARN, WRONG = Level
LLAMA, PYTHON = "0.3.36 AVX2", "3.12.4"
ATTIC = {
    "name": "attic", "connected": True, "address": "10.0.0.7", "llama": LLAMA, "disco": __version__, "python": PYTHON,
    "ray": "2.60.0", "ahead_s": 0.3,
}  # fmt: skip
RAY = {"state": "up", "why": "", "version": "2.60.0", "address": "10.0.0.1:4749", "hosts": [{"address": "10.0.0.7"}]}
HOME = PairedPartner(
    name="home", own_name="attic", addresses=(Address(host="127.0.0.1", port=1),),
    identity=Identity(certificate="", key="", ca=""),
)  # fmt: skip


def home(members: list[dict[str, Any]], **more: Any) -> dict[str, Finding]:
    document = {"listening": "0.0.0.0:4748", "error": None, "llama": LLAMA, "refused": {}, "ray": RAY}
    whole = document | {"members": members} | more
    return {one.name: one for one in (machines.served(whole, 4748), *machines.of_fleet(whole))}


def ray(members: list[dict[str, Any]], **more: Any) -> dict[str, Finding]:
    return {one.name: one for one in machines.ray(RAY | more, members, PYTHON)}


def test_machines_that_agree_are_well_and_none_is_needed() -> None:
    found = home([ATTIC])
    assert [(name, found[name].level) for name in ("peer port", "builds", "clocks")] == [
        ("peer port", OK), ("builds", OK), ("clocks", OK),
    ]  # fmt: skip
    assert "reached by attic" in found["peer port"].found
    assert list(home([])) == ["peer port"]


def test_a_machine_that_has_not_said_hello_is_not_judged() -> None:
    silent = {**dict.fromkeys(ATTIC), "name": "attic", "connected": False}
    assert set(home([silent])) == {"peer port", "Ray", "Ray's nodes"}
    assert home([silent])["peer port"].level is WARN


@pytest.mark.parametrize(("ahead_s", "words"), [(61.0, "cellar's is 61 s ahead of"), (-3600.0, "3600 s behind")])
def test_a_clock_a_minute_off_names_its_machine(ahead_s: float, words: str) -> None:
    found = home([ATTIC, ATTIC | {"name": "cellar", "ahead_s": ahead_s}])["clocks"]
    assert found.level is WARN
    assert words in found.found
    assert "attic" not in found.found
    assert home([ATTIC | {"ahead_s": -60.0}])["clocks"].level is OK


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"disco": "0.1"}, "attic has disco 0.1"), ({"llama": "0.3.36 NEON"}, "attic computes by 0.3.36 NEON")],
)
def test_another_build_names_its_machine(changes: dict[str, str], words: str) -> None:
    found = home([ATTIC | changes])["builds"]
    assert (found.level, words in found.found) == (WARN, True)


def test_a_machine_that_was_refused_for_its_build_is_told() -> None:
    assert "was refused (2 times)" in home([ATTIC], refused={"build": 2})["builds"].found


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"python": "3.11.9"}, "attic has Ray 2.60.0 and Python 3.11.9"), ({"ray": "2.59.0"}, "attic has Ray 2.59.0")],
)
def test_another_python_or_ray_names_its_machine(changes: dict[str, str], words: str) -> None:
    found = ray([ATTIC | changes])["Ray"]
    assert (found.level, words in found.found) == (WARN, True)


def test_ray_of_a_home_is_told_with_its_version() -> None:
    found = ray([ATTIC])
    assert [(name, one.level) for name, one in found.items()] == [("Ray", OK), ("Ray's nodes", OK)]
    assert "Ray 2.60.0 at 10.0.0.1:4749, Python 3.12.4" in found["Ray"].found
    assert ray([ATTIC], state="off")["Ray"].level is OK
    assert ray([ATTIC], state="missing")["Ray"].mend == INSTALL
    assert "it was killed" in ray([ATTIC], state="lost", why="it was killed")["Ray"].found


def test_a_machine_that_lends_and_is_no_node_names_the_ports() -> None:
    found = ray([ATTIC], hosts=[])["Ray's nodes"]
    assert found.level is WARN
    assert found.found.startswith("attic: ")
    assert "10.0.0.1:4749" in found.mend
    assert set(ray([ATTIC | {"address": "127.0.0.1"}], hosts=[])) == {"Ray"}


def test_a_machine_that_joined_tries_the_port_of_homes_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(answer: TheRay | PairingError, version: str = "2.60.0") -> Finding:
        async def ask(_: PairedPartner) -> TheRay:
            if isinstance(answer, PairingError):
                raise answer
            return answer

        monkeypatch.setattr("disco_daemon.machines.fleet.ray_node.ask_ray", ask)
        monkeypatch.setattr("disco_daemon.machines.fleet.ray_keeper.ray_version", lambda: version)
        return machines.ray_of_home(HOME)

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        at = TheRay(address=f"127.0.0.1:{server.getsockname()[1]}")
        assert found(at).level is OK
        assert "none is installed here" in found(at, "").found
    assert found(at).level is WRONG
    assert "docs/explain/fleet.md" in found(at).mend or "check that it runs" in found(at).mend
    assert found(TheRay()).found == "home has none"
    assert found(TheRay(starting=True)).level is OK
    assert found(PairingError("revoked", "this machine has been revoked")).level is WARN


def test_a_machine_that_has_joined_nothing_has_nothing_to_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert list(machines.checks(Config(), None, "")) == []

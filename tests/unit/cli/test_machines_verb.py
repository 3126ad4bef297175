"""`disco machines`: the code says the role, options of the other role are refused, and former verbs are understood."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.cli import machines
from disco_daemon.cli.main import main, make_parser
from disco_daemon.client import once as client
from disco_daemon.link.relay import join
from disco_daemon.link.relay.orders import Address, Identity
from disco_daemon.link.trust.pairing import PairedPartner
from disco_daemon.link.trust.pairing_code import PairingCode, PairingError, format_code
from disco_daemon.link.trust.roles import Role
from disco_daemon.machines.fleet.lending import lent_folder
from disco_daemon.machines.trust_store import membership

HERE = Address(host="127.0.0.1", port=1)
DESK = PairedPartner(
    name="desk", own_name="laptop", addresses=(HERE,), identity=Identity(certificate="", key="", ca="")
)
OFF: dict[str, Any] = {
    "enabled": False, "state": "off", "listening": None, "error": "", "members": [], "cut": None, "relay_pid": None,
}  # fmt: skip
MEMBER = {"name": "laptop", "since": "2026-11-28", "connected": True, "lent": True, "left_alone": False, "layers": []}
CODE = {"code": "ABC", "expires_s": 600, "turned_on": True, "ray": {"state": "off", "why": "Ray is off"}}


def code_for(role: Role | None) -> str:
    return format_code(PairingCode((HERE,), bytes(16), bytes(32), role))


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for kind in ("DATA", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path))
    monkeypatch.setenv("DISCO_CONFIG", str(tmp_path / "config.toml"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was sent to another machine: nothing, but for the tries to pair."""
    seen: list[str] = []

    async def pair(code: PairingCode, *_: object) -> None:
        seen.append(str(code.role))
        raise PairingError("unreachable", "nobody is there")

    monkeypatch.setattr(join, "pair", pair)
    monkeypatch.setattr("disco_daemon.machines.split.joining.pair", pair)
    return seen


class Daemon:
    """The daemon's routes, as they are asked; its documents by their paths."""

    def __init__(self, **documents: dict[str, Any]) -> None:
        self.split, self.fleet = OFF | documents.get("split", {}), OFF | documents.get("fleet", {})
        self.posted: list[tuple[str, dict[str, Any]]] = []

    def get(self, _: str, path: str, _key: str) -> dict[str, Any]:
        return {"/disco/v1/partner": self.split, "/disco/v1/fleet/members": self.fleet}[path]

    def post(self, _: str, path: str, body: dict[str, Any], _key: str) -> dict[str, Any]:
        self.posted.append((path, body))
        return {"revoked": body["name"]} if path.endswith("revoke") else CODE


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    one = Daemon()
    monkeypatch.setattr(client, "daemon_at", lambda *_: ("http://127.0.0.1:1", ""))
    monkeypatch.setattr(client, "get", lambda *given: one.get(*given))
    monkeypatch.setattr(client, "post", lambda *given: one.post(*given))
    return one


# --- joining ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "words", "said"),
    [
        (Role.SPLIT, ("--cpus", "2"), "--cpus says nothing here: this machine splits"),
        (Role.SPLIT, ("--until-eof",), "--until-eof says nothing here"),
        (Role.FLEET, ("--cut", "3"), "--cut says nothing here: this machine lends"),
        (Role.FLEET, ("--draft",), "--draft says nothing here"),
        (Role.SPLIT, ("--as", "fleet"), "the code is for a machine that splits"),
        (Role.FLEET, ("--as", "split"), "the code is for a machine that lends"),
        (None, (), "the code is of an older disco"),
    ],
)
def test_a_code_of_one_role_is_never_used_for_the_other_one(
    role: Role | None, words: tuple[str, ...], said: str, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machines", "join", code_for(role), "--yes", *words]) == 1
    assert said in capsys.readouterr().err
    assert asked == [], "a code that was not used is still good"


@pytest.mark.parametrize(
    ("role", "words"), [(Role.SPLIT, ()), (Role.FLEET, ()), (None, ("--as", "split")), (None, ("--as", "fleet"))]
)
def test_a_code_needs_no_role_but_that_of_an_older_disco(
    role: Role | None, words: tuple[str, ...], asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machines", "join", code_for(role), "--yes", *words]) == 1
    assert asked == [str(role)]
    assert "nobody is there" in capsys.readouterr().err


def test_without_a_code_a_machine_lends_as_before_or_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machines", "join"]) == 1
    assert "joined no fleet: run `disco machines pair`" in capsys.readouterr().err
    assert main(["machines", "join", "--as", "split"]) == 1
    assert "give the code" in capsys.readouterr().err


# --- pairing, listing and revoking --------------------------------------------------------------------------------


@pytest.mark.parametrize("role", Role)
def test_a_code_is_of_what_the_machine_is_set_to_be(
    role: Role, daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machines", "pair"]) == 1
    assert "--as split" in capsys.readouterr().err
    assert daemon.posted == []
    setattr(daemon, role, OFF | {"enabled": True})
    assert main(["machines", "pair", "--address", "desk"]) == 0
    assert daemon.posted == [(f"/disco/v1/{machines.ROUTES[role][1]}", {"address": "desk"})]
    said = capsys.readouterr().out
    assert "\ndisco machines join ABC\n" in said
    assert ("Ray is off" in said) is (role is Role.FLEET)


def test_a_machine_is_revoked_in_each_role_that_it_has(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.fleet = OFF | {"members": [MEMBER]}
    assert main(["machines", "revoke", "desk"]) == 1
    assert "it is one of laptop" in capsys.readouterr().err
    assert main(["machines", "revoke", "laptop"]) == 0
    daemon.split = OFF | {"members": [MEMBER]}
    assert main(["machines", "revoke", "laptop", "--json"]) == 0
    assert [path for path, _ in daemon.posted] == [
        "/disco/v1/fleet/revoke", "/disco/v1/partner/revoke", "/disco/v1/fleet/revoke",
    ]  # fmt: skip


def test_the_list_has_both_roles_and_what_was_joined(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machines", "list"]) == 0
    assert "No machine has joined" in capsys.readouterr().out
    daemon.fleet = OFF | {"enabled": True, "state": "listening", "listening": "0.0.0.0:4748", "members": [MEMBER]}
    membership(Role.SPLIT).save(DESK)
    assert main(["machines", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "fleet: listening at 0.0.0.0:4748",
        "laptop  lends a host, joined on 2026-11-28",
        "joined: desk at 127.0.0.1:1, as laptop; this machine splits a model with the other one",
    ]
    assert main(["machines", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["split"], found["fleet"]) == (daemon.split, daemon.fleet)
    assert found["joined"] == [{"role": "split", "machine": "desk", "name": "laptop", "address": "127.0.0.1:1"}]
    assert main(["machines", "list", "--as", "fleet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == daemon.fleet


# --- leaving ------------------------------------------------------------------------------------------------------


def leaving(monkeypatch: pytest.MonkeyPatch, reason: str = "") -> list[str]:
    told: list[str] = []

    async def leave(other: PairedPartner) -> None:
        told.append(other.name)
        if reason:
            raise PairingError(reason, "it is not there")

    monkeypatch.setattr(join, "leave", leave)
    monkeypatch.setattr("disco_daemon.cli.split_join._reload", lambda _: False)
    return told


@pytest.mark.parametrize("role", Role)
def test_whoever_leaves_keeps_nothing_and_says_so(
    role: Role, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = leaving(monkeypatch)
    assert main(["machines", "leave"]) == 0
    assert "joined no other one" in capsys.readouterr().out
    membership(role).save(DESK)
    (lent_folder() / "desk").mkdir(parents=True)
    assert main(["machines", "leave"]) == 1, "nobody has said yes"
    assert membership(role).partner() == DESK
    assert main(["machines", "leave", "--yes"]) == 0
    assert "has left desk" in capsys.readouterr().out
    assert (told, membership(role).partner()) == (["desk"], None)
    assert lent_folder().exists() is (role is Role.SPLIT)


@pytest.mark.parametrize(
    ("reason", "words"), [("unreachable", "`disco machines revoke laptop` there"), ("revoked", "")]
)
def test_a_machine_that_could_not_be_told_is_named_unless_it_knows(
    reason: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leaving(monkeypatch, reason)
    membership(Role.SPLIT).save(DESK)
    assert main(["machines", "leave", "--yes"]) == 0
    said = capsys.readouterr().out
    assert words in said
    assert ("does not know yet" in said) is bool(words)


def test_who_has_joined_two_machines_says_which_one_it_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = leaving(monkeypatch)
    membership(Role.SPLIT).save(DESK)
    membership(Role.FLEET).save(DESK)
    assert main(["machines", "leave", "--yes"]) == 1
    assert "--as split or --as fleet" in capsys.readouterr().err
    assert main(["machines", "leave", "--yes", "--as", "fleet"]) == 0
    assert told == ["desk"]
    assert membership(Role.SPLIT).partner() == DESK


# --- the verbs of former releases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("old", sorted(machines.OLD))
def test_a_former_verb_does_the_new_thing_and_names_it(
    old: tuple[str, ...], daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[dict[str, Any]] = []
    action = machines.OLD[old][0]

    def run(args: argparse.Namespace) -> int:
        ran.append(vars(args))
        return 0

    monkeypatch.setattr(machines, f"_{action}", run)
    rest = {"revoke": ["laptop"], "join": [code_for(None)]}.get(action, [])
    assert main([*old, *rest]) == 0
    assert capsys.readouterr().err == f"disco: `disco {' '.join(old)}` is `disco machines {action}` now\n"
    [given] = ran
    assert given["role"] == ("fleet" if old[0] == "fleet" else "split")
    assert given.get("yes", False) is (old == ("fleet", "leave")), "that one has never asked"


def test_every_action_that_the_old_verbs_are_exists_and_no_old_verb_is_offered() -> None:
    for words in machines.OLD.values():
        rest = ["laptop"] if words[0] == "revoke" else []
        assert make_parser().parse_args(["machines", *words, *rest]).role in [*Role]
    assert not re.search(r"\b(join|leave|members|new)\b", make_parser().format_help())

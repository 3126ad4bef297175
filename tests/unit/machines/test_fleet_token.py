"""Ray's token runs programs on every node: who has left knows another one than is in use, however it has left."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from disco_daemon.config.schema import Config
from disco_daemon.fleet_keeper.keeper_messages import KeeperJob, KeeperState
from disco_daemon.link.relay.handshake import TheRay
from disco_daemon.link.relay.orders import Address, Identity
from disco_daemon.link.trust.pairing import PairedPartner
from disco_daemon.link.trust.pairing_code import PairingError
from disco_daemon.machines.fleet import ray_keeper, ray_node
from disco_daemon.machines.fleet.ray_keeper import HomeRay, RayToken
from disco_daemon.machines.owner import OwnerTerms

HOME = PairedPartner(
    name="desk", own_name="attic", addresses=(Address(host="127.0.0.1", port=1),),
    identity=Identity(certificate="", key="", ca=""),
)  # fmt: skip


def with_ray(how: str) -> Config:
    config = Config()
    return replace(config, fleet=replace(config.fleet, ray=how, listen="127.0.0.1"))


class Keeper:
    """A keeper that starts no process: Ray is not installed where this runs."""

    made: list[Keeper]

    def __init__(self, job: KeeperJob, changed: Callable[[KeeperState], None]) -> None:
        self.job, self.state, self.pid, self.is_closed = job, KeeperState(state="starting"), None, False
        self.changed = changed
        self.token = Path(job.token_path).read_text("ascii") if job.token_path else ""  # as Ray reads it, once
        self.made.append(self)

    def say(self, state: Any) -> None:
        self.state = KeeperState(state=state)
        self.changed(self.state)

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> list[Keeper]:
    Keeper.made = []
    for module in (ray_keeper, ray_node):
        monkeypatch.setattr(module, "RayKeeper", Keeper)
        monkeypatch.setattr(module, "has_ray", lambda: True)
    return Keeper.made


# --- who may know it ----------------------------------------------------------------------------------------------


def test_a_token_stays_while_members_come_and_is_another_once_one_has_left(tmp_path: Path) -> None:
    token = RayToken(tmp_path)
    assert not token.follow(["a"])
    first = token.file().read_text()
    assert not token.follow(["a", "b"])
    assert token.file().read_text() == first
    assert token.follow(["a"])
    second = token.file().read_text()
    assert second != first
    assert not token.follow(["a"])
    assert token.follow(["c"]), "another certificate of the same name is another machine"
    assert token.file().read_text() not in (first, second)


def test_who_left_while_no_daemon_ran_or_while_it_was_crashing_counts_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = RayToken(tmp_path)
    token.follow(["a", "b"])
    first = token.file().read_text()

    def full(*_: object) -> None:
        raise OSError(28, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(ray_keeper, "write_private", full)
        with pytest.raises(OSError, match="no space"):
            RayToken(tmp_path).follow(["a"])
    again = RayToken(tmp_path)
    assert again.follow(["a"]), "what was not finished is done again"
    assert again.file().read_text() != first


@pytest.mark.parametrize("known", [None, b"", b"{}", b"[1]", b"\xff"])
def test_a_token_of_which_nobody_can_say_who_knows_it_is_made_anew(tmp_path: Path, known: bytes | None) -> None:
    token = RayToken(tmp_path)
    first = token.file().read_text()  # as an earlier version has made it
    if known is not None:
        (tmp_path / "ray-token-known.json").write_bytes(known)
    assert token.follow(["a"])
    assert token.file().read_text() != first


def test_over_any_history_of_members_nobody_who_left_knows_the_token(tmp_path: Path) -> None:
    random_ = random.Random(4)
    for run in range(20):
        folder, members, learned = tmp_path / f"{run}", set[str](), dict[str, set[str]]()
        for step in range(30):
            if members and random_.random() < 0.4:
                members.discard(random_.choice(sorted(members)))
            else:
                members.add(f"{step}")
            token = RayToken(folder)  # a daemon that has just started sees as much as one that ran
            token.follow(members)
            secret = token.file().read_text()
            learned.setdefault(secret, set()).update(members)
            assert learned[secret] <= members, "all who ever learned the present token are members"


def test_the_files_are_for_this_user_alone(tmp_path: Path) -> None:
    token = RayToken(tmp_path / "fleet")
    token.follow(["a"])
    token.file()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "fleet").iterdir()} == {0o600}


# --- at home ------------------------------------------------------------------------------------------------------


def test_ray_is_nothing_without_a_word_of_the_owner(tmp_path: Path) -> None:
    assert Config().fleet.ray == "off"
    assert "fleet.ray auto" in HomeRay(tmp_path, lambda: None).document()["why"]


async def test_no_keeper_is_started_and_no_token_made_by_default(tmp_path: Path, keepers: list[Keeper]) -> None:
    ray = HomeRay(tmp_path, lambda: None)
    await ray.keep(Config(), ["a"])
    assert not keepers
    assert ray.for_members() is None
    assert not (tmp_path / "ray-token").exists()


async def test_the_head_begins_anew_with_another_token_when_a_member_leaves(
    tmp_path: Path, keepers: list[Keeper]
) -> None:
    ray, config = HomeRay(tmp_path, lambda: None), with_ray("auto")
    await ray.keep(config, ["a", "b"])
    keepers[0].say("up")
    told = ray.for_members()
    assert told is not None
    assert told.token == keepers[0].token
    await ray.keep(config, ["a", "b", "c"])
    assert len(keepers) == 1, "nobody has left"
    await ray.keep(config, ["a", "c"])
    assert [one.is_closed for one in keepers] == [True, False]
    assert keepers[1].token not in ("", keepers[0].token)
    assert ray.for_members() == TheRay(starting=True), "nobody gets the old one meanwhile"
    keepers[1].say("up")
    told = ray.for_members()
    assert told is not None
    assert told.token == keepers[1].token
    await ray.close()
    await ray.keep(with_ray("off"), ["c"])
    await ray.keep(config, ["c"])
    assert keepers[2].token not in (keepers[0].token, keepers[1].token), "it left while Ray was off"


async def test_of_a_cluster_of_the_owners_own_the_owner_hears_that_its_token_is_known(
    tmp_path: Path, keepers: list[Keeper], caplog: pytest.LogCaptureFixture
) -> None:
    ray, config = HomeRay(tmp_path, lambda: None), with_ray("10.0.0.1:6379")
    await ray.keep(config, ["a", "b"])
    with caplog.at_level(logging.WARNING, "disco.fleet"):
        await ray.keep(config, ["a"])
    assert len(keepers) == 1
    assert not keepers[0].is_closed
    assert "give it another token" in caplog.text


# --- at a node ----------------------------------------------------------------------------------------------------


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TheRay | PairingError]:
    """What home says to each question, the last one for ever."""
    answers: list[TheRay | PairingError] = []

    async def ask(_: PairedPartner) -> TheRay:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, PairingError):
            raise found
        return found

    monkeypatch.setattr(ray_node, "ask_ray", ask)
    monkeypatch.setattr(ray_node, "ASK_AGAIN_S", 0.001)
    monkeypatch.setattr(ray_node, "ASK_S", 0.001)
    monkeypatch.setattr(ray_node, "data_path", lambda: tmp_path)
    return answers


async def test_a_node_joins_again_when_home_has_another_token(
    keepers: list[Keeper], home: list[TheRay | PairingError], tmp_path: Path
) -> None:
    old, new = TheRay(address="10.0.0.1:4749", token="old"), TheRay(address="10.0.0.1:4749", token="new")
    gone = PairingError("revoked", "this machine has been revoked")
    unreachable = PairingError("unreachable", "nobody is there")
    home += [old, old, unreachable, TheRay(starting=True), TheRay(), new, new, new, gone]
    said: list[str] = []
    await asyncio.wait_for(ray_node.lend_by_ray(HOME, OwnerTerms(1), said.append), 60)
    assert [one.token for one in keepers] == ["old", "new"]
    assert all(one.is_closed for one in keepers), "a machine that was revoked is a node no more"
    assert "has no Ray" in said[-1]
    assert not (tmp_path / "fleet" / "node-token").exists()


async def test_a_node_that_fails_again_and_again_lends_by_itself(
    keepers: list[Keeper], home: list[TheRay | PairingError], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Keeper):
        def __init__(self, job: KeeperJob, changed: Callable[[KeeperState], None]) -> None:
            super().__init__(job, changed)
            asyncio.get_running_loop().call_soon(self.say, "lost")

    monkeypatch.setattr(ray_node, "RayKeeper", Failing)
    home.append(TheRay(address="10.0.0.1:4749", token="t"))
    await asyncio.wait_for(ray_node.lend_by_ray(HOME, OwnerTerms(1), lambda _: None), 60)
    assert len(keepers) == ray_node.MAX_SHORT

"""Which place a machine of a fleet has, and which of the hosts that it offers are taken."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_fields

from disco_daemon.clock import SystemClock
from disco_daemon.config.schema import Config
from disco_daemon.daemon.endpoints import reuse_device
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine, EngineState
from disco_daemon.link.relay.handshake import OfferHost
from disco_daemon.link.relay.orders import HostEnded, HostOffered
from disco_daemon.machines.fleet import offered_hosts
from disco_daemon.machines.fleet.fleet_device import PRIVATE, FleetDevice
from disco_daemon.machines.fleet.host_places import Borrower, LentLife, LentMachine
from disco_daemon.machines.fleet.host_processes import HostProcesses
from disco_daemon.machines.fleet.offered_hosts import HostOffers, MemberPlaces
from disco_daemon.types import GenerationRequest, Outcome
from tests.fixtures.peers import BUILD


def test_a_machine_keeps_its_place_until_it_leaves_and_then_the_next_one_gets_it(tmp_path: Path) -> None:
    places = MemberPlaces(tmp_path)
    assert places.load() == {}
    places.keep(["attic", "cellar"])
    places.keep(["barn", "cellar", "attic"])
    assert MemberPlaces(tmp_path).load() == {"attic": 0, "cellar": 1, "barn": 2}
    places.keep(["attic", "barn"])
    assert (places.name_of(1), places.name_of(2)) == ("", "barn")
    places.keep(["attic", "barn", "dock"])
    assert places.name_of(1) == "dock"
    places.drop("attic")
    assert places.load() == {"barn": 2, "dock": 1}
    (tmp_path / "places.json").write_text("no places")
    assert MemberPlaces(tmp_path).load() == {}


def test_of_two_changes_of_places_at_a_time_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine is forgotten by one thread just when another one has read the places, and is about to write them."""
    places = MemberPlaces(tmp_path)
    places.keep(["attic", "cellar"])
    forgetting = threading.Thread(target=lambda: MemberPlaces(tmp_path).drop("cellar"))
    save = MemberPlaces._save

    def save_late(self: MemberPlaces, kept: dict[str, int]) -> None:
        if self is places:
            forgetting.start()
            forgetting.join(0.2)  # it is done by then, unless it waits for us
        save(self, kept)

    monkeypatch.setattr(MemberPlaces, "_save", save_late)
    places.keep(["attic", "cellar", "barn"])
    forgetting.join()
    assert MemberPlaces(tmp_path).load() == {"attic": 0, "barn": 2}


def offered(life: int, *has: str) -> tuple[HostOffered, socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    offer = OfferHost(build=BUILD, has=has, n_threads=2)
    return HostOffered(name="attic", life=life, address="10.0.0.2", offer=offer), ours, theirs


async def test_a_host_is_taken_if_it_has_the_files_and_else_sent_to_fetch_them() -> None:
    free: list[str] = []
    offers = HostOffers(free.append)
    assert await offers.take("attic", ["a"]) is None
    event, ours, theirs = offered(1, "a", "b")
    with ours, theirs:
        offers.add(event, ours)
        assert (free, offers.is_there("attic")) == (["attic"], True)
        taken = await offers.take("attic", ["b"])
        assert taken is not None
        assert (taken[0].machine, taken[1]) == ("attic", ours)
        assert not offers.is_there("attic")
        assert offers.describe("attic")["lent"]
        offers.end(HostEnded(name="attic", life=1, message="", n_bytes=10_000))
        assert taken[0].has_ended
        assert not offers.describe("attic")["connected"]
    event, ours, theirs = offered(2, "a")
    with theirs:
        offers.add(event, ours)
        assert await offers.take("attic", ["b"]) is None
        assert theirs.recv(1) == b"", "its connection has ended: it asks which files it lacks"


async def test_a_machine_whose_hosts_compute_nothing_is_left_alone_for_a_while() -> None:
    free: list[str] = []
    offers = HostOffers(free.append)
    ends = []
    for life in (1, 2, 3):
        event, ours, theirs = offered(life, "a")
        ends += [ours, theirs]
        offers.add(event, ours)
        if life < 3:
            assert await offers.take("attic", ["a"]) is not None
            offers.end(HostEnded(name="attic", life=life, message="", n_bytes=300))
    assert await offers.take("attic", ["a"]) is None
    assert not offers.is_there("attic")
    assert len(free) == offered_hosts.MAX_BAD
    offers._try_again("attic")
    assert len(free) == offered_hosts.MAX_BAD + 1
    assert await offers.take("attic", ["a"]) is not None
    offers.clear()
    for one in ends:
        one.close()


async def test_an_engine_waits_a_moment_for_the_next_host_of_a_machine_that_was_there_just_now() -> None:
    offers = HostOffers(lambda _: None)
    event, ours, theirs = offered(1, "a")
    offers.add(event, ours)
    assert await offers.take("attic", ["a"]) is not None
    waiting = asyncio.create_task(offers.take("attic", ["a"]))
    await asyncio.sleep(0)
    again, ours2, theirs2 = offered(2, "a")
    offers.add(again, ours2)
    taken = await waiting
    assert taken is not None
    assert taken[1] is ours2
    for one in (ours, theirs, ours2, theirs2):
        one.close()


class Elsewhere:
    """A machine that has joined; `borrowers` are the engines that have asked for its hosts."""

    def __init__(self) -> None:
        self.borrowers: list[Borrower] = []

    def borrow_for(self, borrower: Borrower) -> None:
        self.borrowers.append(borrower)

    def end(self, borrower: Borrower) -> None:
        self.borrowers.remove(borrower)

    async def take(self, place: int, names: Collection[str]) -> tuple[LentLife, socket.socket] | None:
        raise AssertionError((place, names))

    async def stage(self, place: int, names: Collection[str]) -> None:
        raise AssertionError((place, names))

    def machine_at(self, place: int) -> LentMachine | None:
        return LentMachine("attic", 2, 0)

    def name_of(self, place: int) -> str:
        return "attic"

    def is_there(self, place: int) -> bool:
        return True


class View:
    """What a fleet says of itself, as far as a request needs it."""

    def __init__(self, hosts: HostProcesses) -> None:
        self._hosts = hosts

    @property
    def n_hosts(self) -> int:
        return len(self._hosts.hosts)

    @property
    def may_borrow(self) -> bool:
        return self._hosts.may_borrow

    def brief(self) -> dict[str, Any]:
        return {}

    document = brief
    n_moves = 0

    def follow(self, config: Config) -> None:
        """No settings are followed."""

    def observe(self, outcome: Outcome) -> None:
        """Nothing is learned."""

    def pause(self) -> None:
        raise AssertionError

    resume = pause

    def drain(self, name: str) -> None:
        raise AssertionError(name)

    async def run(self) -> None:
        """There is nothing to look after."""


def device(hosts: HostProcesses) -> FleetDevice:
    config = wire.Load(model_path="m.gguf", n_ctx=64, n_threads=1, n_gpu_layers=0)
    return FleetDevice(Engine(config, SystemClock(), hosts=hosts), View(hosts))


ASKED = GenerationRequest("r", ({"role": "user", "content": "hello"},))


def test_a_private_request_is_refused_where_rows_may_reach_another_machine() -> None:
    lent = device(HostProcesses(2, lambda: None, 1, lambda _: (), Elsewhere()))
    assert lent.refuses(ASKED) is None
    assert lent.refuses(replace(ASKED, private=True)) == PRIVATE
    own = device(HostProcesses(2, lambda: None))
    assert own.refuses(replace(ASKED, private=True)) is None


async def test_an_engine_that_has_computed_private_texts_borrows_nothing_any_more() -> None:
    elsewhere = Elsewhere()
    hosts = HostProcesses(1, lambda: None, 0, lambda _: (), elsewhere)
    await hosts.prepare()
    assert elsewhere.borrowers == [hosts]
    hosts.stay_here()
    assert device(hosts).refuses(replace(ASKED, private=True)) is None
    assert await hosts._borrow(hosts.hosts[0]) is None
    await hosts.detach()
    assert elsewhere.borrowers == []


def test_a_fleet_with_another_machine_is_another_device_than_one_without() -> None:
    lent, own = device(HostProcesses(1, lambda: None, 0, lambda _: (), Elsewhere())), device(HostProcesses(1, print))
    lent.engine.state = own.engine.state = EngineState.READY
    assert reuse_device(lent, own) is lent, "what was private in the old one never gets there"
    assert reuse_device(own, lent) is own
    assert reuse_device(device(HostProcesses(1, print)), own) is own
    assert reuse_device(device(HostProcesses(2, print)), own) is not own, "another machine may get layers, too"


async def test_what_a_machine_says_of_itself_is_described_with_how_far_its_clock_is() -> None:
    offers = HostOffers(lambda _: None, wall=lambda: 1000.0)
    assert offers.describe("attic")["ahead_s"] is None
    event, ours, theirs = offered(1)
    said = replace_fields(event.offer, python="3.12.4", ray="2.60.0", now=1090.0)
    with ours, theirs:
        offers.add(replace_fields(event, offer=said), ours)
        found = offers.describe("attic")
    assert (found["python"], found["ray"], found["disco"]) == ("3.12.4", "2.60.0", BUILD.disco)
    assert found["ahead_s"] == 90.0


async def test_what_was_offered_before_a_host_fell_silent_is_not_trusted_and_the_next_offer_is() -> None:
    offers = HostOffers(lambda _: None)
    first, ours, theirs = offered(1, "a")
    stale, stale_ours, stale_theirs = offered(2, "a")
    with ours, theirs, stale_theirs:
        offers.add(first, ours)
        taken = await offers.take("attic", ["a"])
        assert taken is not None
        offers.add(stale, stale_ours)
        offers.end(HostEnded(name="attic", life=1, message="", n_bytes=10_000, given_up=True))
        assert taken[0].has_ended
        assert stale_theirs.recv(1) == b"", "behind it may be the same machine that stands still"
        assert not offers.is_there("attic")
    fresh, ours, theirs = offered(3, "a")
    with ours, theirs:
        taking = asyncio.create_task(offers.take("attic", ["a"]))
        await asyncio.sleep(0)
        offers.add(fresh, ours)
        assert (await taking) is not None

"""Whoever asks at a relay's port: few are let in before they are known, and nobody alone keeps others out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.link.trust.strangers import (
    ADDRESSES_MAX,
    STAYS_S,
    STRANGERS_MAX,
    STRANGERS_OF_HOST_MAX,
    TRIES_BURST,
    TRIES_S,
    StrangerPlaces,
    owner_of,
)

HOSTS = st.sampled_from(
    [f"10.0.0.{i}" for i in range(4)] + [f"2001:db8:0:{i}::{j:x}" for i in range(3) for j in range(5)] + ["no address"]
)


@pytest.mark.parametrize(
    ("a", "b", "is_one"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("::1", "127.0.0.1", False),
    ],
)
def test_what_one_owner_has_of_addresses_is_one(a: str, b: str, *, is_one: bool) -> None:
    assert (owner_of(a) == owner_of(b)) is is_one


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(HOSTS, st.floats(0, 0.5), st.sampled_from("eeeel")), max_size=250))
def test_there_are_never_more_than_may_be_and_whoever_goes_was_there(steps: list[tuple[str, float, str]]) -> None:
    places, there, now = StrangerPlaces(), dict[int, tuple[str, float]](), 0.0
    for host, passes_s, what in steps:
        now += passes_s
        if what == "l" and there:
            gone = min(there)
            del there[gone]
            places.leave(gone)
            places.leave(gone)
            continue
        counts = Counter(owner for owner, _ in there.values())
        place, loser = places.enter(host, now)
        if loser is not None:
            owner, since = there.pop(loser)
            assert since + STAYS_S <= now or counts[owner] > counts[owner_of(host)] + 1
        if place is not None:
            assert place not in there
            there[place] = owner_of(host), now
        counts = Counter(owner for owner, _ in there.values())
        assert len(there) == len(places) <= STRANGERS_MAX
        assert max(counts.values(), default=0) <= STRANGERS_OF_HOST_MAX


@pytest.mark.parametrize("n_owners", [1, 2, 3, 16])
@pytest.mark.parametrize("form", ["10.0.0.{}", "2001:db8:0:{}::9"])
def test_few_owners_however_many_addresses_never_keep_another_one_out(n_owners: int, form: str) -> None:
    places = StrangerPlaces()
    for i in range(200):
        places.enter(form.format(i % n_owners), 0.0)
    assert places.enter("192.0.2.1", 0.0)[0] is not None, "at once, though all of them came just now"


def test_one_address_gets_in_behind_its_own_silent_ones_once_they_had_their_time() -> None:
    places = StrangerPlaces()
    first = [places.enter("10.0.0.1", 0.0)[0] for _ in range(STRANGERS_OF_HOST_MAX)]
    assert places.enter("10.0.0.1", STAYS_S / 2) == (None, None)
    assert places.enter("10.0.0.1", STAYS_S) == (STRANGERS_OF_HOST_MAX + 1, first[0])


def test_as_many_owners_as_there_are_places_give_way_by_their_age() -> None:
    places = StrangerPlaces()
    for i in range(STRANGERS_MAX):
        assert places.enter(f"10.0.0.{i}", 0.0)[0]
    assert places.enter("192.0.2.1", STAYS_S / 2) == (None, None)
    assert places.enter("192.0.2.1", STAYS_S) == (STRANGERS_MAX + 1, 1)


def test_tries_of_one_owner_are_few_a_second_and_a_members_are_none() -> None:
    places = StrangerPlaces()

    def n_let_in(n: int, now: float, *, member: bool = False) -> int:
        let_in = 0
        for i in range(n):
            place, _ = places.enter(f"2001:db8::{i:x}", now)
            if place is not None:
                let_in += 1
                places.leave(place)
                if member:
                    places.forgive(f"2001:db8::{i:x}", now)
        return let_in

    assert n_let_in(1000, 0.0, member=True) == 1000
    assert n_let_in(1000, 0.0) == TRIES_BURST
    assert n_let_in(1000, 2.0) == 2 * TRIES_S
    assert n_let_in(1000, 2.0) == 0
    assert places.enter("10.0.0.1", 2.0)[0], "another one's are its own"


def test_what_is_remembered_of_addresses_has_a_bound() -> None:
    places = StrangerPlaces()
    for i in range(2 * ADDRESSES_MAX):
        place, _ = places.enter(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}", 0.0)
        assert place is not None
        places.leave(place)
    assert len(places._left) == ADDRESSES_MAX
    assert not places._of

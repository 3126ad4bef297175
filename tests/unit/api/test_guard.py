"""Which names of this machine are served, and what shows the key."""

from __future__ import annotations

import pytest

from disco_daemon.api.http.guard import ApiConfig, serves, shows

OURS = [
    "localhost", "LOCALHOST", "localhost:4747", "chat.localhost", "a.b.localhost:80", "127.0.0.1", "127.0.0.1:65535",
    "127.255.255.254", "[::1]", "[::1]:4747",
]  # fmt: skip
NOT_OURS = [
    "", "evil.example", "evil@127.0.0.1", "evil:x@127.0.0.1", "127.0.0.1@evil.example", "127.0.0.1/evil",
    "evil\\@127.0.0.1", "127.0.0.1:99999", "127.0.0.1:", "127.0.0.1:80:80", "127.0.0.1.evil.example", "127.0.0.256",
    "127.1", "0x7f.1", "2130706433", "localhost.evil.example", "evillocalhost", ".localhost", "localhost.", "::1",
    "[::1", "[::2]", "[::ffff:127.0.0.1]", "0.0.0.0", "192.168.0.1", "localhost\u0660", "127.0.0.\u0661",
    "\u017fub.localhost.", "localho\u017ft", "127.0.0.1:\u0664", "localhost\n", " localhost", "localhost, evil.example",
]  # fmt: skip


@pytest.mark.parametrize("host", OURS)
def test_names_of_this_machine_are_served(host: str) -> None:
    assert serves(host)


@pytest.mark.parametrize("host", NOT_OURS)
def test_no_other_name_is_and_none_in_disguise(host: str) -> None:
    assert not serves(host)


def test_more_names_are_served_as_they_are_set_and_with_any_port() -> None:
    more = frozenset({"host.docker.internal", "[fd00::1]"})
    assert serves("host.docker.internal", more)
    assert serves("Host.Docker.Internal:4747", more)
    assert serves("[fd00::1]:80", more)
    assert not serves("docker.internal", more)
    assert not serves("host.docker.internal:99999", more)
    assert not serves("evil@host.docker.internal", more)


@pytest.mark.parametrize(
    ("shown", "right"),
    [
        ("Bearer hush", True), ("bearer hush", True), ("BEARER  hush ", True), ("hush", False), ("", False),
        ("Basic hush", False), ("Bearer", False), ("Bearer hush2", False), ("Bearerhush", False), (" hush", False),
        ("Bearer \udcff", False), ("Bearer hushé", False),
    ],
)  # fmt: skip
def test_the_key_needs_its_scheme_in_any_case(shown: str, right: bool) -> None:
    assert shows(shown, "hush") is right


def test_a_key_beyond_ascii_is_compared_as_bytes() -> None:
    assert shows("Bearer pässword", "pässword")
    assert not shows("Bearer p\udcc3ssword", "pässword")


def test_users_are_asked_for_only_where_there_is_neither_key_nor_leave() -> None:
    assert ApiConfig("127.0.0.1", "").asks_users
    assert not ApiConfig("127.0.0.1", "hush").asks_users
    assert not ApiConfig("127.0.0.1", "", any_user=True).asks_users

"""What home says of its layers fills no disk of a machine that lends it hosts: sizes, names, broken fetches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.link.relay.handshake import MAX_MEMORY, FileFollows, SegmentFact
from disco_daemon.link.relay.join import _Fetching
from disco_daemon.link.relay.orders import Address, Identity
from disco_daemon.link.trust.pairing import PairedPartner
from disco_daemon.link.trust.pairing_code import PairingError
from disco_daemon.machines.fleet import lent_segments
from disco_daemon.machines.fleet.lent_segments import LentSegments

HOME = PairedPartner(
    name="desk", own_name="attic", addresses=(Address(host="127.0.0.1", port=1),),
    identity=Identity(certificate="", key="", ca=""),
)  # fmt: skip
BLOCK = 1 << 16
SUM = "0" * 64


class Home:
    """What is fetched: each file has one BLOCK, or breaks off behind one; `most` is what each may have had."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most, self.breaks = folder, list[int](), False

    async def fetch(self, _: object, __: int, path: Path, *, first: int, most_bytes: int) -> None:
        self.most.append(most_bytes)
        if most_bytes < BLOCK:
            raise PairingError("no_space", f"it may have {most_bytes}")
        data = os.urandom(BLOCK)
        if self.breaks:
            path.with_name(f".{path.name}.part").write_bytes(data)
            path.with_name(f".{path.name}.sum").write_text(SUM)
            raise PairingError("closed", f"layers from {first} on did not come")
        path.write_bytes(data)

    def used(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    found = Home(tmp_path)
    monkeypatch.setattr(lent_segments, "fetch", found.fetch)
    monkeypatch.setattr(lent_segments, "CACHE_BYTES", 4 * BLOCK)
    return found


async def take(lender: LentSegments, names: list[str]) -> list[str]:
    """Fetch what home names, as for an offer; return why some did not come."""
    lender.needed, failed = frozenset(names), list[str]()
    for name in names:
        try:
            await lender.have(SegmentFact(1, 2, name))
        except PairingError as e:
            failed.append(e.reason)
    lender.prune(lender.needed)
    return failed


async def test_whatever_home_names_the_layers_take_no_more_than_they_may(home: Home, tmp_path: Path) -> None:
    lender = LentSegments(HOME, tmp_path, lambda _: None)
    assert await take(lender, [f"{i}.gguf" for i in range(4)]) == []
    assert await take(lender, [f"{i}.gguf" for i in range(12)]) == ["no_space"] * 8, "all of them needed at once"
    assert home.used() <= 4 * BLOCK
    for round_ in range(10):
        assert await take(lender, [f"{round_}-{i}.gguf" for i in range(3)]) == [], "others make room"
        assert home.used() <= 4 * BLOCK
    assert max(home.most) <= 4 * BLOCK


async def test_fetches_that_break_off_leave_no_more_than_one_of_what_is_needed(home: Home, tmp_path: Path) -> None:
    lender = LentSegments(HOME, tmp_path, lambda _: None)
    home.breaks = True
    for i in range(20):
        await take(lender, [f"{i}.gguf"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".19.gguf.part", ".19.gguf.sum"]


@pytest.mark.parametrize(
    "name",
    ["../a.gguf", "/etc/a.gguf", ".a.gguf", "a.gguf/", "a.sh", "a\x00.gguf", "a\n.gguf", "..\\a.gguf", "", "." * 9],
)
async def test_a_name_that_leads_elsewhere_is_not_fetched(home: Home, tmp_path: Path, name: str) -> None:
    lender = LentSegments(HOME, tmp_path, lambda _: None)
    assert await take(lender, [name]) == ["no_file"]
    assert not home.most


@pytest.mark.parametrize(
    ("follows", "reason"),
    [
        (FileFollows(n_bytes=1001, sha256=SUM, offset=0), "no_space"),
        (FileFollows(n_bytes=MAX_MEMORY, sha256=SUM, offset=0), "no_space"),
        (FileFollows(n_bytes=10, sha256=SUM, offset=5), "damaged"),
        (FileFollows(n_bytes=10, sha256=SUM, offset=MAX_MEMORY), "damaged"),
        (FileFollows(n_bytes=2, sha256="1" * 64, offset=3), "damaged"),
        (FileFollows(n_bytes=2, sha256="1" * 64, offset=8), "damaged"),
    ],
)
def test_sizes_and_places_that_lie_write_nothing(tmp_path: Path, follows: FileFollows, reason: str) -> None:
    part, note = tmp_path / "part", tmp_path / "sum"
    part.write_bytes(b"as it was")
    note.write_text("1" * 64)
    handle = os.open(part, os.O_RDWR)
    try:
        fetching: Any = _Fetching(HOME, (1, 2), handle, note, 1000)
        with pytest.raises(PairingError) as caught:
            fetching.begin(follows)
        assert caught.value.reason == reason
        assert part.read_bytes() == b"as it was"
    finally:
        os.close(handle)

"""The file with the sums that caps go by stays open: nothing that becomes of it meanwhile loses a sum."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.store.kept_sums import HALF, KeptSums

SHORT: dict[str, Any] = {"usd_per_day": {"booked": {}}}
LONG: dict[str, Any] = {"usd_per_day": {"booked": {f"2026-11-{i:02}": i for i in range(1, 29)}}}


@pytest.fixture
def history(tmp_path: Path) -> Path:
    return tmp_path / "h.db"


def loaded(history: Path) -> dict[str, Any] | None:
    return KeptSums(history).load()


def handles_of(history: Path) -> int:
    """How many handles of this process are of the folder's files, removed ones too; 0 where nobody tells."""
    handles = Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ()
    return sum(os.path.realpath(handle).startswith(str(history.parent.resolve())) for handle in handles)


def test_it_is_opened_once_and_closed_with_its_owner(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_opened, really = 0, os.open

    def counted(*args: Any) -> int:
        nonlocal n_opened
        n_opened += 1
        return really(*args)

    monkeypatch.setattr(os, "open", counted)
    sums = KeptSums(history)
    for n in range(10):
        sums.save(SHORT | {"n": n})
    assert n_opened == 1
    assert loaded(history) == SHORT | {"n": 9}
    n_handles = handles_of(history)
    del sums
    assert sys.platform != "linux" or handles_of(history) == n_handles - 1


def test_shorter_sums_leave_nothing_of_longer_ones(history: Path) -> None:
    sums = KeptSums(history)
    for each in (LONG, LONG, SHORT, SHORT, LONG, SHORT):
        sums.save(each)
        assert loaded(history) == each
    again = KeptSums(history)
    again.load()
    for each in (SHORT, LONG, SHORT, SHORT):
        again.save(each)
        assert loaded(history) == each
    assert sums.path.stat().st_size == 2 * HALF


def removed(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    os.truncate(path, HALF)


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def put_back(path: Path) -> None:
    """Put in its place the copy that a backup has of it."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("meddle", [removed, emptied, cut, moved, put_back])
def test_whatever_becomes_of_the_file_the_next_sums_are_in_the_one_of_that_name(
    meddle: Callable[[Path], None], history: Path
) -> None:
    sums = KeptSums(history)
    sums.save(LONG)
    for n in range(3):
        n_handles = handles_of(history)
        meddle(sums.path)
        sums.save(SHORT | {"n": n})
        assert loaded(history) == SHORT | {"n": n}
        assert handles_of(history) == n_handles, "the old one is closed"


def notes(path: Path) -> None:
    path.write_text("my own notes")


def other_notes(path: Path) -> None:
    path.unlink()
    notes(path)


def link(path: Path) -> None:
    notes(other := path.with_name("notes"))
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("meddle", [notes, other_notes, link])
def test_somebody_elses_file_that_comes_in_its_place_is_left_alone(
    meddle: Callable[[Path], None], history: Path
) -> None:
    sums = KeptSums(history)
    sums.save(LONG)
    meddle(sums.path)
    for _ in range(2):
        with pytest.raises(OSError):
            sums.save(SHORT)
    assert sums.path.read_text() == "my own notes"
    sums.path.unlink()
    sums.save(SHORT)
    assert loaded(history) == SHORT


def test_sums_that_are_written_in_part_are_an_error_and_the_ones_before_stay(
    history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk without room that tells only how much it took."""
    sums, really = KeptSums(history), os.pwrite
    sums.save(LONG)
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda handle, data, at: really(handle, data[:100], at))
        with pytest.raises(OSError):
            sums.save(LONG | {"n": 1})
    assert loaded(history) == LONG
    sums.save(SHORT)
    assert loaded(history) == SHORT

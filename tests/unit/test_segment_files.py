"""The folder of segments: written once, whole or not at all, never more than it may hold."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from disco_daemon.errors import ConfigError
from disco_daemon.models.gguf import read_header
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.models.vocabulary import vocabulary_mark
from disco_daemon.types import LayerRange
from tests.unit.test_segments import model

HALVES = [LayerRange(0, 2, 4), LayerRange(2, 4, 4)]
PLENTY = 1 << 30


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(model(4))
    return path


def test_a_segment_is_written_once_and_used_again(source: Path, tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path / "segments", PLENTY)
    paths = files.write(source, HALVES)
    written = [path.stat().st_ino for path in paths]
    assert all(read_header(path.read_bytes()).whole for path in paths)
    assert [path.stat().st_ino for path in files.write(source, HALVES)] == written
    assert [path.name.split("-")[-2:] for path in paths] == [["0", "2.v2.gguf"], ["2", "4.v2.gguf"]]


def test_below_all_layers_is_the_header_with_the_vocabulary(source: Path, tmp_path: Path) -> None:
    path = SegmentFiles(tmp_path / "segments", PLENTY).write_vocabulary(source)
    whole, found = read_header(source.read_bytes()), read_header(path.read_bytes())
    assert (found.whole, found.tensors, found.keys) == (True, (), whole.keys)
    assert vocabulary_mark(source.read_bytes(), whole) == vocabulary_mark(path.read_bytes(), found)


def test_a_changed_model_gets_segments_of_its_own(source: Path, tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path / "segments", PLENTY)
    before = files.write(source, HALVES)
    source.write_bytes(model(4, tied=False))
    assert not set(before) & set(files.write(source, HALVES))


def test_the_longest_unused_make_room_but_never_those_that_are_needed(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    [old] = SegmentFiles(folder, PLENTY).write(source, [LayerRange(0, 1, 4)])
    os.utime(old, (1, 1))
    paths = SegmentFiles(folder, 1).write(source, HALVES)
    assert not old.exists()
    assert all(path.exists() for path in paths)


def test_a_full_disk_is_told_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - as shutil has it
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 0))
    with pytest.raises(ConfigError, match="are free"):
        SegmentFiles(tmp_path / "segments", PLENTY).write(source, HALVES)
    assert not list((tmp_path / "segments").iterdir())


def test_a_model_cut_short_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    source.write_bytes(source.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="cannot be written"):
        SegmentFiles(tmp_path / "segments", PLENTY).write(source, HALVES)
    assert [path.name.split("-")[-2:] for path in (tmp_path / "segments").iterdir()] == [["0", "2.v2.gguf"]]


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("hello")
    with pytest.raises(ConfigError, match="no GGUF model"):
        SegmentFiles(tmp_path / "segments", PLENTY).write(path, HALVES)


def test_unfinished_files_of_the_dead_and_other_formats_are_removed_at_the_start(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    files = SegmentFiles(folder, PLENTY)
    [path] = files.write(source, HALVES[:1])
    dead, living, old = (
        folder / name for name in (f"{path.name}.4194399.new", f"x.{os.getpid()}.new", "x-0-2.v0.gguf")
    )
    for other in (dead, living, old):
        other.touch()
    files.clean()
    assert sorted(folder.iterdir()) == sorted([path, living])

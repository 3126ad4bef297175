"""The folder of segments: written once, whole or not at all, never more than it may hold."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from disco_daemon.errors import ConfigError
from disco_daemon.models.gguf import joined, read_header, with_shards
from disco_daemon.models.segment_files import SegmentFiles, disk_bytes, read_head
from disco_daemon.models.segments import cut
from disco_daemon.models.vocabulary import vocabulary_mark
from disco_daemon.types import LayerRange
from tests.unit.models.test_segments import model

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


def test_both_ends_name_one_file_for_an_embedding_that_is_the_head_as_well(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    files, ranges = SegmentFiles(folder, PLENTY, one_embedding=True), [LayerRange(0, 1, 4), LayerRange(1, 3, 4)]
    ranges.append(LayerRange(3, 4, 4))
    first, middle, last = files.write(source, ranges)
    assert files.paths(source, ranges) == [first, middle, last]
    whole = [joined(read_header(path.read_bytes()) for path in with_shards([end])) for end in (first, last)]
    plain = [read_header(path.read_bytes()) for path in SegmentFiles(folder, PLENTY).write(source, ranges)]
    for found, one in zip(whole, (plain[0], plain[2]), strict=True):
        assert {t.name: (t.shape, t.packing) for t in found.tensors} == {
            t.name: (t.shape, t.packing) for t in one.tensors
        }
        assert found.number("split.tensors.count") == len(one.tensors)
    [ours], [theirs] = with_shards([first])[1:], with_shards([last])[1:]
    assert ours.samefile(theirs)
    assert not with_shards([middle])[1:]
    ours.unlink()
    files.clean()
    assert files.write(source, ranges) == [first, middle, last]
    assert ours.samefile(theirs), "what is missing is there again"
    data, source_header = source.read_bytes(), read_header(source.read_bytes())
    at = source_header.data_at + next(t.offset for t in source_header.tensors if t.name == "token_embd.weight")
    [tensor] = read_header(ours.read_bytes()).tensors
    begin = read_header(ours.read_bytes()).data_at + tensor.offset
    assert ours.read_bytes()[begin : begin + (tensor.n_bytes or 0)] == data[at : at + (tensor.n_bytes or 0)]


def test_a_file_system_without_hard_links_gets_copies(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    files, ends = SegmentFiles(tmp_path / "segments", PLENTY, one_embedding=True), HALVES
    for _ in range(2):
        [ours], [theirs] = (with_shards([end])[1:] for end in files.write(source, ends))
        assert ours.read_bytes() == theirs.read_bytes()
        assert not ours.samefile(theirs)


def test_a_head_of_its_own_needs_no_second_file(tmp_path: Path) -> None:
    source = tmp_path / "untied.gguf"
    source.write_bytes(model(4, tied=False))
    files = SegmentFiles(tmp_path / "segments", PLENTY, one_embedding=True)
    assert files.write(source, HALVES) == SegmentFiles(tmp_path / "segments", PLENTY).write(source, HALVES)


def test_a_file_with_several_names_takes_its_room_until_the_last_of_them_is_gone(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    ends = SegmentFiles(folder, PLENTY, one_embedding=True).write(source, HALVES)
    seconds = [second for end in ends for second in with_shards([end])[1:]]
    [embedding] = folder.glob("*-embedding*")
    assert disk_bytes([*seconds, embedding]) == disk_bytes([embedding]) == disk_bytes(seconds[:1])
    for path in folder.iterdir():
        os.utime(path, (2, 2))
    os.utime(embedding, (1, 1))  # by all its names
    coming = LayerRange(0, 1, 4)
    n_bytes = cut(*read_head(source), coming).disk_bytes
    bound = (
        disk_bytes(folder.iterdir()) + n_bytes - 3000
    )  # which are freed with the last of the embedding's three names
    [new] = SegmentFiles(folder, bound).write(source, [coming])
    assert disk_bytes(path for path in folder.iterdir() if path != new) + n_bytes <= bound
    assert all(end.exists() for end in ends)

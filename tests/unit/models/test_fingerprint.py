"""The fingerprint of a model is that of its bytes, and is computed once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from disco_daemon.errors import ConfigError
from disco_daemon.models.fingerprint import fingerprint


def test_it_is_the_checksum_of_the_whole_file_whatever_its_name(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"weights" * 1000)
    expected = hashlib.sha256(b"weights" * 1000).hexdigest()
    assert {fingerprint(tmp_path / name, tmp_path / "kept") for name in ("a.gguf", "b.gguf")} == {expected}


def test_it_is_kept_while_the_file_stays_and_computed_again_when_it_changes(tmp_path: Path) -> None:
    model, folder = tmp_path / "a.gguf", tmp_path / "kept"
    model.write_bytes(b"one")
    stat = model.stat()
    first = fingerprint(model, folder)
    model.write_bytes(b"two")
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint(model, folder) == first  # the same size and time: not read again
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert fingerprint(model, folder) == hashlib.sha256(b"two").hexdigest()


def test_a_damaged_record_is_computed_again(tmp_path: Path) -> None:
    model, folder = tmp_path / "a.gguf", tmp_path / "kept"
    model.write_bytes(b"one")
    found = fingerprint(model, folder)
    next(folder.iterdir()).write_text("what")
    assert fingerprint(model, folder) == found


def test_a_model_that_cannot_be_read_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.gguf cannot be read"):
        fingerprint(tmp_path / "gone.gguf", tmp_path)

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disco_tui.data.attach import AttachError, as_attachment


def test_a_text_file_comes_with_its_name_and_in_a_fence(tmp_path: Path) -> None:
    file = tmp_path / "hello.py"
    file.write_text('print("hi")\n')
    assert as_attachment(file) == 'File `hello.py`:\n\n```py\nprint("hi")\n```\n'


def test_the_fence_is_longer_than_any_within(tmp_path: Path) -> None:
    file = tmp_path / "README"
    file.write_text("````md\n```\n````")
    assert as_attachment(file).endswith("\n`````\n````md\n```\n````\n`````\n")


@pytest.mark.parametrize("data", ["\ufeffmärz\r\n".encode(), "märz\r\n".encode("utf-16"), "märz\n".encode()])
def test_byte_order_marks_and_ends_of_lines_are_understood(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(data)
    assert as_attachment(file) == "File `notes.txt`:\n\n```txt\nmärz\n```\n"


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\0\0", b"\xff\xfe\x00", "märz".encode("latin-1"), b"a\0b"])
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(data)
    with pytest.raises(AttachError, match=r"picture\.png is not text"):
        as_attachment(file)


def test_a_file_may_be_as_large_as_allowed_and_no_larger(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"x" * 2048)
    assert "x" * 2048 in as_attachment(file, 2048)
    with pytest.raises(AttachError, match="larger than 1 KiB"):
        as_attachment(file, 2047)


def test_what_is_not_there_or_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("none", "No such file"), ("", "is no file"), ("pipe", "is no file"), ("a\0b", "cannot be read")):
        with pytest.raises(AttachError, match=why):
            as_attachment(tmp_path / name)

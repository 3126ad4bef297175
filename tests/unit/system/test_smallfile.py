"""Files that somebody named: read once, by what was opened, and never waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disco_daemon.errors import ConfigError
from disco_daemon.system import smallfile

ROOT = os.geteuid() == 0


def test_a_small_file_of_one_s_own_is_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("hush\n", "utf-8")
    file.chmod(0o600)
    assert smallfile.read_text(file, hidden=0o077) == "hush\n"
    link = tmp_path / "link"
    link.symlink_to(file)
    assert smallfile.read_text(link, hidden=0o077) == "hush\n", "a link is looked at where it leads"


@pytest.mark.parametrize(
    ("mode", "hidden", "mend"),
    [(0o640, 0o077, "chmod 600"), (0o604, 0o077, "chmod 600"), (0o646, 0o002, "chmod o-w")],
)
def test_what_others_may_touch_is_refused_with_the_mend(tmp_path: Path, mode: int, hidden: int, mend: str) -> None:
    file = tmp_path / "named"
    file.write_text("text", "utf-8")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=mend):
        smallfile.read_text(file, "device.chat_template ", hidden=hidden)
    assert smallfile.read_text(file) == "text", "where nobody's eyes matter"


def test_a_template_may_be_read_by_all_and_written_by_a_group_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}", "utf-8")
    file.chmod(0o664)
    assert smallfile.read_text(file, hidden=0o002) == "{{ messages }}"


@pytest.mark.skipif(not ROOT, reason="only root can give a file away")
def test_another_user_s_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("theirs", "utf-8")
    file.chmod(0o600)
    os.chown(file, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to another user"):
        smallfile.read_text(file, hidden=0o077)


def test_what_is_too_long_or_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "long"
    file.write_bytes(b"x" * (smallfile.MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="longer than 65536 bytes"):
        smallfile.read_text(file)
    file.write_bytes(b"x" * smallfile.MAX_BYTES)
    assert len(smallfile.read_text(file)) == smallfile.MAX_BYTES
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="no text file"):
        smallfile.read_text(file)


@pytest.mark.parametrize("special", ["/dev/zero", "/dev/null", "/dev/full", "/dev/tty", "/"])
def test_devices_and_folders_are_an_error_at_once(special: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        smallfile.read_text(Path(special))


def test_nobody_waits_for_a_pipe_or_a_socket(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a pipe"):
        smallfile.read_text(tmp_path / "pipe", "server.api_key_file ")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        smallfile.read_text(tmp_path / "none")


def test_an_open_file_is_closed_again_where_it_is_refused(tmp_path: Path) -> None:
    def n_open() -> int:
        return len(list(Path("/dev/fd").iterdir()))

    os.mkfifo(tmp_path / "pipe")
    before = n_open()
    for _ in range(3):
        with pytest.raises(OSError, match="not a regular file"):
            smallfile.open_regular(tmp_path / "pipe")
    assert n_open() == before

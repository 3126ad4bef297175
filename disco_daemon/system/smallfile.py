"""Files that a user names: opened once, checked by that descriptor, and read from it.

A path may name anything: a pipe that never says a word, `/dev/zero`, another user's file, or one that is exchanged
between a look and a read. None of them may hang a program, fill its memory, or be taken for what it is not.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import ConfigError

MAX_BYTES = 64 * 1024  # of a key or a template; the longest known template has 20 kB
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; other kinds of files are not waited for. Raises OSError."""
    handle = os.open(path, _FLAGS)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    kind = next((kind for is_one, kind in _KINDS if is_one(mode)), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")


def read_text(path: Path, name: str = "", *, max_bytes: int = MAX_BYTES, hidden: int = 0) -> str:
    """Return the text of a small file; errors call it `name`, such as its setting. Raises ConfigError with the mend.

    With `hidden` it must be this user's (or root's) own, without those bits of its mode: 0o077 for a secret, 0o002 for
    a file that no other user may write.
    """
    try:
        with open_regular(path) as file:
            if hidden:
                _require_own(os.fstat(file.fileno()), f"{name}{path}", path, hidden)
            data = file.read(max_bytes + 1)
    except OSError as e:
        raise ConfigError(f"{name}{path} cannot be read: {e.strerror or e}") from e
    if len(data) > max_bytes:
        msg = f"{name}{path} is longer than {max_bytes} bytes: it is another file than the one that is meant"
        raise ConfigError(msg)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{name}{path} is no text file") from e


def _require_own(seen: os.stat_result, named: str, path: Path, hidden: int) -> None:
    if seen.st_uid not in (os.geteuid(), 0):
        msg = f"{named} belongs to another user ({seen.st_uid}): run `chown $(id -un) {path}`, or name a file of yours"
        raise ConfigError(msg)
    if stat.S_IMODE(seen.st_mode) & hidden:
        how, mend = ("readable", "600") if hidden & 0o044 else ("writable", "o-w")
        raise ConfigError(f"{named} is {how} by others: run `chmod {mend} {path}`")

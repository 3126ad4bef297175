"""A small file beside the history, with the sums that caps go by: they outlive a history that cannot be read.

It is written in place, each time into the other half of it, so that one of them is always whole, and so that a full
disk has room for it. It is not synchronised: a process that ends loses nothing, a power cut the last seconds. It is
written with each request that costs something, and stays open: to open it and look whose it is takes twenty times as
long as to ask whether it is still the same one.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HALF = 16 * 1024  # bytes; the sums of 40 days and months have 5 kB
_encode = json.JSONEncoder(allow_nan=False).encode
_BEGIN = "disco sums"  # of each half; a file that begins otherwise is somebody else's


class KeptSums:
    """The file. Its one owner is the daemon that has claimed the history at `history`."""

    def __init__(self, history: Path) -> None:
        self.path = history.with_name(f"{history.name}.sums")
        self._name = str(self.path)
        self._n = 0
        self._handle = -1
        self._of: tuple[int, ...] = ()  # the file of the handle, as it was written last
        self._filled = [HALF, HALF]  # bytes of each half that are not known to be zeros
        self._close: Callable[[], object] = _nothing

    def load(self) -> dict[str, Any] | None:
        """Return what was saved last; None if nothing was. Raises OSError, ValueError where no half is whole."""
        try:
            handle = self._open(os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            data = os.pread(handle, 2 * HALF, 0)
        finally:
            os.close(handle)
        if not data.strip(b"\0"):
            return None
        halves = [found for half in (data[:HALF], data[HALF:]) if (found := _whole(half)) is not None]
        if not halves:
            raise ValueError(f"{self.path} is damaged")
        self._n, sums = max(halves, key=lambda half: half[0])
        return sums

    def save(self, sums: Mapping[str, Any]) -> None:
        """Write the sums into the half that is older. Raises OSError; ValueError for more than it has room for."""
        text = _encode(sums).encode()
        half = b"%s %d %d %s\n" % (_BEGIN.encode(), self._n + 1, zlib.crc32(text), text)
        if len(half) > HALF:
            raise ValueError(f"{len(half)} bytes of sums")
        if not self._is_the_same():
            self._reopen()
        which = (self._n + 1) % 2
        before, self._filled[which] = self._filled[which], HALF
        if os.pwrite(self._handle, padded := half.ljust(before, b"\0"), HALF * which) < len(padded):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._name)
        self._filled[which] = len(half)
        self._n += 1

    def _is_the_same(self) -> bool:
        """Whether the file that is open is the one that has the name, and nobody has cut it or put another there."""
        if self._handle < 0:
            return False
        try:
            return _identity(os.lstat(self._name)) == self._of
        except FileNotFoundError:
            return False

    def _reopen(self) -> None:
        """Open the file, with room for both halves while there is some. Raises OSError."""
        self._close()
        self._handle = -1
        handle = self._open(os.O_RDWR | os.O_CREAT)
        self._close = weakref.finalize(self, os.close, handle)
        if os.fstat(handle).st_size < 2 * HALF:
            os.pwrite(handle, bytes(2 * HALF), 0)
        self._of, self._filled = _identity(os.fstat(handle)), [HALF, HALF]
        self._handle = handle

    def _open(self, flags: int) -> int:
        """Open it; raises OSError, also for what is not a file of ours."""
        handle = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        head = os.pread(handle, len(_BEGIN), 0) if stat.S_ISREG(os.fstat(handle).st_mode) else b"?"
        if head.strip(b"\0") and head != _BEGIN.encode():
            other = os.pread(handle, len(_BEGIN), HALF)
            if other != _BEGIN.encode():
                os.close(handle)
                raise OSError(0, "it is somebody else's file", str(self.path))
        return handle


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_mode, found.st_size


def _nothing() -> None:
    """Nothing is open yet."""


def _whole(half: bytes) -> tuple[int, dict[str, Any]] | None:
    """Return the number and the sums of a half that is whole."""
    try:
        begin, number, check, text = half.rstrip(b"\0").decode().replace(_BEGIN, "sums", 1).split(" ", 3)
        if begin != "sums" or int(check) != zlib.crc32(text.rstrip("\n").encode()):
            return None
        sums = json.loads(text)
        return (int(number), sums) if isinstance(sums, dict) else None
    except ValueError:
        return None

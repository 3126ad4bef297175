"""Claims a history for one daemon: of two, each would keep half of the books, and both would save what they learned."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import ConfigError
from ..system.sqlitefile import ForeignFileError, require_ours
from .migrations import HISTORY

_log = logging.getLogger("disco.store")

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_LONGEST = 32  # bytes; the number of a process is shorter
_OURS = re.compile(rb"\d{0,20}")  # the content of a daemon's lock file


@contextmanager
def claimed(history: Path) -> Iterator[None]:
    """Hold this history for this process; the lock ends with the process, however that ends.

    Raises ConfigError if another daemon holds it. If no lock is possible, it only logs that: the file is no history,
    the disk cannot be written, or its file system has no locks.
    """
    handle = _opened(history)
    try:
        if handle is not None:
            _take(handle, history)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _opened(history: Path) -> int | None:
    """Open the lock file; return None, and log it, if that fails or if the file is not ours."""
    path = history.with_name(f"{history.name}.lock")
    try:
        require_ours(history, HISTORY)  # else nothing is written, and nothing needs a lock
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except ForeignFileError:
        return None
    except OSError as e:
        _log.warning("history: %s cannot be written (%s): nothing keeps a second daemon from it", path, e.strerror)
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode) and _OURS.fullmatch(os.pread(handle, _LONGEST, 0)):
        return handle
    os.close(handle)
    _log.warning("history: %s is somebody else's file and left alone: nothing keeps a second daemon from it", path)
    return None


def _take(handle: int, history: Path) -> None:
    """Lock the file, and write our process id into it. Raises ConfigError."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in _TAKEN:
            raise ConfigError(_whose(handle, history)) from e
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)


def _whose(handle: int, history: Path) -> str:
    pid = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    who = f" (it is process {pid})" if pid else ""
    return (
        f"another disco daemon is running and has the history {history}{who}: end that first, or give this one its own "
        "(`disco up --history FILE --port N`)"
    )

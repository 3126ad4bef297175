"""One daemon a history: two would each keep half of the books, and both write what was learned."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import ConfigError

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def claimed(history: Path) -> Iterator[None]:
    """Hold this history for this process; the lock ends with the process, however that ends.

    Raises ConfigError if another daemon holds it. Some network file systems know no locks: then nobody is refused.
    """
    path = history.with_name(f"{history.name}.lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        msg = f"{path} cannot be written: {e.strerror}; give another history.path"
        raise ConfigError(msg) from e
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in _TAKEN:
                raise ConfigError(_whose(handle, history)) from e
        with suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


def _whose(handle: int, history: Path) -> str:
    pid = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    who = f"the process {pid}" if pid else "another process"
    return (
        f"a daemon runs already on {history} ({who}): end it first, or give this one a history of its own "
        "(`disco up --history FILE --port N`)"
    )

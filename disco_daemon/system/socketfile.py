"""The daemon's Unix socket: where it is, how it is made, and how a client finds it.

It is named by the TCP port of the same daemon, `disco/PORT.sock`, in a folder that only this user may enter: in
XDG_RUNTIME_DIR, or else in the state folder. Never in a shared temporary one, where another user could make it first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

NAME = "disco"
MAX_PATH = 103  # bytes of the socket's path; macOS has room for no more, Linux for 107
LOCK = "sockets.lock"
LOCK_TIMEOUT_S = 5.0  # for another daemon that makes or removes its socket: microseconds
LOCK_LOOK_S = 0.02  # between two looks at the lock
BACKLOG = 128  # connections that wait to be taken


class SocketFileError(Exception):
    """No socket can be made; the message says why, and what to do."""


class SocketTakenError(SocketFileError):
    """A living daemon has the socket of this port."""


def is_private(path: Path, *, kind: int = stat.S_IFDIR) -> bool:
    """Whether a path is a folder (or another `kind` of file) of this user that no other user may use."""
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def folders(env: Mapping[str, str] | None = None) -> list[Path]:
    """Return the folders where a socket may be, the best place first. They may be missing."""
    env = os.environ if env is None else env
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if not runtime and sys.platform == "linux":  # as in a cron job, beside a service that has one
        runtime = f"/run/user/{os.geteuid()}"
    found = [Path(runtime) / NAME] if runtime and is_private(Path(runtime)) else []
    return [*found, platformdirs.user_state_path(NAME)]


def found(port: int, env: Mapping[str, str] | None = None) -> Path | None:
    """Return the socket of a living daemon of this user on that port; None if there is none.

    To look is to knock: a service manager that holds the socket starts the daemon.
    """
    for folder in folders(env):
        path = folder / f"{port}.sock"
        if is_private(folder) and is_private(path, kind=stat.S_IFSOCK) and _lives(path):
            return path
    return None


def _lives(path: Path) -> bool:
    """Whether a program listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocking:
        knocking.setblocking(False)
        try:
            knocking.connect(str(path))
        except BlockingIOError:
            return True  # so many are waiting that there is no room for us
        except OSError:
            return False
    return True


@contextmanager
def listening(port: int, env: Mapping[str, str] | None = None) -> Iterator[socket.socket]:
    """Listen at the socket of the daemon on that port; at the end its file is removed.

    Blocks for at most LOCK_TIMEOUT_S. Raises SocketTakenError, SocketFileError.
    """
    path = place(port, env)
    try:
        with _locked(path.parent):
            if _lives(path):
                raise SocketTakenError(f"another daemon of yours has {path}: end it, or take another port (--port)")
            path.unlink(missing_ok=True)
            made = _bound(path)
            own = _identity(path)
    except OSError as e:
        raise SocketFileError(f"{path} cannot be made: {e.strerror or e}") from e
    try:
        yield made
    finally:
        made.close()
        with suppress(OSError, SocketFileError), _locked(path.parent):
            if _identity(path) == own:  # not that of a daemon that came after us
                path.unlink()


def _identity(path: Path) -> tuple[int, ...]:
    """Return the identity of a file; its number alone may be given to the next one."""
    there = path.lstat()
    return there.st_dev, there.st_ino, there.st_mtime_ns


def place(port: int, env: Mapping[str, str] | None = None) -> Path:
    """Return the place for the socket of a daemon on that port, in an existing folder. Raises SocketFileError."""
    why = []
    for folder in folders(env):
        path = folder / f"{port}.sock"
        if len(os.fsencode(path)) > MAX_PATH:
            why.append(f"{path} is longer than the {MAX_PATH} bytes that the name of a socket may have")
        elif problem := _made(folder):
            why.append(problem)
        else:
            return path
    mend = "give a short folder of your own, with mode 0700, as XDG_RUNTIME_DIR"
    raise SocketFileError(f"{'; '.join(why)}: {mend}")


def _made(folder: Path) -> str:
    """Make the folder private, if it is ours; return what is wrong with it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(0o700)
    except OSError as e:
        return f"{folder} cannot be used: {e.strerror or e}"
    return "" if is_private(folder) else f"{folder} is not yours alone"


def _bound(path: Path) -> socket.socket:
    """Return a listening socket at `path`, which is free. The folder is ours alone, also until its mode is set."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(str(path))
        path.chmod(0o600)
        made.listen(BACKLOG)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises OSError when another process keeps it for LOCK_TIMEOUT_S."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as e:
                if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    break  # some network file systems know no locks
                if time.monotonic() > until:
                    raise
            time.sleep(LOCK_LOOK_S)
        yield
    finally:
        os.close(handle)

"""A file that is being downloaded: it grows at its end under a lock, and gets its name once it is checked."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import ConfigError
from .quants import RemoteFile

PREFIX = ".pull-"  # of incomplete files in the models folder
KEPT_S = 30 * 86400.0  # behind its last byte a part is kept: nobody goes on with an older one
CHUNK = 1 << 20  # bytes hashed at a time
_SHA256_DIGITS = 64


class PartTooLong(Exception):
    """The server sends more than the file's size."""


class Part:
    """The present part of `file` in `folder`; a context that locks it."""

    def __init__(self, file: RemoteFile, folder: Path, report: Callable[[int], None]) -> None:
        self.file = file
        self.path = path_of(file, folder)
        self._report = report

    def __enter__(self) -> Self:
        self._handle = _locked(self.path, self.file.name)
        self.n_bytes = os.lseek(self._handle, 0, os.SEEK_END)
        if self.n_bytes > self.file.n_bytes:
            self.restart()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._handle)

    @property
    def whole(self) -> bool:
        """Whether the part has the file's full size."""
        return self.n_bytes == self.file.n_bytes

    def restart(self) -> None:
        """Drop all bytes. Raises OSError."""
        os.ftruncate(self._handle, 0)
        self.n_bytes = os.lseek(self._handle, 0, os.SEEK_SET)

    def write(self, chunk: bytes) -> None:
        """Append bytes. Raises OSError, and PartTooLong before it writes."""
        if self.n_bytes + len(chunk) > self.file.n_bytes:
            raise PartTooLong
        rest = memoryview(chunk)
        while rest:
            n = os.write(self._handle, rest)
            rest = rest[n:]
            self.n_bytes += n
        self._report(self.n_bytes)

    def finish(self, target: Path) -> bool:
        """Rename the part if its checksum is right, else remove it; return whether it was right.

        Raises OSError, and ConfigError if another file has got the name meanwhile; then the part stays.
        """
        os.lseek(self._handle, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._handle), "rb") as source:
            right = _is_right(source.read, self.file)
        if not right:
            self.path.unlink()
            return False
        os.fsync(self._handle)
        try:
            _name(self.path, target)
        except FileExistsError as e:
            if not is_same(target, self.file):
                msg = f"{target} has come meanwhile, and is another file: move it away, then pull again"
                raise ConfigError(msg) from e
            self.path.unlink()
        return True


class NameLock:
    """A context in which nobody else fetches a file of that name into `folder`, whatever its checksum."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._path = folder / f"{PREFIX}name-{hashlib.sha256(name.encode()).hexdigest()[:24]}"

    def __enter__(self) -> None:
        self._handle = _locked(self._path, self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._handle)


def _locked(path: Path, name: str) -> int:
    """Open the file at `path` and lock it; return its handle. Raises ConfigError where another fetch has it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
                return handle
            os.close(handle)  # who had it before has removed it meanwhile
        except BlockingIOError as e:
            os.close(handle)
            raise _is_fetched(name) from e


def drop_old(folder: Path, now: float | None = None) -> None:
    """Remove what fetches left in `folder` that nobody has gone on with for KEPT_S. What cannot be removed stays."""
    now = time.time() if now is None else now
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError, ConfigError):
            if path.is_symlink() or now - path.stat().st_mtime < KEPT_S:
                continue
            handle = _locked(path, path.name)
            try:
                if now - os.fstat(handle).st_mtime >= KEPT_S:
                    path.unlink()
            finally:
                os.close(handle)


def _is_fetched(name: str) -> ConfigError:
    return ConfigError(f"another `disco models pull` is fetching {name}: let it end first")


def path_of(file: RemoteFile, folder: Path) -> Path:
    """Return the path of a part, named by the checksum, so that a later pull finds it again."""
    return folder / f"{PREFIX}{(file.digest or file.version)[:24]}"


def _name(path: Path, target: Path) -> None:
    """Rename a file, but never over another one, as `rename` does. Raises FileExistsError, and OSError."""
    if target.is_symlink() and not target.exists():
        target.unlink()  # it leads nowhere
    try:
        os.link(path, target)
    except FileExistsError:
        raise
    except OSError:  # exFAT, for one, knows no links
        os.close(os.open(target, os.O_CREAT | os.O_EXCL))
        try:
            path.replace(target)
        except OSError:
            target.unlink()
            raise
    else:
        path.unlink()


def is_same(path: Path, file: RemoteFile) -> bool:
    """Whether the file at `path` has the size and checksum of `file`, or that size if none is known. Raises OSError."""
    if path.stat().st_size != file.n_bytes:
        return False
    with path.open("rb") as source:
        return _is_right(source.read, file)


def _is_right(read: Callable[[int], bytes], file: RemoteFile) -> bool:
    return not file.digest or _checksum(read, file) == file.digest


def _checksum(read: Callable[[int], bytes], file: RemoteFile) -> str:
    """Return the checksum in hex, of the kind of `file.digest`."""
    if len(file.digest) == _SHA256_DIGITS:
        digest = hashlib.sha256()
    else:  # a git blob; its SHA-1 comes from the hub, and guards against damage, not against the hub
        digest = hashlib.sha1(b"blob %d\0" % file.n_bytes, usedforsecurity=False)
    while chunk := read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()

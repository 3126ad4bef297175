"""A folder that only this user may enter, with small files that are whole or not there: keys and who is paired."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from ...plain import reason_of
from .pairing_code import PairingError

T = TypeVar("T")


class PrivateFolder:
    """The folder at `path`, which is made by the first write, with mode 0700; files have 0600."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str, kind: type[T]) -> T | None:
        """Return what a JSON file has; None if it is missing. Raises PairingError if it is damaged."""
        data = self.read_bytes(name)
        try:
            return None if data is None else msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as e:
            raise self._damaged(name, str(e)) from e

    def read_bytes(self, name: str) -> bytes | None:
        """Return the bytes of a file; None if it is missing. Raises PairingError."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise self._damaged(name, reason_of(e)) from e

    def write(self, name: str, value: object) -> None:
        """Write a JSON file. Raises PairingError."""
        self.write_bytes(name, msgspec.json.encode(value))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file: by another name first, so that a power cut leaves the old one. Raises PairingError."""
        target = self.path / name
        part = target.with_name(f".{name}.part")
        try:
            part.unlink(missing_ok=True)
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except OSError as e:
            msg = f"{target} cannot be written: {e.strerror or e}"
            raise PairingError("no_file", msg) from e

    def remove(self, *names: str) -> None:
        """Remove files, if they are there."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let nobody else change anything meanwhile; others need milliseconds. Raises PairingError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            msg = f"{self.path} cannot be used: {e.strerror or e}"
            raise PairingError("no_file", msg) from e
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _damaged(self, name: str, why: str) -> PairingError:
        msg = f"{self.path / name} is damaged ({why}): remove the folder and pair the machines again"
        return PairingError("no_file", msg)

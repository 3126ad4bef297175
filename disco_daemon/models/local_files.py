"""A model file of this machine, as what is fetched: checked, copied into the folder of models, and gone on with."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..errors import ConfigError
from .gguf import shard_names
from .part import CHUNK, Part, PartTooLong
from .quants import RemoteFile, Variant, label


class LocalFiles:
    """The parts of the model whose first file is at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._stamps: dict[str, tuple[int, int]] = {}  # by path, as it was read for its checksum

    def variants(self) -> list[Variant]:
        """Return the model, once all its parts have been read for their checksums. Raises OSError and ConfigError."""
        files = [self._path.with_name(name) for name in shard_names(self._path.name)]
        return [Variant(label(self._path.name), tuple(map(self._described, files)))]

    def fetch(self, part: Part) -> None:
        """Copy all of `part.file` that is missing. Raises OSError, and ConfigError for a file that is being written."""
        path = Path(part.file.path)
        try:
            with path.open("rb") as source:
                source.seek(part.n_bytes)
                while chunk := source.read(CHUNK):
                    part.write(chunk)
            self._require_unchanged(path)
        except (PartTooLong, ConfigError) as e:
            part.path.unlink()  # nothing will have its checksum again
            raise _being_written(path) from e

    def _described(self, path: Path) -> RemoteFile:
        self._stamps[str(path)] = stamp = _stamp(path)
        with path.open("rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()
        self._require_unchanged(path)
        return RemoteFile(str(path), stamp[0], digest)

    def _require_unchanged(self, path: Path) -> None:
        if _stamp(path) != self._stamps[str(path)]:
            raise _being_written(path)


def _stamp(path: Path) -> tuple[int, int]:
    """Return the size in bytes, and when it was written last, in ns."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _being_written(path: Path) -> ConfigError:
    return ConfigError(f"{path} is being written by another program: let that end, then pull again")

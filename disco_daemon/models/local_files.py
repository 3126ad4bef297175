"""A model file of this machine, as what is fetched: checked, copied into the folder of models, and gone on with."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .gguf import shard_names
from .part import CHUNK, Part
from .quants import RemoteFile, Variant, label


class LocalFiles:
    """The parts of the model whose first file is at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def variants(self) -> list[Variant]:
        """Return the model, once all its parts have been read for their checksums. Raises OSError."""
        files = [self._path.with_name(name) for name in shard_names(self._path.name)]
        return [Variant(label(self._path.name), tuple(map(_described, files)))]

    def fetch(self, part: Part) -> None:
        """Copy all of `part.file` that is missing. Raises OSError, and PartTooLong for a file that grows."""
        with Path(part.file.path).open("rb") as source:
            source.seek(part.n_bytes)
            while chunk := source.read(CHUNK):
                part.write(chunk)


def _described(path: Path) -> RemoteFile:
    with path.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    return RemoteFile(str(path.absolute()), path.stat().st_size, digest)

"""The files of segments: written once from a model's file, whole or not at all, and kept in a bounded folder."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import psutil

from ..errors import ConfigError
from ..types import LayerRange
from .gguf import Header, with_shards
from .gguf_file import read_file_header
from .segments import (
    FORMAT,
    ExitTensor,
    FileSpan,
    GivenBytes,
    NotCuttableError,
    Segment,
    cut,
    cut_embedding,
    has_one_embedding,
)
from .vocabulary import vocabulary_file

SPARE_BYTES = 256 << 20  # left free on the disk for everything else
CHUNK_BYTES = 8 << 20  # copied at a time where the file system cannot copy by itself
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # of link: each name is a copy
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # of copy_file_range: copy by hand


class SegmentFiles:
    """The segments of models in `folder`, at most `max_bytes` of them, the latest used.

    Where the embedding is the output head as well, a process with the first range and the last one would have it in
    memory twice. With `one_embedding` it is in one file that both name, by hard links, and so in memory once: such a
    range is two files, the first of which stands for both, as of any model in several parts.
    """

    def __init__(self, folder: Path, max_bytes: int, *, one_embedding: bool = False) -> None:
        self._folder, self._max_bytes, self._one_embedding = folder, max_bytes, one_embedding
        self._has_one: dict[str, bool] = {}  # by the beginning of the names of a model's segments

    def clean(self) -> None:
        """Remove unfinished files of processes that are gone, and those of other formats; for the start."""
        for path in self._folder.glob("*.new"):
            pid = path.suffixes[-2].removeprefix(".") if len(path.suffixes) > 1 else ""
            if not (pid.isdigit() and psutil.pid_exists(int(pid))):
                path.unlink(missing_ok=True)
        for path in self._folder.glob("*.gguf"):
            if not path.name.endswith((_SUFFIX, *_PARTS)):
                path.unlink(missing_ok=True)

    def of_model(self, model: Path) -> list[Path]:
        """Return the segments of a model as its file is now. Raises OSError if there is none."""
        return sorted(self._folder.glob(f"{glob.escape(_stem(model))}-*"))

    def paths(self, model: Path, ranges: Iterable[LayerRange]) -> list[Path]:
        """Return where the files of a model's ranges are, or will be. Raises OSError if there is no model."""
        stem = _stem(model)
        if self._one_embedding and stem not in self._has_one:
            self._has_one[stem] = has_one_embedding(read_head(model)[1])
        shares = self._has_one.get(stem, False)
        suffixes = (
            (layers, _PARTS[0] if shares and layers.is_first is not layers.is_last else _SUFFIX) for layers in ranges
        )
        return [self._folder / f"{stem}-{layers}{suffix}" for layers, suffix in suffixes]

    def write(self, model: Path, ranges: Iterable[LayerRange]) -> list[Path]:
        """Return the files of a model's ranges, in order; those that are missing are written.

        Raises ConfigError, with the reason, if the model cannot be cut, or if there is no room.
        """
        head, header = read_head(model)
        ranges = list(ranges)
        paths = self.paths(model, ranges)
        with _cutting(model):
            placed = [
                (cut(head, header, layers, apart=_is_part(path)), path)
                for layers, path in zip(ranges, paths, strict=True)
            ]
            if any(map(_is_part, paths)):
                placed.append((cut_embedding(header), self._embedding(model)))
        self._place(model, placed)
        return paths

    def write_exit(
        self, model: Path, layers: LayerRange, exit_: Mapping[str, ExitTensor], calibration: str = ""
    ) -> Path:
        """Return the file of a model's first range with an exit, as `cut` takes both; written if it is missing.

        Raises ConfigError, with the reason, if the exit is not of this model, or if there is no room.
        """
        digest = hashlib.sha256(calibration.encode())
        for name, tensor in sorted(exit_.items()):
            digest.update(f"{name} {tensor.shape} {tensor.packing} ".encode() + tensor.data)
        head, header = read_head(model)
        path = self._folder / f"{_stem(model)}-{layers}-exit-{digest.hexdigest()[:12]}{_SUFFIX}"
        with _cutting(model):
            segment = cut(head, header, layers, exit_, calibration)
        self._place(model, [(segment, path)])
        return path

    def write_vocabulary(self, model: Path) -> Path:
        """Return the file of what is below a model's first layer: its vocabulary; written if it is missing.

        Raises ConfigError if there is no room.
        """
        head, header = read_head(model)
        path = self._folder / f"{_stem(model)}-vocabulary{_SUFFIX}"
        self._place(model, [(Segment(vocabulary_file(head, header), ()), path)])
        return path

    def _embedding(self, model: Path) -> Path:
        return self._folder / f"{_stem(model)}-embedding{_SUFFIX}"

    def _place(self, model: Path, placed: Sequence[tuple[Segment, Path]]) -> None:
        """Write those segments of a model that are not at their paths yet. Raises ConfigError."""
        seconds = [second for _, path in placed if _is_part(path) for second in with_shards([path])[1:]]
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            missing = [(segment, path) for segment, path in placed if not path.exists()]
            self._make_room(
                sum(segment.disk_bytes for segment, _ in missing), {*seconds, *(path for _, path in placed)}
            )
            for segment, path in missing:
                _write(model, segment, path)
            for second in seconds:
                _link(self._embedding(model), second)
            for _, path in placed:
                os.utime(path)  # used now: the latest are kept
        except OSError as e:
            raise ConfigError(f"the segments of {model.name} cannot be written to {self._folder}: {e.strerror}") from e

    def _make_room(self, n_bytes: int, needed: set[Path]) -> None:
        """Remove the segments that were not used for longest, but for the `needed` ones. Raises ConfigError."""
        kept = sorted(self._folder.glob("*.gguf"), key=lambda path: path.stat().st_mtime)
        for path in list(kept):
            if disk_bytes(kept) + n_bytes <= self._max_bytes:
                break
            if path not in needed:
                path.unlink(missing_ok=True)
                kept.remove(path)
        free = shutil.disk_usage(self._folder).free
        if n_bytes and free < n_bytes + SPARE_BYTES:
            msg = (
                f"the segments take {n_bytes / 1e9:.1f} GB in {self._folder}, where {free / 1e9:.1f} GB are free: "
                "free some, or delete that folder: what is needed of it is written again"
            )
            raise ConfigError(msg)


_SUFFIX = f".v{FORMAT}.gguf"
_PARTS = tuple(f".v{FORMAT}-0000{number}-of-00002.gguf" for number in (1, 2))  # as llama.cpp names them


def read_head(model: Path) -> tuple[bytes, Header]:
    """Return the first bytes of a model's file, with its whole header. Raises ConfigError."""
    try:
        with model.open("rb") as file:
            return read_file_header(file)
    except OSError as e:
        raise ConfigError(f"{model} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"{model} is no GGUF model: {e}") from e


def _stem(model: Path) -> str:
    """Return the beginning of the names of a model's segments; it changes with the file."""
    stat = model.stat()
    told = f"{model.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    return f"{model.stem}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def disk_bytes(paths: Iterable[Path]) -> int:
    """Return what files take of a disk that knows holes; one with several names counts once. Raises OSError."""
    stats = {(stat.st_dev, stat.st_ino): stat for stat in (path.stat() for path in paths)}
    return sum(stat.st_blocks * 512 for stat in stats.values())


def _is_part(path: Path) -> bool:
    return path.name.endswith(_PARTS[0])


@contextmanager
def _cutting(model: Path) -> Iterator[None]:
    """Raise ConfigError if a model cannot be cut."""
    try:
        yield
    except NotCuttableError as e:
        raise ConfigError(f"{model.name} cannot be cut into ranges of layers: {e}") from e


def _link(source: Path, path: Path) -> None:
    """Let a file have another name, or a copy where the file system gives each only one. Raises OSError."""
    if path.exists() and path.samefile(source):
        return
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        unfinished.hardlink_to(source)
    except OSError as e:
        if e.errno not in _NO_LINKS:
            raise
        if path.exists() and path.stat().st_size == source.stat().st_size:
            return
        shutil.copyfile(source, unfinished)
    unfinished.replace(path)


def _write(model: Path, segment: Segment, path: Path) -> None:
    """Write a segment whole or not at all. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with model.open("rb") as source, unfinished.open("xb") as target:
            target.write(segment.header)
            at = len(segment.header)
            for piece in segment.pieces:
                match piece:
                    case FileSpan():
                        _copy(source, piece, target, at)
                    case GivenBytes(data):
                        target.seek(at)
                        target.write(data)
                at += piece.n_bytes
            target.truncate(at)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _copy(source: BinaryIO, piece: FileSpan, target: BinaryIO, at: int) -> None:
    """FileSpan a piece to the offset `at`; the file system does it alone where it can."""
    target.flush()
    done = 0
    try:
        while done < piece.n_bytes and hasattr(os, "copy_file_range"):
            n = os.copy_file_range(
                source.fileno(), target.fileno(), piece.n_bytes - done, piece.offset + done, at + done
            )
            if n == 0:
                break
            done += n
    except OSError as e:
        if e.errno not in _NO_COPY:
            raise
    source.seek(piece.offset + done)
    target.seek(at + done)
    while done < piece.n_bytes:
        data = source.read(min(CHUNK_BYTES, piece.n_bytes - done))
        if not data:
            raise OSError(errno.EIO, "the model's file ends within its weights")
        target.write(data)
        done += len(data)
    target.seek(at + piece.n_bytes)

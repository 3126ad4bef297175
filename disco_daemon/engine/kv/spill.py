"""Conversations on disk: the KV cache's content for each in a file, so that they outlive the engine process.

A file holds a text's token ids, keys and values: reading it is reading the conversation. So the folder is the user's
alone (0700, files 0600). A file is written whole or not at all; one that is damaged, or made by another model, build
or rounding, is removed and never used. Nothing is synced: a file torn by a power cut has a wrong checksum.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import shutil
import struct
import threading
import time
import zlib
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from ..llama.state import State
from ..wire import Load
from .sorted_texts import SortedTexts, text_key, tokens_in_common

MAGIC = b"discokv1"  # and the version of the format
MAX_QUEUED_BYTES = 64 * 2**20  # of texts that wait to be written; one text may always wait, however large
MAX_LEFT = 256  # texts that are not written yet
SPARE_DISK_BYTES = 2**30  # what is left free on a disk
LEAST_GAIN = 32  # tokens that must be saved before a file is read
FIRST_READ_S_PER_BYTE = 2e-9  # a slow SSD; measured from the first read on
NEWEST = 0.3  # weight of the newest read
POLL_S = 0.05  # between two looks at whether a file is written
# MAGIC, fingerprint, number of tokens, bytes of keys and values and their CRC-32; then the tokens, int32 each; then the
# CRC-32 of all so far; then keys and values, as llama_state_seq_get_data gives them.
_HEAD = struct.Struct("<8s32sIQI")
_CRC = struct.Struct("<I")
_NAME = re.compile(r"[0-9a-f]{32}\.(kv|new)")  # of our files; others in the folder are left alone
# Settings on which keys and values do not depend; the rest of Load may change their bits.
_IRRELEVANT = {
    "model_path", "n_ctx", "n_cells", "n_threads", "n_threads_batch", "scheduler", "speculate", "draft_path",
    "chat_template", "disk",
}  # fmt: skip

Copy = Callable[[bytes], State | None]  # returns the content of a text, if it is in memory


class DamagedError(ValueError):
    """A file has been changed since it was written, or another program wrote it."""


@dataclass(frozen=True, slots=True)
class SpilledText:
    """A text on disk, as the bytes of its int32 tokens; it begins with the first `n` of those that were looked for."""

    key: bytes
    n: int

    @property
    def tokens(self) -> list[int]:
        """All its tokens."""
        return array("i", self.key).tolist()


@dataclass(slots=True)
class _File:
    """A file's `size` in bytes, and its date on disk: when it was last used, ns since the epoch."""

    size: int
    used_ns: int


class Spill:
    """The folder, the texts in it, and the thread that writes.

    Bounded by `max_bytes` of disk: the text used longest ago goes first. `_left` are the texts whose answers are over
    and that are not on disk yet, oldest first; only the thread that computes knows them. All else is behind `_lock`:
    that thread reads, the thread that counts prompts calls `find`, and a thread of its own writes.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        fingerprint: bytes,
        token_s: float,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the folder; with `max_bytes` 0, remove what is in it. A token takes `token_s` to compute, s, as known.

        A text is idle when it has been unused for `idle_s`, s. If the folder cannot be used, or another engine has it,
        `error` says so, and nothing is kept.
        """
        self.error = ""
        self.n_bytes = 0
        self.n_dropped = 0  # texts not kept because the disk was too slow
        self.s_per_byte = FIRST_READ_S_PER_BYTE
        self._folder, self._max_bytes, self._fingerprint = folder, max_bytes, fingerprint
        self.token_s = token_s
        self._idle_s, self._clock = idle_s, clock
        self._lock = threading.Condition()
        self._files: dict[bytes, _File] = {}
        self._sorted = SortedTexts()
        self._by_use: list[tuple[int, bytes]] = []  # `used_ns` and the text, of all files; the oldest first
        self._queue: deque[tuple[bytes, State, int]] = deque()
        self._queued_bytes = 0  # the file that is being written included
        self._left: OrderedDict[bytes, float] = OrderedDict()
        self._sorted_left = SortedTexts()
        self._guard: int | None = None
        if max_bytes or folder.exists():
            try:
                self._open()
            except OSError as e:
                self.error = f"{folder} cannot be used: {e.strerror or e}"
        if self.active:
            threading.Thread(target=self._write_queued, name="spill", daemon=True).start()

    def __len__(self) -> int:
        return len(self._files)

    @property
    def active(self) -> bool:
        """Whether texts are kept on disk."""
        return self._guard is not None and self._max_bytes > 0

    # --- what is there -------------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int], have: int) -> SpilledText | None:
        """Find the best matching text, if it has so many more than `have` of these tokens that reading it pays."""
        wanted = text_key(tokens)
        with self._lock:
            near = [(tokens_in_common(key, wanted), -self._files[key].size, key) for key in self._sorted.near(wanted)]
        n, minus_size, key = max(near, default=(0, 0, b""))
        gain = n - have
        pays = gain >= LEAST_GAIN and -minus_size * self.s_per_byte < gain * self.token_s
        return SpilledText(key, n) if pays else None

    def has(self, key: bytes) -> bool:
        """Whether a text is on disk, or one that goes on from it."""
        with self._lock:
            return self._sorted.begins_one(key)

    def read(self, found: SpilledText) -> bytes | None:
        """Read the content of a text; None if the file is gone or damaged, and then it is removed."""
        began = time.perf_counter()
        path = self._path(found.key)
        try:
            data = _read_content(path, self._fingerprint, found.key)
            os.utime(path)
        except (OSError, DamagedError):
            self.remove(found.key)
            return None
        self.s_per_byte += NEWEST * ((time.perf_counter() - began) / len(data) - self.s_per_byte)
        with self._lock:
            if found.key in self._files:
                self._know(found.key, _File(self._files[found.key].size, time.time_ns()))
        return data

    def remove(self, key: bytes) -> None:
        """Remove a text from disk."""
        with self._lock:
            if key in self._files:
                self._forget(key)
        self._path(key).unlink(missing_ok=True)

    # --- what is to be written -----------------------------------------------------------------------------------

    def note_unused(self, key: bytes) -> None:
        """Note the text of an answer that is over; it is written to disk once it has been unused for `idle_s`."""
        if not self.active:
            return
        for old in self._sorted_left.beginnings(key):
            self._take_left(old)
        self._left[key] = self._clock()
        self._sorted_left.add(key)
        if len(self._left) > MAX_LEFT:
            self._take_left(next(iter(self._left)))

    def _take_left(self, key: bytes) -> None:
        del self._left[key]
        self._sorted_left.remove(key)

    def write_idle(self, copy: Copy) -> float | None:
        """Queue a text for writing that has become idle; call it when nothing runs, since `copy` takes some ms.

        Returns how long to wait until the next call, s; None: until an answer has ended.
        """
        key, at = self._due()
        if key and (data := copy(key)) is not None:
            self.put(key, data, age_s=self._clock() - at)
        if self._queued_bytes:
            return POLL_S
        return max(0.0, next(iter(self._left.values())) + self._idle_s - self._clock()) if self._left else None

    def write_all(self, copy: Copy, within_s: float) -> bool:
        """Write all texts not on disk yet, the newest first; return False if `within_s`, s, is not enough."""
        until = self._clock() + within_s
        for key, at in reversed(list(self._left.items())):
            data = None if self.has(key) else copy(key)
            if data is not None and not self.put(key, data, until - self._clock(), self._clock() - at):
                return False
        return self._flush(until - self._clock())

    def _due(self) -> tuple[bytes, float]:
        """Return a text that is idle and not on disk, and since when; each once, and none while another is written."""
        while self._left and not self._queued_bytes:
            key, at = next(iter(self._left.items()))
            if self._clock() - at < self._idle_s:
                break
            self._take_left(key)
            if not self.has(key):
                return key, at
        return b"", 0.0

    def put(self, key: bytes, data: State, wait_s: float = 0.0, age_s: float = 0.0) -> bool:
        """Queue a text for writing that was used `age_s` ago, s.

        Returns False if the disk cannot keep up within `wait_s`, s, and then the text is not kept.
        """
        if not self.active:
            return False
        with self._lock:
            if not self._lock.wait_for(lambda: self._has_room(len(data)), wait_s):
                self.n_dropped += 1
                return False
            self._queue.append((key, data, time.time_ns() - round(1e9 * age_s)))
            self._queued_bytes += len(data)
            self._lock.notify_all()
        return True

    def _flush(self, wait_s: float) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: not self._queued_bytes, wait_s)

    def _has_room(self, n: int) -> bool:
        return not self._queued_bytes or self._queued_bytes + n <= MAX_QUEUED_BYTES

    def _write_queued(self) -> None:
        """Write queued texts for ever, in a thread of its own."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue)
                key, data, used_ns = self._queue.popleft()
            if not self.has(key):
                try:
                    self._write(key, data, used_ns)
                    self.error = ""
                except OSError as e:
                    self.error = f"{self._folder} cannot be written: {e.strerror or e}"
            with self._lock:
                self._queued_bytes -= len(data)
                self._lock.notify_all()

    def _write(self, key: bytes, data: State, used_ns: int) -> None:
        """Write one file, unless there is only room for texts used later. Raises OSError."""
        size = _HEAD.size + len(key) + _CRC.size + len(data)
        if size > self._max_bytes:
            return
        with self._lock:
            shorter = self._sorted.beginnings(key)
        if self.n_bytes + size > self._max_bytes:  # else they stay until the new file is whole: we may be killed
            for old in shorter:
                self.remove(old)
        if not self._trim(self._max_bytes - size, used_ns):
            return
        if shutil.disk_usage(self._folder).free - size < SPARE_DISK_BYTES:
            raise OSError("less than 1 GiB would be free")
        path = self._path(key)
        temporary = path.with_suffix(".new")
        try:
            temporary.unlink(missing_ok=True)
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
                head = _HEAD.pack(MAGIC, self._fingerprint, len(key) // 4, len(data), zlib.crc32(data)) + key
                f.write(head + _CRC.pack(zlib.crc32(head)))
                f.write(data)
            os.utime(temporary, ns=(used_ns, used_ns))
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        with self._lock:
            self._know(key, _File(size, used_ns))
        for old in shorter:
            self.remove(old)

    # --- the folder ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Lock the folder, and list the texts in it. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._folder.stat().st_uid != os.getuid():
            raise PermissionError("it belongs to another user")
        self._folder.chmod(0o700)
        guard = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the end of the process
        except OSError as e:
            os.close(guard)
            raise BlockingIOError("another engine has it") from e
        self._guard = guard
        ours = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file()]
        for path in ours:
            if path.suffix == ".new":  # a process ended while writing
                path.unlink()
                continue
            try:
                with path.open("rb") as f:
                    key, _, _ = _head(f, self._fingerprint)
            except (OSError, DamagedError):
                key = b""
            if path == self._path(key):
                self._know(key, _File(path.stat().st_size, path.stat().st_mtime_ns))
            else:
                path.unlink()
        self._trim(self._max_bytes)

    def _trim(self, n_bytes: int, before_ns: float = math.inf) -> bool:
        """Remove the oldest texts until `n_bytes` are left; return False if one used after `before_ns` had to go."""
        while self.n_bytes > n_bytes:
            with self._lock:
                used_ns, oldest = self._by_use[0]
            if used_ns > before_ns:
                return False
            self.remove(oldest)
        return True

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.kv"

    def _know(self, key: bytes, file: _File) -> None:
        if key in self._files:
            self._forget(key)
        self._files[key] = file
        self._sorted.add(key)
        insort(self._by_use, (file.used_ns, key))
        self.n_bytes += file.size

    def _forget(self, key: bytes) -> None:
        file = self._files.pop(key)
        self.n_bytes -= file.size
        self._sorted.remove(key)
        del self._by_use[bisect_left(self._by_use, (file.used_ns, key))]


def _head(f: BinaryIO, fingerprint: bytes) -> tuple[bytes, int, int]:
    """Read up to the keys and values; return the text, and their size and CRC-32. Raises DamagedError."""
    size = os.fstat(f.fileno()).st_size
    head = f.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise DamagedError("it is cut short")
    magic, made_by, n_tokens, n_data, crc = _HEAD.unpack(head)
    if (magic, made_by) != (MAGIC, fingerprint):
        raise DamagedError("another model or version has made it")
    if size != _HEAD.size + 4 * n_tokens + _CRC.size + n_data:
        raise DamagedError("it has not the size it should have")
    key = f.read(4 * n_tokens)
    if f.read(_CRC.size) != _CRC.pack(zlib.crc32(head + key)):
        raise DamagedError("its header is damaged")
    return key, n_data, crc


def _read_content(path: Path, fingerprint: bytes, key: bytes) -> bytes:
    """Read the keys and values of a text. Raises DamagedError and OSError."""
    with path.open("rb") as f:
        text, size, crc = _head(f, fingerprint)
        data = f.read(size)
    if text != key or zlib.crc32(data) != crc:
        raise DamagedError("it is damaged")
    return data


def fingerprint_of(load: Load, build: str) -> bytes:
    """Hash what keys and values depend on: model file, settings that change bits, and llama.cpp (`build`). 32 bytes.

    A file counts by its size and date, the model's also by its beginning. Raises OSError if that cannot be read.
    """
    settings = {k: v for k, v in msgspec.to_builtins(load).items() if k not in _IRRELEVANT}
    model = Path(load.model_path)
    files = [_size_and_date(path) for path in (model, *(Path(adapter.path) for adapter in load.adapters))]
    with model.open("rb") as f:
        beginning = f.read(2**16)
    return hashlib.sha256(repr((build, sorted(settings.items()), files, beginning)).encode()).digest()


def _size_and_date(path: Path) -> tuple[int, int]:
    """Return size (bytes) and date (ns) of a file; zeros if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns

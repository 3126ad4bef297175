"""Packs a folder with a program, and links it with the default model into one executable: the launcher's counterpart.

The layout is launcher.c's `struct head`, then for each file its `struct entry`, its name and its bytes, compressed as
one LZ4 block where that makes it smaller. LZ4 since its decoder is 30 lines of C that run at the speed of memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAM, MODEL = "program.bin", "model.bin"  # as payload.S names them
MAGIC = b"disco1"
HEAD = struct.Struct("=8s40sIIQ")
ENTRY = struct.Struct("=HHIQQ")
A_FILE, AN_EXECUTABLE, A_LINK = 0, 1, 2
N_DIGITS = 16  # of the content's SHA-256 in the version's name: builds of one version differ
LEVEL = 12  # LZ4's highest: packing takes seconds more, unpacking nothing
LINK_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the program; `data` is where a link points to if `kind` is A_LINK."""

    name: str
    kind: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """What was packed: the version's name, the number of files, and bytes before and after."""

    version: str
    n_files: int
    n_bytes: int
    n_packed: int


def entries(folder: Path) -> Iterator[Entry]:
    """Everything below a folder, by name. A file that another one in the same folder equals becomes a link to it."""
    seen: dict[tuple[str, bytes], str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            yield Entry(name, A_LINK, os.fsencode(path.readlink()))
        elif path.is_file():
            data = path.read_bytes()
            first = seen.setdefault((str(path.parent), hashlib.sha256(data).digest()), path.name)
            if first != path.name and data:
                yield Entry(name, A_LINK, os.fsencode(first))
            else:
                yield Entry(name, AN_EXECUTABLE if os.access(path, os.X_OK) else A_FILE, data)


def pack(folder: Path, target: Path, version: str) -> Packed:
    """Write what is in `folder` into `target`, as the launcher unpacks it."""
    digest, n_files, n_bytes = hashlib.sha256(), 0, 0
    with target.open("wb") as sink:
        sink.write(bytes(HEAD.size))
        for entry in entries(folder):
            name = os.fsencode(entry.name)
            packed = compress(entry.data) if entry.kind != A_LINK else entry.data
            about = ENTRY.pack(entry.kind, len(name), zlib.adler32(entry.data), len(entry.data), len(packed))
            digest.update(about + name + entry.data)
            sink.write(about + name + packed)
            n_files += 1
            n_bytes += len(entry.data) if entry.kind != A_LINK else 0
        made = f"{version}-{digest.hexdigest()[:N_DIGITS]}"
        sink.seek(0)
        sink.write(HEAD.pack(MAGIC, made.encode("ascii"), n_files, 0, n_bytes))
    return Packed(made, n_files, n_bytes, target.stat().st_size)


def compress(data: bytes) -> bytes:
    """One LZ4 block, or the data itself where that is not smaller: equal lengths tell the launcher which it is."""
    import lz4.block

    block: bytes = lz4.block.compress(data, mode="high_compression", compression=LEVEL, store_size=False)
    return block if len(block) < len(data) else data


def link(folder: Path, model: Path, target: Path, *flags: str) -> None:
    """Make the executable of PROGRAM in `folder`, and of the model. Raises CalledProcessError."""
    carried = folder / MODEL
    carried.unlink(missing_ok=True)
    carried.symlink_to(model.resolve())
    sources = [str(HERE / name) for name in ("launcher.c", "payload.S")]
    unfinished = folder / "disco.linked"
    compiler = shutil.which(os.environ.get("CC") or "cc") or "cc"
    # In this folder: the assembler looks for what it includes where it runs.
    command = [compiler, "-std=gnu11", "-O2", "-s", *flags, "-o", str(unfinished), *sources]
    subprocess.run(command, cwd=folder, check=True, timeout=LINK_TIMEOUT_S)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished.replace(target)  # a running one goes on with the file that it was started from

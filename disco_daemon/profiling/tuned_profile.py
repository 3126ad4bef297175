"""The measurements of a model on this machine: one small TOML file, used as long as model and machine stay."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..engine.measure.tune_messages import Knobs, Speed, Tuned
from ..system.control_groups import n_processors

MACHINE = "machine.toml"  # what the machine does, for all models (`measured_machine`)
N_UBATCH = 512  # tokens; llama.cpp's own default
SYSCTL_TIMEOUT_S = 2.0  # asking macOS for the processor's name

_S = TypeVar("_S", bound=msgspec.Struct)


class ProfileKey(msgspec.Struct, frozen=True):
    """The key of a profile; if any part of it changes, the profile is not used.

    `size` in bytes and `mtime_ns` are the model file's, `llama_cpp` is the version of the bindings; the last three are
    as in the settings.
    """

    model: str
    size: int
    mtime_ns: int
    cpu: str
    n_cores: int
    llama_cpp: str
    exact: bool
    kv_type: str
    gpu_layers: int | str


class TunedProfile(msgspec.Struct, frozen=True):
    """The fastest knobs, and the speed that was measured with them, token/s; `measured` is a date."""

    key: ProfileKey
    knobs: Knobs
    speed: Speed
    measured: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """The knobs as the settings have them; 0, or None for `flash_attn`, leaves it to the profile."""

    n_threads: int = 0
    n_threads_batch: int = 0
    n_ubatch: int = 0
    flash_attn: bool | None = None


class TunedProfiles:
    """The profiles of this machine's models, in a folder: one file for each model and way to compute."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: ProfileKey) -> Path:
        """Return the path of the profile. A changed model has the same place: the file is written anew."""
        return place(self.folder, key)

    def load(self, key: ProfileKey) -> TunedProfile | None:
        """The profile, if there is one about just this; a damaged file is none."""
        found = read(self.path(key), TunedProfile)
        return found if found is not None and found.key == key else None

    def save(self, key: ProfileKey, tuned: Tuned, measured: str) -> Path:
        """Write what was measured, whole or not at all. Raises OSError."""
        profile = msgspec.to_builtins(TunedProfile(key, tuned.knobs, tuned.speed, measured))
        comment = "Written by the tune, see `disco tune`. Delete it, and it is measured again."
        return write(self.path(key), comment, profile)


def place(folder: Path, key: ProfileKey, *more: Any) -> Path:
    """Return the file for what was measured of a model, in the same place after the model has changed.

    `more` are values of JSON that tell apart what was measured of one model.
    """
    lasting = msgspec.structs.replace(key, size=0, mtime_ns=0)
    told = b"".join(map(msgspec.json.encode, (lasting, *more)))
    return folder / f"{Path(key.model).stem}-{hashlib.sha256(told).hexdigest()[:12]}.toml"


def read(path: Path, kind: type[_S]) -> _S | None:
    """Return what stands in a TOML file; None if there is none, or it is damaged."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8")), kind)
    except (OSError, ValueError, msgspec.ValidationError):
        return None


def write(path: Path, comment: str, values: Mapping[str, Any]) -> Path:
    """Write a TOML file whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    import tomlkit  # for whom writes a profile

    document = tomlkit.document()
    document.add(tomlkit.comment(comment))
    document.update(values)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        unfinished.write_text(tomlkit.dumps(document), "utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def key_of(model: Path, *, exact: bool, kv_type: str, gpu_layers: int | str = 0) -> ProfileKey:
    """The key for a model file on this machine. Raises OSError if there is no such file."""
    stat, version = model.stat(), importlib.metadata.version("llama-cpp-python")
    model_file = (str(model), stat.st_size, stat.st_mtime_ns)
    return ProfileKey(*model_file, cpu_name(), n_processors(), version, exact, kv_type, gpu_layers)


def choose_knobs(wanted: Wanted, tuned: Knobs | None, cores: int) -> Knobs:
    """The knobs to run with: what the settings say, else what was measured, else the defaults.

    Of `cores` that are worth computing with one stays free by default: with all of them taken a token can go from 8 to
    500 ms on a busy machine.
    """
    default = max(1, cores - 1)
    found = tuned or Knobs(default, default, N_UBATCH)
    n_threads = wanted.n_threads or found.n_threads
    return Knobs(
        n_threads,
        wanted.n_threads_batch or wanted.n_threads or found.n_threads_batch,
        wanted.n_ubatch or found.n_ubatch,
        found.flash_attn if wanted.flash_attn is None else wanted.flash_attn,
        found.repack,
    )


def cpu_name() -> str:
    """The processor's name, such as `AMD EPYC 9354`."""
    try:
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SYSCTL_TIMEOUT_S, check=True)
            return done.stdout.strip()
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, subprocess.SubprocessError):
        return platform.processor() or platform.machine()

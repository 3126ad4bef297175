"""The device's model and knobs: from the settings, else as measured on this machine, else defaults."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_fields

from ..clock import Clock
from ..config.layers import data_path
from ..config.schema import Config, DeviceSettings
from ..engine.measure.tune_messages import Knobs, Speed, Tuned, TuneJob
from ..engine.supervisor import Engine, EngineState
from ..errors import ConfigError
from ..models.default import DEFAULT_MODEL, default_model_path, fetch_default_model
from ..models.files import whole_header
from ..models.gguf import Header, read_header
from ..models.rounding import has_rivals, is_free, rounds_alike
from ..profiling.autotuner import BUDGET_S, Autotuner
from ..profiling.saved import DeviceFigures, Measured, load
from ..profiling.tuned_profile import ProfileKey, TunedProfiles, Wanted, choose_knobs, key_of
from ..system.control_groups import n_processors
from ..system.processors import has_amx, has_avx2, n_cores
from ..system.program import is_binary
from ..system.smallfile import open_regular

log = logging.getLogger("disco.tune")

SHAPE_BYTES = 1 << 16  # of a model's file: its shape stands in front of its vocabulary
PROCESSOR = ("-base", "-cpu", "-blas")  # of ggml's libraries, those that need nothing but a processor
OURS = b"disco_products\0"  # a name in those with our products of weights (native/products.cpp)
FOREGROUND, BACKGROUND = 5, 19  # niceness: as the engine's, and below all others


def model_path(settings: DeviceSettings) -> Path:
    """Return the device's model file. Raises ConfigError if there is none."""
    path = Path(settings.model).expanduser() if settings.model else default_model_path()
    if not settings.model and not path.exists() and is_binary():  # the binary carries it, and needs no network for it
        return fetch_default_model(log.info)
    if not path.exists():
        mend = "check device.model" if settings.model else "run `disco models fetch`"
        raise ConfigError(f"the device's model {path} does not exist: {mend}, or use --no-device")
    require_regular("device.model", path)
    return path


def longest_answer(settings: DeviceSettings) -> int | None:
    """Return the most tokens an answer can have with its prompt, as set or as the model was trained; None: unknown."""
    if settings.n_ctx:
        return settings.n_ctx
    path = Path(settings.model).expanduser() if settings.model else default_model_path()
    try:
        with open_regular(path) as file:
            header = read_header(file.read(SHAPE_BYTES))
    except (OSError, ValueError):
        return None
    return header.number(f"{header.architecture}.context_length")


def stand_in(config: Config) -> str:
    """Return the size of the model that ships, such as "135M", while all answers are its; else ""."""
    return "135M" if has_stand_in(config.device) and not config.server.base_url else ""


def has_stand_in(settings: DeviceSettings) -> bool:
    """Whether the device's model is the one that ships, which is for trying disco out."""
    path = Path(settings.model).expanduser() if settings.model else default_model_path()
    return settings.enabled and not settings.base_url and path.name == DEFAULT_MODEL


def require_regular(key: str, path: Path) -> None:
    """Raise ConfigError if a setting names something that is not a file: reading a pipe would hang."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{key} {path} is not a regular file: name a GGUF file")


def is_exact(config: Config, path: Path) -> bool:
    """Whether answers must be continued to the bit; that needs flash attention, which rounds in one way only.

    If it was left to us, they are where a server may go on with them, and where it slows no prompt down. Layers on a
    GPU are not, and AMX reads K weights faster than our products, which would take its place.
    """
    settings = config.device
    if settings.flash_attn == "off" or settings.rounding != "auto":
        return settings.flash_attn != "off" and settings.rounding == "exact"
    if not config.server.base_url or (n_gpu_layers(settings) != 0 and is_for_gpu()):
        return False
    return _header_is(lambda header: is_free(header, has_products=has_products() and not has_amx()), path)


def is_exact_but_for_rounding(config: Config, path: Path) -> bool:
    """Whether answers are to be exact, and cannot be with these weights, whose rows do not round alike."""
    return is_exact(config, path) and not _header_is(_by_our_products(rounds_alike), path)


def header_of(path: Path) -> Header | None:
    """Return the whole header of a model's file; None where it cannot be read."""
    try:
        stat = path.stat()
        return _read(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError):
        return None


def _header_is(check: Callable[[Header], bool], path: Path) -> bool:
    """Whether a model's header passes a check; one that cannot be read does: the engine says what is wrong with it."""
    header = header_of(path)
    return header is None or check(header)


def _by_our_products(check: Callable[..., bool]) -> Callable[[Header], bool]:
    return lambda header: check(header, has_products=has_products())


def has_products() -> bool:
    """Whether weights are multiplied by our products: in llama.cpp as compiled here, on a processor that has AVX2.

    Where llama.cpp's libraries are not found it is ours.
    """
    kernels = {path.resolve() for path in _libraries() if path.name.startswith("libggml-cpu") and path.is_file()}
    return has_avx2() and (not kernels or any(_has_products(path, path.stat().st_mtime_ns) for path in kernels))


@lru_cache(maxsize=32)
def _has_products(path: Path, _mtime_ns: int) -> bool:
    return OURS in path.read_bytes()


def _libraries() -> list[Path]:
    """Return ggml's libraries, those with kernels for a GPU as well."""
    found = find_spec("llama_cpp")
    folders = [Path(folder) / "lib" for folder in (found and found.submodule_search_locations) or ()]
    return [path for folder in folders for path in folder.glob("libggml*")]


def is_for_gpu() -> bool:
    """Whether llama.cpp is built for a GPU, by the names of its libraries; also where these are not found."""
    parts = {path.name.split(".")[0].removeprefix("libggml") for path in _libraries()}
    return not parts or not all(part.startswith(PROCESSOR) for part in parts if part)


@lru_cache(maxsize=4)
def _read(path: Path, _mtime_ns: int, _size: int) -> Header:
    return whole_header(path)


def n_gpu_layers(settings: DeviceSettings) -> int | None:
    """Return the layers on the GPU, None for as many as fit; none with exact rounding: only the CPU has it."""
    if isinstance(settings.n_gpu_layers, int):
        return settings.n_gpu_layers
    return 0 if settings.rounding == "exact" else None


def n_cpu_moe(settings: DeviceSettings) -> int | None:
    """Return from how many layers experts stay with the processor; None for as few as fit asks for."""
    return settings.n_cpu_moe if isinstance(settings.n_cpu_moe, int) else None


def kv_type(settings: DeviceSettings) -> str:
    """Return the type of keys and values; `auto` where it may be fitted: bytes need flash attention."""
    return "f16" if settings.kv_type == "auto" and settings.flash_attn == "off" else settings.kv_type


def profiles() -> TunedProfiles:
    """Return the tuned profiles of the models on this machine."""
    return TunedProfiles(data_path() / "profiles" / "devices")


def key_for(config: Config, path: Path) -> ProfileKey:
    """Return the key of the configured device's profile."""
    settings = config.device
    return key_of(path, exact=is_exact(config, path), kv_type=settings.kv_type, gpu_layers=settings.n_gpu_layers)


def knobs_for(config: Config, path: Path) -> Knobs:
    """Return the knobs that the engine runs with."""
    settings = config.device
    flash = {"auto": None, "on": True, "off": False}[settings.flash_attn]
    wanted = Wanted(settings.n_threads, settings.n_threads_batch, settings.n_ubatch, flash)
    profile = profiles().load(key_for(config, path))
    return choose_knobs(wanted, None if profile is None else profile.knobs, n_cores())


def job_for(config: Config, path: Path, *, budget_s: float = BUDGET_S, nice: int = FOREGROUND) -> TuneJob:
    """Return the job that tunes the configured device, from the defaults on."""
    settings = config.device
    start, exact = choose_knobs(Wanted(), None, n_cores()), is_exact(config, path)
    return TuneJob(
        str(path), n_processors(), start, exact, settings.kv_type, n_gpu_layers(settings), budget_s,
        nice=nice, layouts=not exact and _header_is(_by_our_products(has_rivals), path),
        n_cpu_moe=n_cpu_moe(settings),
    )  # fmt: skip


def save(config: Config, path: Path, tuned: Tuned) -> Path:
    """Save what was measured for the next start; return the file. Raises OSError."""
    return profiles().save(key_for(config, path), tuned, datetime.now(UTC).date().isoformat())


def token_s(config: Config, path: Path) -> float | None:
    """Return what a model takes for a token, s, as `disco profile` or `disco tune` measured it, else None."""
    found = measured_speeds(config, path)
    return None if found is None else 1 / found.decode_tps


def row_s(config: Config, path: Path) -> float | None:
    """Return what a model takes for a token of a prompt, s, as it was measured, else None."""
    found = measured_speeds(config, path)
    return None if found is None else 1 / found.prefill_tps


def measured_speeds(config: Config, path: Path) -> DeviceFigures | Speed | None:
    """Return the speeds of a model as `disco profile` or `disco tune` measured them, else None."""
    if config.device.enabled and not config.device.base_url:
        key = key_for(config, path)
        if (measured := load(profiles(), key, knobs_for(config, path))) is not None:
            return measured.device
        if (tuned := profiles().load(key)) is not None:
            return tuned.speed
    return None


def load_measured(config: Config) -> Measured | None:
    """Return the figures of `disco profile` for the configured model and knobs; None if it never ran with these."""
    settings = config.device
    if not settings.enabled or settings.base_url or config.split.enabled or config.fleet.enabled:
        return None
    path = model_path(settings)
    return load(profiles(), key_for(config, path), knobs_for(config, path))


def make_autotuner(config: Config, engine: Engine, busy: Callable[[], bool], clock: Clock) -> Autotuner | None:
    """Return the autotuner of an idle daemon; None where settings forbid it, or where the knobs are known already."""
    settings, path = config.device, Path(engine.config.model_path)
    if (
        not settings.autotune
        or settings.n_threads
        or config.split.enabled
        or config.fleet.enabled
        or profiles().load(key_for(config, path)) is not None
    ):
        return None

    def is_occupied() -> bool:
        # With layers on the GPU its memory is taken, and threads hardly matter.
        ready = engine.state is EngineState.READY and engine.info is not None and not engine.info.n_gpu_layers
        return busy() or not ready or engine.in_flight > 0

    def adopt(tuned: Tuned) -> None:
        where = save(config, path, tuned)
        engine.config = replace_fields(engine.config, **engine_knobs(knobs_for(config, path)))
        log.info("%s; from the next start of the engine on (%s)", describe(tuned), where)

    return Autotuner(job_for(config, path, nice=BACKGROUND), is_occupied, adopt, clock)


def engine_knobs(knobs: Knobs) -> dict[str, Any]:
    """Return the knobs as fields of `wire.Load`."""
    return {
        "n_threads": knobs.n_threads,
        "n_threads_batch": knobs.n_threads_batch,
        "n_ubatch": knobs.n_ubatch,
        "flash_attn": knobs.flash_attn,
        "repack": knobs.repack,
    }


def describe(tuned: Tuned) -> str:
    """Return the result of a tune as a sentence."""
    now, before, knobs = tuned.speed, tuned.start, tuned.knobs
    flash = ", no flash attention" if knobs.flash_attn is False else ""
    layout = "" if knobs.repack else ", weights as they are in the file"
    return (
        f"{knobs.n_threads} threads to write ({before.decode_tps:.0f} -> {now.decode_tps:.0f} token/s), "
        f"{knobs.n_threads_batch} to read prompts ({before.prefill_tps:.0f} -> {now.prefill_tps:.0f} token/s), "
        f"{knobs.n_ubatch} tokens at a time{flash}{layout}"
    )

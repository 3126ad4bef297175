"""Checks of the engine without starting it: llama.cpp's bindings, its confinement, and the memory for the model."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import msgspec

from ...config.schema import DeviceSettings
from ...engine.lives import CRASHED
from ...engine.measure.checkup_messages import Bindings, CheckupRequest, Confined, Fit, decode_reply, encode
from ...models.gguf import read_gguf, shard_names
from ...models.model_shape import shape_of
from ...system.process import run as run_part
from ...system.program import is_binary
from .files import GIB, head, model_path
from .finding import Finding, ok, warn, wrong

CHILD_TIMEOUT_S = 30.0  # importing the bindings takes 0.3 s, from a cold disk some seconds
HEAD_BYTES = 1 << 20  # read of a GGUF file: its shape stands in the first kilobytes
NVIDIA = Path("/dev/nvidiactl")  # there while the driver is loaded
MOST_NUMBERS = 1 << 32  # in the KV cache of one token; the largest models have 2 million


@dataclass(frozen=True, slots=True)
class Examined:
    """The child process's results; None where it did not get that far, and `problem` says why."""

    bindings: Bindings | None = None
    fit: Fit | None = None
    problem: str = ""
    confined: Confined | None = None


def checkup_question(settings: DeviceSettings, n_gpu_layers: int | None) -> CheckupRequest | str:
    """Return what the checkup is to find of the configured model, or a text that says why it cannot be asked."""
    path = model_path(settings)
    try:
        return checkup_request(settings, path, n_gpu_layers)
    except (OSError, ValueError) as e:
        return f"{path}: {getattr(e, 'strerror', None) or e}"


def checkup_request(settings: DeviceSettings, path: Path, n_gpu_layers: int | None) -> CheckupRequest:
    """Return the checkup's request for the model at `path`. Raises OSError, or ValueError for a poor header."""
    header = read_gguf(head(path, HEAD_BYTES))
    shape = shape_of(header)
    trained = header.get(f"{header.get('general.architecture')}.context_length")
    n_ctx = settings.n_ctx or (trained if isinstance(trained, int) else 0)
    if n_ctx < 1:
        raise ValueError("its header does not tell its context_length")
    kv_numbers = shape.layers * shape.kv_heads * 2 * shape.head_dim
    if kv_numbers > MOST_NUMBERS:
        raise ValueError("its header tells of a shape that no model has")
    return CheckupRequest(
        n_bytes=sum(path.with_name(name).stat().st_size for name in shard_names(path.name)),
        n_layers=shape.layers,
        n_embd=shape.hidden,
        n_vocab=shape.vocab,
        n_heads=shape.heads if settings.flash_attn == "off" else 0,
        kv_numbers=kv_numbers,
        n_ctx=n_ctx,
        n_cells=settings.n_cells,
        kv_type=settings.kv_type,
        n_gpu_layers=n_gpu_layers,
    )


def run_checkup(about: CheckupRequest | None) -> Examined:
    """Run `engine.measure.checkup` in a process of its own."""
    try:
        done = run_part("disco_daemon.engine.measure.checkup", line=encode(about) + b"\n", timeout_s=CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Examined(problem=f"said nothing for {CHILD_TIMEOUT_S:g} s")
    except OSError as e:
        return Examined(problem=f"cannot be tried: {e.strerror}")
    confined = bindings = fit = None
    for line in done.stdout.splitlines():
        try:
            reply = decode_reply(line)
        except msgspec.MsgspecError:  # a library that prints
            continue
        match reply:
            case Confined():
                confined = reply
            case Bindings():
                bindings = reply
            case Fit():
                fit = reply
    said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"status {done.returncode}"]
    why = f"died of signal {-done.returncode}" if done.returncode < 0 else said[-1]
    return Examined(bindings, fit, why if done.returncode else "", confined)


def confinement(seen: Examined) -> Finding | None:
    """Check what the process that reads model files is kept from; None where it did not get that far."""
    name, found = "confinement", seen.confined
    if found is None:
        return None
    given_up = ", ".join(found.in_force) or "nothing"
    let_through = sorted(what for what, refused in found.refused.items() if not refused)
    if not found.missing and not let_through:
        return ok(name, given_up)
    why = "; ".join(f"not in force: {what} ({reason})" for what, reason in found.missing.items())
    open_ = f"it can {', '.join(let_through)}" if let_through else ""
    text = "; ".join(part for part in (given_up, why, open_) if part)
    return warn(name, text, "use model files from people you trust, or a system with landlock and seccomp (Linux 6.7)")


def llama_cpp(settings: DeviceSettings, seen: Examined, pinned: str) -> Finding:
    """Check the bindings; `pinned` is the version that this program was made for, "" if that is not known."""
    name, found = "llama.cpp", seen.bindings
    rebuild = f"pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python=={pinned}"
    again = "`make binary NATIVE=1` in a checkout on this machine" if is_binary() else f"`{rebuild}`"
    if found is None:
        return wrong(name, f"the bindings cannot be used: {seen.problem}", f"{again} builds them for this processor")
    where = f"{found.gpu_bytes / GIB:.1f} GiB free on the GPU" if found.gpu_bytes else "CPU only"
    build = f"{found.version}, {where}; {' '.join(found.features)}"
    if pinned and found.version != pinned:
        mend = f"{again}: with another one memory layouts differ, and the engine crashes"
        return wrong(name, f"{build}; {pinned} is needed", mend)
    if found.fault:
        return wrong(name, f"{build}: {found.fault}", f"run ./install.sh again, in a checkout `make test`, or {again}")
    if platform.machine().lower() in ("x86_64", "amd64") and "AVX2" not in found.features:
        return warn(name, f"{build}: built without AVX2, prompts are read slowly", f"{again}, if the processor has it")
    if settings.n_gpu_layers not in ("auto", 0) and not found.gpu_bytes:
        mend = "build llama-cpp-python for the GPU, or `disco config set device.n_gpu_layers auto`"
        return warn(name, f"{build}, and device.n_gpu_layers = {settings.n_gpu_layers}", mend)
    if "CUDA" in found.backends and not found.gpu_bytes and NVIDIA.exists():
        mend = "see what `nvidia-smi` says of it; the engine uses the processor meanwhile"
        return warn(name, f"{build}: built for CUDA, and there is an NVIDIA GPU that it cannot open", mend)
    return ok(name, build)


def crashes(daemon: Mapping[str, Any] | None) -> Finding | None:
    """Check whether requests crash the running engine; None where they do not, or none runs."""
    device = ((daemon or {}).get("endpoints") or {}).get("device") or {}
    if device.get("crashes", 0) < CRASHED:
        return None
    return wrong("engine", str(device.get("last_error")), "`disco config reload`, once the model is another one")


def pinned_version() -> str:
    """Return the version of llama-cpp-python that this program requires; "" if it was not installed as a package."""
    try:
        wanted = requires("disco-daemon") or []
    except PackageNotFoundError:
        return ""
    found = (re.match(r"llama-cpp-python\s*==\s*([\w.]+)", line) for line in wanted)
    return next((match[1] for match in found if match), "")


def memory(about: CheckupRequest | str, seen: Examined, daemon: dict[str, Any] | None) -> Finding:
    """Check whether the model fits into memory; a text as `about` says why that cannot be predicted.

    A `daemon` that runs (its state) has the model in memory already.
    """
    name = "memory"
    device = ((daemon or {}).get("endpoints") or {}).get("device") or {}
    if device.get("state") == "ready" and "n_cells" in device:
        return ok(name, f"the running daemon has its model in memory, with room for {device['n_cells']} tokens")
    if isinstance(about, str):
        return warn(name, f"cannot be predicted: {about}", "the engine's first start will tell")
    fit = seen.fit
    if fit is None:
        return warn(name, "cannot be predicted", "mend llama.cpp first")
    if fit.problem:
        return wrong(name, fit.problem, "close other programs, choose a smaller model, or lower device.n_ctx")
    rest = f" and {fit.gpu_layers} layers on the GPU" if fit.gpu_layers else ""
    found = f"{fit.n_bytes / GIB:.2f} GiB{rest} with {fit.n_cells} tokens kept, {fit.available / GIB:.1f} GiB are free"
    if fit.n_ctx < about.n_ctx:
        return warn(name, f"{found}: an answer gets {fit.n_ctx}, not {about.n_ctx}", "close other programs")
    return ok(name, found) if fit.n_bytes <= fit.available else warn(name, f"{found}: it will swap", "free some memory")

"""Checks of the engine without starting it: llama.cpp's bindings, its confinement, and the memory for the model."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from ...client.side_health import without_experts
from ...config.schema import DeviceSettings
from ...engine.lives import CRASHED
from ...engine.measure.checkup_messages import CheckupRequest, Examined
from ...machines.model_memory import checkup_request
from ...system.program import is_binary
from .files import GIB, model_path
from .finding import Finding, ok, warn, wrong

NVIDIA = Path("/dev/nvidiactl")  # there while the driver is loaded


def checkup_question(settings: DeviceSettings, n_gpu_layers: int | None) -> CheckupRequest | str:
    """Return what the checkup is to find of the configured model, or a text that says why it cannot be asked."""
    path = model_path(settings)
    try:
        return checkup_request(settings, path, n_gpu_layers)
    except (OSError, ValueError) as e:
        return f"{path}: {getattr(e, 'strerror', None) or e}"


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
    on_gpu = f"{fit.gpu_layers} layers on the GPU{without_experts(fit.n_cpu_moe)}"
    rest = f" and {on_gpu}" if fit.gpu_layers else ""
    kept = f"{fit.n_cells} tokens kept" + (f" as {fit.kv_type}" if fit.kv_type != "f16" else "")
    found = f"{fit.n_bytes / GIB:.2f} GiB{rest} with {kept}, {fit.available / GIB:.1f} GiB are free"
    if about.pooling:
        found = (
            f"{fit.n_bytes / GIB:.2f} GiB{rest} for texts of {fit.n_ctx} tokens, {fit.available / GIB:.1f} GiB are free"
        )
    elif about.is_open:
        found = f"{found}; an answer may have {fit.n_ctx} tokens of the {about.n_ctx} that it was trained for"
    elif fit.n_ctx < about.n_ctx:
        return warn(name, f"{found}: an answer gets {fit.n_ctx}, not {about.n_ctx}", "close other programs")
    return ok(name, found) if fit.n_bytes <= fit.available else warn(name, f"{found}: it will swap", "free some memory")

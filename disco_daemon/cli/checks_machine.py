"""What `disco doctor` finds of what disco runs on: Python, a compiler, the processor, the service manager."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engine.measure.checkup_messages import Bindings
from ..onboarding.asking import within
from ..service.managers import Manager, ServiceError, of_this_machine
from ..service.spec import Spec
from .checks import Finding, ok, warn, wrong

LEAST_PYTHON = (3, 11)
CALL_TIMEOUT_S = 5.0  # of one of the system's own programs
CPUINFO = Path("/proc/cpuinfo")
# Of llama.cpp's names for what it was built with: what Linux and macOS call the same, where it makes prompts faster.
_X86 = {"AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "AVX512": "avx512f", "AVX512_VNNI": "avx512_vnni"}
_ARM = {"DOTPROD": "asimddp", "MATMUL_INT8": "i8mm"}
_APPLE = {"DOTPROD": "hw.optional.arm.FEAT_DotProd", "MATMUL_INT8": "hw.optional.arm.FEAT_I8MM"}


def frozen() -> bool:
    """Whether this is the single binary, which brings its own Python and engine."""
    return bool(getattr(sys, "frozen", False))


# --- Python -----------------------------------------------------------------------------------------------------------


def python(version: tuple[int, ...] = sys.version_info[:3], *, bits: int = sys.maxsize.bit_length() + 1) -> Finding:
    """Whether the interpreter is one that disco is made for."""
    shown = ".".join(map(str, version))
    found = f"{platform.python_implementation()} {shown}, {bits} bits, {sys.executable}"
    least = ".".join(map(str, LEAST_PYTHON))
    if version[:2] < LEAST_PYTHON:
        return wrong("python", found, f"install Python {least} or newer, and run install.sh again")
    if bits < 64:
        return wrong("python", found, "install a 64-bit Python: a model does not fit into what 32 bits can address")
    if platform.python_implementation() != "CPython":
        return warn("python", found, "use CPython: nothing else is tried")
    return ok("python", found)


# --- the compiler -----------------------------------------------------------------------------------------------------


def compiler(*, engine_works: bool) -> Finding:
    """Whether there is a C++ compiler, which llama.cpp is built with once; an engine that works needs none."""
    name = "compiler"
    if frozen():
        return ok(name, "none is needed: the engine is in this program")
    found = _compiler()
    if found:
        return ok(name, found)
    if engine_works:
        return ok(name, "none; llama.cpp is built already", "an update of it will need one")
    return wrong(name, "no C++ compiler is here to build llama.cpp with", _how_to_get_one())


def _compiler() -> str:
    """Path and version of the compiler that a build would take; "" if there is none."""
    if sys.platform == "darwin" and not said(["xcode-select", "-p"]):
        return ""  # then `c++` only opens a window that asks to install one
    for name in (*shlex.split(os.environ.get("CXX", ""))[:1], "c++", "g++", "clang++"):
        path = shutil.which(name)
        if path and (told := said([path, "--version"])):
            return f"{told.splitlines()[0]} ({path})"
    return ""


def _how_to_get_one() -> str:
    """The command that installs a compiler on this system."""
    if sys.platform == "darwin":
        return "`xcode-select --install`"
    commands = {
        "apt-get": "sudo apt-get install g++",
        "dnf": "sudo dnf install gcc-c++",
        "pacman": "sudo pacman -S gcc",
        "zypper": "sudo zypper install gcc-c++",
        "apk": "sudo apk add g++",
    }
    known = next((command for program, command in commands.items() if shutil.which(program)), "")
    return f"`{known}`" if known else "install a C++ compiler with your system's package manager"


def said(command: Sequence[str]) -> str:
    """What one of the system's programs printed; "" if it failed, is not there or is silent for too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=CALL_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- the processor ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Processor:
    """Its name ("" if nobody tells), and which of the features that llama.cpp makes use of it has."""

    name: str = ""
    features: tuple[str, ...] = ()


def processor(cpu: Processor, built: Bindings | None) -> Finding:
    """Whether llama.cpp was `built` for what the processor can; None if it could not be asked."""
    cores = f"{os.cpu_count() or 1} cores"
    has = f": {' '.join(cpu.features)}" if cpu.features else ""
    found = f"{cpu.name or platform.machine()}, {cores}{has}"
    missing = [] if built is None else [feature for feature in cpu.features if feature not in built.features]
    if built is None or not missing:
        return ok("processor", found)
    told = f"{found}; llama.cpp was built without {' '.join(missing)}"
    if frozen():
        return ok("processor", told, "a build from source, by install.sh, is made for this processor, and faster")
    pip = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python"
    mend = f"`{pip} llama-cpp-python=={built.version}` builds it for this one: prompts are read faster"
    return warn("processor", told, mend)


def this_processor() -> Processor:
    """What this machine tells of its processor."""
    if sys.platform == "darwin":
        return of_macos(said(["sysctl", "machdep.cpu.brand_string", *_APPLE.values()]))
    try:
        return of_linux(CPUINFO.read_text("utf-8", "replace"))
    except OSError:
        return Processor()


def of_linux(cpuinfo: str) -> Processor:
    """What /proc/cpuinfo tells; all cores are taken to be as the first."""
    rows = re.findall(r"^([^:\n]+?)[ \t]*:[ \t]*(.*)$", cpuinfo, re.MULTILINE)
    first = dict(reversed(rows))
    flags = set(f"{first.get('flags', '')} {first.get('Features', '')}".split())
    known = _X86 if "flags" in first else _ARM
    return Processor(first.get("model name", ""), tuple(name for name, flag in known.items() if flag in flags))


def of_macos(sysctl: str) -> Processor:
    """What `sysctl` tells, a line each. An Intel Mac's features are not looked at."""
    rows = dict(line.split(": ", 1) for line in sysctl.splitlines() if ": " in line)
    return Processor(
        rows.get("machdep.cpu.brand_string", ""), tuple(name for name, key in _APPLE.items() if rows.get(key) == "1")
    )


# --- the service ------------------------------------------------------------------------------------------------------


def service(spec: Spec) -> Finding:
    """Whether disco is started at login, and how that service is; `spec` is what the settings say."""
    try:
        return service_of(of_this_machine(), spec)
    except ServiceError:
        return ok("service", "no service manager that we know is here", "`disco up` starts the daemon")


def service_of(manager: Manager, spec: Spec | None = None) -> Finding:
    """How the service is, by this manager, and whether it is as the settings say."""
    try:
        status = within(CALL_TIMEOUT_S, manager.status)
    except TimeoutError:
        return warn("service", f"{manager.name} said nothing for {CALL_TIMEOUT_S:g} s", "`disco service status`")
    except ServiceError as e:
        return warn("service", str(e), "`disco service status` asks again")
    if not status.installed:
        return ok("service", "not installed", "`disco service install` starts disco at each login")
    detail = f" ({status.detail})" if status.detail else ""
    found = f"{manager.name}: {status.state}{f', process {status.pid}' if status.pid else ''}{detail}"
    if status.state == "failed":
        return wrong("service", found, "`disco service logs` tells why; `disco service start` tries again")
    if spec is not None and (differs := manager.differs(spec)):
        return warn("service", f"{found}; {differs}", "`disco service install` makes it as it should be")
    return ok("service", found, "`disco service start`" if status.state == "stopped" else "")

"""Checks of this machine: Python, a compiler, the processor, the service manager, energy, heat and the clock."""

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
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ...engine.measure.checkup_messages import Bindings
from ...money.exchange import DEFAULT_FLOOR
from ...onboarding.asking import within
from ...power.measurement import Charge, Covers, Thermal
from ...power.sensors import GUESS, PowerState
from ...service.managers import Manager, ServiceError, of_this_machine
from ...service.spec import Spec
from ...system.control_groups import affinity
from ...system.program import is_binary
from .finding import Finding, ok, warn, wrong

LEAST_PYTHON = (3, 11)
CALL_TIMEOUT_S = 5.0  # for one of the system's own programs
MAX_SKEW_S = 120.0  # between two clocks; less matters neither to certificates nor to daily caps
EPOCH = timedelta(days=20 * 365)  # a clock so far ahead of the newest price list is wrong
CPUINFO = Path("/proc/cpuinfo")
# llama.cpp's names of features that make prompts faster, with the names that Linux and macOS give them.
_X86 = {"AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "AVX512": "avx512f", "AVX512_VNNI": "avx512_vnni"}
_ARM = {"DOTPROD": "asimddp", "MATMUL_INT8": "i8mm"}
_APPLE = {"DOTPROD": "hw.optional.arm.FEAT_DotProd", "MATMUL_INT8": "hw.optional.arm.FEAT_I8MM"}


# --- Python -----------------------------------------------------------------------------------------------------------


def python(version: tuple[int, ...] = sys.version_info[:3], *, bits: int = sys.maxsize.bit_length() + 1) -> Finding:
    """Check whether disco supports this interpreter."""
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
    """Check for a C++ compiler, which builds llama.cpp once; an engine that works needs none."""
    name = "compiler"
    if is_binary():
        return ok(name, "none is needed: the engine is in this program")
    found = _compiler()
    if found:
        return ok(name, found)
    if engine_works:
        return ok(name, "none; llama.cpp is built already", "an update of it will need one")
    return wrong(name, "no C++ compiler is here to build llama.cpp with", _how_to_get_one())


def _compiler() -> str:
    """Return path and version of the compiler that a build would take; "" if there is none."""
    if sys.platform == "darwin" and not output_of(["xcode-select", "-p"]):
        return ""  # then `c++` only opens a window that asks to install one
    for name in (*shlex.split(os.environ.get("CXX", ""))[:1], "c++", "g++", "clang++"):
        path = shutil.which(name)
        if path and (output := output_of([path, "--version"])):
            return f"{output.splitlines()[0]} ({path})"
    return ""


def _how_to_get_one() -> str:
    """Return the command that installs a compiler on this system."""
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


def output_of(command: Sequence[str]) -> str:
    """Return the output of one of the system's programs; "" if it failed, is missing or is silent for too long."""
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
    """A processor's name ("" if not known), and those of its features that llama.cpp uses."""

    name: str = ""
    features: tuple[str, ...] = ()


def processor(cpu: Processor, built: Bindings | None, quota: float | None = None) -> Finding:
    """Check whether llama.cpp was `built` for the processor's features; None if it could not be asked.

    `quota` is what control groups allow, in processors; it is named if there are fewer threads for its sake.
    """
    cores = f"{os.cpu_count() or 1} cores"
    if quota is not None and max(1, int(quota)) < affinity():
        cores += f", of which a control group's quota allows {quota:.3g}"
    has = f": {' '.join(cpu.features)}" if cpu.features else ""
    found = f"{cpu.name or platform.machine()}, {cores}{has}"
    missing = [] if built is None else [feature for feature in cpu.features if feature not in built.features]
    if built is None or not missing:
        return ok("processor", found)
    text = f"{found}; llama.cpp was built without {' '.join(missing)}"
    if is_binary():
        return ok("processor", text, "a build from source, by install.sh, is made for this processor, and faster")
    pip = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python"
    mend = f"`{pip} llama-cpp-python=={built.version}` builds it for this one: prompts are read faster"
    return warn("processor", text, mend)


def this_processor() -> Processor:
    """Return this machine's processor."""
    if sys.platform == "darwin":
        return of_macos(output_of(["sysctl", "machdep.cpu.brand_string", *_APPLE.values()]))
    try:
        return of_linux(CPUINFO.read_text("utf-8", "replace"))
    except OSError:
        return Processor()


def of_linux(cpuinfo: str) -> Processor:
    """Return the processor of /proc/cpuinfo; all cores are taken to be like the first."""
    rows = re.findall(r"^([^:\n]+?)[ \t]*:[ \t]*(.*)$", cpuinfo, re.MULTILINE)
    first = dict(reversed(rows))
    flags = set(f"{first.get('flags', '')} {first.get('Features', '')}".split())
    known = _X86 if "flags" in first else _ARM
    return Processor(first.get("model name", ""), tuple(name for name, flag in known.items() if flag in flags))


def of_macos(sysctl: str) -> Processor:
    """Return the processor of `sysctl`'s lines, without the features of an Intel Mac."""
    rows = dict(line.split(": ", 1) for line in sysctl.splitlines() if ": " in line)
    return Processor(
        rows.get("machdep.cpu.brand_string", ""), tuple(name for name, key in _APPLE.items() if rows.get(key) == "1")
    )


# --- the service ------------------------------------------------------------------------------------------------------


def service(spec: Spec) -> Finding:
    """Check whether disco is started at login, and its service; `spec` is the service by the settings."""
    try:
        return service_of(of_this_machine(), spec)
    except ServiceError:
        return ok("service", "no service manager that we know is here", "`disco up` starts the daemon")


def service_of(manager: Manager, spec: Spec | None = None) -> Finding:
    """Check the service of this manager, and whether it is as the settings say."""
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


# --- energy and time ---------------------------------------------------------------------------------------------


def energy(state: PowerState) -> Finding:
    """Check the source of energy figures, how far off it may be, and why no better one is used."""
    reading = state.reading
    watts = f" = {reading.watts:.3g} W" if reading.watts is not None else ""
    skipped = "".join(f"; not {s.source}: {s.reason}" for s in state.skipped)
    found = f"{reading.source} ({reading.note}{watts}), give or take {100 * reading.uncertainty:.0f} %{skipped}"
    if reading.source == GUESS:
        return warn(
            "energy", found, "`disco config set device.watts W`, with what a plug-in meter shows more while it computes"
        )
    return ok("energy", found if reading.covers is not Covers.COMPUTING else f"{found}; assumed, not measured")


def battery(charge: Charge | None, floor: float | None) -> Finding:
    """Check the charge; below `caps.battery_floor`, if that is set, the device makes no answers on battery."""
    if charge is None:
        return ok("battery", "none")
    left = f", {charge.seconds_left / 3600:.1f} h left" if charge.seconds_left is not None else ""
    found = f"{charge.fraction:.0%}, {'on mains' if charge.on_mains else 'on battery'}{left}"
    if not charge.on_mains and charge.fraction < (DEFAULT_FLOOR if floor is None else floor):
        stops = "its energy counts as dear" if floor is None else f"below {floor:.0%} the device makes no answers"
        return warn("battery", found, f"plug in: {stops}")
    return ok("battery", found)


def heat(thermal: Thermal | None) -> Finding:
    """Check whether heat slows the processor down."""
    if thermal is None:
        return ok("heat", "no sensor that can be read")
    left = f"{thermal.headroom_k:.0f} K below throttling" if thermal.headroom_k is not None else ""
    text = ", ".join(part for part in (left, thermal.note) if part)
    if thermal.throttled:
        return warn(
            "heat", f"the processor is slowed down{f' ({text})' if text else ''}", "let it cool, clear its vents"
        )
    return ok("heat", text or "the processor is not slowed down")


def clock(now: datetime, past: datetime, latest: float | None, skew_s: float | None) -> Finding:
    """Check the time: after `past`, not long after, not before the `latest` request (Unix time, s).

    `skew_s` is how far this clock is ahead of the server's, s, None if that is not known.
    """
    name, mend = "clock", "let the system set its time from the network"
    shown = f"{now.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    if not past <= now <= past + EPOCH:
        return wrong(name, f"{shown} cannot be: disco's price lists are of {past:%Y-%m-%d}", mend)
    if skew_s is not None and abs(skew_s) > MAX_SKEW_S:
        side = "ahead of" if skew_s > 0 else "behind"
        return warn(name, f"{shown}, {abs(skew_s):.0f} s {side} the server's", mend)
    if latest is not None and latest > now.timestamp() + MAX_SKEW_S:
        when = f"{datetime.fromtimestamp(latest, UTC):%Y-%m-%d %H:%M} UTC" if latest < 1e11 else "far ahead"
        return warn(name, f"{shown}, but the latest request in the history is of {when}", mend)
    return ok(name, shown)

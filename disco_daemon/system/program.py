"""How this program starts a part of itself as a process of its own: from source, or out of the single binary.

The single binary (docs/howto/binary.md) has no `python -m`. It takes the same two words, for its own parts only.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

CLI = "disco_daemon.cli.main"
FETCHING = "disco_daemon.models.fetching"
PART = "-m"  # the single binary's first word when the second one is a module of PARTS
PARTS = (
    "disco_daemon.bench.loopback",
    "disco_daemon.engine.hosts.process",
    "disco_daemon.engine.measure.checkup",
    "disco_daemon.engine.measure.exit_training",
    "disco_daemon.engine.measure.machine_speed",
    "disco_daemon.engine.measure.requantize",
    "disco_daemon.engine.measure.split_check",
    "disco_daemon.engine.measure.tune",
    "disco_daemon.engine.worker",
    "disco_daemon.fleet_keeper.keeper",
    "disco_daemon.link.relay.worker",
    FETCHING,
)
EXECUTABLE = "DISCO_EXECUTABLE"  # variable in which the launcher names its own file; binary/launcher.c sets it
MODEL = "--model-bytes"  # the launcher's own word: it writes the model that it carries to stdout


# llama.cpp's threads meet hundreds of times a token. GNU's OpenMP lets those who have come spin there for milliseconds:
# as long as another program has one of the cores, the thread that all wait for does not run, and nothing gets done.
# After so many turns, its own number for too few cores, they sleep instead; on a quiet machine few wait for as long.
# `benchmarks/relay/busy_core.py` measures both.
SPINS = 1000

# A host's KV cache is made while answers are written. With pages of 2 MB, where the kernel lets programs ask for them,
# that takes a third of the time: 21 ms, not 73, for 8,192 cells of 10 layers (70 MB, cleared) and their layers.
LARGE_PAGES = {"disco_daemon.engine.hosts.process": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}}

# What a part that reads model files is told of our environment: where things are, how libraries and GPUs are to be
# used, and what the single binary says to itself. Never what else is there: keys, tokens, the user's session.
TOLD = frozenset(
    {
        "HOME", "LANG", "LANGUAGE", "PATH", "TMPDIR", "TZ", "USER", "LOGNAME", "DISPLAY", "WAYLAND_DISPLAY",
        "XDG_RUNTIME_DIR", "PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE", "PYTHONUTF8",
        "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "LLAMA_CPP_LIB_PATH", "_MEIPASS2",
        EXECUTABLE,
    }
)  # fmt: skip
TOLD_FAMILIES = (
    "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "ROCM_", "HSA_", "AMD_", "GPU_", "GGML_", "LLAMA_", "OMP_", "GOMP_", "KMP_",
    "OPENBLAS_", "MKL_", "VK_", "ZE_", "ZES_", "SYCL_", "ONEAPI_", "METAL_", "MTL_", "LC_", "_PYI_",
)  # fmt: skip
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")  # in a name: not even of those families


def is_binary() -> bool:
    """Whether this runs out of the single binary: then there is neither a `python` nor a pip."""
    return bool(getattr(sys, "frozen", False))


def command(module: str, *args: str) -> list[str]:
    """The command that runs a module of this program in a process of its own, as `python -m` does."""
    if is_binary():
        return [sys.executable, PART, module, *args]
    return [sys.executable, "-P", "-m", module, *args]


def line(code: str, *args: str) -> list[str]:
    """The command that runs a line of Python, such as another package's own command, in a process of its own.

    Raises RuntimeError in the single binary, which has neither a `python` nor packages that it does not carry.
    """
    if is_binary():
        raise RuntimeError("the single binary cannot run other packages")
    return [sys.executable, "-P", "-c", code, *args]


def verb(*words: str) -> list[str]:
    """The command `disco WORDS…`, carried out by this very program."""
    return [sys.executable, *words] if is_binary() else command(CLI, *words)


def file() -> Path | None:
    """The single binary as the user has it; None from source, or if it has gone.

    `sys.executable` is what the launcher unpacked, which another version removes: nothing that outlives this process
    may point there.
    """
    named = Path(os.environ.get(EXECUTABLE, "")) if is_binary() else Path()
    return named if named.is_absolute() and named.is_file() else None


def environment(ours: Mapping[str, str] = os.environ, module: str = "") -> dict[str, str]:
    """The environment of a part that reads model files: by a list of what it is told, so that no key is.

    Its threads stop spinning soon, unless the user has said how they wait. Linear algebra has one thread: it has little
    to do there, and a process that has only one can be confined. The part that fetches models is no such part: it is
    told all, since token, proxy and certificates are for it.
    """
    if module == FETCHING:
        return dict(ours)
    told = {name: value for name, value in ours.items() if name in TOLD or name.startswith(TOLD_FAMILIES)}
    told = {name: value for name, value in told.items() if not any(word in name for word in SECRET)}
    waits = {} if "OMP_WAIT_POLICY" in told else {"GOMP_SPINCOUNT": str(SPINS)}
    return waits | LARGE_PAGES.get(module, {}) | told | {"OPENBLAS_NUM_THREADS": "1"}


def end_with_stdin(end: Callable[[], object] = lambda: os._exit(1)) -> None:
    """Call `end` when stdin does, from a thread: however the process that holds its other end has ended.

    Every process that this program starts is ended that way, or by the end of a socket, so that none outlives it.
    """

    def watch() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass
        end()

    threading.Thread(target=watch, name="end with stdin", daemon=True).start()

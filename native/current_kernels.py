"""Compiles llama.cpp anew where the one that is installed has kernels of ours from before a mend.

`make` and install.sh run it with pip's options for what is to be installed. pip installs what it has compiled before,
by name and version, and an environment keeps what it has; neither knows that the kernels in this folder have changed.
Their sources tell versions (told.h), and so does a compiled library. One that has none of them is llama.cpp's own, and
right. First pip's cache is asked, as another checkout may have filled it anew.
"""

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

NAME = "llama-cpp-python"
ASK_S = 120.0  # for what takes a second on a machine with nothing else to do
BUILD_S = 4 * 3600.0  # llama.cpp compiles in minutes on most machines, in an hour on a small one
TOLD = re.compile(r"^DISCO_TOLD\((\w+), (\d+)\)", re.MULTILINE)  # told.h has it


def wanted(sources: Path = Path(__file__).parent) -> dict[str, int]:
    """Return the versions of our changes, by their sources; of one that some processors lack, the higher number."""
    found: dict[str, int] = {}
    for path in sorted(sources.glob("*.h")) + sorted(sources.glob("*.cpp")):
        for name, version in TOLD.findall(path.read_text()):
            found[name] = max(found.get(name, 0), int(version))
    return found


def old(folder: Path, versions: dict[str, int]) -> Iterator[str]:
    """Yield what the libraries in a folder have of before: "disco_products 1, not 2"."""
    for path in sorted(folder.glob("libggml-cpu*")):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # not for this machine: the engine does not load it either
            continue
        for name, version in versions.items():
            try:
                found = ctypes.c_int.in_dll(library, name).value
            except ValueError:  # llama.cpp's own
                continue
            if 0 < found < version:
                yield f"{name} {found}, not {version}"


def installed() -> Path:
    """Return the folder of the libraries that are installed."""
    spec = find_spec("llama_cpp")
    return Path(spec.origin).parent / "lib" if spec and spec.origin else Path()


def is_current() -> bool:
    """Ask in another process: this one would keep a library that is replaced."""
    return subprocess.call([sys.executable, __file__], timeout=ASK_S) == 0


def main(options: list[str]) -> int:
    """Without options: return 1 and say why if what is installed is of before. With pip's: install until it is not."""
    if not options:
        found = sorted(set(old(installed(), wanted())))
        if found:
            print(f"{NAME} was compiled before a mend of our kernels ({'; '.join(found)})", flush=True)
        return 1 if found else 0
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    for again in (False, True):
        if is_current():
            return 0
        if again:
            subprocess.call([*pip, "cache", "remove", NAME.replace("-", "_")], timeout=ASK_S)
        for step in ([*pip, "uninstall", "--yes", NAME], [*pip, "install", *options]):
            if code := subprocess.call(step, timeout=BUILD_S):
                return code
    return 0 if is_current() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

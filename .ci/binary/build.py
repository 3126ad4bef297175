"""`python -m binary.build`: the whole program as one executable, dist/disco. docs/howto/binary.md says how, and why so.

PyInstaller makes a folder out of our modules and the packages that they need, `pack` makes one file of that folder, and
what came out is started a few times to say how large and how fast it is.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from disco_daemon import __version__
from disco_daemon.models import default as models
from disco_daemon.system.program import PARTS

from . import pack, started

ROOT = Path(__file__).resolve().parents[2]
WORK, TARGET = ROOT / "build" / "binary", ROOT / "dist" / "disco"
SITE = WORK / "modules"  # found before the installed ones: our own as a wheel lays them out, and the engine
ENGINE = "llama-cpp-python"
APART = "-DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON"
ENGINE_TIMEOUT_S = 5400.0  # llama.cpp's compilation on one slow core
FREEZE_TIMEOUT_S = 1800.0
STRIP_TIMEOUT_S = 60.0
# Packages that import modules of theirs by name, which PyInstaller cannot see.
LAZY = ("anyio", "disco_daemon", "disco_tui", "huggingface_hub", "pydantic", "rich", "textual")
# What the program reads beside its modules, and the folder that it is looked for in.
DATA = (
    ("disco_daemon/api/openapi.json", "disco_daemon/api"),
    ("disco_daemon/profiles", "disco_daemon/profiles"),
    ("disco_tui/disco.tcss", "disco_tui"),
)
METADATA = ("disco-daemon", ENGINE)  # whose versions the program asks for
# Installed beside us for the tests, for plots, or by something that could use them: nothing here needs them.
UNUSED = (
    "IPython", "PIL", "PyInstaller", "_pytest", "fontTools", "hypothesis", "lifelines", "matplotlib", "mypy", "pandas",
    "pip", "pkg_resources", "pytest", "scipy", "setuptools", "tkinter", "xllamacpp",
)  # fmt: skip


def main() -> int:
    """Build it, and say what it is like."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--native", action="store_true", help="with the engine that is installed here, made for this very processor"
    )
    native = parser.parse_args().native
    stage()
    if not native:
        unpack_wheel(engine_wheel())
    frozen = freeze()
    slim(frozen)
    packed = pack.pack(frozen, WORK / pack.PROGRAM, __version__)
    pack.link(WORK, models.fetch_default_model(say), TARGET)
    say(f"{TARGET}: version {packed.version}, {platform.system()} {platform.machine()}")
    size, unpacked = TARGET.stat().st_size / 1e6, packed.n_bytes / 1e6
    say(f"size      {size:.0f} MB, {packed.n_packed / 1e6:.0f} of them the program ({unpacked:.0f} MB unpacked, once)")
    say(f"engine    {started.engine(TARGET)}: {for_whom(frozen, native=native)}")
    for line in started.times(TARGET):
        say(line)
    return 0


def for_whom(folder: Path, *, native: bool) -> str:
    """Say which processors the engine in a folder is for, of which this one uses what was told."""
    if n_kernels := len(list(folder.rglob("libggml-cpu-*.so"))):
        return f"this processor's of {n_kernels} kinds of kernels"
    return "this processor" if native else "any processor that has these"


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, flush=True)


# --- what goes in --------------------------------------------------------------------------------------------------


def stage() -> None:
    """Lay our own modules out as a wheel does: an editable installation is of no use to PyInstaller."""
    shutil.rmtree(SITE, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    places = {"disco_daemon": "disco_daemon", "profiles": "disco_daemon/profiles", "tui": "disco_tui"}
    for folder, place in places.items():
        shutil.copytree(ROOT / folder, SITE / place, ignore=ignored)
    shutil.copy(Path(__file__).with_name("entry.py"), SITE)


def engine_wheel() -> Path:
    """The engine for all processors of this kind, compiled once for each version and set of options.

    On Linux on x86-64 it has kernels for each generation of processors, of which llama.cpp takes the best that this one
    can run; elsewhere those that all have, which on x86-64 means AVX2, FMA, F16C and BMI2 (since 2013). The installed
    one is compiled for the processor that it was installed on.
    """
    flags = f"-DGGML_NATIVE=OFF {APART if kernels_apart() else ''} {os.environ.get('CMAKE_ARGS', '')}".strip()
    wanted = f"{ENGINE}=={version(ENGINE)}"
    folder = WORK / "wheels" / hashlib.sha256(f"{wanted} {flags}".encode()).hexdigest()[:12]
    if not list(folder.glob("*.whl")):
        say(f"compiling {wanted} with {flags}: minutes, once")
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-binary", ENGINE, "--no-input"]
        # pip's cache does not tell wheels with other CMAKE_ARGS apart.
        command += ["--no-cache-dir", "--disable-pip-version-check", "-w", str(folder), wanted]
        subprocess.run(command, env=os.environ | {"CMAKE_ARGS": flags}, check=True, timeout=ENGINE_TIMEOUT_S)
    return next(folder.glob("*.whl"))


def kernels_apart() -> bool:
    """Whether llama.cpp's kernels go into libraries of their own, one for each generation of processors."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def unpack_wheel(wheel: Path) -> None:
    """Put the engine's package before the installed one."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.startswith("llama_cpp")]
        archive.extractall(SITE, wanted)


# --- the folder ----------------------------------------------------------------------------------------------------


def freeze() -> Path:
    """Let PyInstaller make a folder with the program; where it is."""
    out = WORK / "dist"
    command = [
        sys.executable, "-P", "-m", "PyInstaller", "--noconfirm", "--clean", "--log-level", "WARN", "--onedir",
        "--noupx", "--name", "disco", "--distpath", str(out), "--workpath", str(WORK / "work"), "--specpath", str(WORK),
    ]  # fmt: skip
    command += [f"--add-data={SITE / source}{os.pathsep}{folder}" for source, folder in DATA]
    command += [f"--hidden-import={name}" for name in sorted({*PARTS, *hidden_modules()})]
    command += [f"--copy-metadata={name}" for name in METADATA if is_installed(name)]
    command += [f"--add-binary={path}{os.pathsep}llama_cpp/lib" for path in engine_libraries()]
    command += [f"--exclude-module={name}" for name in UNUSED]
    say("collecting the program")
    path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))  # for PyInstaller's children too
    entry = str(SITE / "entry.py")
    subprocess.run([*command, entry], env=os.environ | {"PYTHONPATH": path}, check=True, timeout=FREEZE_TIMEOUT_S)
    return out / "disco"


def is_installed(package: str) -> bool:
    """Whether there is metadata of it."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def home_of(package: str) -> Path | None:
    """The folder of a package, ours first; None where it is not installed."""
    if (SITE / package).is_dir():
        return SITE / package
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def hidden_modules() -> Iterator[str]:
    """The names of all modules of the packages that import some by name."""
    for package in LAZY:
        home = home_of(package)
        if home is None:
            continue
        for path in home.rglob("*.py"):
            *folders, name = path.relative_to(home).with_suffix("").parts
            if name != "__main__":
                yield ".".join([package, *folders, *([] if name == "__init__" else [name])])


def engine_libraries() -> list[Path]:
    """llama.cpp's libraries by the names that they are asked for; their full versions would be one copy more."""
    home = home_of("llama_cpp")
    assert home is not None, f"{ENGINE} is not installed"
    return [path for path in sorted((home / "lib").iterdir()) if path.name.count(".") <= 2]


def slim(folder: Path) -> None:
    """Take out what is of no use: where this checkout lies, libraries that are there twice, Python's debugging symbols.

    Those are most of its size, if it was built with them. `strip` breaks some of the packages' libraries: not theirs.
    """
    for path in folder.rglob("direct_url.json"):
        path.unlink()
    engine = folder / "_internal" / "llama_cpp" / "lib"
    for path in (folder / "_internal").glob("lib*"):  # beside each other is where the engine's libraries look
        if not path.is_symlink() and (engine / path.name).is_file():
            path.unlink()
    strip = shutil.which("strip")
    if strip is None or sys.platform == "darwin":  # where it would break the signature
        return
    for library in folder.rglob("libpython*.so*"):
        if not library.is_symlink():
            subprocess.run([strip, "--strip-debug", str(library)], check=True, timeout=STRIP_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())

"""Installs what a lock file names, by its hashes, and compiles llama.cpp beside that: two processors have enough to do.

`install.sh` and the Makefile run it with the lock file and pip's options for what is to be installed. Both halves write
to the same output; what fails ends the other one.
"""

import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NAME = "llama-cpp-python"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
INSTALL_S = 3600.0  # of one wheel that is here, on a disk however slow
LOOK_S = 0.2  # between two looks at whether a half has ended


def halves(lock: str) -> tuple[str, str]:
    """Return the entry of llama.cpp in a lock file, and all the others. Raises ValueError where it has none."""
    engine, others = [], []
    mine = others
    for line in lock.splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            mine = engine if line.startswith(f"{NAME}==") else others
        mine.append(line)
    if not engine:
        msg = f"the lock file has no {NAME}"
        raise ValueError(msg)
    return "".join(engine), "".join(others)


def is_installed(entry: str) -> bool:
    """Return whether the version that an entry of a lock file asks for is installed."""
    try:
        return version(NAME) == entry.removeprefix(f"{NAME}==").split()[0]
    except PackageNotFoundError:
        return False


def together(commands: list[list[str]]) -> int:
    """Run commands side by side; return 0, or the code of the first that failed, which ends the others."""
    running = [subprocess.Popen(command) for command in commands]
    try:
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            time.sleep(LOOK_S)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return next(filter(None, codes), 0)


def main(lock: Path, options: list[str]) -> int:
    """Install all that a lock file names. Returns pip's exit code."""
    engine, others = halves(lock.read_text())
    with tempfile.TemporaryDirectory(prefix="disco-install-") as folder:
        wheels, of_engine, of_others = (Path(folder, name) for name in ("wheels", "engine.lock", "others.lock"))
        of_engine.write_text(engine)
        of_others.write_text(others)
        locked = ["--require-hashes", "--no-deps", "--no-build-isolation"]
        commands = [[*PIP, "install", *options, *locked, "-r", str(of_others)]]
        is_missing = "--force-reinstall" in options or not is_installed(engine)
        if is_missing:
            for_wheels = [option for option in options if option not in ("--no-compile", "--force-reinstall")]
            commands.append([*PIP, "wheel", *for_wheels, *locked, "--wheel-dir", str(wheels), "-r", str(of_engine)])
        if code := together(commands):
            return code
        if is_missing:
            wheel = [str(path) for path in wheels.glob("*.whl")]
            command = [*PIP, "install", *options, "--no-deps", "--no-build-isolation", "--no-index", *wheel]
            return subprocess.call(command, timeout=INSTALL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

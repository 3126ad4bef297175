"""Installs what a lock file names, by its hashes, and compiles llama.cpp beside that: two processors have enough to do.

`install.sh` and the Makefile run it with the lock file and pip's options for what is to be installed. What follows a
`--then` is a command that needs all but llama.cpp, and runs while that is still compiled. Both halves write to the same
output; what fails ends the other one.
"""

import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NAME = "llama-cpp-python"
THEN = "--then"
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


def together(lanes: list[list[list[str]]]) -> int:
    """Run lanes side by side, the commands of each in turn; return 0, or the code of a failure, which ends all."""
    left = [iter(lane) for lane in lanes]
    running = [subprocess.Popen(next(lane)) for lane in left]
    try:
        while not any(codes := [process.poll() for process in running]):
            following = [next(lane, None) if code == 0 else None for code, lane in zip(codes, left, strict=True)]
            if None not in codes and not any(following):
                break
            for i, command in enumerate(following):
                if command:
                    running[i] = subprocess.Popen(command)
            time.sleep(LOOK_S)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return next(filter(None, codes), 0)


def commands_in(words: list[str]) -> list[list[str]]:
    """Return the words before the first `--then`, and between each two."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == THEN:
            found.append([])
        else:
            found[-1].append(word)
    return found


def main(lock: Path, words: list[str]) -> int:
    """Install all that a lock file names, and run what is to follow. Returns the exit code of what failed, or 0."""
    options, *following = commands_in(words)
    engine, others = halves(lock.read_text())
    with tempfile.TemporaryDirectory(prefix="disco-install-") as folder:
        wheels, of_engine, of_others = (Path(folder, name) for name in ("wheels", "engine.lock", "others.lock"))
        of_engine.write_text(engine)
        of_others.write_text(others)
        locked = ["--require-hashes", "--no-deps", "--no-build-isolation"]
        lanes = [[[*PIP, "install", *options, *locked, "-r", str(of_others)], *following]]
        is_missing = "--force-reinstall" in options or not is_installed(engine)
        if is_missing:
            for_wheels = [option for option in options if option not in ("--no-compile", "--force-reinstall")]
            lanes.append([[*PIP, "wheel", *for_wheels, *locked, "--wheel-dir", str(wheels), "-r", str(of_engine)]])
        if code := together(lanes):
            return code
        if is_missing:
            wheel = [str(path) for path in wheels.glob("*.whl")]
            command = [*PIP, "install", *options, "--no-deps", "--no-build-isolation", "--no-index", *wheel]
            return subprocess.call(command, timeout=INSTALL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

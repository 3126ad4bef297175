"""Processes that read model files are confined: seen from outside on a running engine, and tried from inside."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from disco_daemon.bench.child import child_env
from disco_daemon.cli.doctor.engine import confinement
from disco_daemon.cli.tune import _requantize
from disco_daemon.machines.model_memory import run_checkup
from disco_daemon.models.default import default_model_path
from disco_daemon.system import confine
from tests.fixtures.daemon import DaemonProcess, ask, running

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="seccomp and landlock are Linux's")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("confined")
    settings = {"device": {"spill_gib": 0.1, "spill_after_s": 0.0}}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"HF_TOKEN": "hf-TOKEN", "GGML_A_KEY": "no"}.items():
            patched.setenv(name, value)
        async with running(folder, settings=settings) as daemon:
            await daemon.device_ready()
            yield daemon


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


async def test_what_must_not_succeed_is_refused_inside_or_doctor_says_that_it_is_not_in_force() -> None:
    seen = await run_checkup()
    assert seen.confined is not None, seen.problem
    missing = set(seen.confined.missing)
    assert seen.confined.refused["connect"] or {"landlock", "seccomp"} <= missing
    assert seen.confined.refused["read"] or "landlock" in missing
    assert seen.confined.refused["write"] or "landlock" in missing
    told = confinement(seen)
    assert told is not None
    assert all(f"not in force: {name}" in told.found for name in missing)
    if os.environ.get("CI") and sys.platform == "linux":
        assert any(measure.startswith("seccomp") for measure in seen.confined.in_force), missing


# A child that is confined as the worker is, as another user where it may: what is in force, and whether it can name a
# thread of its own after the kernel has dropped what it had looked up there.
CHILD = """
import codecs, encodings.ascii, json, os, sys, threading
from pathlib import Path
from disco_daemon.system import confine
if os.geteuid() == 0 and sys.argv[1] == "a user":
    os.setgid(65534); os.setuid(65534); confine._prctl(confine.PR_SET_DUMPABLE, 1)  # as after an exec
confine.NAMES_THREADS = ("null",) if sys.argv[2] == "nvidia" else ("no-such-device",)
found = confine.confine(confine.Access())
try:
    (confine.THREADS / str(threading.get_native_id()) / "comm").write_text("named")
    named = "named"
except OSError as e:
    named = type(e).__name__
try:
    Path("/proc/self/clear_refs").write_text("1")
    other = "written"
except OSError as e:
    other = type(e).__name__
print(json.dumps([found.in_force, found.missing, named, other]))
"""


@LINUX
@pytest.mark.parametrize("user", ["a user", "whoever runs this"])
@pytest.mark.parametrize("gpu", ["nvidia", "none"])
def test_all_is_in_force_for_an_ordinary_user_and_nvidias_driver_may_name_its_threads(user: str, gpu: str) -> None:
    """Without that, CUDA does not open (error 304), as seen on an H100 with driver 580."""
    argv = [sys.executable, "-P", "-c", CHILD, user, gpu]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    in_force, missing, named, other = json.loads(done.stdout)
    assert "first to be ended when memory is short" in in_force, missing
    if not any(measure.startswith("landlock") for measure in in_force):
        pytest.skip(f"landlock is not in force here: {missing}")
    assert named == ("named" if gpu == "nvidia" else "PermissionError")
    assert other == "PermissionError"


@LINUX
@pytest.mark.asyncio(loop_scope="module")
async def test_a_running_engine_has_no_keys_no_new_privileges_and_a_filter(daemon: DaemonProcess) -> None:
    state = (await daemon.state())["endpoints"]["device"]
    pid, confined = state["pid"], state["confined"]
    if os.geteuid() != 0:  # of a process that may not be dumped nobody else reads this
        with pytest.raises(PermissionError):
            Path(f"/proc/{pid}/environ").read_bytes()
    else:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"secret-of-the-test" not in environment, "the provider's key"
        assert b"hf-TOKEN" not in environment
        assert b"GGML_A_KEY" not in environment
        assert psutil.Process(pid).rlimit(psutil.RLIMIT_CORE) == (0, 0)
    seen = status_of(pid)
    assert seen["NoNewPrivs"] == "1"
    assert seen["Seccomp"] == "2" or not any(measure.startswith("seccomp") for measure in confined)
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text("ascii")) >= confine.OOM_SCORE


@pytest.mark.asyncio(loop_scope="module")
async def test_a_confined_engine_answers_and_writes_its_idle_conversations(daemon: DaemonProcess) -> None:
    heard = await ask(daemon, "Name three colours.", model="disco/device", max_tokens=12)
    assert heard.text
    state = await daemon.until(lambda s: (s["endpoints"]["device"]["engine"] or {}).get("disk_texts", 0) > 0)
    assert state["endpoints"]["device"]["restarts"] == 0


def test_a_requantized_copy_is_written_and_nothing_else_can_be(tmp_path: Path) -> None:
    copy = tmp_path / "copy.Q8_0.gguf"
    _requantize(default_model_path(), copy)
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]
    assert copy.stat().st_size > default_model_path().stat().st_size
    probe = (
        "import sys; from pathlib import Path; from disco_daemon.system.confine import Access, confine\n"
        "new = Path(sys.argv[1], 'new'); new.touch(); found = confine(Access(replace=new))\n"
        "assert found.missing.get('landlock') is None, 'not in force'\n"
        "new.write_text('may be written'); new.replace(Path(sys.argv[1], 'renamed'))\n"
        "try: Path(sys.argv[1], 'copy.Q8_0.gguf').open('ab')\n"
        "except PermissionError: print('refused')\n"
    )
    seen = asyncio.run(run_checkup()).confined
    if seen is None or "landlock" in seen.missing:
        pytest.skip("doctor says: landlock is not in force")
    argv, env = [sys.executable, "-c", probe, str(tmp_path)], child_env(tmp_path)
    tried = subprocess.run(argv, env=env, capture_output=True, timeout=60, check=False)
    assert tried.stdout == b"refused\n", tried.stderr
    assert (tmp_path / "renamed").read_text() == "may be written"


async def gone(processes: list[psutil.Process], timeout_s: float = 20.0) -> None:
    """Wait until all of them have ended."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout_s)
    assert not alive, [process.cmdline() for process in alive]


async def descendants(pid: int, words: list[str], timeout_s: float = 60.0) -> list[psutil.Process]:
    """All processes below `pid`, once each of `words` is in the command of one of them."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = psutil.Process(pid).children(recursive=True)
            commands = []
            for process in found:
                try:
                    commands.append(" ".join(process.cmdline()))
                except psutil.Error:
                    continue
            if all(any(word in command for command in commands) for word in words):
                return found
            await asyncio.sleep(0.05)  # a process has no event for another one's child


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["demo"], ["disco_daemon.cli.main up", "disco_daemon.engine.worker"]),
        (["bench", "engine"], ["disco_daemon.cli.main up", "disco_daemon.engine.worker"]),
        (["bench", "relay"], ["disco_daemon.bench.loopback", "disco_daemon.cli.main up"]),
        (["tune"], ["disco_daemon.engine.measure.tune"]),
        (["up", "--port", "0"], ["disco_daemon.engine.worker"]),
    ],
    ids=["demo", "bench engine", "bench relay", "tune", "up"],
)
async def test_what_disco_starts_ends_with_it_also_when_it_is_killed(
    argv: list[str], words: list[str], tmp_path: Path
) -> None:
    env = child_env(tmp_path) | {"DISCO_MODELS_DIR": str(default_model_path().parent)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "disco_daemon.cli.main", *argv, env=env,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        children = await descendants(process.pid, words)
    finally:
        process.kill()
        await process.wait()
    assert children
    await gone(children)

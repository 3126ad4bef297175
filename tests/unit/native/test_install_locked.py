"""llama.cpp is compiled while the rest is installed (`native/install_locked.py`), and all of it by its hashes."""

from __future__ import annotations

import importlib.util
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.native.test_llama_build import CI

ROOT = CI.parent
ENDED = "import sys; sys.exit({})"
ENDLESS = "import pathlib, time; pathlib.Path({!r}).touch(); time.sleep(600)"
HASH = "    --hash=sha256:00"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("install_locked", CI / "install_locked.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-fleet.lock", "requirements-dev.lock"])
def test_both_halves_are_the_lock_file(script: Any, name: str) -> None:
    lock = (ROOT / name).read_text()
    engine, others = script.halves(lock)
    assert sorted((engine + others).splitlines()) == sorted(lock.splitlines())
    assert engine.startswith("llama-cpp-python==")
    assert engine.count("==") == 1
    assert "llama-cpp-python==" not in others
    assert all("--hash=" in entry for entry in engine.split("llama-cpp-python==")[1:])


def test_a_lock_file_without_llama_cpp_is_told(script: Any) -> None:
    with pytest.raises(ValueError, match="llama-cpp-python"):
        script.halves(f"numpy==1 \\\n{HASH}\n")


def test_what_is_installed_is_not_built_again(script: Any) -> None:
    assert script.is_installed(script.halves((ROOT / "requirements-dev.lock").read_text())[0])
    assert not script.is_installed("llama-cpp-python==0.0.1 \\")


def test_what_fails_ends_the_other_half(script: Any, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    failing = f"import os, sys, time\nwhile not os.path.exists({str(begun)!r}): time.sleep(0.01)\nsys.exit(7)"
    at = time.monotonic()
    lanes = [[[sys.executable, "-c", text]] for text in (ENDLESS.format(str(begun)), failing)]
    assert script.together(lanes) == 7
    assert time.monotonic() - at < 300  # ten minutes, had it waited


def test_an_installation_that_fails_leaves_nothing_running(tmp_path: Path) -> None:
    """What a half has started is in the group of `install.sh`'s child; whoever runs on holds the pipe open."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text("#!/bin/sh\nsleep 600 &\nexit 7\n")
    python.chmod(0o755)
    (tmp_path / "source").mkdir()
    function = re.search(
        r"^install_packages\(\) \{\n.*?^\}\n", (ROOT / "install.sh").read_text(), re.DOTALL | re.MULTILINE
    )
    assert function is not None
    begin = (
        f"set -euo pipefail; VENV='{tmp_path}/venv' SOURCE='{tmp_path}/source' LOG='{tmp_path}/log' LOCK='{tmp_path}'\n"
        'PIP_STEPS="" PACKAGES=""; say() { :; }; watch_child() { :; }; show_failure() { exit "$status"; }\n'
    )
    reader, writer = os.pipe()
    with open(reader, "rb") as heard:  # noqa: PTH123 - a pipe has no path
        try:
            program = ["bash", "-c", f"{begin}{function[0]}install_packages"]
            assert subprocess.run(program, pass_fds=[writer], timeout=60, check=False).returncode == 7
        finally:
            os.close(writer)
        assert select.select([heard], [], [], 60.0)[0], "it runs on"
        assert heard.read() == b""


def test_the_commands_of_a_half_run_in_turn_while_the_other_one_runs(script: Any, tmp_path: Path) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    makes = f"import pathlib; assert pathlib.Path({str(first)!r}).exists(); pathlib.Path({str(last)!r}).touch()"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(last)!r}).exists(): time.sleep(0.01)"
    begins = f"import pathlib; pathlib.Path({str(first)!r}).touch()"
    lanes = [[[sys.executable, "-c", text] for text in lane] for lane in ([begins, makes], [waits])]
    assert script.together(lanes) == 0
    never = tmp_path / "never"
    lane = ENDED.format(3), f"import pathlib; pathlib.Path({str(never)!r}).touch()"
    assert script.together([[[sys.executable, "-c", text] for text in lane]]) == 3
    assert not never.exists()


def test_pip_gets_the_options_and_checks_the_hashes(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = tmp_path / "some.lock"
    lock.write_text(f"llama-cpp-python==0.0.1 \\\n{HASH}\nnumpy==1 \\\n{HASH}\n")
    asked: list[list[str]] = []

    def together(lanes: list[list[list[str]]]) -> int:
        [others, *following], [wheel] = lanes
        assert following == [["first", "-v"], ["second"]]
        asked.extend(command[4:] for command in (others, wheel))
        Path(wheel[wheel.index("--wheel-dir") + 1]).mkdir()
        Path(wheel[wheel.index("--wheel-dir") + 1], "llama.whl").touch()
        return 0

    def call(command: list[str], timeout: float) -> int:
        assert timeout > 0
        asked.append(command[4:])
        return 5

    monkeypatch.setattr(script, "together", together)
    monkeypatch.setattr(script.subprocess, "call", call)
    following = ["--then", "first", "-v", "--then", "second"]
    assert script.main(lock, ["-v", "--no-compile", "--force-reinstall", *following]) == 5
    others, wheel, last = asked
    assert (others[0], wheel[0], last[0]) == ("install", "wheel", "install")
    assert all({"-v", "--require-hashes", "--no-deps", "--no-build-isolation"} <= set(half) for half in (others, wheel))
    assert not {"--no-compile", "--force-reinstall"} & set(wheel)  # which `pip wheel` does not know
    assert {"--no-compile", "--force-reinstall", "--no-deps", "--no-index"} <= set(last)
    assert last[-1].endswith("llama.whl")

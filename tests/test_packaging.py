"""What a user installs: the wheel owns two import names and carries its data."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from binary import build
from disco_tui.app import STYLESHEET

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_owns_two_import_names_and_ships_the_profiles(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves folders behind: not in the checkout
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", ".*_cache")
    )
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(source)]
    subprocess.run(pip, check=True, capture_output=True, timeout=170)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"disco_daemon", "disco_tui"}
    assert "disco_daemon/profiles/traces/gpt-3.5-turbo.csv" in names
    assert "disco_daemon/profiles/traces/README.md" in names, "the trace travels with its licence"
    assert "disco_daemon/py.typed" in names
    assert {"disco_daemon/profiles/readers.toml", "disco_daemon/profiles/demo_answers.toml"} <= set(names)
    assert "disco_tui/disco.tcss" in names, "the terminal UI travels with its stylesheet"
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "disco_daemon").rglob("*.py")}
    modules |= {f"disco_tui/{p.relative_to(ROOT / 'tui').as_posix()}" for p in (ROOT / "tui").rglob("*.py")}
    assert modules <= set(names), "packages in folders of packages are listed too"
    assert "disco_daemon/api/openapi.json" in names
    assert not {n for n in names if "benchmarks" in n or n.startswith("tests")}, "what measures stays in a checkout"
    assert any(n.endswith("LICENSE") for n in names)


def test_the_binary_finds_the_stylesheet_where_the_terminal_ui_looks_for_it() -> None:
    assert STYLESHEET.resolve() == (ROOT / "tui" / "disco.tcss").resolve()
    assert (f"disco_tui/{STYLESHEET.name}", "disco_tui") in build.DATA

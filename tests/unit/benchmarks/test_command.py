"""What scripts and verbs do where nobody reads what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERB = "from disco_daemon.cli.main import main; raise SystemExit(main(['config', 'path']))"
SCRIPT = "from benchmarks.command import run_script; raise SystemExit(run_script(lambda: print({text}) or 0))"


@pytest.mark.parametrize("code", [VERB, SCRIPT.format(text="1"), SCRIPT.format(text="'x' * 10**6")])
def test_who_reads_no_further_gets_no_traceback(code: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        env=os.environ | {"DISCO_CONFIG": str(tmp_path / "config.toml")}, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    os.close(write)
    assert (done.stderr, done.returncode) == ("", 1)

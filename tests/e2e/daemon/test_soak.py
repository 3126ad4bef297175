"""`benchmarks.soak`, for seconds: faults and clients at once, and nothing broken or left behind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from disco_daemon.models.default import models_dir

ROOT = Path(__file__).parents[3]
NAMES = {
    "minutes", "requests", "faults", "broken", "rss_growth", "fds_left", "tasks_left", "cells_left", "lag_ms_p99",
    "ledger_gap_usd",
}  # fmt: skip


@pytest.mark.slow
async def test_under_random_faults_no_promise_is_broken_and_nothing_is_left(tmp_path: Path) -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.soak", "--minutes", "0.25", "--json",
        cwd=ROOT, stdout=pipe, stderr=pipe,
        env=os.environ | {"HOME": str(tmp_path), "DISCO_MODELS_DIR": str(models_dir())},
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, out.decode() + err.decode()
    figures = json.loads(out)
    assert figures.keys() >= NAMES
    assert figures["broken"] == 0, figures["what_broke"]
    assert figures["requests"] > 10
    assert figures["faults"] >= 5
    left = {name: figures[f"{name}_left"] for name in ("fds", "tasks", "cells", "threads", "children", "running")}
    assert not any(left.values()), left
    assert figures["ledger_gap_usd"] < 1e-9

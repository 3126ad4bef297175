"""`python -m benchmarks.handoff` from a checkout, as small as it goes: real answers move, and its figures are there."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from disco_daemon.bench.child import child_env
from disco_daemon.models.default import default_model_path

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
async def test_bench_handoff_moves_real_answers_and_prints_its_figures(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.handoff", "--json", "--count", "3", "--live", "0",
        cwd=ROOT, env=child_env(tmp_path) | {"DISCO_MODELS_DIR": str(default_model_path().parent)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    figures = json.loads(out)
    assert "cost_reduction" in figures
    for way in ("to_device", "to_server"):
        found = figures[way]
        assert set(found) >= {
            "handoffs", "identical", "lost_chars", "doubled_chars", "tbt_p99_s", "delayed_tokens_mean",
            "delayed_tokens_p99", "largest_gap_s",
        }  # fmt: skip
        assert found["handoffs"] >= 3, found
        assert found["identical"] == found["handoffs"], found
        assert found["lost_chars"] == found["doubled_chars"] == 0

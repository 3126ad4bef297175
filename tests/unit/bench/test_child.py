"""What a measurement's processes are told: another checkout's code hears of no setting that it may not know."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from disco_daemon.bench.child import EQUAL, NOT_STOPPED, child

TELLS = """
import json, os, signal
print(json.dumps({"url": " ".join(sorted(name for name in os.environ if name.startswith("DISCO_")))}), flush=True)
signal.pause()
"""
ARGV = [sys.executable, "-c", TELLS, "up"]
BOTH = sorted(EQUAL | NOT_STOPPED)


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({}, BOTH),
        ({"PYTHONPATH": "/another/checkout"}, []),
        ({"PYTHONPATH": "/another/checkout", "DISCO_POLICY_UNEQUAL": "race"}, ["DISCO_POLICY_UNEQUAL"]),
    ],
    ids=["ours", "another's", "another's that is told so"],
)
async def test_only_our_own_code_is_told_settings_that_another_checkout_may_not_know(
    env: dict[str, str], told: list[str], tmp_path: Path
) -> None:
    async with child(ARGV, tmp_path, "child", env) as heard:
        assert heard.split() == told

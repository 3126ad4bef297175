"""Many slow streams at once: all are taken and come whole. The figures are of `python -m benchmarks.relay.streams`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
STREAMS = 60


def test_many_slow_streams_are_whole_and_take_little_memory() -> None:
    # They begin within a tenth of a second and last 3 s: a busy machine has as long to begin the last one.
    argv = [
        sys.executable, "-m", "benchmarks.relay.streams", "--streams", str(STREAMS), "--arrivals", "1000", "--tokens",
        "30", "--json",
    ]  # fmt: skip
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["completed"] == {"direct": STREAMS, "daemon": STREAMS}, found["errors"]
    assert found["most_at_once"] == STREAMS
    assert found["rss_mib"] < 400

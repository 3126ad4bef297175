"""How a daemon hears that another process has ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from disco_daemon.daemon import lifecycle

PATIENCE_S = 20.0

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no process can be waited for by its id here")


async def test_the_end_of_a_process_is_heard_once_also_of_one_that_is_no_child() -> None:
    grandchild = "import subprocess, sys; p = subprocess.Popen(['cat']); print(p.pid, flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", grandchild, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert process.stdin is not None
    pid = int(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S))
    ended, times = asyncio.Event(), 0

    def call() -> None:
        nonlocal times
        times += 1
        ended.set()

    descriptors = Path("/proc/self/fd")
    open_before = len(list(descriptors.iterdir()))
    assert lifecycle._on_end(pid, call)
    await asyncio.sleep(0)
    assert not ended.is_set()
    process.stdin.close()
    await asyncio.wait_for(ended.wait(), PATIENCE_S)
    await asyncio.wait_for(process.wait(), PATIENCE_S)
    assert times == 1
    assert len(list(descriptors.iterdir())) <= open_before, "what was opened for it is closed"


async def test_of_a_process_that_is_gone_it_is_said() -> None:
    process = await asyncio.create_subprocess_exec("true")
    await asyncio.wait_for(process.wait(), PATIENCE_S)
    assert not lifecycle._on_end(process.pid, lambda: None)

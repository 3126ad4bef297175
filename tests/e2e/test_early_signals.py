"""A SIGHUP before the daemon listens does not end it: it is obeyed when there is something that can."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.fixtures.daemon import running


async def test_a_hangup_during_the_start_is_obeyed_when_the_daemon_listens(tmp_path: Path) -> None:
    # Just behind the first lines of `disco up`, while the daemon's modules are being loaded.
    early = f"""
import os, disco_daemon.daemon.logs as logs
begin = logs.begin
def begin_and_hang_up(*given, **named):
    begin(*given, **named)
    os.kill(os.getpid(), {int(signal.SIGHUP)})
logs.begin = begin_and_hang_up
"""
    async with running(tmp_path, device=False, server="http://127.0.0.1:9/v1", before=early) as daemon:
        await daemon.until(lambda _: "configuration read again" in daemon.log)
        os.kill((await daemon.state())["pid"], signal.SIGHUP)
        await daemon.until(lambda _: daemon.log.count("configuration read again") == 2)

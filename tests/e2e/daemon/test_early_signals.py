"""Signals before the daemon listens: a SIGHUP is obeyed when something can, a SIGTERM ends it in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.fixtures.daemon import running


def behind(module: str, function: str, *numbers: int) -> str:
    """Code that lets a process send itself these signals behind the first call of a function."""
    return f"""
import os, {module} as module
original = module.{function}
def and_signal(*given, **named):
    module.{function} = original
    found = original(*given, **named)
    for number in {[int(number) for number in numbers]}:
        os.kill(os.getpid(), number)
    return found
module.{function} = and_signal
"""


async def test_a_hangup_during_the_start_is_obeyed_when_the_daemon_listens(tmp_path: Path) -> None:
    early = behind("disco_daemon.daemon.logs", "begin", signal.SIGHUP)
    async with running(tmp_path, device=False, server="http://127.0.0.1:9/v1", before=early) as daemon:
        await daemon.until(lambda _: "configuration read again" in daemon.log)
        os.kill((await daemon.state())["pid"], signal.SIGHUP)
        await daemon.until(lambda _: daemon.log.count("configuration read again") == 2)


EARLY = {
    "behind the first lines of `disco up`": ("disco_daemon.daemon.logs", "begin"),
    "while the daemon's modules are loaded, and its engine begins": (
        "disco_daemon.system.control_groups",
        "n_processors",
    ),
    "while it starts to serve": ("disco_daemon.daemon.money", "restore"),
}


@pytest.mark.parametrize(("where", "n"), [*((where, 1) for where in EARLY), *((where, 2) for where in [*EARLY][:2])])
async def test_a_sigterm_during_the_start_ends_it_in_order_and_a_second_one_at_once(
    where: str, n: int, tmp_path: Path
) -> None:
    """Its exit code is that of an end in order; nothing of it is left, and its history is closed."""
    module, function = EARLY[where]
    early = behind(module, function, *[signal.SIGTERM] * n)
    (tmp_path / "config.toml").write_text("")
    argv = ["up", "--port", "0", "--json", "--threads", "1"]
    argv += ["--config", str(tmp_path / "config.toml"), "--history", str(tmp_path / "history.sqlite")]
    code = f"{early}\nimport sys\nfrom disco_daemon.cli.main import main\nsys.exit(main())"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", code, *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == (0 if n == 1 else 128 + signal.SIGTERM), said.decode()
    assert b"Traceback" not in said
    if n == 1:
        marked = str(tmp_path)
        assert not [one for one in psutil.process_iter(["cmdline"]) if marked in " ".join(one.info["cmdline"] or ())]
        assert not list(tmp_path.glob("history.sqlite-wal"))

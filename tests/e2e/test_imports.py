"""What the commands that people wait for load: nothing heavy, neither to say what there is nor to ask a daemon."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.fixtures.daemon import running
from tests.fixtures.upstream import Upstream

# Each of them takes longer to import than the rest of such a command takes.
HEAVY = ("aiohttp", "asyncio", "httpx2", "llama_cpp", "markdown_it", "matplotlib", "numpy", "openai", "psutil",
         "prometheus_client", "pygments", "sqlite3", "textual")  # fmt: skip
PROGRAM = """
import json, sys
from disco_daemon.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
sys.stdout.flush()
print(json.dumps([code or 0, sorted(sys.modules)]), file=sys.stderr)
"""


async def loaded(home: Path, *args: str) -> tuple[int, str, set[str]]:
    """Exit code of a command, what it printed, and the modules it has loaded by its end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", PROGRAM, *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parent.parent.parent), "HOME": str(home), "PATH": ""},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    code, modules = json.loads(err.splitlines()[-1])
    return code, out.decode(), set(modules)


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("up", "--help"), ("service", "--help")])
async def test_help_loads_nothing_heavy(args: tuple[str, ...], tmp_path: Path) -> None:
    code, out, modules = await loaded(tmp_path, *args)
    assert code == 0
    assert "disco" in out
    assert modules.isdisjoint((*HEAVY, "rich", "msgspec"))


async def test_status_of_a_running_daemon_loads_nothing_heavy(tmp_path: Path) -> None:
    """Both ways of showing it; the daemon has answered something, so that there is something to show."""
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, device=False) as daemon:
        await daemon.client.chat.completions.create(model="disco", messages=[{"role": "user", "content": "Hello"}])
        for more in ((), ("--json",)):
            code, out, modules = await loaded(tmp_path, "status", "--url", daemon.root, *more)
            assert code == 0
            assert "server" in out
            assert modules.isdisjoint(HEAVY)
        assert "rich" not in modules, "a program that reads JSON needs no tables"

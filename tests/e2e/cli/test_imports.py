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
         "prometheus_client", "pygments", "rich", "sqlite3", "textual")  # fmt: skip
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

# A server that has started answers for the first time.
FIRST_ANSWER = """
import asyncio, sys
from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.types import GenerationRequest, Usage

async def main():
    server = Server(ServerConfig(sys.argv[1], "m", "k"))
    await server.start()
    before = set(sys.modules)
    async for _ in server.ask(GenerationRequest("r", ({"role": "user", "content": "Hello"},)), Usage()):
        pass
    await server.close()
    print(*(name for name in set(sys.modules) - before if name.startswith(("openai", "httpx2", "aiohttp"))))

asyncio.run(main())
"""


async def loaded(home: Path, *args: str) -> tuple[int, str, set[str]]:
    """Exit code of a command, what it printed, and the modules it has loaded by its end."""
    out, err = await python(home, PROGRAM, *args)
    code, modules = json.loads(err.splitlines()[-1])
    return code, out, set(modules)


async def python(home: Path, program: str, *args: str) -> tuple[str, str]:
    """What a program printed on both."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", program, *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parent.parent.parent.parent), "HOME": str(home), "PATH": ""},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return out.decode(), err.decode()


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("up", "--help"), ("service", "--help")])
async def test_help_loads_nothing_heavy(args: tuple[str, ...], tmp_path: Path) -> None:
    code, out, modules = await loaded(tmp_path, *args)
    assert code == 0
    assert "disco" in out
    assert modules.isdisjoint((*HEAVY, "msgspec"))


async def test_status_of_a_running_daemon_loads_nothing_heavy(tmp_path: Path) -> None:
    """Both ways of showing it; the daemon has answered something, so that there is something to show."""
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, device=False) as daemon:
        await daemon.client.chat.completions.create(model="disco", messages=[{"role": "user", "content": "Hello"}])
        for more in ((), ("--json",)):
            code, out, modules = await loaded(tmp_path, "status", "--url", daemon.root, *more)
            assert code == 0
            assert "server" in out
            assert modules.isdisjoint(HEAVY)


async def test_the_first_answer_of_a_server_loads_no_more_of_the_client(tmp_path: Path) -> None:
    """It would wait for that, with the whole daemon, and its time to first token would not be learned."""
    async with Upstream() as upstream:
        out, err = await python(tmp_path, FIRST_ANSWER, upstream.url)
    assert not err
    assert out.split() == []
    assert upstream.exchanges[0].chunks > 0


async def test_a_daemon_without_a_server_never_loads_the_servers_client(tmp_path: Path) -> None:
    """It would be half of what a daemon does until it listens."""
    program = "import sys, disco_daemon.daemon.daemon; print('openai' in sys.modules)"
    assert (await python(tmp_path, program))[0].strip() == "False"


@pytest.mark.parametrize("module", ["disco_daemon.engine.worker", "disco_daemon.engine.hosts.process"])
async def test_an_engine_which_has_no_loop_loads_none(module: str, tmp_path: Path) -> None:
    """It would be a twelfth of its start, for which a first answer waits."""
    program = f"import sys, {module}; print('asyncio' in sys.modules)"
    assert (await python(tmp_path, program))[0].strip() == "False"

"""Every process that this program starts ends with it, also when it is killed: there is one way, and all take it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("disco_daemon", "tui", "benchmarks", ".ci", "native")
# Where a process is started that goes on beside us, and how it hears of our end. Everywhere else programs are run to
# their end, with a time-out.
ENDS = {
    "disco_daemon/system/process.py": "the parts: their socket ends",
    "disco_daemon/fleet_keeper/keeper.py": "the lending command: its stdin ends; Ray: PR_SET_PDEATHSIG",
    "disco_daemon/bench/child.py": "`disco up --until-eof`, loopback and llama-server: their stdin ends",
    "disco_daemon/client/launcher.py": "`disco up --until-eof`: its stdin ends",
    "benchmarks/fleet/live.py": "its stdin ends, when it has played what it was asked for",
    "benchmarks/split/daemons.py": "a verb, which ends by itself or is killed after its time-out",
    "benchmarks/split/naive.py": "end_with_stdin",
    "benchmarks/split/proxy.py": "end_with_stdin",
    "benchmarks/faults/browser.py": "a guard with end_with_stdin",
    "benchmarks/relay/busy_core.py": "end_with_stdin",
    "benchmarks/tui/tui_memory.py": "end_with_stdin",
    "benchmarks/tui/tui_latency.py": "its terminal hangs up",
    "benchmarks/faults/fuzz_files.py": "a limit on its processor time",
    "benchmarks/relay/startup.py": "once(): a program that ends by itself",
    "native/install_locked.py": "together(): what fails ends the other half",
    ".ci/binary/started.py": "the build of the binary, which kills it at its end",
}
STARTS = {
    "create_subprocess_exec",
    "create_subprocess_shell",
    "Popen",
    "fork",
    "spawnv",
    "posix_spawn",
    "system",
    "popen",
}
RUNS = {"run", "call", "check_call", "check_output"}


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            match node.func:
                case (
                    ast.Attribute(value=ast.Name(id=module), attr=name)
                    | ast.Attribute(value=ast.Attribute(attr=module), attr=name)
                ):
                    yield f"{module}.{name}", node
                case ast.Name(id=name):
                    yield name, node


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_a_process_that_goes_on_beside_us_is_started_where_its_end_is_known() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        for name, _ in calls(path)
        if name.rpartition(".")[2] in STARTS and name.startswith(("asyncio.", "os.", "subprocess."))
    }
    assert found == set(ENDS)


def test_a_program_that_is_run_to_its_end_has_a_time_out() -> None:
    endless = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sources()
        for name, call in calls(path)
        if name in {f"subprocess.{run}" for run in RUNS} and not any(word.arg == "timeout" for word in call.keywords)
    ]
    assert endless == []


def test_every_daemon_of_a_measurement_ends_with_its_stdin() -> None:
    started = [path for path in sources() if '"--port", "0", "--json"' in path.read_text("utf-8")]
    assert len(started) > 5
    for path in started:
        _, *commands = path.read_text("utf-8").split('"--port", "0", "--json"')
        if path.parent.name != "binary":  # other programs that end so may be started beside it
            assert all('"--until-eof"' in command[:200] for command in commands), path

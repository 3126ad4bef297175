"""Measures how long the commands that people wait for take to start, beside a Python that does nothing.

    python benchmarks/relay/startup.py [--repeats 21] [--program dist/disco] [--peer llm]

A daemon of its own is started for `disco status`, without engine and server to speak of. All commands are run in turns,
so that a machine that gets busy is busy for all. Printed are medians and their ratio to `python -c pass`; with
`--program` the commands of another build, such as the single binary; with `--peer` also `PEER --help`, of another
program with a command line. The last line is JSON, times in s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from disco_daemon.bench.child import child

OWN = (sys.executable, "-P", "-m", "disco_daemon.cli.main")
LIMIT_S = 60.0


def once(command: list[str], env: dict[str, str]) -> float:
    """Wall time of one run, s. Raises CalledProcessError."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    limit = threading.Timer(LIMIT_S, process.kill)  # a wait with a time-out would look every 50 ms
    limit.start()
    code = process.wait()
    took_s = time.perf_counter() - began
    limit.cancel()
    if code:
        raise subprocess.CalledProcessError(code, command)
    return took_s


def measure(commands: dict[str, list[str]], repeats: int, env: dict[str, str]) -> dict[str, list[float]]:
    """The times of each command, in turns; the first turn only warms up."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(repeats + 1):
        for name, command in commands.items():
            took_s = once(command, env)
            if turn:
                times[name].append(took_s)
    return times


async def against_a_daemon(program: tuple[str, ...], peer: str, repeats: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.toml").write_text('[server]\nbase_url = "http://127.0.0.1:9/v1"\nmodel = "none"\n', "utf-8")
        env = os.environ | {"HOME": name, "DISCO_CONFIG": str(folder / "config.toml")}
        up = [
            *OWN,
            "up",
            "--port",
            "0",
            "--json",
            "--until-eof",
            "--no-device",
            "--history",
            str(folder / "history.sqlite"),
        ]
        async with child([*up, "--config", str(folder / "config.toml")], folder, "daemon") as url:
            commands = {
                "python -c pass": [sys.executable, "-c", "pass"],
                "disco --help": [*program, "--help"],
                "disco status": [*program, "status", "--url", url],
                "disco status --json": [*program, "status", "--url", url, "--json"],
            }
            if peer:
                commands[f"{peer} --help"] = [*shlex.split(peer), "--help"]
            return await asyncio.to_thread(measure, commands, repeats, env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--program", type=Path, help="another build of disco, such as dist/disco")
    parser.add_argument("--peer", default="", help="another program whose --help is timed, too")
    args = parser.parse_args()
    program = OWN if args.program is None else (str(args.program.resolve()),)
    times = asyncio.run(against_a_daemon(program, args.peer, args.repeats))
    medians = {name: statistics.median(found) for name, found in times.items()}
    least = medians["python -c pass"]
    for name, found in times.items():
        spread = f"{1e3 * min(found):.0f} to {1e3 * max(found):.0f}"
        print(f"{name:<22} {1e3 * medians[name]:6.0f} ms  {medians[name] / least:5.1f} x  ({spread})")
    machine = {"machine": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
    ratios = {name: round(median / least, 2) for name, median in medians.items()}
    print(json.dumps(machine | {"repeats": args.repeats, "median_s": medians, "ratio": ratios}))


if __name__ == "__main__":
    main()

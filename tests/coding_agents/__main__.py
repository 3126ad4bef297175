"""The agents that people use, unmodified, against a daemon: `make agents`.

    python -m tests.coding_agents [--runs N] [NAME …]

Each agent reads a file, changes a word in it and ends, N times over, by a scripted server behind the daemon that
dictates the calls of its tools. Then each is asked once of a device alone, whose context its first prompt does not fit,
and has to show why; and a device with room is sent that prompt. All of them run in a network namespace of their own,
which has nothing but its loopback. Prints `{"clients": {NAME: {"version", "passed", "failed",
"first_prompt_tokens", …}}, "skipped": {NAME: why}}`, and ends with 1 where something has failed. Prompts are counted in
tokens of the embedded model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.coding_agents.inside import loopback_up, try_all
from tests.coding_agents.installing import installed, no_namespace
from tests.coding_agents.programs import PROGRAMS

RUNS = 3


def main() -> int:
    """Install the agents, and try them in a namespace."""
    parser = argparse.ArgumentParser(prog="python -m tests.coding_agents")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; all by default")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"of each agent; {RUNS} by default")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.names) - PROGRAMS.keys():
        parser.error(f"no such agent: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    names = [name for name in PROGRAMS if name in args.names or not args.names]
    if args.inside:
        loopback_up()
        with tempfile.TemporaryDirectory(prefix="agents") as folder:
            print(json.dumps(asyncio.run(try_all(names, args.runs, Path(folder)))))
        return 0
    refused = no_namespace()
    skipped = {name: why for name in names if (why := refused or installed(name))}
    clients: dict[str, Any] = {}
    if able := [name for name in names if name not in skipped]:
        command = [sys.executable, "-m", "tests.coding_agents", "--inside", "--runs", str(args.runs), *able]
        unshare = shutil.which("unshare")
        assert unshare is not None
        done = subprocess.run([unshare, "-rn", *command], stdout=subprocess.PIPE, text=True, check=True)
        clients = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({"clients": clients, "skipped": skipped}, indent=1))
    return 1 if any(told["failed"] for told in clients.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

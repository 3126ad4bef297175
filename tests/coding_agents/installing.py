"""The agents' programs: npm's by its lock file, Python's in a virtual environment of their own; both unable to run
anything while they are installed.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

from tests.coding_agents.programs import HERE, PROGRAMS, ROOT, VENV
from tests.fixtures.installing import install_node, install_python

NODE_AT_LEAST = 16  # of which Codex's launcher is


def no_namespace() -> str:
    """Return why no network namespace can be made here; "" if one can."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return "there is no unshare here: the agents run on Linux only"
    done = subprocess.run([unshare, "-rn", "true"], capture_output=True, text=True, timeout=10, check=False)
    return "" if done.returncode == 0 else f"unshare -rn is refused: {done.stderr.strip()}"


def installed(name: str) -> str:
    """Install an agent if it is not there; return why it cannot be run, "" if it can."""
    why = _python() if name == "aider-chat" else _node()
    if not why and not PROGRAMS[name].program.exists():
        return f"there is no program for this machine at {PROGRAMS[name].program.relative_to(ROOT)}"
    return why


@cache
def _python() -> str:
    return install_python(HERE / "requirements.lock", VENV)


@cache
def _node() -> str:
    node = shutil.which("node")
    if node is not None:
        told = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
        if int(told.removeprefix("v").partition(".")[0] or 0) < NODE_AT_LEAST:
            return f"node {told.strip()} is too old: {NODE_AT_LEAST} or newer is needed"
    return install_node(HERE / "node")

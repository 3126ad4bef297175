"""The agents' programs: npm's by its lock file, Python's in a virtual environment of their own; both unable to run
anything while they are installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache

from tests.clients.__main__ import install
from tests.coding_agents.programs import HERE, PROGRAMS, ROOT, VENV

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
    lock, stamp = HERE / "requirements.lock", VENV / ".stamp"
    if stamp.exists() and stamp.stat().st_mtime >= lock.stat().st_mtime:
        return ""
    pip = [str(VENV / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--require-hashes"]
    if why := install([sys.executable, "-m", "venv", str(VENV)], ROOT) or install([*pip, "-r", str(lock)], ROOT):
        return why
    stamp.touch()
    return ""


@cache
def _node() -> str:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        return "node and npm are not installed"
    told = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    if int(told.removeprefix("v").partition(".")[0] or 0) < NODE_AT_LEAST:
        return f"node {told.strip()} is too old: {NODE_AT_LEAST} or newer is needed"
    lock, stamp = HERE / "node/package-lock.json", HERE / "node/node_modules/.package-lock.json"
    if stamp.exists() and stamp.stat().st_mtime >= lock.stat().st_mtime:
        return ""
    return install([npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], HERE / "node")

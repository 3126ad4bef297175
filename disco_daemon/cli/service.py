"""`disco service`: have systemd or launchd start the daemon at login and keep it running."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config.schema import Config
    from ..service.managers import Manager
    from ..service.spec import Spec

# Variables of this shell that a daemon needs when a service manager starts it.
INHERITED = ("DISCO_CONFIG", "DISCO_MODELS_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
SPARE_BYTES = 2 << 30  # for the system and the user's programs; the limit is the rest of the memory
LEAST_BYTES = 2 << 30  # of memory that the service is allowed, however little there is


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("service", help="start disco at login, and keep it running", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    install = actions.add_parser("install", help="install it for you, and start it")
    install.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    for name, what in (
        ("uninstall", "stop it, and remove it"),
        ("start", "start it"),
        ("stop", "stop it until the next login"),
        ("restart", "stop it and start it again"),
    ):
        actions.add_parser(name, help=what)
    status = actions.add_parser("status", help="show whether it is installed, and how it is")
    status.add_argument("--json", action="store_true", help="print one JSON document")
    logs = actions.add_parser("logs", help="show what the daemon has logged")
    logs.add_argument("-f", "--follow", action="store_true", help="go on as more comes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the service manager of this machine."""
    from ..service.managers import of_this_machine

    manager = of_this_machine()
    if args.action == "install":
        return install(manager, dry_run=args.dry_run)
    if args.action == "status":
        return _status(manager, as_json=args.json)
    if args.action == "logs":
        command = manager.logs(args.follow)
        os.execvp(command[0], command)  # noqa: S606 - a pager of the system, with our own words
    if args.action == "uninstall":
        gone = manager.uninstall()
        for path in gone:
            print(f"removed {path}")
        print("the service is uninstalled; your settings and history stay" if gone else "it was not installed")
        return 0
    getattr(manager, args.action)()
    print({"start": "started", "stop": "stopped", "restart": "restarted"}[args.action])
    return 0


def install(manager: Manager, *, dry_run: bool = False) -> int:
    """Have it started at each login and now, or print the files; return the exit code. Raises ServiceError."""
    from ..config.layers import load

    config = load()  # a service with a wrong configuration would fail out of sight
    spec = spec_of(config)
    if dry_run:
        for path, text in manager.files(spec).items():
            print(f"# {path}\n{text}")
        return 0
    manager.install(spec)
    for path in manager.files(spec):
        print(f"wrote {path}")
    print("disco starts at each login from now on; `disco service status` shows how it is")
    key = config.server.api_key_env
    if config.server.base_url and not config.server.api_key_file and os.environ.get(key):
        print(f"the service does not see ${key} of this shell: put the key into a file, `disco setup` does it")
    return 0


def _status(manager: Manager, *, as_json: bool) -> int:
    status = manager.status()
    if as_json:
        found = {"manager": manager.name, "installed": status.installed, "state": status.state, "pid": status.pid}
        print(json.dumps(found | {"detail": status.detail}))
    else:
        pid = f", process {status.pid}" if status.pid else ""
        print(f"{manager.name}: {status.state}{pid}{f' ({status.detail})' if status.detail else ''}")
    return 0 if status.state == "running" else 1


def spec_of(config: Config) -> Spec:
    """Return the service's specification by the settings."""
    from ..service.managers import log_folder
    from ..service.spec import Spec

    return Spec(
        command=(*own_command(), "up", "--service"),
        host=config.api.host,
        port=config.api.port or None,
        environment={name: os.environ[name] for name in INHERITED if os.environ.get(name)},
        memory_bytes=memory_limit(),
        log=log_folder(),
    )


def own_command() -> tuple[str, ...]:
    """Return the command that starts this program again, with absolute paths."""
    from ..system.program import CLI, file, is_binary

    if is_binary():
        return (str(file() or sys.executable),)
    beside = Path(sys.executable).parent / "disco"
    if beside.exists():
        return (str(beside),)
    return sys.executable, "-P", "-m", CLI


def memory_limit() -> int:
    """Return the memory limit of daemon and engine, bytes: this machine's memory but for some to spare."""
    import psutil

    whole: int = psutil.virtual_memory().total
    return max(LEAST_BYTES, whole - SPARE_BYTES)

"""What `disco partner` and `disco fleet` have in common: a code for one machine, and the machines that have joined."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from .terminal import make_console


def add_actions(
    *actions: tuple[argparse.ArgumentParser, Callable[[argparse.Namespace], int]],
) -> None:
    """Let actions ask the daemon."""
    for action, run in actions:
        action.add_argument("--url", help="daemon to ask (default from the configuration)")
        action.set_defaults(run=run)


def ask(args: argparse.Namespace, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Ask the daemon, by a route below /disco/v1. Raises DaemonError."""
    from ..client import once as client
    from ..config.layers import load

    root, key = client.daemon_at(args.url, load())
    path = f"/disco/v1/{path}"
    return client.get(root, path, key) if method == "GET" else client.post(root, path, body or {}, key)


def print_code(args: argparse.Namespace, found: dict[str, Any], turned_on: str, command: str) -> bool:
    """Print a code, how long it lives and what to type on the other machine; return whether as text, not as JSON."""
    if args.json:
        print(json.dumps(found))
        return False
    console = make_console(highlight=False, soft_wrap=True)
    if found["turned_on"]:
        console.print(turned_on)
    print(found["code"])
    console.print(f"The code is good for one machine, for {found['expires_s'] / 60:.0f} minutes. There, type:")
    print(f"{command} {found['code']}")
    return True


def revoke(args: argparse.Namespace, path: str) -> int:
    """Refuse a machine from now on, by a route below /disco/v1."""
    found = ask(args, "POST", path, {"name": args.name})
    print(json.dumps(found) if args.json else f"{found['revoked']} is refused from now on.")
    return 0

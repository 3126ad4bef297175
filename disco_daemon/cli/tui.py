"""`disco tui`: the terminal UI, for this machine's daemon or another one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .terminal import has_screen, raw_output


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("tui", help="the terminal UI: chat, control panel, dashboard", description=__doc__)
    parser.add_argument("--url", help="daemon to talk to (default from the configuration)")
    parser.add_argument(
        "--plain", action="store_true", help="no frames, no animation, words in place of signs (for screen readers)"
    )
    parser.add_argument("--store", type=Path, help="another file for the conversations")
    parser.add_argument("--no-store", action="store_true", help="keep no conversations")
    parser.add_argument("--no-start", action="store_true", help="start no daemon where none runs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the terminal UI until it is quit."""
    if not has_screen():
        print("disco tui: this is no terminal to draw on; `disco chat` works in pipes and scripts", file=sys.stderr)
        return 2
    from disco_tui.app import run as show

    from ..client import once as client
    from ..config.layers import data_path, load

    root, key = client.daemon_at(args.url, load())
    path = None if args.no_store else args.store or data_path() / "conversations.sqlite"
    # An address stands for a daemon that runs already.
    with raw_output():
        return show(root, key, path, plain=args.plain, start=args.url is None and not args.no_start)

"""`disco usage`: what was used in the last days, by key, model, server or day.

By key and by day these are whole requests, with the tokens that clients were told. By model and by server they are the
starts of each, with the tokens that it has processed, also where another side was first; of requests that the history
still has.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

DAYS = 31  # by default: a month, as `disco status` has the ledger
MOST_DAYS = 1000  # as the API's other lists of days
MOST_NAME = 100  # characters of a name; the longest ones of models have that many
BY = ("key", "model", "server", "day")
NOBODY = {"key": "(no name)", "server": "(this machine)"}  # in place of an empty name


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "usage", help="show what was used, by key, model, server or day", description=__doc__
    )
    parser.add_argument("--by", choices=BY, default="key", help="what it is summed up by (default: %(default)s)")
    parser.add_argument("--days", type=int, default=DAYS, metavar="N", help="of the last N days (default: %(default)s)")
    parser.add_argument("--url", help="daemon to ask (default from the configuration)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the daemon, or read its history where none runs; print a table, or JSON."""
    from ..client import once as client
    from ..config.layers import load
    from ..errors import ConfigError

    if not 1 <= args.days <= MOST_DAYS:
        raise ConfigError(f"--days must be between 1 and {MOST_DAYS}")
    root, key = client.daemon_at(args.url, load())
    try:
        rows = client.get(root, f"/disco/v1/usage?by={args.by}&days={args.days}", key)["data"]
    except client.DaemonError as e:
        if args.url or e.code != client.NOT_RUNNING:
            raise
        rows = _recorded(args)
    if args.json:
        print(json.dumps(rows))
    elif not rows:
        print("Nothing was used in these days.")
    else:
        print("\n".join(_table(rows, args.by)))
    return 0


def _recorded(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what the history says, without a daemon. Raises DiscoError."""
    from datetime import datetime, timedelta
    from pathlib import Path

    from ..config.layers import data_path, load
    from ..errors import ConfigError
    from ..store import History
    from ..store.checkup import NEWEST, look

    settings = load().history
    path = Path(settings.path).expanduser() if settings.path else data_path() / "history.sqlite"
    if not path.exists():
        return []
    if look(path).schema < NEWEST:
        raise ConfigError(
            f"{path} is of an older disco: start the daemon once (`disco up`), which brings it up to date"
        )
    today = datetime.fromtimestamp(time.time()).date()  # noqa: DTZ006 - the user's own day is wanted
    return History(path).usage(args.by, today - timedelta(days=args.days - 1))


def _table(rows: list[dict[str, Any]], by: str) -> list[str]:
    """Return the lines of a table."""
    from ..client.amounts import dollars, figure
    from ..plain import one_line

    head = (by, "requests", "prompt tokens", "answer tokens", "servers' bill", "energy")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        name = one_line(row[by], MOST_NAME) or NOBODY.get(by, "")
        counts = (f"{row[n]:,}" for n in ("requests", "prompt_tokens", "completion_tokens"))
        lines.append((name, *counts, dollars(row["usd"]), f"{figure(row['wh'])} Wh"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([f"{first:<{widths[0]}}", *(f"{cell:>{n}}" for cell, n in zip(rest, widths[1:], strict=True))])
        for first, *rest in lines
    ]

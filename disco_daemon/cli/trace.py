"""`disco trace`: one request's timeline: when each side started, when each token came, and when the reader saw it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from textual.content import Content

LATEST = "latest"  # of the daemon's traces
GONE = "trace_gone"
RECENT = 1000  # rows of the history that are searched where there is no trace
DELIVERY_HEIGHT, LEVEL_HEIGHT = 14, 7  # lines of the pictures
LEAST_WIDTH = 30  # columns
STYLES = {"$success": "green", "$primary": "blue", "$accent": "magenta", "$warning": "yellow"}  # the terminal's own


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("trace", help="show one request's timeline", description=__doc__)
    parser.add_argument("id", nargs="?", default=LATEST, metavar="ID", help="of the request (default: the latest one)")
    parser.add_argument("--url", help="daemon to ask (default from the configuration)")
    parser.add_argument("--plain", action="store_true", help="words only, no pictures (for screen readers)")
    parser.add_argument("--json", action="store_true", help="the trace itself; fails where none is kept")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the daemon, and print the timeline."""
    from ..client import once as client
    from ..config.layers import load

    root, key = client.daemon_at(args.url, load())
    path = f"/disco/v1/trace/{quote(args.id, safe='')}"
    if args.json:
        print(json.dumps(client.get(root, path, key)))
        return 0
    row = trace = None
    try:
        trace = client.get(root, path, key)
    except client.DaemonError as e:
        row = _row(root, key, args.id) if e.code == GONE else None
        if row is None:
            raise
    settings = client.get(root, "/disco/v1/settings", key)["settings"]["delivery"]
    _show(row, trace, settings, plain=args.plain)
    return 0


def _row(root: str, key: str, request_id: str) -> dict[str, Any] | None:
    """Return the history's row of a request whose trace is gone; of the latest one, if none is named."""
    from ..client import once as client
    from ..types import EntryKind

    rows: list[dict[str, Any]] = client.get(root, f"/disco/v1/history?limit={RECENT}", key)["data"]
    answers = (row for row in rows if row["policy"] not in tuple(EntryKind))
    return next((row for row in answers if request_id in (LATEST, row["request_id"])), None)


def _show(row: dict[str, Any] | None, trace: dict[str, Any] | None, settings: dict[str, Any], *, plain: bool) -> None:

    from disco_tui.draw import timeline_model

    console = make_console(highlight=False)
    model = timeline_model.TimelineModel.of(None, row, trace)
    console.print(f"answer {model.request_id}: {model.winner or 'nobody'} was first", markup=False)
    for line in timeline_model.words(model):
        console.print(line, markup=False)
    if not plain:
        for picture in _pictures(model, settings, console):
            console.print()
            console.print(picture)


def _pictures(model: Any, settings: dict[str, Any], console: Console) -> Iterator[Text]:
    """Print the pictures, each with its legend below."""
    from disco_tui.draw import timeline_model

    width = max(LEAST_WIDTH, console.width)
    wish = settings["pace_tps"], settings["expected_ttft_s"]
    legend = timeline_model.STRAIGHT if model.trace is None else timeline_model.DELIVERY
    yield _text(timeline_model.lanes(model, width) + f"\n{timeline_model.LEGEND}")
    for picture, below in (
        (timeline_model.delivery(model, *wish, width, DELIVERY_HEIGHT), legend),
        (timeline_model.level(model, *wish, width, LEVEL_HEIGHT), timeline_model.LEVEL),
    ):
        if picture is not None:
            yield _text(picture + f"\n{below}")


def _text(picture: Content) -> Text:
    """Return a picture of the terminal UI in the colours of any terminal."""
    from rich.text import Text

    text = Text(picture.plain)
    for span in picture.spans:
        text.stylize(STYLES.get(str(span.style), ""), span.start, span.end)
    return text

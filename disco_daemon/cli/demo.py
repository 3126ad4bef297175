"""`disco demo`: what disco is for, in half a minute, without a key or a network."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .terminal import make_console, progress

if TYPE_CHECKING:
    from rich.live import Live as LiveLines
    from rich.table import Table
    from rich.text import Text

STYLES = {"device": "green", "server": "cyan"}
DOES = {"device": "reads the question", "server": "was asked"}
WIDTH = 96  # of answers, columns; a narrower terminal has its own
ROOM = 8  # columns left at the end of a line: a word comes in several pieces


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("demo", help="see device and server race, no key needed", description=__doc__)
    parser.add_argument("--live", action="store_true", help="race OPENAI_BASE_URL (with OPENAI_API_KEY): costs money")
    parser.add_argument("--live-model", default="gpt-4o-mini", help="model to ask there (default gpt-4o-mini)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show all acts and the table."""
    import asyncio

    from ..bench.demo import Live, run_demo
    from ..errors import ConfigError

    live = None
    if args.live:
        key = os.environ.get("OPENAI_API_KEY", "")
        if not key and not os.environ.get("OPENAI_BASE_URL"):
            raise ConfigError("--live needs OPENAI_API_KEY (and OPENAI_BASE_URL for another server than OpenAI's)")
        live = Live(os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1"), args.live_model, key)
    if args.json:
        print(json.dumps(asyncio.run(run_demo(Quiet(), progress, live=live))))
        return 0
    screen = DemoScreen()
    _introduce(screen, live)
    try:
        _conclude(screen, asyncio.run(run_demo(screen, progress, live=live)))
    finally:
        screen.ended()
    return 0


class Quiet:
    """Shows the story's lines on stderr, and no answers."""

    def say(self, line: str, *, title: bool = False) -> None:
        """Show a line."""
        progress(line if title else f"   {line}")

    def asked(self, question: str, sides: Sequence[str]) -> None:
        """Show nothing."""

    def piece(self, text: str, side: str) -> None:
        """Show nothing."""

    def ended(self) -> None:
        """Show nothing."""


class DemoScreen:
    """Shows the story at a terminal, with lines that move; elsewhere, and without colours, line by line."""

    def __init__(self) -> None:
        from ..bench.demo import MARKS

        self._marks = MARKS
        self._console = make_console(highlight=False)
        self._moves = self._console.is_terminal and not self._console.no_color
        self._lines: LiveLines | None = None
        self._sides: Sequence[str] = ()
        self._asked = 0.0
        self._writes: str | None = None  # the side of the latest piece
        self._column = 0

    def say(self, line: str, *, title: bool = False) -> None:
        """Print a line; a title stands apart."""
        from rich.text import Text

        if title:
            self._console.print()
        self._console.print(Text(line if title else f"  {line}", "bold" if title else "dim"))

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def asked(self, question: str, sides: Sequence[str]) -> None:
        """Print the question, and have a line for each side that was asked, until `piece`."""
        from rich.live import Live as LiveLines
        from rich.text import Text

        self._console.print(Text(f"> {question}"))
        self._sides, self._asked, self._writes, self._column = sides, time.monotonic(), None, 0
        if self._moves:
            self._lines = LiveLines(
                get_renderable=self._race, console=self._console, refresh_per_second=10, transient=True
            )
            self._lines.start()
        else:
            self._console.print(self._race())

    def piece(self, text: str, side: str) -> None:
        """Print a piece in the colour of its side: the first one ends the race, a mark shows where the side changes."""
        from rich.text import Text

        if self._writes is None:
            self._stop()
            self._console.print(self._race(side))
        elif side != self._writes:
            self._print(Text(f" ⇢{self._marks[side]}", "bold"))
        self._writes = side
        limit = min(WIDTH, self._console.width) - ROOM
        if "\n" in text or (text[:1].isspace() and self._column + len(text) > limit):
            self._console.print()
            text, self._column = text.strip(), 0
        self._print(Text(text, STYLES[side]))

    def ended(self) -> None:
        """End the line of the answer, and what moves."""
        self._stop()
        if self._column:
            self._console.print()
        self._column = 0

    def _stop(self) -> None:
        if self._lines is not None:
            self._lines.stop()
            self._lines = None

    def _print(self, text: Text) -> None:
        self._column += text.cell_len
        self._console.print(text, end="", soft_wrap=True)

    def _race(self, winner: str | None = None) -> Text:
        """Return a line for each side; the winner's is reversed."""
        from rich.text import Text

        elapsed_s = time.monotonic() - self._asked
        bar = "▰" * min(20, int(elapsed_s * 10)) if self._moves and winner is None else ""
        lines = []
        for side in self._sides:
            told = DOES[side] + (f" {bar} {elapsed_s:.1f} s" if bar else " …")
            if winner is not None:
                told = f"has the first word, after {elapsed_s:.2f} s" if side == winner else "is not needed"
            lines.append(Text(f"{self._marks[side]} {told}", f"{STYLES[side]}{' bold reverse' * (side == winner)}"))
        return Text("\n").join(lines)


def _introduce(screen: DemoScreen, live: object) -> None:
    from ..bench.demo import MARKS, SERVICE, SOURCE
    from ..models.default import DEFAULT_MODEL

    screen.say("disco asks this machine and a server, and gives you one answer", title=True)
    screen.say(f"{MARKS['device']} this machine computes, with {DEFAULT_MODEL.split('.')[0]}: a small stand-in")
    if live is None:
        screen.say(f"{MARKS['server']} the server is played, so that no second engine takes these processors:")
        screen.say(f"  recorded times, at the list price, of {SERVICE}")
        screen.say(f"  ({SOURCE}), and recorded words of this model")
    else:
        screen.say(f"{MARKS['server']} the server is yours, and costs money")


def _conclude(screen: DemoScreen, result: Mapping[str, Any]) -> None:
    from ..bench.demo import first_words
    from ..client.amounts import dollars

    s = result["summary"]
    screen.say(f"{s['of']} questions, each asked three times; the first word came after", title=True)
    _table(screen, s)
    screen.say("In short", title=True)
    screen.say(f"first word  {first_words(s['mean'])}")
    if moved := result["moved"]:
        said = "nothing here: that answer did not move"
        if moved["saved_usd"] > 0:
            one, thousand = dollars(moved["saved_usd"]), dollars(1000 * moved["saved_usd"])
            said = f"{one} of {dollars(moved['usd'])} where an answer moved; {thousand} on 1,000"
        screen.say(f"saved       {said}")
    if result["killed"]:
        screen.say(f"dead server {result['killed']['pause_s']:.2f} s without text, and no word lost")
    screen.say("Next", title=True)
    screen.say("disco tui                 ask it something yourself")
    screen.say("disco setup               add your own server and key (in the window: F5)")
    screen.say("disco models recommend    get a real model that fits this machine")


def _table(screen: DemoScreen, summary: Mapping[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("", "disco", "this machine alone", "server alone"):
        table.add_column(column, justify="right" if column else "left")
    rows = {"short question": "mean_short", "long question": "mean_long", "both": "mean", "both, median": "median"}
    for name, key in rows.items():
        table.add_row(f"  {name}", *(f"{seconds:.2f} s" for seconds in summary[key].values()))
    wins = summary["wins"]
    table.add_row("  first", "", f"{wins['device']} times", f"{wins['server']} times")
    screen.show(table)

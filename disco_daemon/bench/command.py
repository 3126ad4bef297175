"""Shared parts of the commands that measure: types of arguments, progress on stderr, and a run that ends cleanly.

`disco bench` and the scripts in benchmarks/ are made with it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

Figures = dict[str, Any]


def at_least(least: int) -> Callable[[str], int]:
    """Return an argument type: an integer of at least `least`."""

    def count(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    return count


def progress(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


def run_measurement(
    work: Coroutine[Any, Any, Figures], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> Figures | None:
    """Run a measurement that has children; none of them outlives this process. None when it was ended by SIGTERM."""
    import asyncio

    async def measure() -> Figures | None:
        task = asyncio.ensure_future(work)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        figures = runner.run(measure())
    if figures is None:
        progress("ended by SIGTERM")
    return figures


def print_figures(figures: Figures | None, table: Callable[[Figures], str], *, as_json: bool) -> int:
    """Print the figures as one JSON document or as a table, and return the exit code."""
    if figures is None:
        return 1
    print(json.dumps(figures) if as_json else table(figures))
    return 0

"""The verbs' output: plain text only, from whatever source.

A verb prints text of servers, model files, file names and other programs. So that no verb can forget it, all output to
stdout and stderr is made plain on the way (`plainly`). Codes for the terminal itself go by `direct`, and colours by a
console of `make_console`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from ..plain import plain

if TYPE_CHECKING:
    from rich.console import Console


class Plainly:
    """A text stream that passes on no control codes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write as a text stream; return the length of the given text."""
        self.stream.write(plain(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write as a text stream."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def plainly() -> Iterator[None]:
    """Make all output plain within this context."""
    with _printing(Plainly(sys.stdout), Plainly(sys.stderr)):
        yield


@contextmanager
def raw_output() -> Iterator[None]:
    """Leave output as it is within this context, for a screen program that makes its text plain itself."""
    with _printing(direct(sys.stdout), direct(sys.stderr)):
        yield


@contextmanager
def _printing(out: Any, err: Any) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def direct(stream: TextIO) -> TextIO:
    """Return the terminal behind stdout or stderr, for text and codes of ours only."""
    return stream.stream if isinstance(stream, Plainly) else stream


def has_screen() -> bool:
    """Whether this program reads from and writes to a terminal, all of it: the terminal UI draws on stderr."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def make_console(*, stderr: bool = False, **options: Any) -> Console:
    """Make a console of Rich, whose colours are ours and whose text is plain."""
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
            for part in super().render(*args, **options):
                yield part if part.control else Segment(plain(part.text), part.style)

    return PlainConsole(file=direct(cast("TextIO", sys.stderr if stderr else sys.stdout)), **options)


def progress(line: str) -> None:
    """Print one line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def moved(verb: str, script: str) -> str:
    """Say which script of a checkout a verb has become."""
    return f"`{verb}` is a script now: in a checkout of the source, run `python -m benchmarks.{script}` instead"


def agrees(question: str) -> bool:
    """Ask at a terminal whether that is wanted; without one nobody agrees."""
    return sys.stdin.isatty() and input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
